"""A circuit in Graphviz' language: components in rows by layer, edges by sign and size of their scores."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import groupby

from conewise.drawing.circuit_layers import layered
from conewise.drawing.circuit_style import colour, width
from conewise.structure.components.edge_graph import EdgeGraph

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
