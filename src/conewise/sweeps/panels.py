"""A selector's cells as rows and columns, for the figures of plotly and the heatmaps of notebooks."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conewise.anatomy.selectors import Spread
from conewise.sweeps.storage.result_data import ResultData
from conewise.templates import Heatmap

LETTERS = {
    "layer": "L",
    "head": "H",
    "kv_head": "K",
    "expert": "E",
    "pos": "P",
    "query_pos": "Q",
    "key_pos": "K",
    "neuron": "N",
    "latent": "F",
}

POSITIONS = ("pos", "query_pos", "key_pos")
"""Axes that are labelled by tokens."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Cells in rows and columns, by their number in the selector; None where there is no cell."""

    rows: list[str]
    columns: list[str]
    cells: list[list[int | None]]
    row_title: str = ""
    column_title: str = ""

    def laid_out(self, values: Sequence[Any], gap: Any = None) -> list[list[Any]]:
        """Return what there is for each cell, in rows; `gap` where there is no cell."""
        return [[gap if one is None else values[one] for one in row] for row in self.cells]


def panel(part: Spread, tokens: Sequence[str] = ()) -> Panel:
    """Edges as writers by readers, pairs as cells by cells, else the last axis across and the others down.

    One axis alone is one row. `tokens` are those at each position, where they are known.
    """
    if part.axes == ("edge",):
        return _edges(part)
    if part.ends:
        return _pairs(part)
    if len(part.axes) < 2:
        axis = part.axes[0] if part.axes else "site"
        columns = (
            [cell.name for cell in part.cells]
            if axis == "site" or not part.axes
            else _labels(part, 0, tokens)
        )
        return Panel([""], columns, [list(range(len(part.cells)))], "", axis)
    width = part.shape[-1]
    numbers = list(range(len(part.cells)))
    rows = [list[int | None](numbers[start : start + width]) for start in range(0, len(numbers), width)]
    return Panel(
        _row_labels(part, tokens), _labels(part, -1, tokens), rows, " × ".join(part.axes[:-1]), part.axes[-1]
    )


STRONG = 0.99
"""The share of the effects that colours tell apart: the few larger ones have the strongest colour too."""


def strong(result: ResultData, metric: int) -> float:
    """The effect from which on a heatmap has its strongest colour."""
    sizes = (result.table[metric] - result.base[metric]).abs()
    sizes = sizes[sizes.isfinite()].sort().values
    return float(sizes[min(len(sizes) - 1, math.ceil(STRONG * (len(sizes) - 1)))]) if len(sizes) else 0.0


def heatmaps(result: ResultData, metric: int, tokens: Sequence[str] = ()) -> list[str]:
    """The effects on a metric, a heatmap for each selector, all by one scale."""
    base, largest = float(result.base[metric]), strong(result, metric)
    values = result.table[metric].tolist()
    effects = [value - base for value in values]
    is_by_layer = any(part.axes[:1] == ("layer",) and len(part.axes) == 2 for part in result.spreads)
    drawn = []
    for part, start in result.parts():
        own = range(start, start + len(part.cells))
        laid = panel(part, tokens)
        if is_by_layer and part.axes == ("layer",):  # beside the others, whose rows are layers
            laid = Panel(laid.columns, [""], [[one] for one in laid.cells[0]], laid.column_title)
        told = [
            f"{cell.name}: {effects[at]:+.4g} ({values[at]:.4g})"
            for cell, at in zip(part.cells, own, strict=True)
        ]
        made = Heatmap(
            laid.laid_out([effects[at] for at in own]),
            [html.unescape(name) for name in laid.rows],
            [html.unescape(name) for name in laid.columns],
            laid.laid_out(told, ""),
            laid.row_title,
            laid.column_title,
            part.name,
            largest,
        )
        drawn.append(made.html())
    return drawn


def plain(token: str) -> str:
    """A token as text that Plotly does not take for tags."""
    return html.escape(token.replace("\n", "⏎").strip() or "␣", quote=False)


def _edges(part: Spread) -> Panel:
    """Writers by readers; what is no edge stays empty."""
    ends = [cell.name.split("->", 1) for cell in part.cells]
    ends = [[writer, reader.replace(f"{writer}->", "")] for writer, reader in ends]
    rows, columns = (
        {name: at for at, name in enumerate(dict.fromkeys(one))} for one in zip(*ends, strict=True)
    )
    cells: list[list[int | None]] = [[None] * len(columns) for _ in rows]
    for number, (writer, reader) in enumerate(ends):
        cells[rows[writer]][columns[reader]] = number
    return Panel(list(rows), list(columns), cells, "writer", "reader")


def _pairs(part: Spread) -> Panel:
    """Cells by cells, the same on both sides of the diagonal; single cells stand on it, or nothing does."""
    cells: list[list[int | None]] = [[None] * len(part.ends) for _ in part.ends]
    for number, (row, other) in enumerate(part.pairs()):
        cells[row][other] = cells[other][row] = number
    return Panel(list(part.ends), list(part.ends), cells)


def _labels(part: Spread, axis: int, tokens: Sequence[str]) -> list[str]:
    """The labels along an axis: numbers, names, or a position's token with its number."""
    labels = part.labels_of(axis)
    if part.axes[axis] not in POSITIONS or not tokens:
        return labels
    numbers = part.coordinates[axis]
    return [
        f"{plain(tokens[number])} {number}" if 0 <= number < len(tokens) else label
        for number, label in zip(numbers, labels, strict=True)
    ]


def _row_labels(part: Spread, tokens: Sequence[str]) -> list[str]:
    """The numbers along the first of two axes; along the first of more, numbers with letters: L0 H3."""
    if len(part.axes) == 2:
        return _labels(part, 0, tokens)
    letters = [LETTERS.get(axis, f"{axis} ") for axis in part.axes[:-1]]
    along = [part.labels_of(axis) for axis in range(len(part.axes) - 1)]
    return [
        " ".join(f"{letter}{name}" for letter, name in zip(letters, point, strict=True))
        for point in itertools.product(*along)
    ]
