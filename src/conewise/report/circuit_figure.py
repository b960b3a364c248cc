"""A circuit as a Plotly figure: components by layer, edges coloured by sign and as wide as their scores."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from itertools import groupby

from conewise.anatomy.edge_graph import EdgeGraph, GraphReader
from conewise.extras import needs
from conewise.runs.figures import escaped

PORTS = {"q": -0.22, "k": 0.0, "v": 0.22}
"""Where a head is entered, in columns from its middle."""


@dataclass(frozen=True, slots=True)
class Box:
    """A component: `kind` is "input", "head", "kv", "mlp" or "logits"."""

    name: str
    kind: str
    layer: int | None
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Line:
    """An edge from one box to another, `port` columns beside its middle."""

    edge: str
    start: int
    stop: int
    slot: str
    port: float
    score: float | None


Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Layered:
    """The picture: boxes, lines from the weakest to the strongest, and links of shared keys and values."""

    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]
    links: tuple[tuple[int, int], ...]
    columns: int
    rows: int

    def curve(self, line: Line, spread: float = 1.0) -> tuple[Point, Point, Point, Point]:
        """A line as a Bézier curve. It bends aside where boxes may stand straight below its start.

        `spread` says how far apart queries, keys and values enter a head, of what a box is wide.
        """
        start, stop = self.boxes[line.start], self.boxes[line.stop]
        x, y, to_x, to_y = start.x, start.y, stop.x + spread * line.port, stop.y
        reach = 0.45 * (to_y - y)
        straight = abs(to_x - x) < 0.5 and to_y - y > 1
        bend = 0.0 if not straight else 0.42 + 0.03 * min(to_y - y, 8)
        return (x, y), (x + bend, y + reach), (to_x + bend, to_y - reach), (to_x, to_y)


def layered(graph: EdgeGraph, edges: Collection[str], scores: Mapping[str, float] | None) -> Layered:
    """The picture of some edges, and of the components that they join."""
    ends = [(edge, *graph.split(edge)) for edge in edges]
    kinds: dict[str, str] = {}
    for _, writer, reader in ends:
        kinds[writer.name] = _kind(writer.layer, writer.head)
        kinds[_owner(reader)] = _reader_kind(graph, reader)
    links = _links(graph, kinds)
    layers = {one.name: one.layer for one in graph.writers} | {
        _owner(one): one.layer for one in graph.readers
    }
    heads = {one.name: one.head for one in graph.writers if one.head is not None}
    order = {name: number for number, name in enumerate(sorted({heads[n] for n in kinds if n in heads}))}
    columns = max(len(order), 1)
    middle = (columns - 1) / 2
    mlps_first = _mlps_first(graph)
    row_of = {name: _row(layers[name], kind, mlps_first) for name, kind in kinds.items()}
    rows = sorted(set(row_of.values()))
    groups = {kv: [order[heads[head]] for head in linked] for kv, linked in links.items()}

    def across(name: str, kind: str) -> float:
        if kind == "head":
            return float(order[heads[name]])
        if kind == "kv":
            return sum(groups[name]) / len(groups[name]) if groups[name] else middle
        return float(columns) if kind == "mlp" else middle

    names = sorted(kinds, key=lambda name: (row_of[name], across(name, kinds[name]), name))
    at = {name: number for number, name in enumerate(names)}
    boxes = tuple(
        Box(
            name,
            kinds[name],
            layers[name],
            across(name, kinds[name]),
            float(rows.index(row_of[name])),
        )
        for name in names
    )
    lines = [
        Line(
            edge,
            at[writer.name],
            at[_owner(reader)],
            reader.slot,
            PORTS.get(reader.slot, 0.0),
            None if scores is None else scores.get(edge),
        )
        for edge, writer, reader in ends
    ]
    lines.sort(key=lambda line: abs(line.score or 0.0))
    joined = tuple((at[kv], at[head]) for kv, linked in links.items() for head in linked)
    return Layered(boxes, tuple(lines), joined, columns + 1, len(rows))


def _owner(reader: GraphReader) -> str:
    """The box that a reader is a part of: its head, its MLP, what a group shares, the logits."""
    return reader.name.partition("<")[0]


def _kind(layer: int | None, head: int | None) -> str:
    return "head" if head is not None else "input" if layer is None else "mlp"


def _reader_kind(graph: EdgeGraph, reader: GraphReader) -> str:
    if reader.slot == "logits":
        return "logits"
    if reader.slot not in PORTS:
        return "mlp"
    return "head" if graph.is_writer(_owner(reader)) else "kv"


def _links(graph: EdgeGraph, kinds: Mapping[str, str]) -> dict[str, list[str]]:
    """For each box of shared keys and values, the heads of the picture that read them."""
    found: dict[str, list[str]] = {}
    for number, reader in enumerate(graph.readers):
        owner = _owner(reader)
        if kinds.get(owner) == "kv" and owner not in found:
            heads = [graph.writers[one].name for one in graph.fed[number]]
            found[owner] = [head for head in heads if head in kinds]
    return found


def _mlps_first(graph: EdgeGraph) -> frozenset[int | None]:
    """The layers whose MLP writes before their heads do."""
    first: dict[int | None, bool] = {}
    for writer in graph.writers:
        first.setdefault(writer.layer, writer.head is None)
    return frozenset(layer for layer, is_mlp in first.items() if is_mlp)


def _row(layer: int | None, kind: str, mlps_first: Container[int | None]) -> tuple[int, int, int]:
    """Rows from the input down: in a layer, shared keys and values, heads, and the MLP before or after."""
    if kind == "input":
        return (0, 0, 0)
    if kind == "logits":
        return (2, 0, 0)
    order = ("mlp", "kv", "head") if layer in mlps_first else ("kv", "head", "mlp")
    return (1, -1 if layer is None else layer, order.index(kind))


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


SHAPES = {"input": "plain", "head": "circle", "kv": "box", "mlp": "box", "logits": "plain"}


def dot(of: str, graph: EdgeGraph, edges: Collection[str], scores: Mapping[str, float] | None) -> str:
    """The circuit as a digraph: a node for each component, an edge for each edge, its score as tooltip."""
    drawn = layered(graph, edges, scores)
    largest = max((abs(line.score or 0.0) for line in drawn.lines), default=0.0)
    lines = [
        f"digraph {_quoted(of or 'circuit')} {{",
        "  rankdir=TB;",
        '  node [fontname="Helvetica", fontsize=10];',
        '  edge [fontname="Helvetica", fontsize=8, arrowsize=0.5];',
    ]
    for _, row in groupby(drawn.boxes, key=lambda box: box.y):
        names = [f"{_quoted(box.name)} [shape={SHAPES[box.kind]}];" for box in row]
        lines.append(f"  {{ rank=same; {' '.join(names)} }}")
    for line in drawn.lines:
        shown = {
            "color": colour(line.score),
            "penwidth": f"{width(line.score, largest):.2f}",
            "tooltip": line.edge if line.score is None else f"{line.edge} {line.score:+.6g}",
        }
        if line.slot in ("q", "k", "v"):
            shown["label"] = line.slot
        lines.append(
            f"  {_joined(drawn.boxes[line.start].name, drawn.boxes[line.stop].name)} {_written(shown)};"
        )
    for kv, head in drawn.links:
        shown = {"style": "dashed", "color": colour(None), "arrowhead": "none"}
        lines.append(f"  {_joined(drawn.boxes[kv].name, drawn.boxes[head].name)} {_written(shown)};")
    return "\n".join([*lines, "}", ""])


def _joined(start: str, stop: str) -> str:
    return f"{_quoted(start)} -> {_quoted(stop)}"


def _written(shown: Mapping[str, str]) -> str:
    return f"[{', '.join(f'{name}={_quoted(text)}' for name, text in shown.items())}]"


def _quoted(text: str) -> str:
    """A text as an ID: in quotes, of which those inside are escaped. A backslash is one, and not a code."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


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
