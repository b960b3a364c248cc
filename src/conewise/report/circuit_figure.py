"""A circuit as a Plotly figure: components by layer, edges coloured by sign and as wide as their scores."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from conewise.decomposing.figures import escaped
from conewise.extras import needs
from conewise.report.circuit_layout import PLAIN, Layered, Line, colour, layered, width
from conewise.structure.components.edge_graph import EdgeGraph

with needs("plots"):
    import plotly.graph_objects as go

MOST_LINES = 4000
"""How many edges a figure shows, the strongest of them: with more, one sees none."""

SPREAD = 0.3
"""Heads are small dots here, so edges enter them close together."""

STEPS = 14
"""How many pieces a curve is drawn in."""

WIDTHS = 6
"""How many widths there are: edges of one colour and width are one trace, or there would be thousands."""

COLOURS = {"input": "#57606c", "head": "#0060a8", "kv": "#7a8795", "mlp": "#8a5a00", "logits": "#57606c"}


def figure(
    of: str, graph: EdgeGraph, edges: Collection[str], scores: Mapping[str, float] | None
) -> go.Figure:
    """The layered picture; pointing at an edge's middle or at a component tells its name."""
    shown = list(edges)
    if len(shown) > MOST_LINES:
        known = scores or {}
        shown = sorted(shown, key=lambda edge: -abs(known.get(edge, 0.0)))[:MOST_LINES]
    drawn = layered(graph, shown, scores)
    largest = max((abs(line.score or 0.0) for line in drawn.lines), default=0.0)
    made = go.Figure()
    for (tint, size), lines in _groups(drawn, largest).items():
        xs, ys = _paths(drawn, lines)
        made.add_trace(
            go.Scatter(
                x=xs, y=ys, mode="lines", line={"color": tint, "width": size}, opacity=0.75, hoverinfo="skip"
            )
        )
    if drawn.links:
        made.add_trace(_link_trace(drawn))
    made.add_trace(_middles(drawn))
    made.add_trace(_boxes(drawn))
    left = len(edges) - len(shown)
    rest = f" (the {len(shown):,} strongest of {len(edges):,} edges)" if left else ""
    made.update_layout(
        title=f"Circuit of {escaped(of or 'a model')}: {len(edges):,} of {graph.count:,} edges{rest}",
        showlegend=False,
        plot_bgcolor="rgba(0,0,0,0)",
        height=max(320, 120 + 46 * drawn.rows),
        xaxis={"visible": False},
        yaxis={
            "autorange": "reversed",
            "showgrid": False,
            "zeroline": False,
            "tickvals": [row for row, _ in _rows(drawn)],
            "ticktext": [text for _, text in _rows(drawn)],
        },
        hovermode="closest",
    )
    return made


def _groups(drawn: Layered, largest: float) -> dict[tuple[str, float], list[Line]]:
    """Lines by colour and width, in the order in which they are drawn."""
    found: dict[tuple[str, float], list[Line]] = {}
    for line in drawn.lines:
        share = abs(line.score) / largest if line.score is not None and largest else 0.0
        step = round(share * (WIDTHS - 1)) / (WIDTHS - 1)
        size = width(None, 1.0) if line.score is None else width(step, 1.0)
        found.setdefault((colour(line.score), size), []).append(line)
    return found


def _paths(drawn: Layered, lines: list[Line]) -> tuple[list[float | None], list[float | None]]:
    xs: list[float | None] = []
    ys: list[float | None] = []
    for line in lines:
        for step in range(STEPS + 1):
            x, y = _point(drawn, line, step / STEPS)
            xs.append(x)
            ys.append(y)
        xs.append(None)
        ys.append(None)
    return xs, ys


def _point(drawn: Layered, line: Line, share: float) -> tuple[float, float]:
    """Where a curve is after a share of its way."""
    points, rest = drawn.curve(line, SPREAD), 1 - share
    weights = (rest**3, 3 * rest**2 * share, 3 * rest * share**2, share**3)
    x = sum(weight * point[0] for weight, point in zip(weights, points, strict=True))
    y = sum(weight * point[1] for weight, point in zip(weights, points, strict=True))
    return x, y


def _middles(drawn: Layered) -> go.Scatter:
    """Invisible points in the middle of the edges: what the pointer finds."""
    middles = [_point(drawn, line, 0.5) for line in drawn.lines]
    told = [
        [escaped(line.edge), "no score" if line.score is None else f"score {line.score:+.6g}"]
        for line in drawn.lines
    ]
    return go.Scatter(
        x=[x for x, _ in middles],
        y=[y for _, y in middles],
        mode="markers",
        marker={"size": 9, "color": [colour(line.score) for line in drawn.lines], "opacity": 0},
        customdata=told,
        hovertemplate="%{customdata[0]}<br>%{customdata[1]}<extra></extra>",
        name="edges",
    )


def _boxes(drawn: Layered) -> go.Scatter:
    counts: dict[int, list[int]] = {at: [0, 0] for at in range(len(drawn.boxes))}
    for line in drawn.lines:
        counts[line.stop][0] += 1
        counts[line.start][1] += 1
    return go.Scatter(
        x=[box.x for box in drawn.boxes],
        y=[box.y for box in drawn.boxes],
        mode="markers+text",
        marker={
            "size": 13,
            "symbol": ["circle" if box.kind == "head" else "square" for box in drawn.boxes],
            "color": [COLOURS[box.kind] for box in drawn.boxes],
            "line": {"color": "white", "width": 1},
        },
        text=[escaped(box.name) for box in drawn.boxes],
        textposition="middle right",
        textfont={"size": 10},
        customdata=[counts[at] for at in range(len(drawn.boxes))],
        hovertemplate="%{text}<br>reads %{customdata[0]} edges<br>is read by %{customdata[1]}<extra></extra>",
        name="components",
    )


def _link_trace(drawn: Layered) -> go.Scatter:
    xs: list[float | None] = []
    ys: list[float | None] = []
    for start, stop in drawn.links:
        xs += [drawn.boxes[start].x, drawn.boxes[stop].x, None]
        ys += [drawn.boxes[start].y, drawn.boxes[stop].y, None]
    return go.Scatter(
        x=xs, y=ys, mode="lines", line={"color": PLAIN, "width": 1, "dash": "dot"}, hoverinfo="skip"
    )


def _rows(drawn: Layered) -> list[tuple[float, str]]:
    """The first row of each layer, and its number."""
    found: dict[str, float] = {}
    for box in drawn.boxes:
        text = box.kind if box.layer is None else f"layer {box.layer}"
        found.setdefault(text, box.y)
    return [(row, text) for text, row in found.items()]
