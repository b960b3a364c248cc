"""Prompts and questions in text."""
