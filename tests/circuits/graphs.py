"""Small graphs of edges, named as people name them, and naive answers about them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from conewise.anatomy.edge_graph import EdgeGraph, GraphReader, GraphWriter


def graph(
    layers: int = 2, heads: int = 2, *, kv_heads: int | None = None, parallel: bool = False, width: int = 8
) -> EdgeGraph:
    """The graph of a decoder: `kv_heads` keys and values for its heads, MLPs beside attention or behind."""
    writers, readers = [GraphWriter("input")], list[GraphReader]()
    for layer in range(layers):
        seen = len(writers)
        readers += [GraphReader(f"a{layer}.h{head}<q>", "q", seen, layer, head) for head in range(heads)]
        letter, shared = ("h", heads) if kv_heads is None else ("kv", kv_heads)
        for slot in ("k", "v"):
            readers += [
                GraphReader(f"a{layer}.{letter}{head}<{slot}>", slot, seen, layer, head)
                for head in range(shared)
            ]
        writers += [GraphWriter(f"a{layer}.h{head}", layer, head) for head in range(heads)]
        readers.append(GraphReader(f"m{layer}", "mlp", seen if parallel else len(writers), layer))
        writers.append(GraphWriter(f"m{layer}", layer))
    readers.append(GraphReader("logits", "logits", len(writers)))
    return EdgeGraph(tuple(writers), tuple(readers), width)


def successors(found: EdgeGraph, edge: str) -> list[str]:
    """The edges that what this one leads into writes, read off the names alone."""
    reader = edge.partition("->")[2]
    owner = reader.partition("<")[0]
    if ".kv" in owner:
        layer, _, group = owner.partition(".kv")
        heads = sum(one.name.startswith(f"{layer}.h") for one in found.writers)
        shared = sum(one.name.startswith(f"{layer}.kv") and one.slot == "k" for one in found.readers)
        size = heads // shared
        owners = {f"{layer}.h{head}" for head in range(int(group) * size, (int(group) + 1) * size)}
    else:
        owners = {owner}
    return [name for name in found.edges if name.partition("->")[0] in owners]


def on_a_path(found: EdgeGraph, edges: Collection[str]) -> set[str]:
    """The edges that are on a path from the input to the logits over `edges`, every path looked at."""
    kept = set(edges)
    good: set[str] = set()

    def walk(edge: str, path: tuple[str, ...]) -> None:
        path = (*path, edge)
        if edge.endswith("->logits"):
            good.update(path)
        for one in successors(found, edge):
            if one in kept:
                walk(one, path)

    for edge in kept:
        if edge.startswith("input->"):
            walk(edge, ())
    return good


def random_scores(found: EdgeGraph, seed: int, *, missing: float = 0.0) -> dict[str, float]:
    """Scores of both signs, some equal to each other, and some edges without one."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(-6, 7, found.count) / 4
    there = draw.random(found.count) >= missing
    return {edge: float(sizes[at]) for at, edge in enumerate(found.edges) if there[at]}
