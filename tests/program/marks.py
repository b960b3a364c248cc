"""Which architectures `make test` goes through; the others have a target of their own."""

from __future__ import annotations

import pytest

FAST = ("gpt2", "llama", "bert", "t5", "mamba", "mixtral", "skips", "two_and_two")
"""The architectures that others are not like. `make test-architectures` goes through all of them."""


def marks(name: str) -> list[pytest.MarkDecorator]:
    """Whether a test of an architecture has to wait for that."""
    return [] if name in FAST else [pytest.mark.slow]
