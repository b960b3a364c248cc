"""Short texts: of a longer one, its digest."""

from __future__ import annotations

import hashlib

LONGEST = 60
"""A longer text is shown as its digest."""


def short(kind: str, text: str) -> str:
    """A text after its kind; a long one as its digest."""
    text = text if len(text) <= LONGEST else f"~{sha(text)}"
    return f"{kind} {text}".strip()


def sha(text: str) -> str:
    """A digest of a text."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]
