"""Wavefronts: how often stacks of worlds launch, and what they hold, counted on a captured model.

Claim: worlds in the order of depth, B at once, launch between Σ|cone|/B and Σ|cone|/B + |∪cone| times, so
that c/(ε·u) worlds at once leave less than a share ε of the work to be saved, whatever the model; and
launching nodes depth by depth can hold many times what going branch by branch does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction

from conewise.anatomy.selectors import SelectorLike, sites
from conewise.model import Model
from conewise.models.architectures import ARCHITECTURES
from conewise.paper.experiments.llama import one_thread
from conewise.paper.experiments.result import Progress, Result, Row, silent, versions
from conewise.paper.theory.clocks import calibrate_stacks
from conewise.paper.theory.sweeps import sweep_cost
from conewise.paper.theory.wavefront import saturating_worlds, stack_launches, stack_peak
from conewise.program.foreign import quiet
from conewise.reactive.graph import Graph
from conewise.runs.metrics import logit_diff
from conewise.runs.run import Run
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.sweep import Sweep

SEED, POSITIONS = 0, 5
DEPTHS, WIDTHS = (2, 5), (1, 2, 3, 5, 8, 13, 1000)
BRANCHES, WIDE = (2, 4, 8), 16
TIMED_POSITIONS, TIMED_WIDTHS, ROUNDS = 32, (1, 2, 3, 5, 8, 13, 1000), 9


@dataclass(frozen=True, slots=True)
class Timed:
    """A sweep in stacks of one width: what its plans launch and compute, and the seconds that it took."""

    width: int
    launches: int
    flops: int
    nodes: int
    seconds: float


def run(progress: Progress = silent, depths: Sequence[int] = DEPTHS, rounds: int = ROUNDS) -> Result:
    """Count launches of stacks of every width on plans of sweeps over all heads and MLPs, and time them."""
    started = time.perf_counter()
    rows: list[Row] = []
    for done, depth in enumerate(depths, start=1):
        rows += _launched(depth)
        progress(done, len(depths))
    rows += [row for branches in BRANCHES for row in _held(branches)]
    with one_thread():
        timed = _timed(depths, rounds)
    rows += _clock(timed)
    return Result(
        name="wavefront",
        title="Stacks of worlds",
        claim=(
            "In the order of depth, stacks of B worlds launch between Σ|cone|/B and Σ|cone|/B + |∪cone| "
            "times; depth by depth holds n times what branch by branch does."
        ),
        rows=rows,
        compared="launches by plan, and what stacks hold, equal the theory exactly. Seconds are reported",
        notes=(
            (
                "Launches are nodes that some world of a stack computes, by the plan's list of the worlds of "
                "each node; kernels that compute several nodes at once launch less often."
            ),
            (
                "With a launch that takes 20 times what a world does, "
                f"{saturating_worlds(20, 1, Fraction(1, 10))} worlds at once leave less than a "
                "tenth of the work to be saved."
            ),
            (
                "Branches: one site, n branches of a wide node and a narrow one, and their sum; values are "
                "counted while the nodes are launched in either order."
            ),
            (
                f"Seconds: one thread, {TIMED_POSITIONS} positions, the fastest of {rounds} runs, in turns. "
                "What a launch and an operation take is fitted to the last depth, all widths, and predicts "
                "the others from the launches and FLOPs of their plans."
            ),
        ),
        seed=SEED,
        seconds=time.perf_counter() - started,
        versions=versions("torch", "transformers"),
        series={"timed": {str(depth): [asdict(one) for one in found] for depth, found in timed.items()}},
    )


def _launched(depth: int) -> list[Row]:
    sweep = _sweep(depth)
    graph, demand = sweep.model.graph, sweep.targets()
    compiled = sweep.plan(evaluator="wavefront").compiled
    assert compiled is not None, "a planned sweep is compiled"
    nodes = [sweep.model.locate(place).node for cell in sweep.cells for place in cell.places]
    ordered = [nodes[cell] for cell in compiled.order]
    work, union = sweep_cost(graph, nodes, demand), stack_launches(graph, nodes, len(nodes), demand)
    found = []
    for width in sorted({min(width, len(nodes)) for width in WIDTHS}):
        chunks = [range(first, min(first + width, len(nodes))) for first in range(0, len(nodes), width)]
        measured = sum(
            any(begin < chunk.stop and chunk.start < end for begin, end in worlds)
            for chunk in chunks
            for _, worlds in compiled.steps
        )
        found.append(
            Row(
                f"{depth} layers, {len(nodes)} worlds, {width} at once, launches",
                None,
                stack_launches(graph, ordered, width, demand),
                measured,
                facts={
                    "layers": depth,
                    "width": width,
                    "least": float(Fraction(work) / width),
                    "most": float(Fraction(work) / width + Fraction(union)),
                },
            )
        )
    return found


def _sweep(depth: int) -> Sweep:
    """All heads and MLPs."""
    model, base, source = _model(depth, POSITIONS)
    return _swept(model, base, source, sites("z", layer=":", head=":") + sites("mlp_out", layer=":"))


def _model(depth: int, positions: int) -> tuple[Model, Run, Run]:
    architecture = ARCHITECTURES["gpt2"]
    with quiet():
        model = Model(architecture.make(depth, SEED), (), architecture.example(positions, SEED))
    base, source = (model.run(**architecture.example(positions, SEED + more)) for more in (1, 2))
    return model, base, source


def _swept(model: Model, base: Run, source: Run, chosen: SelectorLike) -> Sweep:
    found: Sweep = model.sweep(chosen, base=base, source=source, metric=logit_diff(1, 2))
    return found


def _timed(depths: Sequence[int], rounds: int) -> dict[int, list[Timed]]:
    """Stacks of each width, in the order of depth, all in turns; the first run of a stack is not timed."""
    plans = {(depth, width): found for depth in depths for width, found in _stacks(depth).items()}
    fastest = {key: [math.inf] * len(found) for key, found in plans.items()}
    for turn in range(rounds + 1):
        for key, found in plans.items():
            for at, plan in enumerate(found):
                seconds = plan.run(progress=False, verify=0).ledger.compute_seconds
                fastest[key][at] = min(fastest[key][at], seconds if turn else math.inf)
    timed: dict[int, list[Timed]] = {depth: [] for depth in depths}
    for (depth, width), found in plans.items():
        timed[depth].append(
            Timed(
                width,
                sum(plan.launches for plan in found),
                sum(plan.flops for plan in found),
                sum(plan.node_evaluations for plan in found),
                sum(fastest[depth, width]),
            )
        )
    return timed


def _stacks(depth: int) -> dict[int, list[SweepPlan]]:
    """The plans of the stacks of each width: all heads and MLPs, those that come first together."""
    model, base, source = _model(depth, TIMED_POSITIONS)
    whole = _swept(model, base, source, sites("z", layer=":", head=":") + sites("mlp_out", layer=":"))
    compiled = whole.plan(evaluator="wavefront").compiled
    assert compiled is not None, "a planned sweep is compiled"
    places = [whole.cells[cell].places[0] for cell in compiled.order]
    return {
        width: [
            _swept(model, base, source, places[first : first + width]).plan(evaluator="wavefront")
            for first in range(0, len(places), width)
        ]
        for width in sorted({min(width, len(places)) for width in TIMED_WIDTHS})
    }


def _clock(timed: Mapping[int, Sequence[Timed]]) -> list[Row]:
    """What a launch and an operation take at the last depth, and the seconds of all others by that."""
    *others, first = timed
    clock = calibrate_stacks([(one.launches, one.flops, one.seconds) for one in timed[first]])
    rows = [
        Row(
            f"{first} layers, a launch takes",
            None,
            None,
            1e6 * clock.launch.value,
            exact=False,
            unit="µs",
            facts={"low": 1e6 * clock.launch.low, "high": 1e6 * clock.launch.high},
        ),
        Row(
            f"{first} layers, a billion operations take",
            None,
            None,
            1e12 * clock.work.value,
            exact=False,
            unit="ms",
            facts={"low": 1e12 * clock.work.low, "high": 1e12 * clock.work.high},
        ),
    ]
    for depth in (first, *others):
        for one in timed[depth]:
            predicted = 1e3 * clock.seconds(one.launches, one.flops)
            fitted = " (fitted)" if depth == first else ""
            name = f"{depth} layers, {one.width} at once, milliseconds{fitted}"
            facts = {"timed": depth, "at_once": one.width, "launches": one.launches}
            rows.append(Row(name, None, predicted, 1e3 * one.seconds, exact=False, unit="ms", facts=facts))
    last = timed[first][0]
    if clock.work.value > 0 and clock.launch.value > 0:
        enough = clock.enough_worlds(Fraction(last.flops, last.nodes), Fraction(1, 10))
        rows.append(
            Row("worlds at once that leave a tenth of the work to be saved", None, None, enough, exact=False)
        )
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
            None,
            stack_peak(graph, ["site"], order, "sum", sizes).peak,
            walked(graph, order, sizes),
            facts={"branches": branches, "order": how},
        )
        for how, order in orders.items()
    ]


def fan(branches: int, wide: int) -> tuple[Graph, dict[str, int]]:
    """Branches of a wide node and a narrow one, from one site, added up at the end; and sizes of values."""
    graph = Graph()
    site = graph.node("site", _sum, [graph.source("x", 1)])
    for at in range(branches):
        graph.node(f"narrow{at}", _sum, [graph.node(f"wide{at}", _sum, [site])])
    graph.node("sum", _sum, [f"narrow{at}" for at in range(branches)])
    return graph, {name: wide if name.startswith("wide") else 1 for name in graph.computed}


def walked(graph: Graph, order: Sequence[str], sizes: dict[str, int]) -> int:
    """The most that is held while nodes are computed in that order, from one site that is given."""
    values, most = {"site": 1}, 0
    for at, name in enumerate(order):
        values[name] = graph.rule(name)(*(values[read] for read in graph.inputs(name)))
        most = max(most, sum(sizes[one] for one in values))
        wanted = {read for later in order[at + 1 :] for read in graph.inputs(later)} | {order[-1]}
        values = {one: value for one, value in values.items() if one in wanted}
    return most


def _sum(*values: int) -> int:
    return sum(values)
