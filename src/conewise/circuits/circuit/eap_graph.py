"""The graph JSON of EAP-IG's tools: `cfg`, `nodes`, and every `edge` with its score and whether it is in.

Its graphs have heads with q, k and v each, also where a model's queries share keys and values. What a group
shares is then there once for each of its heads: it is in a circuit if it is for any of them, its score is
their sum, and it is written to all of them in equal shares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from conewise.circuits.circuit.circuit_data import CircuitData, checked_scores
from conewise.errors import CircuitError
from conewise.structure.components.edge_graph import ARROW, EdgeGraph, GraphReader, GraphWriter
from conewise.sweeps.storage.decoding import decoded

METHOD = "read from EAP-IG"
MOST_HEADS = 100_000
"""More heads than that has no model; a file may say anything."""


def eap_json(circuit: CircuitData, width: int | None = None) -> str:
    """A circuit as EAP-IG's tools read it. Edges without a score have 0.

    Raises CircuitError for a graph that theirs cannot say, and where d_model is not known.
    """
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
    shares: dict[str, int] = {}
    for edge in theirs:
        shares[edge] = shares.get(edge, 0) + 1
    scores = circuit.scores or {}
    nodes = set(circuit.nodes) | {"logits"}
    whole = {
        "cfg": {"n_layers": layers, "n_heads": heads, "parallel_attn_mlp": parallel, "d_model": width},
        "nodes": {name: {"in_graph": name in nodes} for name in _nodes(written)},
        "edges": {
            name: {"score": scores.get(edge, 0.0) / shares[edge], "in_graph": edge in circuit}
            for name, edge in zip(written.edges, theirs, strict=True)
        },
    }
    return json.dumps(whole, ensure_ascii=True, allow_nan=False) + "\n"


def read_eap(found: Mapping[str, Any], graph: EdgeGraph | None) -> CircuitData:
    """The circuit of a graph of EAP-IG's tools; `graph` is that of the model it is read for.

    Raises ValueError for what is no such graph, CircuitError for the graph of another model.
    """
    cfg = found["cfg"]
    if not isinstance(cfg, Mapping):
        raise ValueError("cfg is no object")
    sizes = {name: decoded(cfg.get(name), int, f"cfg.{name}") for name in ("n_layers", "n_heads")}
    layers, heads = sizes["n_layers"], sizes["n_heads"]
    if layers < 1 or heads < 1 or layers * heads > MOST_HEADS:
        raise ValueError(f"it has {layers} layers of {heads} heads")
    parallel = decoded(cfg.get("parallel_attn_mlp", False), bool, "cfg.parallel_attn_mlp")
    width = decoded(cfg.get("d_model"), int | None, "cfg.d_model")
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
    for name, said in _object(found["edges"], "edges").items():
        edge = _translated(theirs, theirs.number(name), own)
        score, is_in = _said(said, name)
        if is_in:
            edges.add(edge)
        if score is not None:
            scores[edge] = scores.get(edge, 0.0) + score
    return CircuitData(
        of=str(cfg.get("model_name") or cfg.get("model") or "a model of EAP-IG"),
        graph=own,
        edges=own.names(own.numbers(edges)),
        method=METHOD,
        scores=checked_scores(own, scores) if scores else None,
    )


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


def _nodes(graph: EdgeGraph) -> list[str]:
    return [*(writer.name for writer in graph.writers), "logits"]


def _expect_whole_nodes(nodes: Any) -> None:
    """No node is in the circuit with some of its neurons alone."""
    for name, said in _object(nodes, "nodes").items():
        neurons = said.get("neurons") if isinstance(said, Mapping) else None
        if neurons is not None and not all(decoded(neurons, tuple[bool, ...], f"nodes.{name}.neurons")):
            raise ValueError(
                f"it is a circuit of neurons ({name} has some of them alone), and circuits here are of edges"
            )


def _said(said: Any, name: str) -> tuple[float | None, bool]:
    said = _object(said, f"edges.{name}")
    score = said.get("score")
    if isinstance(score, float) and math.isnan(score):
        score = None  # as their tools write what was never scored
    return (
        decoded(score, float | None, f"edges.{name}.score"),
        decoded(said.get("in_graph", False), bool, f"edges.{name}.in_graph"),
    )


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is no object")
    return value


def _described(layers: int, heads: int, parallel: bool) -> str:
    return f"{layers} layers of {heads} heads" + (", attention and MLP in parallel" if parallel else "")
