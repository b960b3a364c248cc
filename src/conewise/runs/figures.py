"""Figures of the parts of a run: heatmaps with tokens on their axes, patterns of heads, lens tables."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conewise.errors import DecompositionError
from conewise.extras import needs
from conewise.files import write_whole
from conewise.program.tensors import Tensor
from conewise.templates import LIGHT, RISING, escaped

with needs("plots"):
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

ENDINGS = ("png", "svg", "pdf", "jpeg", "webp")
CELL = 26
"""The height of a row of a heatmap, in pixels, where there are few of them."""

Cells = Sequence[Sequence[float]]


def heatmap(
    values: Tensor,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    measure: str,
    row_title: str = "",
    column_title: str = "token",
) -> go.Figure:
    """Numbers [row, column] around 0: red below, blue above; the first row stands at the top."""
    numbers = values.double().cpu()
    largest = float(numbers.abs().max()) if numbers.numel() else 0.0
    drawn = go.Figure(
        go.Heatmap(
            z=numbers.tolist(),
            customdata=[[[escaped(row), escaped(column)] for column in columns] for row in rows],
            hovertemplate="<b>%{customdata[0]}</b> at %{customdata[1]}<br>"
            + measure
            + " %{z:.6g}<extra></extra>",
            colorscale=LIGHT,
            zmid=0,
            zmin=-(largest or 1.0),
            zmax=largest or 1.0,
            colorbar={"title": measure},
        )
    )
    _axes(drawn, rows, columns, row_title, column_title)
    drawn.update_layout(title=title, height=_height(len(rows)), plot_bgcolor="rgba(0,0,0,0)")
    return drawn


def bars(values: Tensor, *, names: Sequence[str], title: str, measure: str) -> go.Figure:
    """Numbers by name, with one bar each."""
    numbers = values.double().cpu().tolist()
    drawn = go.Figure(
        go.Bar(
            x=list(range(len(names))),
            y=numbers,
            customdata=[escaped(name) for name in names],
            hovertemplate="<b>%{customdata}</b><br>" + measure + " %{y:.6g}<extra></extra>",
        )
    )
    drawn.update_xaxes(_ticks(names))
    drawn.update_yaxes(title_text=measure)
    drawn.update_layout(title=title, showlegend=False, plot_bgcolor="rgba(0,0,0,0)")
    return drawn


def patterns(
    values: Tensor,
    *,
    layers: Sequence[int],
    heads: Sequence[int],
    queries: Sequence[str],
    keys: Sequence[str],
) -> go.Figure:
    """Attention [layer, head, query, key], a small picture for each head; a menu chooses among layers."""
    across = min(len(heads), max(math.ceil(len(heads) ** 0.5), 4))
    down = math.ceil(len(heads) / across)
    drawn = make_subplots(
        rows=down,
        cols=across,
        subplot_titles=[f"head {head}" for head in heads],
        horizontal_spacing=0.25 / across,
        vertical_spacing=min(0.3 / down, 0.14),
    )
    told = [[[escaped(query), escaped(key)] for key in keys] for query in queries]
    few = len(keys) <= 24 and across <= 4
    for number, (layer, of_layer) in enumerate(zip(layers, values.double().cpu().tolist(), strict=True)):
        for at, (head, one) in enumerate(zip(heads, of_layer, strict=True)):
            heat = go.Heatmap(
                z=one,
                customdata=told,
                name=f"layer {layer}, head {head}",
                hovertemplate="<b>%{fullData.name}</b><br>"
                "%{customdata[0]} reads %{customdata[1]}<br>%{z:.4f}<extra></extra>",
                coloraxis="coloraxis",
                visible=number == 0,
            )
            drawn.add_trace(heat, row=at // across + 1, col=at % across + 1)
    for at in range(len(heads)):
        place = {"row": at // across + 1, "col": at % across + 1}
        drawn.update_xaxes(_ticks(keys) if few else {"showticklabels": False}, **place)
        ticks = _ticks(queries) if few and at % across == 0 else {"showticklabels": False}
        drawn.update_yaxes({**ticks, "autorange": "reversed"}, **place)
    drawn.update_layout(
        title=_layer_title(layers[0]),
        height=130 + 230 * down,
        coloraxis={"colorscale": RISING, "cmin": 0, "cmax": 1, "colorbar": {"title": "weight"}},
        plot_bgcolor="rgba(0,0,0,0)",
        updatemenus=[_menu(layers, len(heads))] if len(layers) > 1 else [],
    )
    return drawn


def _layer_title(layer: int) -> str:
    return f"Attention of layer {layer}: rows read columns"


def _menu(layers: Sequence[int], heads: int) -> dict[str, Any]:
    """A menu that shows the pictures of one layer, and hides the others."""
    return {
        "x": 1,
        "xanchor": "right",
        "y": 1.02,
        "yanchor": "bottom",
        "buttons": [
            {
                "label": f"layer {layer}",
                "method": "update",
                "args": [
                    {"visible": [at // heads == number for at in range(len(layers) * heads)]},
                    {"title.text": _layer_title(layer)},
                ],
            }
            for number, layer in enumerate(layers)
        ],
    }


def lens_table(
    shown: Sequence[Sequence[str]],
    shares: Cells,
    told: Sequence[Sequence[str]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    measure: str,
) -> go.Figure:
    """A text for each row and column, on the colour of a share between 0 and 1; the last row on top."""
    drawn = go.Figure(
        go.Heatmap(
            z=[list(row) for row in shares],
            text=[[escaped(text) for text in row] for row in shown],
            texttemplate="%{text}",
            customdata=[[escaped(text).replace("\n", "<br>") for text in row] for row in told],
            hovertemplate="%{customdata}<extra></extra>",
            colorscale=RISING,
            zmin=0,
            zmax=1,
            colorbar={"title": measure},
        )
    )
    _axes(drawn, rows, columns, "read after layer", "token", is_up=True)
    drawn.update_layout(title=title, height=_height(len(rows)), plot_bgcolor="rgba(0,0,0,0)")
    return drawn


def feature_figure(
    nodes: Sequence[tuple[int, int, str, str]],
    edges: Sequence[tuple[int, int, float]],
    tokens: Sequence[str],
    rows: Sequence[str],
) -> go.Figure:
    """Nodes at token and row, and the edges between them: wide where an effect is large.

    A node is its position, its row, its kind and its name; an edge the numbers of its ends, and its effect.
    """
    drawn, largest = go.Figure(), max((abs(effect) for *_, effect in edges), default=0.0) or 1.0
    beside: dict[tuple[int, int], int] = {}
    xs, ys = [], []
    for pos, row, *_ in nodes:  # nodes of one token and row stand side by side
        number = beside[pos, row] = beside.get((pos, row), 0) + 1
        xs.append(pos + 0.09 * ((number - 1) % 9) - 0.05)
        ys.append(row + 0.14 * ((number - 1) // 9))
    for one, other, effect in reversed(edges):
        colour = "rgba(33, 102, 172, .7)" if effect > 0 else "rgba(178, 24, 43, .7)"
        drawn.add_scatter(
            x=[xs[one], xs[other]],
            y=[ys[one], ys[other]],
            mode="lines",
            line={"width": 0.4 + 4 * abs(effect) / largest, "color": colour},
            hoverinfo="skip",
            showlegend=False,
        )
    shapes = {"feature": "circle", "error": "diamond", "embedding": "square", "metric": "star"}
    for kind, shape in shapes.items():
        own = [number for number, node in enumerate(nodes) if node[2] == kind]
        if own:
            drawn.add_scatter(
                x=[xs[number] for number in own],
                y=[ys[number] for number in own],
                mode="markers",
                marker={"symbol": shape, "size": 9, "color": "#444", "line": {"width": 1, "color": "white"}},
                text=[escaped(nodes[number][3]) for number in own],
                hovertemplate="%{text}<extra></extra>",
                name=kind,
            )
    drawn.update_layout(
        xaxis={
            "tickvals": list(range(len(tokens))),
            "ticktext": [escaped(t) for t in tokens],
            "showgrid": False,
        },
        yaxis={"tickvals": list(range(len(rows))), "ticktext": [escaped(r) for r in rows], "showgrid": True},
        plot_bgcolor="rgba(0,0,0,0)",
        height=140 + 100 * len(rows),
    )
    return drawn


def _axes(
    drawn: go.Figure,
    rows: Sequence[str],
    columns: Sequence[str],
    row_title: str,
    column_title: str,
    *,
    is_up: bool = False,
) -> None:
    drawn.update_xaxes({**_ticks(columns), "title_text": column_title})
    drawn.update_yaxes({**_ticks(rows), "title_text": row_title, "autorange": True if is_up else "reversed"})


def _ticks(labels: Sequence[str]) -> dict[str, Any]:
    """Labels by number: two positions may have the same token. Of many, some are left out."""
    every = max(1, math.ceil(len(labels) / 80))
    return {
        "tickvals": list(range(0, len(labels), every)),
        "ticktext": [escaped(label) for label in labels[::every]],
    }


def _height(rows: int) -> int:
    return 180 + min(max(rows, 6) * CELL, 1400)


def save_image(figure: go.Figure, path: str | Path) -> Path:
    """Write a figure as an image, whole or not at all; returns its path.

    Raises DecompositionError where the ending is none of `ENDINGS`, and where kaleido, which draws it, or
    the browser that kaleido draws with is not there.
    """
    path = Path(path)
    ending = path.suffix.removeprefix(".").lower().replace("jpg", "jpeg")
    if ending not in ENDINGS:
        raise DecompositionError(
            f"{path.name!r} is no image: its ending is to be one of .{', .'.join(ENDINGS)}. "
            "A page that can be explored is `figure.write_html(...)`."
        )
    if find_spec("kaleido") is None:
        raise DecompositionError(
            "images are drawn by kaleido, which is not installed: `pip install kaleido`. A page needs "
            "nothing: `figure.write_html(...)`."
        )
    with _drawing():
        image: bytes = figure.to_image(format=ending)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, image)
    return path


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever kaleido raises where it finds no browser
        raise DecompositionError(
            f"kaleido could not draw the image: {error}. It needs Chrome or Chromium: `kaleido_get_chrome` "
            "installs one. A page needs neither: `figure.write_html(...)`."
        ) from error
