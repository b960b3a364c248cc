"""Positions: sweeps over (layer, position) counted in node-rows, on graphs of rows and on captured models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any

import torch

from conewise.anatomy.selectors import sites
from conewise.models.architectures import ARCHITECTURES
from conewise.paper.experiments.result import (
    Progress,
    Result,
    Row,
    experiment,
    rows_of,
    silent,
    sweep,
    tracked,
)
from conewise.paper.experiments.sweeps import SEED, captured
from conewise.paper.theory.parts import Computed, Rows, RowStack, position_limit, row_costs
from conewise.program.records import ATTENTION
from conewise.program.walk import Rule
from conewise.reactive.graph import Graph
from conewise.runs.metric_words import logit_diff
from conewise.runs.run import Run
from conewise.sweeps.execution.wavefront import Wavefront
from conewise.sweeps.planning.passes import Step
from conewise.sweeps.planning.plan import SweepPlan

SIZES = ((1, 1), (2, 4), (4, 4), (4, 16), (8, 16), (12, 1))
CURVE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
KEYS, QUERIES, MIXED = 3, 1, 6
CASES: tuple[tuple[str, bool, Rows], ...] = (
    ("causal, last position demanded", True, "last"),
    ("causal, all demanded", True, "all"),
    ("both ways, last position demanded", False, "last"),
)
MODELS = (("gpt2", 3, 6), ("llama", 2, 5), ("bert", 2, 5))
"""Captured ones: which, of how many layers, over how many positions."""
BOTH_WAYS = {"bert"}


@experiment("Layers and positions", "torch", "transformers")
def positions(
    progress: Progress = silent,
    sizes: Sequence[tuple[int, int]] = SIZES,
    models: Sequence[tuple[str, int, int]] = MODELS,
) -> Result:
    """Patch every layer at every position, in graphs of rows and on captured models.

    In a causal stack a patch makes stale only rows from its position on; a shared prefix divides the ratio by
    what is left.

    Claim: Counted in node-rows, the ratio over every layer and position of a causal stack tends to 4, with
    the last position demanded or all; where attention looks both ways it tends to 2.

    Compared: node-rows of full runs and of sweeps equal the closed forms exactly; so do those of plans and of
    runs on captured models, counted from the first row on.
    """
    rows: list[Row] = []
    cases: list[tuple[int, int] | tuple[str, int, int]] = [*sizes, *models]
    for case in tracked(cases, progress):
        if len(case) == 3:
            rows += _swept(*case)
        else:
            for name, causal, demand in CASES:
                rows += _rows(name, RowStack(*case, KEYS, QUERIES, MIXED, causal=causal), demand)
    squares = {
        causal: [RowStack(size, size, KEYS, QUERIES, MIXED, causal=causal) for size in CURVE]
        for causal in (True, False)
    }
    series = {
        "size": list(CURVE),
        "ratio": {
            case: [float(stack.ratio(demand)) for stack in squares[causal]] for case, causal, demand in CASES
        },
        "limit": {case: float(position_limit(causal=causal)) for case, causal, _ in CASES},
    }
    return Result(
        rows,
        f"""
        A layer has {KEYS} nodes that other rows read, {QUERIES} that only its own row reads, and {MIXED}
        behind the attention. Every row of a node is a node of the graph, and each patch is made in a fork of
        a warm world.

        With a shared prefix, base and source differ in the second half of the positions alone, and only these
        are swept.

        Captured models have random weights and fused attention; the stream behind each layer is patched at
        each position, and the last one demanded. Planned: steps of plans, by worlds and rows. Computed: sizes
        of the tensors that the run makes. A wavefront computes a node from the first row that changes on;
        what has to be computed stands beside it.
        """,
        SEED,
        series=series,
    )


def _rows(case: str, stack: RowStack, demand: Rows) -> list[Row]:
    full, costs = counts(stack, demand)
    at = f"{case}, {stack.layers} × {stack.positions}"
    facts = {"case": case, "layers": stack.layers, "positions": stack.positions}
    sites, spent = len(costs), sum(costs.values())
    half = stack.positions // 2
    later = [cost for (_, t), cost in costs.items() if t >= half]
    shared = Fraction(len(later) * full, sum(later))
    whole, swept = ("a full run", stack.full(demand), full), ("the sweep", stack.sweep(demand), spent)
    ratio = ("the ratio", stack.ratio(demand), Fraction(sites * full, spent))
    prefixed = (f"the ratio with a shared prefix of {half}", stack.ratio(demand, half), shared)
    return rows_of(at, whole, swept, unit="node-rows", facts=facts) + rows_of(
        at, ratio, prefixed, facts=facts
    )


@dataclass(frozen=True, slots=True)
class Swept:
    """Node-rows of one patch of a captured model: predicted from the first on, needed, planned, computed."""

    predicted: int
    needed: int
    planned: int
    computed: int


def swept(name: str, layers: int, positions: int) -> list[Swept]:
    """Patch the stream behind each layer at each position, one sweep each."""
    fused = replace(ARCHITECTURES[name], attention=False)
    model, base, source = captured(fused, layers, positions)
    mixes = {
        record.name: [key.name for key in record.args[1:3]]
        for record in model.program.records
        if record.op == ATTENTION
    }
    found = []
    for layer in range(layers):
        for at in range(positions):
            chosen = sites("resid_post", layer=layer, pos=at)
            sweep = model.sweep(chosen, base=base, source=source, metric=logit_diff(1, 2, pos=-1))
            with counting_rows(base, positions) as count:
                result = sweep.run(evaluator="wavefront", progress=False)
            place = (model.locate(("resid_post", layer)).node, at)
            of = (model.graph, [place], positions, mixes, sweep.targets())
            predicted, needed = (row_costs(*of, causal=name not in BOTH_WAYS, computed=how)[0] for how in HOW)
            found.append(Swept(predicted, needed, planned_rows(result.plan, positions), count["node-rows"]))
    return found


HOW: tuple[Computed, ...] = ("from the first on", "row by row")


def _swept(name: str, layers: int, positions: int) -> list[Row]:
    found = swept(name, layers, positions)
    at = f"{name} captured, {layers} × {positions}"
    facts = {"case": name, "layers": layers, "positions": positions}
    sums = [sum(numbers) for numbers in zip(*map(astuple, found), strict=True)]
    predicted, needed, planned, computed = sums
    wrong = sum(not one.predicted == one.planned == one.computed for one in found)
    swept_rows = ("the sweep, planned", predicted, planned), ("the sweep, computed", predicted, computed)
    behind = ("the sweep; predicted: what has to be computed", needed, computed)
    return [
        *rows_of(at, *swept_rows, unit="node-rows", facts=facts),
        *rows_of(at, ("patches of which the three differ", 0, wrong), facts=facts),
        *rows_of(at, behind, exact=False, unit="node-rows", facts=facts),
    ]


def counts(stack: RowStack, demand: Rows) -> tuple[int, dict[tuple[int, int], int]]:
    """Count what the engine computes for a full run, and for a patch at each layer and position."""
    graph, ends = graph_of(stack)
    places = list(product(range(stack.layers), range(stack.positions)))
    wanted = tuple(ends if demand == "all" else ends[-1:])
    made = sweep(graph, [f"{layer}.{t}" for layer, t in places], wanted, -1)
    return made.full, {place: cost.recomputed for place, cost in zip(places, made.costs, strict=True)}


def graph_of(stack: RowStack) -> tuple[Graph, list[str]]:
    """Build the graph of rows; returns the demanded nodes, too. A site is named `{layer}.{row}`."""
    graph, positions = Graph(), range(stack.positions)
    stream = [graph.source(f"x.{t}", t) for t in positions]
    for layer in range(stack.layers):
        at = f"layer{layer}."
        keys = [chained(graph, f"{at}key.{t}", stream[t], stack.keys) for t in positions]
        queries = [chained(graph, f"{at}query.{t}", stream[t], stack.queries) for t in positions]
        for t in positions:
            seen = keys[: t + 1] if stack.causal else keys
            # Without nodes of its own, a query is the stream, which is read once.
            mixed: Sequence[str] = list(dict.fromkeys([stream[t], queries[t], *seen]))
            for step in range(1, stack.mixed):
                mixed = [graph.node(f"{at}mixed.{t}.{step}", mixed_rows, mixed)]
            graph.node(f"{layer}.{t}", mixed_rows, mixed)
        stream = [f"{layer}.{t}" for t in positions]
    return graph, [chained(graph, f"end.{t}", stream[t], stack.terminal) for t in positions]


def chained(graph: Graph, name: str, reads: str, length: int) -> str:
    """Add a chain of nodes behind a site; returns the last of them."""
    for step in range(length):
        reads = graph.node(f"{name}.{step}", mixed_rows, [reads])
    return reads


def mixed_rows(*values: int) -> int:
    """Return a number that tells what was read, and in which order."""
    return hash(values)


# -- An instrument that counts rows by the sizes of the tensors that rules return ------------------


@contextmanager
def counting_rows(base: Run, positions: int) -> Iterator[Counter[str]]:
    """Count node-rows that wavefronts over runs of the base's shape compute, from the first run of each on.

    A row of a node has as many numbers as the base's value has, over its positions where it has some.
    """
    count, original, lengths = Counter[str](), Wavefront._rule, _lengths(base, positions)

    def counted(self: Wavefront, step: Step) -> Rule:
        rule = original(self, step)

        def noting(*operands: Any) -> Any:
            value = rule(*operands)
            columns = self._columns.get(step.node)  # of a product of which only some are computed
            each = lengths[step.node] if columns is None else columns.numel()
            rows, rest = divmod(_numbers(value), each)
            assert not rest, f"{step.node} is computed in whole rows"
            count["node-rows"] += rows * (1 + len(step.inside))
            return value

        return noting

    Wavefront._rule = counted  # type: ignore[method-assign]
    try:
        yield count
    finally:
        Wavefront._rule = original  # type: ignore[method-assign]


def planned_rows(plan: SweepPlan, positions: int) -> int:
    """Return the node-rows of a plan: its steps, by their worlds and their positions."""
    assert plan.compiled is not None, "a planned sweep is compiled"
    programs = plan.compiled.programs
    return sum(
        step.count * (1 + len(step.inside)) * (positions if step.rows is None else step.rows)
        for one in plan.compiled.passes
        for step in programs[one.program].steps
    )


def _lengths(base: Run, positions: int) -> dict[str, int]:
    """Return how many numbers a row of each node has."""
    program = base.model.program
    names = [record.name for record in program.records]
    found = {}
    for name, value in zip(names, base.demand(names), strict=True):
        has_rows = any(program.pos_dims[one] is not None for one in (name, *program.parts.get(name, ())))
        found[name] = _numbers(value) // (positions if has_rows else 1)
    return found


def _numbers(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    return sum(map(_numbers, value)) if isinstance(value, tuple | list) else 0
