"""A plan: what a demand will compute, in order, before any of it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


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
