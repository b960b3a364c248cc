"""Results as figures: effects in natural axes, in colours that colour-blind readers tell apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

from conewise.anatomy.selectors import Spread
from conewise.extras import needs
from conewise.program.tensors import Tensor
from conewise.sweeps.findings import panel, plain
from conewise.sweeps.statistics import Statistics
from conewise.sweeps.storage.result_data import ResultData
from conewise.templates import LIGHT

with needs("plots"):
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

HOVER = "<b>%{customdata[0]}</b><br>value %{customdata[1]:.6g}<br>effect %{customdata[2]:+.6g}<extra></extra>"


FEW_BARS = 48
"""So many bars are wide enough for an outline."""


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
        column_widths=[max(len(panel(part).columns), 4) ** 0.5 for part, _ in parts],
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
    labels = [plain(name) for name in names]
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
    drawn.update_xaxes(title_text=f"effect on {plain(metric)}")
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
    laid = panel(part, tokens)
    if len(part.axes) < 2 and not part.ends and part.axes != ("edge",):
        # Pale bars are seen by their outline; of many thin ones it would be all that is seen.
        outline = {"color": "#8a8f98", "width": 1 if len(effects) <= FEW_BARS else 0}
        bars = go.Bar(
            x=laid.columns,
            y=effects,
            customdata=told,
            hovertemplate=HOVER,
            marker={"color": effects, "coloraxis": "coloraxis", "line": outline},
        )
        drawn.add_trace(bars, row=1, col=column)
        drawn.update_xaxes(title_text=laid.column_title, type="category", row=1, col=column)
        drawn.update_yaxes(title_text="effect", row=1, col=column)
        return
    heat = go.Heatmap(
        z=laid.laid_out(effects),
        x=laid.columns,
        y=laid.rows,
        customdata=laid.laid_out(told, ["", None, None]),
        hovertemplate=HOVER,
        hoverongaps=False,
        coloraxis="coloraxis",
    )
    drawn.add_trace(heat, row=1, col=column)
    # The first layer stands at the top, as in the tables.
    across, down = ({"title_text": one} if one else {} for one in (laid.column_title, laid.row_title))
    drawn.update_xaxes(**across, type="category", row=1, col=column)
    drawn.update_yaxes(**down, type="category", autorange="reversed", row=1, col=column)
