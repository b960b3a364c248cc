"""A circuit as a page: one file that opens from disk and fetches nothing.

The layered picture, the curve and the table are drawn in the browser, from the edges that are sent: those of
the circuit, and those that a lower threshold would add.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from conewise.anatomy.edge_graph import EdgeGraph
from conewise.errors import CircuitError
from conewise.report.circuit_figure import layered
from conewise.report.document import document, script, write_document
from conewise.report.sections import number, prompt_pairs
from conewise.report.sent import SentCircuit
from conewise.report.story import Story
from conewise.templates import asset
from conewise.version import __version__

MOST_LINES = 3000
"""How many edges a page draws: with more, one sees none, and a browser has much to do."""

SCRIPT = "javascript/circuit/main.js"


@dataclass(frozen=True, slots=True)
class DrawnCircuit:
    """What a page says of a circuit, as plain values.

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
    curve: Curve = field(default_factory=lambda: Curve(()))
    measured: Sequence[tuple[str, float]] = ()
    notes: Sequence[str] = ()
    story: Story | None = None


def write_circuit_page(path: str | Path, circuit: DrawnCircuit) -> Path:
    """Write the page of a circuit to a file, whole or not at all; returns its path. Raises CircuitError."""
    return write_document(path, circuit_page(circuit), CircuitError)


def circuit_page(circuit: DrawnCircuit, *, made_at: datetime | None = None) -> str:
    """The page of a circuit as HTML."""
    shown = _shown(circuit)
    story = circuit.story
    return document(
        "report/circuit.html",
        _title(circuit),
        styles=[asset("report/theme.css"), asset("report/page.css"), asset("report/circuit.css")],
        scripts=[script(SCRIPT)],
        data={"conewise-circuit": _packed(circuit, shown)},
        facts=_facts(circuit),
        story=story,
        pairs=None if story is None else prompt_pairs(story),
        measured=[(name, number(value)) for name, value in circuit.measured],
        notes=list(circuit.notes),
        has_scores=circuit.scores is not None and bool(circuit.curve.points),
        has_faithfulness=any(_finite(point.faithfulness) is not None for point in circuit.curve.points),
        metric=circuit.curve.metric,
        left_out=len(set(circuit.edges) - set(shown)),
        origin=_origin(circuit, made_at or datetime.now(UTC)),
    )


def _title(circuit: DrawnCircuit) -> str:
    if circuit.story is not None and circuit.story.title:
        return circuit.story.title
    model = circuit.story.model if circuit.story is not None else circuit.of
    count = len(circuit.edges)
    return f"A circuit of {count:,} {'edge' if count == 1 else 'edges'} in {model or 'a model'}"


def _facts(circuit: DrawnCircuit) -> list[tuple[str, str]]:
    """The numbers below the title, and what each is of."""
    share = len(circuit.edges) / circuit.graph.count if circuit.graph.count else 0.0
    found = [
        (f"{len(circuit.edges):,}", f"of {circuit.graph.count:,} edges ({share:.2%})"),
        (f"{circuit.nodes:,}", "components"),
    ]
    faithfulness = circuit.curve.faithfulness
    measured = dict(circuit.measured)
    if faithfulness is None and "faithfulness" in measured:
        faithfulness = measured["faithfulness"]
    if faithfulness is not None:
        found.append((number(faithfulness), "faithfulness"))
    if circuit.method:
        at = "" if circuit.threshold is None else f", threshold {circuit.threshold:g}"
        found.append((circuit.method, f"how it was found{at}"))
    return found


def _shown(circuit: DrawnCircuit) -> list[str]:
    """The edges that are sent: the circuit's, and those of its curve, the strongest first where too many."""
    lowest = min((point.threshold for point in circuit.curve.points), default=math.inf)
    own = set(circuit.edges)
    levels, scores = circuit.levels, circuit.scores or {}
    found = sorted(own, key=lambda edge: -abs(scores.get(edge, 0.0)))
    more = [edge for edge, level in levels.items() if level >= lowest and edge not in own]
    found += sorted(more, key=lambda edge: -levels[edge])
    return found[:MOST_LINES]


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


def _origin(circuit: DrawnCircuit, made_at: datetime) -> dict[str, object]:
    rows = [("model", circuit.story.model)] if circuit.story is not None else []
    if circuit.of:
        rows.append(("captured as", circuit.of))
    rows.append(("graph", f"{len(circuit.graph.writers):,} writers, {len(circuit.graph.readers):,} readers"))
    if circuit.story is not None and circuit.story.seed is not None:
        rows.append(("seed", str(circuit.story.seed)))
    rows.append(("conewise", __version__))
    rows.append(("page made", made_at.strftime("%d %B %Y, %H:%M UTC")))
    return {"command": None if circuit.story is None else circuit.story.command, "rows": rows}


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

    def __repr__(self) -> str:
        if not self.points:
            return "Curve of no circuits"
        first, last = self.points[0], self.points[-1]
        return (
            f"Curve of {len(self.points)} circuits, from {first.edges:,} edges (threshold "
            f"{first.threshold:.4g}) to {last.edges:,} ({last.threshold:.4g})"
        )
