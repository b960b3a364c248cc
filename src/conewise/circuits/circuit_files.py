"""Circuits as JSON: our own format, and the graphs of EAP-IG's tools."""

from __future__ import annotations

import io
import json
import math
import pickle
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from conewise.anatomy.edge_graph import ARROW, EdgeGraph, GraphReader, GraphWriter
from conewise.circuits.circuit_data import CircuitData, Decision, checked_scores
from conewise.errors import CircuitError
from conewise.files import KIND, Format, is_there, parse_json, read_bounded, write_whole
from conewise.sweeps.storage.codec import decoded

CIRCUIT = "circuit.json"
"""The file of a circuit in a folder."""
FORMATS = ("conewise", "eap", "eap-pt")
FORMAT = Format("conewise circuit", 1)
MOST_BYTES = 512 * 1024 * 1024
"""More than any circuit takes: a file that is larger is something else."""
METHOD = "read from EAP-IG"
MOST_HEADS = 100_000
"""More heads than that has no model; a file may say anything."""


def read(path: Path, graph: EdgeGraph | None) -> CircuitData:
    """The circuit of a file, or of a folder; `graph` is that of the model that it is read for.

    Raises CircuitError where it cannot be read, or is larger than any circuit.
    """
    is_pt = path.suffix == ".pt"
    path = path if is_pt else file_of(path)
    try:
        data = read_bounded(path, MOST_BYTES)
    except OSError as error:
        raise CircuitError(
            f"the circuit {path} cannot be read: {error.strerror or error}. `circuit.save(path)` writes one."
        ) from None
    if data is None:
        raise CircuitError(f"{path} has more than {MOST_BYTES:,} bytes, more than any circuit has.")
    if is_pt:
        return _from_pt(data, graph, path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise CircuitError(f"{path} is not a circuit: it is not text in UTF-8.") from None
    return from_json(text, graph, str(path))


def write(path: Path, circuit: CircuitData, form: str = "conewise") -> None:
    """Write a circuit's file, whole or not at all. Raises CircuitError where that cannot be."""
    if form not in FORMATS:
        raise CircuitError(f"format={form!r} is no format of circuits; there are {', '.join(FORMATS)}.")
    if form == "eap-pt":
        if path.suffix != ".pt":
            raise CircuitError(
                f"{path}: the format 'eap-pt' is that of files whose names end in .pt; name it so."
            )
        data = _to_pt(circuit)
    else:
        path, data = file_of(path), (to_json(circuit) if form == "conewise" else eap_json(circuit)).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CircuitError(f"the circuit cannot be written to {path}: {why}. Name another file.") from None


def file_of(path: Path) -> Path:
    """Return the file of a circuit: a path that ends in ".json", or is no folder; or that in the folder."""
    is_file = path.suffix == ".json" or (is_there(path, Path.exists) and not is_there(path, Path.is_dir))
    return path if is_file else path / CIRCUIT


# -- the graphs of EAP-IG's tools ------------------------------------------------------------------------


def eap_json(circuit: CircuitData, width: int | None = None) -> str:
    """A circuit as EAP-IG's tools read it. Edges without a score have 0; a positive score is one that helps.

    Raises CircuitError for a graph that theirs cannot say, and where d_model is not known.
    """
    _, whole = _to_eap(circuit, width)
    return json.dumps(whole, ensure_ascii=True, allow_nan=False) + "\n"


def _to_eap(circuit: CircuitData, width: int | None = None) -> tuple[EdgeGraph, dict[str, Any]]:
    """The graph of EAP-IG's tools, and what their JSON holds."""
    graph = circuit.graph
    layers, heads, parallel = _sizes(graph)
    width = width or graph.width
    if width is None:
        raise CircuitError(
            "the graph of EAP-IG's tools has d_model in it, which this circuit does not know: bind it to its "
            "model first, with `circuit.bind(model)`."
        )
    written = _graph(layers, heads, parallel, width)
    theirs = [_translated(written, edge, graph) for edge in range(written.count)]
    shares, scores, nodes = Counter(theirs), circuit.scores or {}, {*circuit.nodes, "logits"}
    return written, {
        "cfg": {"n_layers": layers, "n_heads": heads, "parallel_attn_mlp": parallel, "d_model": width},
        "nodes": {
            name: {"in_graph": name in nodes} for name in (*(one.name for one in written.writers), "logits")
        },
        "edges": {
            name: {
                "score": circuit.helps * scores.get(edge, 0.0) / shares[edge] + 0.0,
                "in_graph": edge in circuit,
            }
            for name, edge in zip(written.edges, theirs, strict=True)
        },
    }


def _to_pt(circuit: CircuitData) -> bytes:
    """A circuit as the `.pt` file of EAP-IG's tools: tables [writer, reader] and names, no code."""
    written, whole = _to_eap(circuit)
    at = torch.from_numpy(written.edge_writers), torch.from_numpy(written.edge_readers)
    scores = torch.zeros(len(written.writers), len(written.readers), dtype=torch.float64)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    said = whole["edges"].values()
    scores[at] = torch.tensor([one["score"] for one in said], dtype=torch.float64)
    kept[at] = torch.tensor([one["in_graph"] for one in said])
    nodes = [whole["nodes"][writer.name]["in_graph"] for writer in written.writers]
    tables = {
        "cfg": whole["cfg"],
        "src_nodes": [writer.name for writer in written.writers],
        "dst_nodes": [reader.name for reader in written.readers],
        "edges_scores": scores,
        "edges_in_graph": kept,
        "nodes_in_graph": torch.tensor(nodes),
    }
    held = io.BytesIO()
    torch.save(tables, held)
    return held.getvalue()


def _from_pt(data: bytes, graph: EdgeGraph | None, path: Path) -> CircuitData:
    """The circuit of a `.pt` file of EAP-IG's tools; only tensors and plain values are read, never code."""
    try:
        found = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except (ArithmeticError, AttributeError, EOFError, LookupError, *_UNREADABLE) as error:
        why = (str(error).splitlines() or ["it ends too early"])[0]
        raise CircuitError(
            f"{path} is no circuit of EAP-IG's tools that can be read without running code: {why}"
        ) from None
    try:
        return read_eap(_unpacked(found), graph)
    except ValueError as error:
        raise CircuitError(f"{path} cannot be read as a circuit: {str(error).rstrip('.')}.") from None


_UNREADABLE = (OSError, ValueError, TypeError, RuntimeError, MemoryError, pickle.UnpicklingError)


def _unpacked(found: Any) -> Mapping[str, Any]:
    """The tables of a `.pt` file as the object that the JSON of the same tools holds."""
    wanted = ("cfg", "src_nodes", "dst_nodes", "edges_scores", "edges_in_graph")
    missing = [name for name in wanted if not isinstance(found, Mapping) or name not in found]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}")
    writers, readers = (decoded(found[name], tuple[str, ...], name) for name in wanted[1:3])
    theirs = _graph(*_sizes_said(found["cfg"]))
    if set(writers) != {one.name for one in theirs.writers} or set(readers) != {
        one.name for one in theirs.readers
    }:
        raise ValueError("src_nodes and dst_nodes are not the nodes of a model of the sizes in cfg")
    scores = _numbers(found, "edges_scores", len(writers), len(readers))
    kept = _numbers(found, "edges_in_graph", len(writers), len(readers))
    nodes: dict[str, dict[str, Any]] = {name: {} for name in writers}
    if "neurons_in_graph" in found:
        neurons = _numbers(found, "neurons_in_graph", len(writers))
        nodes = {
            name: {"neurons": [bool(one) for one in row]} for name, row in zip(writers, neurons, strict=True)
        }
    rows, columns = ({name: at for at, name in enumerate(names)} for names in (writers, readers))
    places = ((rows[name.partition(ARROW)[0]], columns[name.partition(ARROW)[2]]) for name in theirs.edges)
    edges = {
        name: {"score": float(scores[row][column]), "in_graph": bool(kept[row][column])}
        for name, (row, column) in zip(theirs.edges, places, strict=True)
    }
    return {"cfg": found["cfg"], "nodes": nodes, "edges": edges}


def _numbers(found: Mapping[str, Any], name: str, *sizes: int) -> list[list[float]]:
    """A table of a `.pt` file whose first sizes are these. Raises ValueError for anything else."""
    table = found[name]
    if not isinstance(table, torch.Tensor) or table.is_complex() or table.ndim != 2:
        raise ValueError(f"{name} is no table of numbers")
    if tuple(table.shape[: len(sizes)]) != sizes:
        raise ValueError(f"{name} is {list(table.shape)} large, where the nodes make it {list(sizes)}")
    rows: list[list[float]] = table.tolist()
    return rows


def read_eap(found: Mapping[str, Any], graph: EdgeGraph | None) -> CircuitData:
    """The circuit of a graph of EAP-IG's tools; `graph` is that of the model it is read for.

    Raises ValueError for what is no such graph, CircuitError for the graph of another model.
    """
    cfg = found["cfg"]
    layers, heads, parallel, width = _sizes_said(cfg)
    theirs = _graph(layers, heads, parallel, width)
    own = theirs if graph is None else graph
    if own is not theirs and _sizes(own) != (layers, heads, parallel):
        ours = _described(*_sizes(own))
        raise CircuitError(
            f"this circuit is one of another model: it has {_described(layers, heads, parallel)}, and the "
            f"model has {ours}."
        )
    _expect_whole_nodes(found["nodes"])
    edges, scores = set(), dict[str, float]()
    for name, one in _object(found["edges"], "edges").items():
        edge, where = _translated(theirs, theirs.number(name), own), f"edges.{name}"
        said = _object(one, where)
        if decoded(said.get("in_graph", False), bool, f"{where}.in_graph"):
            edges.add(edge)
        score = said.get("score")
        is_none = isinstance(score, float) and math.isnan(score)  # as they write what was never scored
        score = None if is_none else decoded(score, float | None, f"{where}.score")
        if score is not None:
            scores[edge] = scores.get(edge, 0.0) + score
    return CircuitData(
        of=str(cfg.get("model_name") or cfg.get("model") or "a model of EAP-IG"),
        graph=own,
        edges=own.names(own.numbers(edges)),
        method=METHOD,
        scores=checked_scores(own, scores) if scores else None,
        helps=1.0,
    )


def _sizes_said(cfg: Any) -> tuple[int, int, bool, int | None]:
    """Layers, heads in each, whether they are parallel to the MLP, and d_model, as a file says them."""
    if not isinstance(cfg, Mapping):
        raise ValueError("cfg is no object")
    layers, heads = (decoded(cfg.get(name), int, f"cfg.{name}") for name in ("n_layers", "n_heads"))
    if layers < 1 or heads < 1 or layers * heads > MOST_HEADS:
        raise ValueError(f"it has {layers} layers of {heads} heads")
    parallel = decoded(cfg.get("parallel_attn_mlp", False), bool, "cfg.parallel_attn_mlp")
    return layers, heads, parallel, decoded(cfg.get("d_model"), int | None, "cfg.d_model")


def _graph(layers: int, heads: int, parallel: bool, width: int | None) -> EdgeGraph:
    """The graph of EAP-IG's tools for a model of these sizes."""
    writers, readers = [GraphWriter("input")], list[GraphReader]()
    for layer in range(layers):
        before = len(writers)
        for slot in "qkv":
            readers += [
                GraphReader(f"a{layer}.h{head}<{slot}>", slot, before, layer, head) for head in range(heads)
            ]
        writers += [GraphWriter(f"a{layer}.h{head}", layer, head) for head in range(heads)]
        readers.append(GraphReader(f"m{layer}", "mlp", before if parallel else len(writers), layer))
        writers.append(GraphWriter(f"m{layer}", layer))
    readers.append(GraphReader("logits", "logits", len(writers)))
    return EdgeGraph(tuple(writers), tuple(readers), width)


def _sizes(graph: EdgeGraph) -> tuple[int, int, bool]:
    """Layers, heads in each, and whether attention and MLP read the same stream; CircuitError for others."""
    layers = {writer.layer for writer in graph.writers if writer.layer is not None}
    heads = sum(writer.head is not None for writer in graph.writers)
    reads = {
        (reader.layer, "mlp" if reader.slot == "mlp" else "attention"): reader.writers
        for reader in graph.readers
        if reader.layer is not None
    }
    count = len(layers)
    parallel = bool(reads) and reads.get((0, "mlp")) == reads.get((0, "attention"))
    if count and heads and heads % count == 0:
        like = _graph(count, heads // count, parallel, None)
        same = [w.name for w in like.writers] == [w.name for w in graph.writers]
        if same and all(
            reads.get((one.layer, "mlp" if one.slot == "mlp" else "attention")) == one.writers
            for one in like.readers
            if one.layer is not None
        ):
            return count, heads // count, parallel
    raise CircuitError(
        "EAP-IG's graphs have an input, layers of one number of heads and an MLP each, and logits; this "
        f"model's has {', '.join(w.name for w in graph.writers[:6])}, ... ({len(graph.writers)} writers)."
    )


def _translated(theirs: EdgeGraph, edge: int, own: EdgeGraph) -> str:
    """The edge of our graph that one of theirs is: the same, or that of the group of its head."""
    name = theirs.edges[edge]
    if own is theirs:
        return name
    reader = theirs.readers[theirs.edge_readers[edge]]
    if reader.slot == "logits":
        return f"{name.partition(ARROW)[0]}{ARROW}{own.readers[-1].name}"
    if reader.slot not in ("k", "v"):
        return name
    head = own.writer_number(f"a{reader.layer}.h{reader.head}")
    for number in own.feeding[head]:
        if own.readers[number].slot == reader.slot:
            return f"{name.partition(ARROW)[0]}{ARROW}{own.readers[number].name}"
    raise CircuitError(f"no reader of {own.writers[head].name} is its {reader.slot}.")


def _expect_whole_nodes(nodes: Any) -> None:
    """No node is in the circuit with some of its neurons alone."""
    for name, said in _object(nodes, "nodes").items():
        neurons = said.get("neurons") if isinstance(said, Mapping) else None
        if neurons is not None and not all(decoded(neurons, tuple[bool, ...], f"nodes.{name}.neurons")):
            raise ValueError(
                f"it is a circuit of neurons ({name} has some of them alone), and circuits here are of edges"
            )


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is no object")
    return value


def _described(layers: int, heads: int, parallel: bool) -> str:
    return f"{layers} layers of {heads} heads" + (", attention and MLP in parallel" if parallel else "")


# -- our own --------------------------------------------------------------------------------------------


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
        **({} if circuit.helps < 0 else {"helps": circuit.helps}),
    }
    lines = [
        f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=True, allow_nan=False)}"
        for name, value in whole.items()
    ]
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


def _circuit(found: Mapping[str, Any]) -> CircuitData:
    for name in ("model", "graph", "edges"):
        if name not in found:
            raise ValueError(f"it has no {name}")
    graph = _circuit_json_graph(found["graph"])
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
        helps=decoded(found.get("helps", -1.0), float, "helps"),
    )


def _circuit_json_graph(found: Any) -> EdgeGraph:
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
