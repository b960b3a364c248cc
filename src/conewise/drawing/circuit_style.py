"""How an edge of a circuit looks: blue for a score above 0, red for one below, the larger the wider."""

from __future__ import annotations

MORE, LESS, PLAIN = "#2166ac", "#b2182b", "#6b7280"
THIN, WIDE = 0.6, 5.0


def colour(score: float | None) -> str:
    """Red below zero, blue above, grey where there is no score; told apart by colour-blind readers."""
    if score is None or score == 0:
        return PLAIN
    return LESS if score < 0 else MORE


def width(score: float | None, largest: float) -> float:
    """From thin to wide, by the size of a score as a share of the largest."""
    if score is None:
        return 1.2
    return THIN + (WIDE - THIN) * (abs(score) / largest if largest else 0.0)
