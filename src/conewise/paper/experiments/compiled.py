"""Compiled plans: the route to β = 0 that the paper names and leaves open, counted and timed.

Claim (the remark after Corollary "wall-clock refinement"): a compilation layer would eliminate β. A planned
sweep walks the graph once, for all its worlds and for every baseline of a shape; when it is run again it
follows no edge. And since all worlds are computed together, what a launch takes is paid once, so that 2 is
no ceiling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from fractions import Fraction

from conewise.anatomy.selectors import sites
from conewise.model import Model
from conewise.models.architectures import ARCHITECTURES
from conewise.paper.experiments.llama import one_thread
from conewise.paper.experiments.result import (
    Progress,
    Result,
    Row,
    Scan,
    scanning,
    silent,
    trimmed_median,
    versions,
)
from conewise.paper.theory.clocks import compiled_ratio
from conewise.paper.theory.sweeps import full_cost, stale, sweep_costs
from conewise.program.foreign import quiet
from conewise.runs.captured import Captured
from conewise.runs.metrics import logit_diff
from conewise.runs.run import baseline
from conewise.sweeps.sweep import Sweep

SEED = 0
DEPTHS, POSITIONS, ROUNDS = (2, 5), 12, 9
SECOND = "a second run"


def run(progress: Progress = silent, depths: Sequence[int] = DEPTHS, rounds: int = ROUNDS) -> Result:
    """Sweep all heads and MLPs of small GPT-2s: planned, run and run again, and timed against full runs."""
    started = time.perf_counter()
    rows: list[Row] = []
    with one_thread():
        for done, depth in enumerate(depths, start=1):
            model = _captured(depth)
            sweep = _sweep(model)
            rows += _looks(sweep, depth)
            rows += _ratios(sweep, depth, rounds)
            progress(done, len(depths))
    return Result(
        name="compiled",
        title="Compiled plans, and the wall-clock ceiling",
        claim=(
            "A planned sweep that runs again follows no edge of the graph, so β is paid by the plan, once; "
            "and all worlds share a launch, so that the ratio in time passes 2."
        ),
        rows=rows,
        compared=(
            "evaluations, their ratio, and the looks at the graph's wiring by a second run, which are none, "
            "exactly. Other looks, launches and times are reported"
        ),
        notes=(
            (
                f"GPT-2 of {' and '.join(map(str, depths))} layers with random weights, {POSITIONS} "
                "positions, one thread. Looks are counted by an instrument in place of the graph's lists of "
                "readers and inputs."
            ),
            (
                "With β paid, the ratio lies between that of nodes that are all work, K·N/Σ|cones|, and that "
                "of nodes that are all launch, K·N/|∪cones|. Launches are fewer than the nodes of the union "
                "where one kernel computes a chain of them. Times are of the processor, the median of the "
                "faster half; a full run is a demand of the outputs in a fresh world."
            ),
        ),
        seed=SEED,
        seconds=time.perf_counter() - started,
        versions=versions("torch", "transformers"),
    )


def _captured(depth: int) -> Model:
    architecture = ARCHITECTURES["gpt2"]
    with quiet():
        return Model(architecture.make(depth, SEED), (), architecture.example(POSITIONS, SEED))


def _sweep(model: Model) -> Sweep:
    """All heads and MLPs."""
    example = ARCHITECTURES["gpt2"].example
    found: Sweep = model.sweep(
        sites("z", layer=":", head=":") + sites("mlp_out", layer=":"),
        base=model.run(**example(POSITIONS, SEED + 1)),
        source=model.run(**example(POSITIONS, SEED + 2)),
        metric=logit_diff(1, 2),
    )
    return found


def _looks(sweep: Sweep, depth: int) -> list[Row]:
    """How often nodes are looked at when a sweep is planned, run, run again, and run world by world."""
    counts: dict[str, int] = {}
    with scanning(sweep.model.graph) as scan:
        sweep.plan(evaluator="wavefront")
        counts["planning"] = _count(scan)
        sweep.run(evaluator="wavefront")
        counts["the first run"] = _count(scan)
        sweep.run(evaluator="wavefront")
        counts[SECOND] = _count(scan)
        sweep.run(evaluator="serial")
        counts["world by world"] = _count(scan)
    return [
        Row(
            f"{depth} layers, looks at the graph: {what}",
            None,
            0 if what == SECOND else None,
            count,
            exact=what == SECOND,
            facts={"layers": depth, "looks": what},
        )
        for what, count in counts.items()
    ]


def _count(scan: Scan) -> int:
    """How many looks there were since the last call."""
    looks = scan.up.nodes.total() + scan.down.nodes.total()
    scan.clear()
    return looks


def _ratios(sweep: Sweep, depth: int, rounds: int) -> list[Row]:
    """Full runs over the sweep: in evaluations, in launches, and in time."""
    graph, demand = sweep.model.graph, sweep.targets()
    patched = [sweep.model.locate(place).node for cell in sweep.cells for place in cell.places]
    cones, nodes = sweep_costs(graph, patched, demand), full_cost(graph, demand)
    union = len(set().union(*(stale(graph, site, demand) for site in dict.fromkeys(patched))))
    ledger = sweep.run(evaluator="wavefront").ledger
    worlds, full = len(sweep.cells), _full_run(sweep.model, rounds)
    spent = _fastest(lambda: sweep.run(evaluator="wavefront", progress=False), rounds)
    at = f"{depth} layers, {worlds} worlds"
    return [
        Row(f"{at}, node evaluations", None, sum(cones), ledger.node_evaluations, unit="nodes"),
        Row(
            f"{at}, full runs over the sweep, in evaluations",
            None,
            compiled_ratio(cones, nodes, 1, 0),
            Fraction(worlds * int(nodes), ledger.node_evaluations),
            facts={"layers": depth, "ratio": "evaluations"},
        ),
        Row(
            f"{at}, full runs over the sweep, in launches; predicted: one for each node of the union",
            None,
            compiled_ratio(cones, nodes, 1, 0, launch=1, launches=union),
            Fraction(worlds * int(nodes), ledger.launches),
            exact=False,
            facts={"layers": depth, "ratio": "launches"},
        ),
        Row(
            f"{at}, full runs over the sweep, in time",
            None,
            None,
            worlds * full / spent,
            exact=False,
            facts={"layers": depth, "ratio": "time"},
        ),
    ]


def _full_run(model: Captured, rounds: int) -> float:
    example = ARCHITECTURES["gpt2"].example(POSITIONS, SEED + 1)
    return _fastest(lambda: baseline(model, (), example), rounds)


def _fastest(task: Callable[[], object], rounds: int) -> float:
    """Seconds of the processor: the median of the faster half of some runs, after one that is not timed."""
    task()
    times = []
    for _ in range(rounds):
        started = time.thread_time()
        task()
        times.append(time.thread_time() - started)
    return trimmed_median(times, trim=0.5)
