"""Sweeps over the heads and MLPs of captured models: compiled plans, and stacks of worlds (wavefronts)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from conewise.anatomy.selectors import SelectorLike, sites
from conewise.model import Model
from conewise.models.architectures import ARCHITECTURES, Architecture
from conewise.paper.experiments.result import (
    Number,
    Progress,
    Result,
    Row,
    experiment,
    rows_of,
    scanning,
    silent,
    tracked,
    trimmed_median,
)
from conewise.paper.experiments.transformers import one_thread
from conewise.paper.theory.clocks import calibrate_stacks, compiled_ratio
from conewise.paper.theory.sweeps import (
    full_cost,
    saturating_worlds,
    stack_launches,
    stack_peak,
    stale,
    sweep_cost,
    sweep_costs,
)
from conewise.program.foreign import quiet
from conewise.reactive.graph import Graph
from conewise.runs.metric_words import logit_diff
from conewise.runs.run import Run, baseline
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.sweep import Sweep

SEED = 0
HEADS_AND_MLPS = sites("z", layer=":", head=":") + sites("mlp_out", layer=":")


def captured(architecture: str | Architecture, layers: int, positions: int) -> tuple[Model, Run, Run]:
    """Capture a model with random weights, and run it on two inputs: the base and the source."""
    made = ARCHITECTURES[architecture] if isinstance(architecture, str) else architecture
    with quiet():
        model = Model(made.make(layers, SEED), (), made.example(positions, SEED))
    base, source = (model.run(**made.example(positions, SEED + more)) for more in (1, 2))
    return model, base, source


def _swept(model: Model, base: Run, source: Run, chosen: SelectorLike = HEADS_AND_MLPS) -> Sweep:
    found: Sweep = model.sweep(chosen, base=base, source=source, metric=logit_diff(1, 2))
    return found


# -- Compiled plans: the route to β = 0 that the paper names and leaves open, counted and timed ----

DEPTHS, POSITIONS, ROUNDS = (2, 5), 12, 9
SECOND = "a second run"


@experiment("Compiled plans, and the wall-clock ceiling", "torch", "transformers")
def compiled(progress: Progress = silent, depths: Sequence[int] = DEPTHS, rounds: int = ROUNDS) -> Result:
    """Sweep all heads and MLPs of small GPT-2s: planned, run and run again, and timed against full runs.

    Claim (the remark after Corollary "wall-clock refinement"): A planned sweep that runs again follows no
    edge of the graph, so β is paid by the plan, once; and all worlds share a launch, so that the ratio in
    time passes 2.

    Compared: evaluations, their ratio, and the looks at the graph's wiring by a second run, which are none,
    exactly. Other looks, launches and times are reported.
    """
    rows: list[Row] = []
    with one_thread():
        for depth in tracked(depths, progress):
            sweep = _swept(*captured("gpt2", depth, POSITIONS))
            rows += _looks(sweep, depth)
            rows += _ratios(sweep, depth, rounds)
    return Result(
        rows,
        f"""
        GPT-2 of {" and ".join(map(str, depths))} layers with random weights, {POSITIONS} positions, one
        thread. Looks are counted by an instrument in place of the graph's lists of readers and inputs.

        With β paid, the ratio lies between that of nodes that are all work, K·N/Σ|cones|, and that of nodes
        that are all launch, K·N/|∪cones|. Launches are fewer than the nodes of the union where one kernel
        computes a chain of them. Times are of the processor, the median of the faster half; a full run is a
        demand of the outputs in a fresh world.
        """,
        SEED,
    )


def _looks(sweep: Sweep, depth: int) -> list[Row]:
    """Count the looks at nodes when a sweep is planned, run, run again, and run world by world."""
    rows: list[Row] = []

    def look(name: str, predicted: int | None = None) -> None:
        at, facts = f"{depth} layers, looks at the graph: {name}", {"layers": depth, "looks": name}
        looks = scan.up.nodes.total() + scan.down.nodes.total()
        rows.append(Row(at, predicted, looks, exact=predicted is not None, facts=facts))
        scan.clear()

    with scanning(sweep.model.graph) as scan:
        sweep.plan(evaluator="wavefront")
        look("planning")
        sweep.run(evaluator="wavefront")
        look("the first run")
        sweep.run(evaluator="wavefront")
        look(SECOND, 0)
        sweep.run(evaluator="serial")
        look("world by world")
    return rows


def _ratios(sweep: Sweep, depth: int, rounds: int) -> list[Row]:
    """Return full runs over the sweep: in evaluations, in launches, and in time."""
    graph, demand = sweep.model.graph, sweep.targets()
    patched = [sweep.model.locate(place).node for cell in sweep.cells for place in cell.places]
    cones, nodes = sweep_costs(graph, patched, demand), full_cost(graph, demand)
    union = len(set().union(*(stale(graph, site, demand) for site in dict.fromkeys(patched))))
    ledger = sweep.run(evaluator="wavefront").ledger
    worlds, example = len(sweep.cells), ARCHITECTURES["gpt2"].example(POSITIONS, SEED + 1)
    full = _fastest(lambda: baseline(sweep.model, (), example), rounds)
    spent = _fastest(lambda: sweep.run(evaluator="wavefront", progress=False), rounds)
    at, ratio = f"{depth} layers, {worlds} worlds", "full runs over the sweep, in"
    launches = Fraction(worlds * int(nodes), ledger.launches)
    evaluations = Fraction(worlds * int(nodes), ledger.node_evaluations)
    figures: list[tuple[str, str, Number | None, Number]] = [
        ("evaluations", "", compiled_ratio(cones, nodes, 1, 0), evaluations),
        (
            "launches",
            "; predicted: one for each node of the union",
            compiled_ratio(cones, nodes, 1, 0, launch=1, launches=union),
            launches,
        ),
        ("time", "", None, worlds * full / spent),
    ]
    rows = rows_of(at, ("node evaluations", sum(cones), ledger.node_evaluations), unit="nodes")
    for unit, more, predicted, measured in figures:
        how = {"exact": unit == "evaluations", "facts": {"layers": depth, "ratio": unit}}
        rows += rows_of(at, (f"{ratio} {unit}{more}", predicted, measured), **how)
    return rows


def _fastest(task: Callable[[], object], rounds: int) -> float:
    """Return seconds of the processor: the median of the faster half of some runs, after one not timed."""
    task()
    times = []
    for _ in range(rounds):
        started = time.thread_time()
        task()
        times.append(time.thread_time() - started)
    return trimmed_median(times, trim=0.5)


# -- Wavefronts: how often stacks of worlds launch, and what they hold ----------------------------

WIDTHS, COUNTED_POSITIONS = (1, 2, 3, 5, 8, 13, 1000), 5
BRANCHES, WIDE = (2, 4, 8), 16
TIMED_POSITIONS = 32


@experiment("Stacks of worlds", "torch", "transformers")
def wavefront(progress: Progress = silent, depths: Sequence[int] = DEPTHS, rounds: int = ROUNDS) -> Result:
    """Count launches of stacks of every width on plans of sweeps over all heads and MLPs, and time them.

    c/(ε·u) worlds at once leave less than a share ε of the work to be saved, whatever the model.

    Claim: In the order of depth, stacks of B worlds launch between Σ|cone|/B and Σ|cone|/B + |∪cone| times;
    depth by depth holds n times what branch by branch does.

    Compared: launches by plan, and what stacks hold, equal the theory exactly. Seconds are reported.
    """
    rows = [row for depth in tracked(depths, progress) for row in _launched(depth)]
    rows += [row for branches in BRANCHES for row in _held(branches)]
    with one_thread():
        timed = _timed(depths, rounds)
    return Result(
        [*rows, *_clock(timed)],
        f"""
        Launches are nodes that some world of a stack computes, by the plan's list of the worlds of each node;
        kernels that compute several nodes at once launch less often.

        With a launch that takes 20 times what a world does, {saturating_worlds(20, 1, Fraction(1, 10))}
        worlds at once leave less than a tenth of the work to be saved.

        Branches: one site, n branches of a wide node and a narrow one, and their sum; values are counted
        while the nodes are launched in either order.

        Seconds: one thread, {TIMED_POSITIONS} positions, the fastest of {rounds} runs, in turns. What a
        launch and an operation take is fitted to the last depth, all widths, and predicts the others from the
        launches and FLOPs of their plans.
        """,
        SEED,
        series={"timed": {str(depth): found for depth, found in timed.items()}},
    )


def _launched(depth: int) -> list[Row]:
    sweep = _swept(*captured("gpt2", depth, COUNTED_POSITIONS))
    graph, demand = sweep.model.graph, sweep.targets()
    steps = sweep.plan(evaluator="wavefront").compiled
    assert steps is not None, "a planned sweep is compiled"
    nodes = [sweep.model.locate(place).node for cell in sweep.cells for place in cell.places]
    ordered = [nodes[cell] for cell in steps.order]
    work, union = sweep_cost(graph, nodes, demand), stack_launches(graph, nodes, len(nodes), demand)
    found = []
    for width in sorted({min(width, len(nodes)) for width in WIDTHS}):
        chunks = [range(first, min(first + width, len(nodes))) for first in range(0, len(nodes), width)]
        measured = sum(
            any(begin < chunk.stop and chunk.start < end for begin, end in worlds)
            for chunk in chunks
            for _, worlds in steps.steps
        )
        least = Fraction(work) / width
        bounds = {"least": float(least), "most": float(least + Fraction(union))}
        name, facts = f"{depth} layers, {len(nodes)} worlds, {width} at once, launches", {"layers": depth}
        predicted = stack_launches(graph, ordered, width, demand)
        found.append(Row(name, predicted, measured, facts=facts | {"width": width, **bounds}))
    return found


def _timed(depths: Sequence[int], rounds: int) -> dict[int, list[dict[str, Any]]]:
    """Run stacks of each width, in the order of depth, all in turns; the first run is not timed.

    Returns launches and work by the plans, and the seconds that each width took.
    """
    plans = {(depth, width): found for depth in depths for width, found in _stacks(depth).items()}
    fastest = {key: [math.inf] * len(found) for key, found in plans.items()}
    for turn in range(rounds + 1):
        for key, found in plans.items():
            for at, plan in enumerate(found):
                seconds = plan.run(progress=False, verify=0).ledger.compute_seconds
                fastest[key][at] = min(fastest[key][at], seconds if turn else math.inf)
    timed: dict[int, list[dict[str, Any]]] = {depth: [] for depth in depths}
    for (depth, width), found in plans.items():
        fields = {"launches": "launches", "flops": "flops", "nodes": "node_evaluations"}
        work = {name: sum(getattr(plan, kept) for plan in found) for name, kept in fields.items()}
        timed[depth].append({"width": width, **work, "seconds": sum(fastest[depth, width])})
    return timed


def _stacks(depth: int) -> dict[int, list[SweepPlan]]:
    """Plan the stacks of each width: all heads and MLPs, those that come first together."""
    model, base, source = captured("gpt2", depth, TIMED_POSITIONS)
    whole = _swept(model, base, source)
    steps = whole.plan(evaluator="wavefront").compiled
    assert steps is not None, "a planned sweep is compiled"
    places = [whole.cells[cell].places[0] for cell in steps.order]
    return {
        width: [
            _swept(model, base, source, places[first : first + width]).plan(evaluator="wavefront")
            for first in range(0, len(places), width)
        ]
        for width in sorted({min(width, len(places)) for width in WIDTHS})
    }


def _clock(timed: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[Row]:
    """Fit what a launch and an operation take to the last depth, and predict the seconds of all others."""
    *others, first = timed
    clock = calibrate_stacks([(one["launches"], one["flops"], one["seconds"]) for one in timed[first]])
    rows = []
    for what, constant, scale, unit in (
        ("a launch takes", clock.launch, 1e6, "µs"),
        ("a billion operations take", clock.work, 1e12, "ms"),
    ):
        facts = {"low": scale * constant.low, "high": scale * constant.high}
        name = f"{first} layers, {what}"
        rows.append(Row(name, None, scale * constant.value, exact=False, unit=unit, facts=facts))
    for depth in (first, *others):
        for one in timed[depth]:
            predicted = 1e3 * clock.seconds(one["launches"], one["flops"])
            fitted = " (fitted)" if depth == first else ""
            name = f"{depth} layers, {one['width']} at once, milliseconds{fitted}"
            facts = {"timed": depth, "at_once": one["width"], "launches": one["launches"]}
            rows.append(Row(name, predicted, 1e3 * one["seconds"], exact=False, unit="ms", facts=facts))
    last = timed[first][0]
    if clock.work.value > 0 and clock.launch.value > 0:
        enough = clock.enough_worlds(Fraction(last["flops"], last["nodes"]), Fraction(1, 10))
        name = "worlds at once that leave a tenth of the work to be saved"
        rows.append(Row(name, None, enough, exact=False))
    return rows


def _held(branches: int) -> list[Row]:
    graph, sizes = fan(branches, WIDE)
    numbers = range(branches)
    orders = {
        "depth by depth": [*(f"wide{at}" for at in numbers), *(f"narrow{at}" for at in numbers), "sum"],
        "branch by branch": [*(name for at in numbers for name in (f"wide{at}", f"narrow{at}")), "sum"],
    }
    return [
        Row(
            f"{branches} branches, {how}, values held",
            stack_peak(graph, ["site"], order, "sum", sizes).peak,
            walked(graph, order, sizes),
            facts={"branches": branches, "order": how},
        )
        for how, order in orders.items()
    ]


def fan(branches: int, wide: int) -> tuple[Graph, dict[str, int]]:
    """Build branches of a wide node and a narrow one, added up at the end; and sizes of values."""
    graph = Graph()
    site = graph.node("site", _sum, [graph.source("x", 1)])
    for at in range(branches):
        graph.node(f"narrow{at}", _sum, [graph.node(f"wide{at}", _sum, [site])])
    graph.node("sum", _sum, [f"narrow{at}" for at in range(branches)])
    return graph, {name: wide if name.startswith("wide") else 1 for name in graph.computed}


def walked(graph: Graph, order: Sequence[str], sizes: dict[str, int]) -> int:
    """Return the most that is held while nodes are computed in that order, from one site that is given."""
    values, most = {"site": 1}, 0
    for at, name in enumerate(order):
        values[name] = graph.rule(name)(*(values[read] for read in graph.inputs(name)))
        most = max(most, sum(sizes[one] for one in values))
        wanted = {read for later in order[at + 1 :] for read in graph.inputs(later)} | {order[-1]}
        values = {one: value for one, value in values.items() if one in wanted}
    return most


def _sum(*values: int) -> int:
    return sum(values)
