"""Where a world's values lie: a list by node number for a root, an overlay for a fork."""

from __future__ import annotations

from typing import Any, Final


class _Mark:
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


INVALID: Final[Any] = _Mark("INVALID")
"""Stands where a value has to be computed before it can be read."""

SHARED: Final[Any] = _Mark("SHARED")
"""What an overlay answers for a node that it does not own."""


class Overlay(dict[int, Any]):
    """Entries of its own over another store: `overlay[n]` is its own, or else what lies below.

    `get(n, SHARED)` looks at its own entries only. Memory is what it owns, however large the
    store below; a read through k overlays takes k steps.
    """

    __slots__ = ("below",)

    def __init__(self, below: list[Any] | Overlay) -> None:
        super().__init__()
        self.below = below

    def __missing__(self, node: int) -> Any:
        below = self.below
        while type(below) is Overlay:
            value = below.get(node, SHARED)
            if value is not SHARED:
                return value
            below = below.below
        return below[node]


Store = list[Any] | Overlay
