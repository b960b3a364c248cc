"""Prompts, answers, and questions about them."""
