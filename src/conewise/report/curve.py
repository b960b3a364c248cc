"""The curve of a circuit: how faithful the circuits are that a threshold of the scores chooses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The circuit of one threshold: its size, and its faithfulness, if that was computed."""

    threshold: float
    edges: int
    faithfulness: float | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """Circuits of falling thresholds, each a part of the next; and the one that the page is about.

    `metric` is the name of what was measured, empty where nothing was.
    """

    points: tuple[CurvePoint, ...]
    metric: str = ""
    faithfulness: float | None = None

    def __repr__(self) -> str:
        if not self.points:
            return "Curve of no circuits"
        first, last = self.points[0], self.points[-1]
        return (
            f"Curve of {len(self.points)} circuits, from {first.edges:,} edges (threshold "
            f"{first.threshold:.4g}) to {last.edges:,} ({last.threshold:.4g})"
        )
