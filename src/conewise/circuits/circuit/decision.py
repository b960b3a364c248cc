"""One decision of a search for a circuit: an edge was looked at, and kept or removed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decision:
    """An edge in the order of visits: whether it was kept, and what removing it changed."""

    edge: str
    kept: bool
    change: float
