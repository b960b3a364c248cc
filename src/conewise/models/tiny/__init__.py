"""The tiny model: a small Llama with a word-level vocabulary, trained on indirect object identification.

`conewise.load("tiny")` loads it; README.md beside this file is its model card.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
"""The model as a Hugging Face folder."""

PROMPTS = FOLDER / "prompts.json"
"""Prompts that it was not trained on: rows {clean, corrupted, answers, wrong_answers}, all of one length."""
