"""A plan: what a demand will compute, in order, before any of it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SHOWN = 6
"""How many sites a plan names when it is printed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The sites to compute, inputs first.

    `own` are the last of them: those that the world itself computes. The ones before belong to
    its ancestors, which share the result with all of their forks.
    """

    sites: tuple[str, ...]
    own: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __repr__(self) -> str:
        if not self.sites:
            return "Plan(nothing to compute)"
        shown = ", ".join(self.sites[:SHOWN]) + (", ..." if len(self) > SHOWN else "")
        return f"Plan({len(self)} sites to compute, {len(self.own)} of them in the world itself: {shown})"
