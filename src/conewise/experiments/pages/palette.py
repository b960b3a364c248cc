"""What the figures have in common: colours, and figures of rows as they are drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from conewise.experiments.result import Row, plain

# Okabe and Ito's colours, which colour-blind readers tell apart; the blue is a little lighter than
# theirs, so that it shows on a dark page too.
BLUE, ORANGE, GREEN, PINK, RED, SKY = "#2b8ccd", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"
COLOURS = (BLUE, ORANGE, GREEN, PINK, RED, SKY)
GREY = "#8a8f98"
PAPER_MARK: dict[str, Any] = {"symbol": "diamond-open", "size": 13, "color": RED, "line": {"width": 2}}


def measured_of(rows: Iterable[Row]) -> list[int | float | None]:
    """What was measured, as it is drawn."""
    return [plain(row.measured) for row in rows]


def papers_of(rows: Sequence[Row]) -> list[float | None]:
    """What the paper prints, as it is drawn."""
    return [None if row.paper is None else float(row.paper) for row in rows]
