"""Positions: sweeps over (layer, position) counted in node-rows, on graphs in which every row is a node.

Claim: in a causal stack a patch makes stale only rows from its position on, so that the ratio tends to 4
where that of whole nodes tends to 2; a demand at the last position leaves the limit as it is, a shared prefix
divides by what is left, and attention that looks both ways takes the gain away.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction

from conewise.experiments.measure import patch_cost, warm
from conewise.experiments.result import Progress, Result, Row, silent, versions
from conewise.graph.graph import Graph
from conewise.theory.parts.positions import Rows, RowStack, position_limit

SIZES = ((1, 1), (2, 4), (4, 4), (4, 16), (8, 16), (12, 1))
CURVE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
KEYS, QUERIES, MIXED = 3, 1, 6
CASES: tuple[tuple[str, bool, Rows], ...] = (
    ("causal, last position demanded", True, "last"),
    ("causal, all demanded", True, "all"),
    ("both ways, last position demanded", False, "last"),
)


def run(progress: Progress = silent, sizes: Sequence[tuple[int, int]] = SIZES) -> Result:
    """Patch every layer at every position, in a graph of rows, for each kind of stack and demand."""
    started = time.perf_counter()
    rows: list[Row] = []
    for done, (layers, positions) in enumerate(sizes, start=1):
        for case, causal, demand in CASES:
            rows += _rows(case, RowStack(layers, positions, KEYS, QUERIES, MIXED, causal=causal), demand)
        progress(done, len(sizes))
    series = {
        "size": list(CURVE),
        "ratio": {
            case: [
                float(RowStack(size, size, KEYS, QUERIES, MIXED, causal=causal).ratio(demand))
                for size in CURVE
            ]
            for case, causal, demand in CASES
        },
        "limit": {case: float(position_limit(causal=causal)) for case, causal, _ in CASES},
    }
    return Result(
        name="positions",
        title="Layers and positions",
        claim=(
            "Counted in node-rows, the ratio over every layer and position of a causal stack tends to 4, "
            "with the last position demanded or all; where attention looks both ways it tends to 2."
        ),
        rows=rows,
        compared="node-rows of full runs and of sweeps equal the closed forms exactly",
        notes=(
            (
                f"A layer has {KEYS} nodes that other rows read, {QUERIES} that only its own row reads, and "
                f"{MIXED} behind the attention. Every row of a node is a node of the graph, and each patch "
                "is made in a fork of a warm world."
            ),
            (
                "With a shared prefix, base and source differ in the second half of the positions alone, and "
                "only these are swept."
            ),
        ),
        seconds=time.perf_counter() - started,
        versions=versions(),
        series=series,
    )


def _rows(case: str, stack: RowStack, demand: Rows) -> list[Row]:
    full, costs = counts(stack, demand)
    at = f"{case}, {stack.layers} × {stack.positions}"
    facts = {"case": case, "layers": stack.layers, "positions": stack.positions}
    sites, spent = len(costs), sum(costs.values())
    half = stack.positions // 2
    later = [cost for (_, t), cost in costs.items() if t >= half]
    return [
        Row(f"{at}, a full run", None, stack.full(demand), full, unit="node-rows", facts=facts),
        Row(f"{at}, the sweep", None, stack.sweep(demand), spent, unit="node-rows", facts=facts),
        Row(f"{at}, the ratio", None, stack.ratio(demand), Fraction(sites * full, spent), facts=facts),
        Row(
            f"{at}, the ratio with a shared prefix of {half}",
            None,
            stack.ratio(demand, half),
            Fraction(len(later) * full, sum(later)),
            facts=facts,
        ),
    ]


def counts(stack: RowStack, demand: Rows) -> tuple[int, dict[tuple[int, int], int]]:
    """What the engine computes for a full run, and for a patch at each layer and position."""
    graph, ends = graph_of(stack)
    wanted = tuple(ends if demand == "all" else ends[-1:])
    base = warm(graph, wanted)
    found = {
        (layer, t): patch_cost(base, f"{layer}.{t}", -1, wanted).recomputed
        for layer in range(stack.layers)
        for t in range(stack.positions)
    }
    return base.ledger.count("recomputed"), found


def graph_of(stack: RowStack) -> tuple[Graph, list[str]]:
    """The graph of rows, and what is demanded of each; the site of a layer and row is `{layer}.{row}`."""
    graph, positions = Graph(), range(stack.positions)
    stream = [graph.source(f"x.{t}", t) for t in positions]
    for layer in range(stack.layers):
        at = f"layer{layer}."
        keys = [_chain(graph, f"{at}key.{t}", stream[t], stack.keys) for t in positions]
        queries = [_chain(graph, f"{at}query.{t}", stream[t], stack.queries) for t in positions]
        for t in positions:
            seen = keys[: t + 1] if stack.causal else keys
            # Without nodes of its own, a query is the stream, which is read once.
            mixed: Sequence[str] = list(dict.fromkeys([stream[t], queries[t], *seen]))
            for step in range(1, stack.mixed):
                mixed = [graph.node(f"{at}mixed.{t}.{step}", _mixed, mixed)]
            graph.node(f"{layer}.{t}", _mixed, mixed)
        stream = [f"{layer}.{t}" for t in positions]
    return graph, [_chain(graph, f"end.{t}", stream[t], stack.terminal) for t in positions]


def _chain(graph: Graph, name: str, reads: str, length: int) -> str:
    for step in range(length):
        reads = graph.node(f"{name}.{step}", _mixed, [reads])
    return reads


def _mixed(*values: int) -> int:
    return hash(values)
