"""Phases: the seconds of some work by what was under way, one phase at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

clock = time.perf_counter

REST = "other"
"""The phase of all that no other is named for."""

LEAST = 0.01
"""The share of the whole below which a phase is not worth showing."""


class Phases:
    """A stopwatch of phases. Every second belongs to one of them, so that together they are the whole.

    It reads the host's clock alone and waits for nothing: of what a device does meanwhile, a phase has the
    time that the host waited for it. `name` and `words` say what is under way; another thread may look.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.name, self.words = REST, ""
        self._done = dict.fromkeys([*names, REST], 0.0)
        self._since = clock()

    @contextmanager
    def during(self, name: str, words: str = "") -> Iterator[None]:
        """Be in a phase until the block ends, and then in the one before. `words` say more of it."""
        before = self.name, self.words
        self.begin(name, words)
        try:
            yield
        finally:
            self.begin(*before)

    def begin(self, name: str, words: str = "") -> None:
        """Go over to another phase."""
        now = clock()
        self._done[self.name] += now - self._since
        self._done.setdefault(name, 0.0)
        self.name, self.words, self._since = name, words, now

    def seconds(self) -> dict[str, float]:
        """The seconds of each phase until now."""
        found, name, since = dict(self._done), self.name, self._since
        found[name] += clock() - since
        return found

    def lasting(self) -> float:
        """For how many seconds the phase has been under way."""
        return clock() - self._since


def shown_phases(seconds: Mapping[str, float], least: float = LEAST) -> str:
    """The seconds of phases as people read them: those of a share of at least `least`, in their order."""
    whole = sum(seconds.values())
    return ", ".join(
        f"{name} {taken:.3g} s" for name, taken in seconds.items() if taken > 0 and taken >= least * whole
    )
