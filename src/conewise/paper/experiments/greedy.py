"""Greedy search: what ACDC costs by its order of visits and by what it keeps, and what guessing ahead takes.

Claim: a trial costs its correction, the cone of its reader, and the corrections that stand behind it;
guesses that are right with a chance p take in stacks of width W, on average, what the closed form says. The
search runs on a captured model; its decisions are made once more on a graph of numbers, with a ledger.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conewise.anatomy.components import Reader
from conewise.circuits.acdc import Search, acdc_plan
from conewise.circuits.circuit import Circuit
from conewise.circuits.greedy import Candidate, Greedy, Mask, Spent
from conewise.circuits.replaced_parts import edge_facts
from conewise.model import Model
from conewise.models.architectures import ARCHITECTURES
from conewise.paper.experiments.result import Progress, Result, Row, silent, versions
from conewise.paper.theory.greedy import best_width, greedy_cost, speculation, speculation_gain
from conewise.program.foreign import quiet
from conewise.reactive.graph import Graft, Graph, chain
from conewise.reactive.world import World
from conewise.runs.metrics import logit_diff
from conewise.sweeps.planning.planner import facts_of

SEED, POSITIONS, LAYERS = 0, 5, 2
NAMES, LINES = ("gpt2", "llama", "gpt_neox"), ((6, 2), (6, 3), (7, 4))
THRESHOLD = 0.002
CHANCES, LAUNCH, WIDTHS = ("1/2", "4/5", "9/10", "19/20"), 20, (*range(1, 16), *range(16, 65, 4))
LINE = 200


def run(
    progress: Progress = silent,
    names: Sequence[str] = NAMES,
    lines: Sequence[tuple[int, int]] = LINES,
) -> Result:
    """Search small models, count their decisions again by a ledger, and run the search over every script."""
    started = time.perf_counter()
    rows: list[Row] = []
    for done, name in enumerate(names, start=1):
        rows += _searched(name)
        progress(done, len(names) + len(lines))
    for done, (candidates, width) in enumerate(lines, start=len(names) + 1):
        rows += _guessed(candidates, width)
        progress(done, len(names) + len(lines))
    series = {
        "widths": list(WIDTHS),
        "gain": {
            p: [float(speculation_gain(width, Fraction(p), LAUNCH)) for width in WIDTHS] for p in CHANCES
        },
        "best": {p: _best(Fraction(p)) for p in CHANCES},
        "worlds": {
            p: [float(speculation(LINE, width, Fraction(p)).worlds) / LINE for width in WIDTHS]
            for p in CHANCES
        },
        "launch": LAUNCH,
    }
    return Result(
        name="greedy",
        title="Greedy search, and guessing ahead",
        claim=(
            "A trial of ACDC costs its correction, a cone, and the corrections behind it; guesses in stacks "
            "of W take what the closed form says, and gain at most 1/(1−p), and at most 1 + c/u."
        ),
        rows=rows,
        compared=(
            "node evaluations of plans and of trials, stacks, worlds and worlds in vain over all scripts "
            "equal the closed forms exactly. What the searches themselves took is reported"
        ),
        notes=(
            (
                f"Models of {LAYERS} layers with random weights; the decisions of their searches are made "
                "again, in order, on the same graph with numbers for values: a correction is grafted behind "
                "its reader, or given another rule, and taken back where the edge is kept."
            ),
            (
                "The search itself leaves out what nothing reads any more, and what no kept edge reaches; "
                "current worlds, and those in vain, come on top. A script says of each guess whether it "
                "turns out right; the mean is over all of them, each with its chance."
            ),
        ),
        seed=SEED,
        seconds=time.perf_counter() - started,
        versions=versions("torch", "transformers"),
        series=series,
    )


def _best(right: Fraction) -> tuple[int, float]:
    width = best_width(right, LAUNCH)
    return width, float(speculation_gain(width, right, LAUNCH))


def _searched(name: str) -> list[Row]:
    architecture = ARCHITECTURES[name]
    with quiet():
        model = Model(architecture.make(LAYERS, SEED), (), architecture.example(POSITIONS, SEED))
    metric = logit_diff(1, 2, pos=-1)
    search = Search(
        model,
        base=model.run(**architecture.example(POSITIONS, SEED + 1)),
        source=model.run(**architecture.example(POSITIONS, SEED + 2)),
        metric=metric,
        threshold=THRESHOLD,
    )
    circuit = search.run(progress=False)
    readers = edge_facts(model).components.readers
    targets = facts_of(model).targets((metric,))
    sites = [one.node for one in readers]
    every = [at for at in range(len(readers) - 1, -1, -1) for _ in range(readers[at].writers)]
    plan = acdc_plan(model, metric=metric)
    tried, kept = decisions(circuit, readers)
    cost = greedy_cost(model.graph, sites, tried, kept, targets)
    at, spent, facts = f"{name}, {LAYERS} layers", search.spent, {"model": name}
    return [
        Row(
            f"{at}, node evaluations at most",
            None,
            greedy_cost(model.graph, sites, every, (), targets).total,
            plan.node_evaluations,
            facts=facts,
        ),
        Row(
            f"{at}, node evaluations of its {len(tried)} trials, {len(kept)} edges kept",
            None,
            cost.total,
            sum(trials(copy_of(model.graph), sites, tried, kept, targets)),
            facts=facts,
        ),
        Row(f"{at}, node evaluations of the search", None, None, search.node_evaluations, False, facts=facts),
        Row(f"{at}, worlds of the search", None, None, spent.worlds, False, facts=facts),
        Row(f"{at}, stacks of the search", None, None, spent.stacks, False, facts=facts),
        Row(f"{at}, worlds of the search in vain", None, None, spent.in_vain, False, facts=facts),
    ]


def decisions(circuit: Circuit, readers: Sequence[Reader]) -> tuple[list[int], list[int]]:
    """The readers whose edges a search decided about, in order, and the trials that kept one."""
    places = {one.name: place for place, one in enumerate(readers)}
    tried = [places[one.edge.partition("->")[2]] for one in circuit.log]
    return tried, [trial for trial, one in enumerate(circuit.log) if one.kept]


def copy_of(graph: Graph) -> Graph:
    """A graph of the same wiring, with numbers for values."""
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
    """What the engine computes for each trial; corrections are grafts, which stay unless the edge is kept."""
    world, staying = World(graph, keep_sites=False), set(kept)
    world.demand(tuple(demand))
    standing: dict[int, Graft] = {}
    found = []
    for trial, reader in enumerate(visits):
        if reader in standing:
            output = standing[reader].output
            before = graph.rule(output)
            graph.redefine(output, lambda *values: sum(values))
            found.append(_bill(world, demand))
            if trial in staying:
                graph.redefine(output, before)
        else:
            graft = graph.graft_after(sites[reader], chain(_count))
            found.append(_bill(world, demand))
            if trial in staying:
                graph.remove(graft)
            else:
                standing[reader] = graft
        world.demand(tuple(demand))
    return found


def _bill(world: World, demand: Sequence[str]) -> int:
    before = world.ledger.count("recomputed")
    world.demand(tuple(demand))
    return world.ledger.count("recomputed") - before


def _count(*values: int) -> int:
    return len(values)


def _guessed(candidates: int, width: int) -> list[Row]:
    right = Fraction(3, 4)
    predicted = speculation(candidates, width, right)
    measured = expected(candidates, width, right)
    at = f"{candidates} candidates, {width} at once, guesses right 3 times in 4"
    facts: dict[str, Any] = {"candidates": candidates, "width": width}
    return [
        Row(f"{at}, {what} on average", None, one, other, facts=facts | {"what": what})
        for what, one, other in (
            ("stacks", predicted.stacks, measured[0]),
            ("worlds", predicted.worlds, measured[1]),
            ("worlds in vain", predicted.in_vain, measured[2]),
        )
    ]


class Scripted:
    """Worlds in which the guess about candidate k turns out right iff `script[k]` says so."""

    epsilon = 0.0

    def __init__(self, script: Sequence[bool], width: int) -> None:
        self.script = script
        self.most, self.few = width + 1, width

    def values(self, removed: Mask) -> NDArray[np.float64]:
        """0 for the current world; 4 more wherever a candidate is to be kept, where 1 is the threshold."""
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
        """No change is close to the threshold."""
        raise AssertionError(removed)


def spent_on(script: Sequence[bool], width: int) -> Spent:
    """What the search takes when guesses turn out as scripted."""
    greedy = Greedy(1.0, lambda change: change)
    line = [Candidate(0, at) for at in range(len(script))]
    verdicts = greedy.decide(Scripted(script, width), line, np.zeros((1, len(script)), dtype=bool))
    assert sum(map(len, verdicts)) == len(script), "every candidate has a verdict"
    return greedy.spent


def expected(candidates: int, width: int, right: Fraction) -> tuple[Fraction, Fraction, Fraction]:
    """Stacks, worlds and worlds in vain on average, by running the search over every script."""
    totals = [Fraction(0)] * 3
    for script in product((True, False), repeat=candidates):
        chance = right ** sum(script) * (1 - right) ** (candidates - sum(script))
        spent = spent_on(script, width)
        for place, count in enumerate((spent.stacks, spent.worlds, spent.in_vain)):
            totals[place] += chance * count
    return totals[0], totals[1], totals[2]
