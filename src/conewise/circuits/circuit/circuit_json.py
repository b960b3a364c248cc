"""Circuits as JSON: our own format, with a version, and the graphs that EAP-IG's tools write and read.

Files are somebody else's until they were read: they are bounded in size, every field is of the type that is
expected, and every name is one of the graph.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conewise.circuits.circuit.circuit_data import CircuitData, checked_scores
from conewise.circuits.circuit.decision import Decision
from conewise.circuits.circuit.eap_graph import read_eap
from conewise.errors import CircuitError
from conewise.files import write_whole
from conewise.formats import KIND, Format
from conewise.reading import parse_json, read_bounded
from conewise.structure.components.edge_graph import EdgeGraph, GraphReader, GraphWriter
from conewise.sweeps.storage.decoding import decoded

FORMAT = Format("conewise circuit", 1)
MOST_BYTES = 512 * 1024 * 1024
"""More than any circuit takes: a file that is larger is something else."""


def to_json(circuit: CircuitData) -> str:
    """The circuit as JSON, equal after `from_json`."""
    graph = circuit.graph
    whole = {
        **FORMAT.header(),
        "model": circuit.of,
        "method": circuit.method,
        "threshold": circuit.threshold,
        "graph": {
            "width": graph.width,
            "writers": [[one.name, one.layer, one.head] for one in graph.writers],
            "readers": [[one.name, one.slot, one.writers, one.layer, one.head] for one in graph.readers],
        },
        "edges": list(circuit.edges),
        "scores": None if circuit.scores is None else dict(circuit.scores),
        "log": [[one.edge, one.kept, one.change] for one in circuit.log],
    }
    lines = [f"  {json.dumps(name)}: {_compact(value)}" for name, value in whole.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str, graph: EdgeGraph | None = None, name: str = "this text") -> CircuitData:
    """The circuit that a text holds: one of ours, or a graph of EAP-IG's tools.

    `graph` is that of the model it is read for; without one, the file's own is taken. Raises CircuitError,
    which says what `name` is and why it is no circuit; FormatError for one of a newer version.
    """
    try:
        found = parse_json(text)
        if not isinstance(found, Mapping):
            raise ValueError("it is not an object")
        if {"cfg", "nodes", "edges"} <= set(found):
            return read_eap(found, graph)
        if KIND not in found:
            raise ValueError(
                f"it has neither {KIND}: {FORMAT.kind!r}, as our files have, nor cfg, nodes and edges, as "
                "EAP-IG's"
            )
        return _circuit(FORMAT.expect(found, name))
    except json.JSONDecodeError as error:
        why = f"it is not JSON ({error.msg}, line {error.lineno})"
    except (ValueError, CircuitError) as error:
        why = str(error).rstrip(".")
    raise CircuitError(f"{name} cannot be read as a circuit: {why}.")


def read_text(path: Path) -> str:
    """The text of a circuit's file. Raises CircuitError where it cannot be read, or is too large for one."""
    try:
        data = read_bounded(path, MOST_BYTES)
        if data is None:
            raise CircuitError(f"{path} has more than {MOST_BYTES:,} bytes, more than any circuit has.")
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise CircuitError(f"{path} is not a circuit: it is not text in UTF-8.") from None
    except OSError as error:
        raise CircuitError(
            f"the circuit {path} cannot be read: {error.strerror or error}. `circuit.save(path)` writes one."
        ) from None


def write_text(path: Path, text: str) -> None:
    """Write a circuit's file, whole or not at all. Raises CircuitError where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CircuitError(f"the circuit cannot be written to {path}: {why}. Name another file.") from None


def _circuit(found: Mapping[str, Any]) -> CircuitData:
    for name in ("model", "graph", "edges"):
        if name not in found:
            raise ValueError(f"it has no {name}")
    graph = _graph(found["graph"])
    edges = decoded(found["edges"], tuple[str, ...], "edges")
    scores = decoded(found.get("scores"), Mapping[str, float] | None, "scores")
    log = decoded(found.get("log", []), tuple[tuple[str, bool, float], ...], "log")
    for edge, _, _ in log:
        graph.number(edge)
    return CircuitData(
        of=decoded(found["model"], str, "model"),
        graph=graph,
        edges=graph.names(graph.numbers(edges)),
        method=decoded(found.get("method"), str | None, "method"),
        threshold=decoded(found.get("threshold"), float | None, "threshold"),
        scores=None if scores is None else checked_scores(graph, scores),
        log=tuple(Decision(*one) for one in log),
    )


def _graph(found: Any) -> EdgeGraph:
    if not isinstance(found, Mapping) or not {"writers", "readers"} <= set(found):
        raise ValueError("its graph has no writers and readers")
    writers = decoded(found["writers"], tuple[tuple[str, int | None, int | None], ...], "graph.writers")
    readers = decoded(
        found["readers"], tuple[tuple[str, str, int, int | None, int | None], ...], "graph.readers"
    )
    width = decoded(found.get("width"), int | None, "graph.width")
    return EdgeGraph(
        tuple(GraphWriter(*one) for one in writers), tuple(GraphReader(*one) for one in readers), width
    )


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False)
