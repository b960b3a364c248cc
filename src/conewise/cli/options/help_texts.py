"""Help texts: with colours and boxes in a terminal, plain elsewhere."""

from __future__ import annotations

import sys
from typing import Literal

MARKUP: Literal["rich"] | None = "rich" if sys.stdout.isatty() else None


def help_text(text: str) -> str:
    """A help text as the parser takes it: paragraphs that it may wrap, and marked ones as they are."""
    paragraphs = [
        paragraph if paragraph.startswith("\b") else " ".join(paragraph.split())
        for paragraph in text.strip().split("\n\n")
    ]
    return literal("\n\n".join(paragraphs))


def literal(text: str) -> str:
    """Text in which brackets are brackets."""
    return text.replace("[", r"\[") if MARKUP else text
