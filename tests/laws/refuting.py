"""Whether a search refutes a formula: a law that no scene could refute would say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hypothesis import Phase, find, settings
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy

Made = TypeVar("Made")


def is_refuted(strategy: SearchStrategy[Made], by: Callable[[Made], bool], *, examples: int) -> bool:
    """Whether one of so many examples refutes it; the same ones every time."""
    search = settings(max_examples=examples, phases=[Phase.generate], derandomize=True)
    try:
        return by(find(strategy, by, settings=search))
    except NoSuchExample:
        return False
