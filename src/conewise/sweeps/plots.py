"""Results as figures: effects in natural axes, in colours that colour-blind readers tell apart."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from typing import Any

from conewise.anatomy.selectors import Spread
from conewise.extras import needs
from conewise.program.tensors import Tensor
from conewise.sweeps.statistics import Statistics
from conewise.sweeps.storage.result_data import ResultData
from conewise.templates import LIGHT

with needs("plots"):
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

LETTERS = {
    "layer": "L",
    "head": "H",
    "kv_head": "K",
    "pos": "P",
    "query_pos": "Q",
    "key_pos": "K",
    "neuron": "N",
    "latent": "F",
}

HOVER = "<b>%{customdata[0]}</b><br>value %{customdata[1]:.6g}<br>effect %{customdata[2]:+.6g}<extra></extra>"


FEW_BARS = 48
"""So many bars are wide enough for an outline."""

POSITIONS = ("pos", "query_pos", "key_pos")
"""Axes that are labelled by tokens."""


def figure(result: ResultData, tokens: Sequence[str] = ()) -> go.Figure:
    """The effects of the first metric, one panel for each selector; 0 is white, and one scale is for all.

    `tokens` are those at each position, where they are known: they stand on the axes.
    """
    parts = result.parts()
    effects = (result.table[0] - result.base[0]).tolist()
    values = result.table[0].tolist()
    drawn = make_subplots(
        cols=len(parts),
        subplot_titles=[part.name for part, _ in parts] if len(parts) > 1 else None,
        column_widths=[max(_columns(part), 4) ** 0.5 for part, _ in parts],
        horizontal_spacing=0.25 / max(len(parts), 2),
    )
    for column, (part, start) in enumerate(parts, start=1):
        stop = start + len(part.cells)
        _panel(drawn, part, effects[start:stop], values[start:stop], column, tokens)
    largest = max((abs(effect) for effect in effects if math.isfinite(effect)), default=0.0) or 1.0
    metric = result.metrics[0]
    name = parts[0][0].name if len(parts) == 1 else "the sites"
    drawn.update_layout(
        title=f"Effect of patching {name} on {metric}"
        + (f", approximate ({result.method})" if result.method else ""),
        coloraxis={
            "colorscale": LIGHT,
            "cmin": -largest,
            "cmid": 0,
            "cmax": largest,
            "colorbar": {"title": f"{metric} − base"},
        },
        showlegend=False,
        plot_bgcolor="rgba(0,0,0,0)",
    )
    return drawn


def intervals(names: Sequence[str], effects: Tensor, statistics: Statistics, metric: str) -> go.Figure:
    """Effects [cell, prompt]: a dot for each prompt, the mean and its interval; the first cell is on top."""
    rows = list(range(len(names)))
    labels = [_plain(name) for name in names]
    found = effects.double().cpu()
    mean, low, high = (one.tolist() for one in (statistics.mean, statistics.low, statistics.high))
    dots = go.Scatter(
        x=found.flatten().tolist(),
        y=[row for row in rows for _ in range(found.shape[1])],
        customdata=[[label, prompt + 1] for label in labels for prompt in range(found.shape[1])],
        hovertemplate="<b>%{customdata[0]}</b><br>prompt %{customdata[1]}: %{x:+.6g}<extra></extra>",
        mode="markers",
        marker={"size": 7, "opacity": 0.4, "color": "#2166ac"},
    )
    means = go.Scatter(
        x=mean,
        y=rows,
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [top - value for top, value in zip(high, mean, strict=True)],
            "arrayminus": [value - bottom for bottom, value in zip(low, mean, strict=True)],
            "color": "#1a1e24",
        },
        customdata=[list(row) for row in zip(labels, low, high, statistics.p.tolist(), strict=True)],
        hovertemplate="<b>%{customdata[0]}</b><br>mean %{x:+.6g}, "
        "[%{customdata[1]:+.4g}, %{customdata[2]:+.4g}], p = %{customdata[3]:.2g}<extra></extra>",
        mode="markers",
        marker={"size": 8, "color": "#1a1e24"},
    )
    drawn = go.Figure([dots, means])
    drawn.update_xaxes(title_text=f"effect on {_plain(metric)}")
    drawn.update_yaxes(tickvals=rows, ticktext=labels, autorange="reversed")
    drawn.update_layout(
        title=f"Effects over {statistics.prompts} prompts, with intervals of {statistics.level:.0%}"
        + (f"; {statistics.note}" if statistics.note else ""),
        showlegend=False,
        height=160 + 28 * len(names),
        plot_bgcolor="rgba(0,0,0,0)",
    )
    return drawn


def _panel(
    drawn: go.Figure,
    part: Spread,
    effects: list[float],
    values: list[float],
    column: int,
    tokens: Sequence[str],
) -> None:
    told = [
        [cell.name, value, effect] for cell, value, effect in zip(part.cells, values, effects, strict=True)
    ]
    if part.axes == ("edge",):
        _edges_panel(drawn, part, effects, told, column)
        return
    if part.ends:
        _pairs_panel(drawn, part, effects, told, column)
        return
    if len(part.axes) < 2:
        axis = part.axes[0] if part.axes else "site"
        labels = (
            [cell.name for cell in part.cells]
            if axis == "site" or not part.axes
            else _labels(part, 0, tokens)
        )
        bars = go.Bar(
            x=labels,
            y=effects,
            customdata=told,
            hovertemplate=HOVER,
            marker={"color": effects, "coloraxis": "coloraxis", "line": _outline(len(effects))},
        )
        drawn.add_trace(bars, row=1, col=column)
        drawn.update_xaxes(title_text=axis, type="category", row=1, col=column)
        drawn.update_yaxes(title_text="effect", row=1, col=column)
        return
    width = _columns(part)
    heat = go.Heatmap(
        z=_rows(effects, width),
        x=_labels(part, -1, tokens),
        y=_row_labels(part, tokens),
        customdata=_rows(told, width),
        hovertemplate=HOVER,
        coloraxis="coloraxis",
    )
    drawn.add_trace(heat, row=1, col=column)
    drawn.update_xaxes(title_text=part.axes[-1], type="category", row=1, col=column)
    # The first layer stands at the top, as in the tables.
    title = " × ".join(part.axes[:-1])
    drawn.update_yaxes(title_text=title, type="category", autorange="reversed", row=1, col=column)


def _outline(bars: int) -> dict[str, Any]:
    """Pale bars are seen by it; of many thin ones it would be all that is seen."""
    return {"color": "#8a8f98", "width": 1 if bars <= FEW_BARS else 0}


def _edges_panel(
    drawn: go.Figure, part: Spread, effects: list[float], told: list[list[Any]], column: int
) -> None:
    """Writers by readers; what is no edge stays empty."""
    ends = [cell.name.split("->", 1) for cell in part.cells]
    ends = [[writer, reader.replace(f"{writer}->", "")] for writer, reader in ends]
    rows, columns = (
        {name: at for at, name in enumerate(dict.fromkeys(one))} for one in zip(*ends, strict=True)
    )
    heat: list[list[float | None]] = [[None] * len(columns) for _ in rows]
    hover: list[list[Any]] = [[["", None, None]] * len(columns) for _ in rows]
    for (writer, reader), effect, one in zip(ends, effects, told, strict=True):
        heat[rows[writer]][columns[reader]] = effect
        hover[rows[writer]][columns[reader]] = one
    drawn.add_trace(
        go.Heatmap(
            z=heat,
            x=list(columns),
            y=list(rows),
            customdata=hover,
            hovertemplate=HOVER,
            hoverongaps=False,
            coloraxis="coloraxis",
        ),
        row=1,
        col=column,
    )
    drawn.update_xaxes(title_text="reader", type="category", row=1, col=column)
    drawn.update_yaxes(title_text="writer", type="category", autorange="reversed", row=1, col=column)


def _pairs_panel(
    drawn: go.Figure, part: Spread, effects: list[float], told: list[list[Any]], column: int
) -> None:
    """Cells by cells, the same on both sides of the diagonal; single cells stand on it, or nothing does."""
    count = len(part.ends)
    heat: list[list[float | None]] = [[None] * count for _ in part.ends]
    hover: list[list[Any]] = [[["", None, None]] * count for _ in part.ends]
    for (row, other), effect, one in zip(part.pairs(), effects, told, strict=True):
        heat[row][other] = heat[other][row] = effect
        hover[row][other] = hover[other][row] = one
    matrix = go.Heatmap(
        z=heat,
        x=list(part.ends),
        y=list(part.ends),
        customdata=hover,
        hovertemplate=HOVER,
        hoverongaps=False,
        coloraxis="coloraxis",
    )
    drawn.add_trace(matrix, row=1, col=column)
    drawn.update_xaxes(type="category", row=1, col=column)
    drawn.update_yaxes(type="category", autorange="reversed", row=1, col=column)


def _columns(part: Spread) -> int:
    if part.ends:
        return len(part.ends)
    return part.shape[-1] if part.shape else 1


def _rows(flat: list[Any], width: int) -> list[list[Any]]:
    return [flat[start : start + width] for start in range(0, len(flat), width)]


def _labels(part: Spread, axis: int, tokens: Sequence[str]) -> list[str]:
    """What stands along an axis: numbers, labels, or a position's token with its number."""
    labels = part.labels_of(axis)
    if part.axes[axis] not in POSITIONS or not tokens:
        return labels
    numbers = part.coordinates[axis]
    return [
        f"{_plain(tokens[number])} {number}" if 0 <= number < len(tokens) else label
        for number, label in zip(numbers, labels, strict=True)
    ]


def _plain(token: str) -> str:
    """A token as text that Plotly does not take for tags."""
    return html.escape(token.replace("\n", "⏎").strip() or "␣", quote=False)


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
