"""Edges: what the exhaustive sweep over edges costs, in closed form and on captured models.

Claim: readers compute once for each writer, every edge costs the cone of its reader, and against one full
run for each edge the ratio tends to 3, times what a layer computes over what of it a change can reach. The
numbers of one layer are read off graphs of one and two layers; deeper models are predicted from them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from conewise.anatomy.components import Components
from conewise.circuits.replaced_parts import edge_facts
from conewise.model import Model
from conewise.models.architectures import ARCHITECTURES
from conewise.paper.experiments.result import Progress, Result, Row, silent, versions
from conewise.paper.theory.parts import EdgeCost, ReaderAt, edge_cost, edge_limit, stack_edge_cost
from conewise.paper.theory.sweeps import full_cost
from conewise.program.foreign import quiet
from conewise.runs.metrics import logit_diff
from conewise.sweeps.sweep import Sweep

SEED, POSITIONS, HEADS = 0, 5, 4
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"heads": HEADS},
    "llama": {"heads": HEADS, "kv_heads": 2},
    "gpt_neox": {"heads": HEADS, "parallel": True},
}
DEPTHS, CURVE = (1, 2, 3), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


def run(
    progress: Progress = silent, names: Sequence[str] = tuple(SHAPES), depths: Sequence[int] = DEPTHS
) -> Result:
    """Sweep every edge of small models; predict each depth from graphs of one and two layers."""
    started = time.perf_counter()
    rows: list[Row] = []
    series: dict[str, Any] = {"layers": list(CURVE), "ratio": {}, "shared": {}}
    for done, name in enumerate(names, start=1):
        sweeps = {depth: _sweep(name, depth) for depth in sorted({1, 2, *depths})}
        numbers = _numbers(sweeps[1], sweeps[2])
        for depth in depths:
            rows += _rows(name, depth, sweeps[depth], _predicted(name, depth, numbers))
        curve = [_predicted(name, depth, numbers) for depth in CURVE]
        series["ratio"][name] = [float(one.ratio) for one in curve]
        series["shared"][name] = [float(Fraction(one.shared) / Fraction(one.total)) for one in curve]
        limit = edge_limit(numbers["layer"], numbers["per_layer"])
        rows.append(
            Row(
                f"{name}, the ratio at {CURVE[-1]} layers, by the closed form; predicted: its limit",
                *(None, limit, curve[-1].ratio),
                exact=False,
                facts={"model": name, "limit": float(limit)},
            )
        )
        progress(done, len(names))
    return Result(
        name="edges",
        title="Every edge of a model",
        claim=(
            "The sweep over all edges costs what readers compute, once for each writer, and a cone for each "
            "edge; against full runs its ratio tends to 3, or more where part of a layer never changes."
        ),
        rows=rows,
        compared="edges and node evaluations of plans and ledgers equal the closed forms exactly",
        notes=(
            (
                f"Random weights, {HEADS} heads, {POSITIONS} positions; Llama with two heads for keys and "
                "values, GPT-NeoX with parallel blocks. What a reader computes and what lies behind it is "
                "read off the graph of one layer, what a layer adds off that of two."
            ),
            (
                "The shared part is what readers compute before their sites have values. World by world "
                "nothing is shared, and every edge pays for its reader."
            ),
        ),
        seed=SEED,
        seconds=time.perf_counter() - started,
        versions=versions("torch", "transformers"),
        series=series,
    )


def readers_of(components: Components) -> list[ReaderAt]:
    """The readers of a model by node: heads of one layer that read by one node are parts of one reader."""
    found: dict[tuple[str, str, int], int] = {}
    for reader in components.readers:
        at = (reader.entry, reader.node, reader.writers)
        found[at] = found.get(at, 0) + 1
    return [ReaderAt(*at, parts) for at, parts in found.items()]


def _sweep(name: str, depth: int) -> Sweep:
    architecture = ARCHITECTURES[name]
    with quiet():
        model = Model(architecture.make(depth, SEED), (), architecture.example(POSITIONS, SEED))
    found: Sweep = model.sweep(
        model.edges(),
        base=model.run(**architecture.example(POSITIONS, SEED + 1)),
        source=model.run(**architecture.example(POSITIONS, SEED + 2)),
        metric=logit_diff(1, 2, pos=-1),
    )
    return found


def _numbers(one: Sweep, two: Sweep) -> dict[str, Any]:
    """What the closed form takes: of each slot in a model of one layer, and what a second layer adds."""
    alone, first = _by_slot(one), _by_slot(two)
    full, deeper = (int(full_cost(sweep.model.graph, sweep.targets())) for sweep in (one, two))
    return {
        "between": {slot: int(cost.shared) for slot, cost in alone.items()},
        "below": {slot: int(cost.cones) for slot, cost in alone.items()},
        "layer": int(first["q"].cones) - int(alone["q"].cones),
        "full": full,
        "per_layer": deeper - full,
    }


def _by_slot(sweep: Sweep) -> dict[str, EdgeCost]:
    """One edge into the first reader of each slot."""
    found: dict[str, EdgeCost] = {}
    for reader in edge_facts(sweep.model).components.readers:
        one = ReaderAt(reader.entry, reader.node, 1)
        if reader.slot not in found:
            found[reader.slot] = edge_cost(sweep.model.graph, [one], sweep.targets())
    return found


def _predicted(name: str, depth: int, numbers: Mapping[str, Any]) -> EdgeCost:
    return stack_edge_cost(
        depth,
        **SHAPES[name],
        between=numbers["between"],
        below=numbers["below"],
        layer=numbers["layer"],
        full=numbers["full"] + (depth - 1) * numbers["per_layer"],
    )


def _rows(name: str, depth: int, sweep: Sweep, predicted: EdgeCost) -> list[Row]:
    result = sweep.run(evaluator="wavefront", progress=False)
    serial = sweep.plan(evaluator="serial")
    full = result.plan.full_evaluations
    at, facts = f"{name}, {depth} layer{'s' if depth > 1 else ''}", {"model": name, "layers": depth}
    spent = result.ledger.node_evaluations
    return [
        Row(f"{at}, edges", None, predicted.edges, result.plan.worlds, facts=facts),
        Row(
            f"{at}, node evaluations, planned",
            None,
            predicted.total,
            result.plan.node_evaluations,
            facts=facts,
        ),
        Row(f"{at}, node evaluations, by the ledger", None, predicted.total, spent, facts=facts),
        Row(
            f"{at}, node evaluations, edge by edge",
            None,
            predicted.one_by_one,
            serial.node_evaluations,
            facts=facts,
        ),
        Row(f"{at}, full runs over the sweep", None, predicted.ratio, Fraction(full, spent), facts=facts),
    ]
