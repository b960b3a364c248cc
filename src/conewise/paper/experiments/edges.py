"""Edges of captured models: the exhaustive sweep over all of them, and greedy search (ACDC)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conewise.anatomy.components import Reader
from conewise.circuits.acdc import Greedy, Search, Spent, search_plan
from conewise.circuits.circuit import Circuit
from conewise.circuits.replaced_parts import Mask, edge_facts
from conewise.paper.experiments.result import (
    Progress,
    Result,
    Row,
    experiment,
    rows_of,
    silent,
    tracked,
    warm,
)
from conewise.paper.experiments.sweeps import SEED, captured
from conewise.paper.theory.greedy import best_width, greedy_cost, speculation, speculation_gain
from conewise.paper.theory.parts import EdgeCost, ReaderAt, edge_cost, edge_limit, stack_edge_cost
from conewise.paper.theory.sweeps import full_cost
from conewise.reactive.graph import Graft, Graph, chain
from conewise.runs.metric_words import logit_diff
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.sweep import Sweep

POSITIONS = 5

# -- All edges -------------------------------------------------------------------------------------

HEADS = 4
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"heads": HEADS},
    "llama": {"heads": HEADS, "kv_heads": 2},
    "gpt_neox": {"heads": HEADS, "parallel": True},
}
DEPTHS, CURVE = (1, 2, 3), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


@experiment("Every edge of a model", "torch", "transformers")
def edges(
    progress: Progress = silent, names: Sequence[str] = tuple(SHAPES), depths: Sequence[int] = DEPTHS
) -> Result:
    """Sweep every edge of small models; predict each depth from graphs of one and two layers.

    Claim: The sweep over all edges costs what readers compute, once for each writer, and a cone for each
    edge; against full runs its ratio tends to 3, or more where part of a layer never changes.

    Compared: edges and node evaluations of plans and ledgers equal the closed forms exactly.
    """
    rows: list[Row] = []
    series: dict[str, Any] = {"layers": list(CURVE), "ratio": {}, "shared": {}}
    for name in tracked(names, progress):
        sweeps = {depth: _sweep(name, depth) for depth in sorted({1, 2, *depths})}
        numbers = _numbers(sweeps[1], sweeps[2])
        for depth in depths:
            rows += _rows(name, depth, sweeps[depth], _predicted(name, depth, numbers))
        curve = [_predicted(name, depth, numbers) for depth in CURVE]
        series["ratio"][name] = [float(one.ratio) for one in curve]
        series["shared"][name] = [float(Fraction(one.shared) / Fraction(one.total)) for one in curve]
        limit = edge_limit(numbers["layer"], numbers["per_layer"])
        deepest = f"{name}, the ratio at {CURVE[-1]} layers, by the closed form; predicted: its limit"
        facts = {"model": name, "limit": float(limit)}
        rows.append(Row(deepest, limit, curve[-1].ratio, exact=False, facts=facts))
    return Result(
        rows,
        f"""
        Random weights, {HEADS} heads, {POSITIONS} positions; Llama with two heads for keys and values,
        GPT-NeoX with parallel blocks. What a reader computes and what lies behind it is read off the graph of
        one layer, what a layer adds off that of two.

        The shared part is what readers compute before their sites have values. World by world nothing is
        shared, and every edge pays for its reader.
        """,
        SEED,
        series=series,
    )


def _sweep(name: str, depth: int) -> Sweep:
    model, base, source = captured(name, depth, POSITIONS)
    metric = logit_diff(1, 2, pos=-1)
    found: Sweep = model.sweep(model.edges(), base=base, source=source, metric=metric)
    return found


def _numbers(one: Sweep, two: Sweep) -> dict[str, Any]:
    """Return what the closed form takes: of each slot in one layer, and what a second layer adds."""
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
    """Return the cost of one edge into the first reader of each slot."""
    found: dict[str, EdgeCost] = {}
    for reader in edge_facts(sweep.model).components.readers:
        one = ReaderAt(reader.entry, reader.node, 1)
        if reader.slot not in found:
            found[reader.slot] = edge_cost(sweep.model.graph, [one], sweep.targets())
    return found


def _predicted(name: str, depth: int, numbers: Mapping[str, Any]) -> EdgeCost:
    own = {part: numbers[part] for part in ("between", "below", "layer")}
    full = numbers["full"] + (depth - 1) * numbers["per_layer"]
    return stack_edge_cost(depth, **SHAPES[name], **own, full=full)


def _rows(name: str, depth: int, sweep: Sweep, predicted: EdgeCost) -> list[Row]:
    result = sweep.run(evaluator="wavefront", progress=False)
    serial = sweep.plan(evaluator="serial")
    full = result.plan.full_evaluations
    at, facts = f"{name}, {depth} layer{'s' if depth > 1 else ''}", {"model": name, "layers": depth}
    spent = result.ledger.node_evaluations
    return rows_of(
        at,
        ("edges", predicted.edges, result.plan.worlds),
        ("node evaluations, planned", predicted.total, result.plan.node_evaluations),
        ("node evaluations, by the ledger", predicted.total, spent),
        ("node evaluations, edge by edge", predicted.one_by_one, serial.node_evaluations),
        ("full runs over the sweep", predicted.ratio, Fraction(full, spent)),
        facts=facts,
    )


# -- Greedy search: ACDC by its order of visits and by what it keeps, and guessing ahead -----------

LAYERS = 2
NAMES, LINES = ("gpt2", "llama", "gpt_neox"), ((6, 2), (6, 3), (7, 4))
THRESHOLD = 0.002
CHANCES, LAUNCH, WIDTHS = ("1/2", "4/5", "9/10", "19/20"), 20, (*range(1, 16), *range(16, 65, 4))
LINE = 200


@experiment("Greedy search, and guessing ahead", "torch", "transformers")
def greedy(
    progress: Progress = silent,
    names: Sequence[str] = NAMES,
    lines: Sequence[tuple[int, int]] = LINES,
) -> Result:
    """Search small models, count their decisions again by a ledger, and run the search over every script.

    The search runs on a captured model; its decisions are made again on a graph of numbers, with a ledger.

    Claim: A trial of ACDC costs its correction, a cone, and the corrections behind it; guesses in stacks of W
    take what the closed form says, and gain at most 1/(1−p), and at most 1 + c/u.

    Compared: node evaluations of plans and of trials, stacks, worlds and worlds in vain over all scripts
    equal the closed forms exactly. What the searches themselves took is reported.
    """
    rows: list[Row] = []
    cases: list[str | tuple[int, int]] = [*names, *lines]
    for case in tracked(cases, progress):
        rows += _searched(case) if isinstance(case, str) else _guessed(*case)
    series: dict[str, Any] = {"widths": list(WIDTHS), "gain": {}, "best": {}, "worlds": {}, "launch": LAUNCH}
    for chance in CHANCES:
        right = Fraction(chance)
        best = best_width(right, LAUNCH)
        series["gain"][chance] = [float(speculation_gain(W, right, LAUNCH)) for W in WIDTHS]
        series["best"][chance] = best, float(speculation_gain(best, right, LAUNCH))
        series["worlds"][chance] = [float(speculation(LINE, W, right).worlds) / LINE for W in WIDTHS]
    return Result(
        rows,
        f"""
        Models of {LAYERS} layers with random weights; the decisions of their searches are made again, in
        order, on the same graph with numbers for values: a correction is grafted behind its reader, or given
        another rule, and taken back where the edge is kept.

        The search itself leaves out what nothing reads any more, and what no kept edge reaches; current
        worlds, and those in vain, come on top. A script says of each guess whether it turns out right; the
        mean is over all of them, each with its chance.
        """,
        SEED,
        series=series,
    )


def _searched(name: str) -> list[Row]:
    model, base, source = captured(name, LAYERS, POSITIONS)
    metric = logit_diff(1, 2, pos=-1)
    search = Search(model, base=base, source=source, metric=metric, threshold=THRESHOLD)
    circuit = search.run(progress=False)
    readers = edge_facts(model).components.readers
    targets = facts_of(model).targets((metric,))
    sites = [one.node for one in readers]
    every = [at for at in range(len(readers) - 1, -1, -1) for _ in range(readers[at].writers)]
    plan = search_plan(model, metric)
    tried, kept = decisions(circuit, readers)
    cost = greedy_cost(model.graph, sites, tried, kept, targets)
    most = greedy_cost(model.graph, sites, every, (), targets).total
    again = sum(trials(copy_of(model.graph), sites, tried, kept, targets))
    at, spent, facts = f"{name}, {LAYERS} layers", search.spent, {"model": name}
    trial_costs = f"node evaluations of its {len(tried)} trials, {len(kept)} edges kept"
    bound = ("node evaluations at most", most, plan.node_evaluations)
    taken = {
        "node evaluations of the search": search.node_evaluations,
        "worlds of the search": spent.worlds,
        "stacks of the search": spent.stacks,
        "worlds of the search in vain": spent.in_vain,
    }
    return rows_of(at, bound, (trial_costs, cost.total, again), facts=facts) + rows_of(
        at, *((what, None, count) for what, count in taken.items()), exact=False, facts=facts
    )


def decisions(circuit: Circuit, readers: Sequence[Reader]) -> tuple[list[int], list[int]]:
    """Return the readers whose edges a search decided about, in order, and the trials that kept one."""
    places = {one.name: place for place, one in enumerate(readers)}
    tried = [places[one.edge.partition("->")[2]] for one in circuit.log]
    return tried, [trial for trial, one in enumerate(circuit.log) if one.kept]


def copy_of(graph: Graph) -> Graph:
    """Return a graph of the same wiring, with numbers for values."""
    found = Graph()
    for node in graph:
        if graph.is_source(node.site):
            found.source(node.site, 1)
        else:
            found.node(node.site, _count, node.inputs)
    return found


def trials(
    graph: Graph, sites: Sequence[str], visits: Sequence[int], kept: Sequence[int], demand: Sequence[str]
) -> list[int]:
    """Count what the engine computes for each trial; corrections are grafts, which go if the edge is kept."""
    world, staying = warm(graph, tuple(demand)), set(kept)
    standing: dict[int, Graft] = {}
    found = []
    for trial, reader in enumerate(visits):
        is_first = reader not in standing
        if is_first:
            standing[reader] = graph.graft_after(sites[reader], chain(_count))
        output = standing[reader].output
        before = graph.rule(output)
        if not is_first:
            graph.redefine(output, lambda *values: sum(values))
        with world.ledger.interval() as ledger:
            world.demand(tuple(demand))
        found.append(ledger.count("recomputed"))
        if trial in staying and is_first:
            graph.remove(standing.pop(reader))
        elif trial in staying:
            graph.redefine(output, before)
        world.demand(tuple(demand))
    return found


def _count(*values: int) -> int:
    return len(values)


def _guessed(candidates: int, width: int) -> list[Row]:
    right = Fraction(3, 4)
    predicted, measured = speculation(candidates, width, right), expected(candidates, width, right)
    at = f"{candidates} candidates, {width} at once, guesses right 3 times in 4"
    return [
        Row(
            f"{at}, {what} on average",
            one,
            other,
            facts={"candidates": candidates, "width": width, "what": what},
        )
        for what, one, other in zip(
            ("stacks", "worlds", "worlds in vain"), astuple(predicted), measured, strict=True
        )
    ]


class Scripted:
    """Worlds in which the guess about candidate k turns out right iff `script[k]` says so."""

    epsilon = 0.0

    def __init__(self, script: Sequence[bool], width: int) -> None:
        self.script = script
        self.most, self.few = width + 1, width

    def values(self, removed: Mask) -> NDArray[np.float64]:
        """Return 0 for the current world, 4 more wherever a candidate is to be kept; 1 is the threshold."""
        if len(removed) == 1:
            return np.zeros(1)
        found, here = [0.0], 0.0
        (first,) = np.flatnonzero(removed[1, 0] & ~removed[0, 0])
        for world in range(1, len(removed)):
            at = int(first) + world - 1
            guess = bool(removed[world + 1, 0, at]) if world + 1 < len(removed) else True
            is_removed = guess == self.script[at]
            found.append(here + (0.0 if is_removed else 4.0))
            if guess:
                here = found[-1]
        return np.array(found)

    def exact(self, removed: Mask) -> float:
        """Refuse: no change is close to the threshold."""
        raise AssertionError(removed)


def spent_on(script: Sequence[bool], width: int) -> Spent:
    """Return what the search takes when guesses turn out as scripted."""
    greedy = Greedy(1.0, lambda change: change)
    line = [(0, at) for at in range(len(script))]
    verdicts = greedy.decide(Scripted(script, width), line, np.zeros((1, len(script)), dtype=bool))
    assert sum(map(len, verdicts)) == len(script), "every candidate has a verdict"
    return greedy.spent


def expected(candidates: int, width: int, right: Fraction) -> tuple[Fraction, ...]:
    """Return stacks, worlds and worlds in vain on average, by running the search over every script."""
    totals = [Fraction(0)] * 3
    for script in product((True, False), repeat=candidates):
        chance = right ** sum(script) * (1 - right) ** (candidates - sum(script))
        spent = spent_on(script, width)
        for place, count in enumerate((spent.stacks, spent.worlds, spent.in_vain)):
            totals[place] += chance * count
    return tuple(totals)
