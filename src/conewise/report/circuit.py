"""A circuit as a picture: in Graphviz' language, as a Plotly figure, and as a page of its own.

The layered picture has components in rows by layer, and edges coloured by the sign of their scores and
as wide as these are large. A page is one file that opens from disk and fetches nothing: picture, curve and
table are drawn in the browser, from the edges of the circuit and those that a lower threshold would add.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conewise.anatomy.edge_graph import EdgeGraph, GraphReader
from conewise.errors import CircuitError
from conewise.extras import needs
from conewise.report.sent import SentCircuit
from conewise.report.story import Story
from conewise.templates import asset, escaped, heading, line_chart, macro, note, shown
from conewise.version import __version__

if TYPE_CHECKING:
    import plotly.graph_objects as go

# -- the layered picture ------------------------------------------------------------

PORTS = {"q": -0.22, "k": 0.0, "v": 0.22}
"""The places where edges enter a head, in columns from its middle."""


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

    @property
    def largest(self) -> float:
        """The largest size of a score."""
        return max((abs(line.score or 0.0) for line in self.lines), default=0.0)

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
        Box(name, kinds[name], layers[name], across(name, kinds[name]), float(rows.index(row_of[name])))
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


def strongest(edges: Iterable[str], scores: Mapping[str, float] | None, most: int | None = None) -> list[str]:
    """Return the edges with the largest scores, either way, the largest first."""
    known = scores or {}
    return sorted(edges, key=lambda edge: -abs(known.get(edge, 0.0)))[:most]


SHAPES = {"input": "plain", "head": "circle", "kv": "box", "mlp": "box", "logits": "plain"}


def dot(of: str, graph: EdgeGraph, edges: Collection[str], scores: Mapping[str, float] | None) -> str:
    """The circuit as a digraph: a node for each component, an edge for each edge, its score as tooltip."""
    drawn = layered(graph, edges, scores)
    largest = drawn.largest
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


# -- a drawing for notebooks ------------------------------------------------------------

MOST_DRAWN = 400
"""The most edges of a drawing in a notebook, the strongest of them."""


def drawing(graph: EdgeGraph, edges: Collection[str], scores: Mapping[str, float] | None) -> str:
    """The layered picture as SVG without scripts; a line below it says what colours and shapes mean."""
    drawn = layered(graph, strongest(edges, scores, MOST_DRAWN), scores)
    largest = drawn.largest
    across, down = max(36.0, min(64.0, 620 / max(drawn.columns, 1))), 46.0

    def at(point: Point) -> str:
        return f"{30 + across * point[0]:.1f} {22 + down * point[1]:.1f}"

    lines = [
        {
            "path": "M{} C{}, {}, {}".format(*map(at, drawn.curve(line, SPREAD))),
            "colour": colour(line.score),
            "width": width(line.score, largest),
            "told": line.edge if line.score is None else f"{line.edge}: {line.score:+.4g}",
        }
        for line in drawn.lines
    ]
    boxes = [
        {
            "x": 30 + across * box.x,
            "y": 22 + down * box.y,
            "name": box.name,
            "colour": COLOURS[box.kind],
            "is_head": box.kind == "head",
        }
        for box in drawn.boxes
    ]
    size = (60 + across * max(drawn.columns - 1, 1) + 40, 44 + down * max(drawn.rows - 1, 0))
    return str(macro("markup.html", "circuit", lines, boxes, size))


def colours_in_words(scores: Mapping[str, float] | None) -> str:
    """Describe the colours of a circuit."""
    if not scores:
        return "Grey edges have no score. Round: attention heads; square: MLPs."
    return (
        "Blue edges have a positive score (where scores are effects, replacing the edge raises the metric), "
        "red ones a negative score (it lowers the metric, which needs it); wider ones have larger scores. "
        "Round: attention heads; square: MLPs."
    )


# -- a Plotly figure ------------------------------------------------------------

MOST_IN_FIGURE = 4000
"""The most edges that a figure shows, the strongest of them: with more, one sees none."""

SPREAD = 0.3
"""Heads are small dots here, so edges enter them close together."""

STEPS = 14
"""The pieces that a curve is drawn in."""

WIDTHS = 6
"""The widths of edges: those of one colour and width are one trace, or there would be thousands."""

COLOURS = {"input": "#57606c", "head": "#0060a8", "kv": "#7a8795", "mlp": "#8a5a00", "logits": "#57606c"}


def figure(
    of: str, graph: EdgeGraph, edges: Collection[str], scores: Mapping[str, float] | None
) -> go.Figure:
    """The layered picture; pointing at an edge's middle or at a component tells its name."""
    with needs("plots"):
        import plotly.graph_objects as go

    shown = strongest(edges, scores, MOST_IN_FIGURE)
    drawn = layered(graph, shown, scores)
    rest = f" (the {len(shown):,} strongest of {len(edges):,} edges)" if len(shown) < len(edges) else ""
    rows: dict[str, float] = {}  # the first row of each layer
    for box in drawn.boxes:
        rows.setdefault(box.kind if box.layer is None else f"layer {box.layer}", box.y)
    made = go.Figure([*_curves(drawn), *_links_of(drawn), _middles(drawn), _boxes(drawn)])
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
            "tickvals": list(rows.values()),
            "ticktext": list(rows),
        },
        hovermode="closest",
    )
    return made


Trace = dict[str, Any]
"""A trace of a Plotly figure as plain values."""


def _curves(drawn: Layered) -> Iterator[Trace]:
    """Yield a trace for the lines of each colour and width, in the order in which they are drawn."""
    groups: dict[tuple[str, float], list[Line]] = {}
    largest = drawn.largest
    for line in drawn.lines:
        share = abs(line.score) / largest if line.score is not None and largest else 0.0
        step = round(share * (WIDTHS - 1)) / (WIDTHS - 1)
        size = width(None if line.score is None else step, 1.0)
        groups.setdefault((colour(line.score), size), []).append(line)
    for (tint, size), lines in groups.items():
        paths = [[_point(drawn, line, step / STEPS) for step in range(STEPS + 1)] for line in lines]
        yield _lines(paths, {"color": tint, "width": size}, opacity=0.75)


def _links_of(drawn: Layered) -> Iterator[Trace]:
    """Yield the trace of the links of shared keys and values, where there are any."""
    if drawn.links:
        ends = [[drawn.boxes[start], drawn.boxes[stop]] for start, stop in drawn.links]
        paths = [[(box.x, box.y) for box in pair] for pair in ends]
        yield _lines(paths, {"color": PLAIN, "width": 1, "dash": "dot"})


def _lines(paths: Iterable[Sequence[Point]], line: Mapping[str, Any], **how: Any) -> Trace:
    """Return paths as one trace, with gaps between them."""
    points = [point for path in paths for point in (*path, (None, None))]
    xs, ys = zip(*points, strict=True)
    return {"type": "scatter", "x": xs, "y": ys, "mode": "lines", "line": line, "hoverinfo": "skip", **how}


def _point(drawn: Layered, line: Line, share: float) -> Point:
    """Return the point of a curve after a share of its way."""
    points, rest = drawn.curve(line, SPREAD), 1 - share
    weights = (rest**3, 3 * rest**2 * share, 3 * rest * share**2, share**3)
    x, y = (
        sum(weight * point[axis] for weight, point in zip(weights, points, strict=True)) for axis in (0, 1)
    )
    return x, y


def _middles(drawn: Layered) -> Trace:
    """Return invisible points in the middle of the edges, for the pointer to find."""
    middles = [_point(drawn, line, 0.5) for line in drawn.lines]
    return {
        "type": "scatter",
        "x": [x for x, _ in middles],
        "y": [y for _, y in middles],
        "mode": "markers",
        "marker": {"size": 9, "color": [colour(line.score) for line in drawn.lines], "opacity": 0},
        "customdata": [
            [escaped(line.edge), "no score" if line.score is None else f"score {line.score:+.6g}"]
            for line in drawn.lines
        ],
        "hovertemplate": "%{customdata[0]}<br>%{customdata[1]}<extra></extra>",
        "name": "edges",
    }


def _boxes(drawn: Layered) -> Trace:
    read, written = Counter(line.stop for line in drawn.lines), Counter(line.start for line in drawn.lines)
    return {
        "type": "scatter",
        "x": [box.x for box in drawn.boxes],
        "y": [box.y for box in drawn.boxes],
        "mode": "markers+text",
        "marker": {
            "size": 13,
            "symbol": ["circle" if box.kind == "head" else "square" for box in drawn.boxes],
            "color": [COLOURS[box.kind] for box in drawn.boxes],
            "line": {"color": "white", "width": 1},
        },
        "text": [escaped(box.name) for box in drawn.boxes],
        "textposition": "middle right",
        "textfont": {"size": 10},
        "customdata": [[read[at], written[at]] for at in range(len(drawn.boxes))],
        "hovertemplate": (
            "%{text}<br>reads %{customdata[0]} edges<br>is read by %{customdata[1]}<extra></extra>"
        ),
        "name": "components",
    }


# -- a page ------------------------------------------------------------


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

    def _repr_html_(self) -> str:
        measured = [
            (float(one.edges), one.faithfulness) for one in self.points if one.faithfulness is not None
        ]
        drawn = line_chart(measured, "edges", "faithfulness", 1.0)
        words = "" if measured else "Nothing was measured: `circuit.curve(base=..., metric=...)`."
        return shown(heading(repr(self)), drawn, note(words) if words else "")

    def __repr__(self) -> str:
        if not self.points:
            return "Curve of no circuits"
        first, last = self.points[0], self.points[-1]
        return (
            f"Curve of {len(self.points)} circuits, from {first.edges:,} edges (threshold "
            f"{first.threshold:.4g}) to {last.edges:,} ({last.threshold:.4g})"
        )


MOST_ON_PAGE = 3000
"""The most edges that a page draws: with more, one sees none, and a browser has much to do."""

SCRIPT = "javascript/circuit/main.js"


@dataclass(frozen=True, slots=True)
class DrawnCircuit:
    """The circuit of a page, as plain values.

    `levels` has, for each edge that was scored, the largest threshold at which it is on a path over edges of
    such scores. `measured` are numbers of the circuit in words: what was measured, and how much it is.
    """

    of: str
    graph: EdgeGraph = field(repr=False)
    edges: Collection[str] = field(repr=False)
    nodes: int = 0
    method: str | None = None
    threshold: float | None = None
    scores: Mapping[str, float] | None = None
    levels: Mapping[str, float] = field(default_factory=dict)
    curve: Curve = Curve(())
    measured: Sequence[tuple[str, float]] = ()
    notes: Sequence[str] = ()
    finding: str = ""
    certainty: str = ""
    story: Story | None = None


def write_circuit_page(path: str | Path, circuit: DrawnCircuit) -> Path:
    """Write the page of a circuit to a file, whole or not at all; return its path. Raises CircuitError."""
    from conewise.report.document import document, number, origin, prompt_pairs, script, write_document

    shown = _shown(circuit)
    story, curve = circuit.story, circuit.curve
    faithfulness = dict(circuit.measured).get("faithfulness")
    if curve.faithfulness is not None:
        faithfulness = curve.faithfulness
    facts = [
        (f"{len(circuit.edges):,}", f"of {circuit.graph.count:,} edges ({_share(circuit):.2%})"),
        (f"{circuit.nodes:,}", "components"),
    ]
    if faithfulness is not None:
        facts.append((number(faithfulness), "faithfulness"))
    if circuit.method:
        at = "" if circuit.threshold is None else f", threshold {circuit.threshold:g}"
        facts.append((circuit.method, f"how it was found{at}"))
    graph = f"{len(circuit.graph.writers):,} writers, {len(circuit.graph.readers):,} readers"
    rows = [("captured as", circuit.of)] if circuit.of else []
    rows += [("graph", graph), ("conewise", __version__)]
    page = document(
        "report/circuit.html",
        _title(circuit),
        styles=[asset("report/theme.css"), asset("report/page.css"), asset("report/circuit.css")],
        scripts=[script(SCRIPT)],
        data={"conewise-circuit": _packed(circuit, shown)},
        facts=facts,
        story=story,
        finding=circuit.finding,
        certainty=circuit.certainty,
        pairs=None if story is None else prompt_pairs(story, roles=("is kept", "fills removed edges")),
        measured=[(name, number(value)) for name, value in circuit.measured],
        notes=list(circuit.notes),
        has_scores=circuit.scores is not None and bool(curve.points),
        has_faithfulness=any(_finite(point.faithfulness) is not None for point in curve.points),
        metric=curve.metric,
        left_out=len(set(circuit.edges) - set(shown)),
        origin=origin(story, rows),
    )
    return write_document(path, page, CircuitError)


def _title(circuit: DrawnCircuit) -> str:
    if circuit.story is not None and circuit.story.title:
        return circuit.story.title
    model = circuit.story.model if circuit.story is not None else circuit.of
    count = len(circuit.edges)
    return f"A circuit of {count:,} {'edge' if count == 1 else 'edges'} in {model or 'a model'}"


def _share(circuit: DrawnCircuit) -> float:
    return len(circuit.edges) / circuit.graph.count if circuit.graph.count else 0.0


def _shown(circuit: DrawnCircuit) -> list[str]:
    """The edges that are sent: the circuit's, and those of its curve, the strongest first where too many."""
    lowest = min((point.threshold for point in circuit.curve.points), default=math.inf)
    own = set(circuit.edges)
    levels, found = circuit.levels, strongest(own, circuit.scores)
    more = [edge for edge, level in levels.items() if level >= lowest and edge not in own]
    found += sorted(more, key=lambda edge: -levels[edge])
    return found[:MOST_ON_PAGE]


def _packed(circuit: DrawnCircuit, shown: Sequence[str]) -> SentCircuit:
    drawn = layered(circuit.graph, shown, circuit.scores)
    own = frozenset(circuit.edges)
    return {
        "columns": drawn.columns,
        "rows": drawn.rows,
        "boxes": [(box.name, box.kind, box.layer, box.x, box.y) for box in drawn.boxes],
        "links": drawn.links,
        "edges": [
            {
                "name": line.edge,
                "from": line.start,
                "to": line.stop,
                "slot": line.slot,
                "curve": [(round(x, 3), round(y, 3)) for x, y in drawn.curve(line)],
                "score": line.score,
                "level": circuit.levels.get(line.edge, -1.0),
                "own": line.edge in own,
            }
            for line in drawn.lines
        ],
        "points": [
            (point.threshold, point.edges, _finite(point.faithfulness)) for point in circuit.curve.points
        ],
        "own": {"edges": len(circuit.edges), "faithfulness": _finite(circuit.curve.faithfulness)},
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
