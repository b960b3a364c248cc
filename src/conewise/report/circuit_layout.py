"""Where the components and edges of a circuit stand: rows from the input down, a column for each head.

Positions are in columns and rows; who draws says how large these are. Keys and values that heads share are a
box of their own above them, joined to the heads by links.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from itertools import groupby

from conewise.structure.components.edge_graph import EdgeGraph, GraphReader

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
