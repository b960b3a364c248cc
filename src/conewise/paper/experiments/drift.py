"""Drift: whether the bookkeeping of a mutation gets dearer with the number of mutations before it.

The paper times 100 grafts and 100 redefinitions and finds no drift beyond graph size; here are 10,000 of
each. Beside it stands the wall-clock ceiling: what a node that is computed costs (a), what a node that
is only in the graph costs (β), and the sweep ratio that follows.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from conewise.paper.experiments.e4 import relu, sequential
from conewise.paper.experiments.e9 import GRAPH_SIZES, measure_ceiling
from conewise.paper.experiments.result import (
    Progress,
    Result,
    Row,
    block_medians,
    drift,
    silent,
    trimmed_median,
    versions,
    warm,
)
from conewise.paper.theory.changes import ChangeAt, changed_cost
from conewise.paper.theory.clocks import Estimate
from conewise.paper.theory.grafts import GraftAt, batched_cost
from conewise.reactive.graph import chain

NODES = 400
BELOW = 10
PAPER_MUTATIONS, MUTATIONS, BLOCK = 100, 10_000, 100

# Milliseconds that the paper prints; its control has one figure for both halves.
PAPER_MS = {
    ("graft", "first half"): "0.033",
    ("graft", "second half"): "0.036",
    ("graft", "all"): "0.035",
    ("redefinition", "first half"): "0.0243",
    ("redefinition", "second half"): "0.0243",
    ("redefinition", "all"): "0.024",
}


# Sizes that it prints: computed nodes in the end; with the input, at the ends of the halves.
PAPER_SIZE, PAPER_LENGTHS = "500", ("401", "451", "501")


@dataclass(slots=True)
class Arms:
    """The milliseconds of each mutation, in order, and the nodes that the demands after them recomputed.

    `sizes` count the computed nodes in the end, `lengths` all nodes, the input among them, before the first
    mutation and after each.
    """

    graft: list[float] = field(default_factory=list)
    redefinition: list[float] = field(default_factory=list)
    recomputed: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, list[int]] = field(default_factory=lambda: {"graft": [], "redefinition": []})


def run(
    progress: Progress = silent, mutations: int = MUTATIONS, graph_sizes: tuple[int, ...] = GRAPH_SIZES
) -> Result:
    """The paper's 100 mutations, then 10,000; then a and β."""
    started = time.perf_counter()
    work = 2 * mutations
    few = mutate(PAPER_MUTATIONS)
    many = mutate(mutations, progress=lambda done: progress(done, work))
    rows = [*_counts(few, PAPER_MUTATIONS), *_lengths(few), *_counts(many, mutations)]
    for kind, values in (("graft", few.graft), ("redefinition", few.redefinition)):
        middle = len(values) // 2
        halves = (("first half", values[:middle]), ("second half", values[middle:]), ("all", values))
        rows.extend(
            _timing(f"{kind}, 100 of them, {part}", PAPER_MS[kind, part], trimmed_median(times))
            for part, times in halves
        )
    series: dict[str, Any] = {"block": BLOCK}
    for kind, values in (("graft", many.graft), ("redefinition", many.redefinition)):
        medians = block_medians(values, BLOCK)
        middles = [BLOCK * (number + 0.5) for number in range(len(medians))]
        series[kind] = medians
        rows.append(
            _timing(
                f"{kind}, {mutations:,} of them, first tenth",
                None,
                trimmed_median(values[: len(values) // 10]),
            )
        )
        rows.append(
            _timing(
                f"{kind}, {mutations:,} of them, last tenth",
                None,
                trimmed_median(values[-len(values) // 10 :]),
            )
        )
        rows.append(_drift_row(kind, mutations, drift([at / 1000 for at in middles], medians)))
    paired = [graft - control for graft, control in zip(series["graft"], series["redefinition"], strict=True)]
    rows.append(
        _drift_row("graft less redefinition", mutations, drift([at / 1000 for at in middles], paired))
    )
    ceiling = measure_ceiling(graph_sizes)
    progress(work, work)
    series["ceiling"] = ceiling.as_dict()
    rows.extend(ceiling.rows())
    return Result(
        name="drift",
        title="Bookkeeping at scale, and the wall-clock ceiling",
        claim=(
            "The time of a graft or of a redefinition hardly grows with the number of mutations before it; "
            "and the engine pays for the nodes it computes, hardly for those that are only there."
        ),
        rows=rows,
        compared=(
            "counts exactly: nodes recomputed after each mutation and the final graph sizes. Timings are "
            "reported beside the paper's, with drift as a slope and its 95 % interval; they are not judged"
        ),
        notes=(
            (
                f"A chain of {NODES} nodes with a warm world over it. Every graft puts one node on the edge "
                f"above a fixed node, {BELOW} nodes from the end, so that what it invalidates stays the same "
                "while the chain grows; the control redefines that node in a graph of its own. Mutations of "
                "the two kinds take turns. A mutation is timed, invalidation included; the demand that "
                "follows is not."
            ),
            "The trimmed median leaves out the slowest tenth: what disturbs a timing makes it longer.",
            (
                "The interval of a slope allows for neighbouring blocks that are alike (Newey and West, five "
                "blocks), and is too narrow where they are alike for longer. The slope of grafts holds graph "
                "size as well as history: the chain grows. What drifts with the machine drifts in both arms, "
                "and falls out of their difference."
            ),
            (
                "a and β are fitted by least squares, with a fixed cost, to fork, patch and demand on chains "
                f"of {graph_sizes[0]:,} to {graph_sizes[-1]:,} nodes. The ceiling is (a+β)/(a/2+β), where "
                "a β below zero, which noise can bring about, counts as zero. It supposes that a full run "
                "costs a per node too; a fresh world without forks is cheaper per node, as the last row "
                "shows, and the ratio in time is lower by as much: with ops as trivial as these, a full "
                "re-run can win."
            ),
        ),
        seconds=time.perf_counter() - started,
        versions=versions(),
        series=series,
    )


def mutate(count: int, progress: Callable[[int], None] | None = None) -> Arms:
    """`count` grafts on one chain and as many redefinitions on another, in turns, each then demanded."""
    arms = Arms()
    growing, fixed = sequential([NODES - 1]), sequential([NODES - 1])
    grown, kept = warm(growing.graph, growing.output), warm(fixed.graph, fixed.output)
    above, reader = f"layer1.{NODES - 2 - BELOW}", f"layer1.{NODES - 1 - BELOW}"
    block, clock = chain(relu), time.perf_counter_ns
    grown.ledger.clear()
    kept.ledger.clear()
    arms.lengths["graft"].append(len(growing.graph))
    arms.lengths["redefinition"].append(len(fixed.graph))
    gc.collect()
    gc.disable()
    try:
        for number in range(count):
            started = clock()
            graft = growing.graph.graft((above, reader), block, name=f"graft{number}")
            arms.graft.append((clock() - started) / 1e6)
            above = graft.output
            grown.demand(growing.output)
            rule = _same_as_before if number % 2 else relu
            started = clock()
            fixed.graph.redefine(reader, rule)
            arms.redefinition.append((clock() - started) / 1e6)
            kept.demand(fixed.output)
            arms.lengths["graft"].append(len(growing.graph))
            arms.lengths["redefinition"].append(len(fixed.graph))
            if progress is not None and number % 500 == 499:
                progress(number + 1)
    finally:
        gc.enable()
    for kind, world, layered in (("graft", grown, growing), ("redefinition", kept, fixed)):
        arms.recomputed[kind] = world.ledger.count("recomputed")
        arms.sizes[kind] = layered.size
    return arms


def _same_as_before(x: float) -> float:
    return relu(x)


def _counts(arms: Arms, mutations: int) -> list[Row]:
    """What is exact: the work that the demands did, and the size of the graphs in the end."""
    graph = sequential([NODES - 1]).graph
    above, reader = f"layer1.{NODES - 2 - BELOW}", f"layer1.{NODES - 1 - BELOW}"
    each = {
        "graft": batched_cost(graph, [GraftAt((above, reader), 1)]),
        "redefinition": changed_cost(graph, [ChangeAt(reader, "redefine")]).total,
    }
    rows = []
    for kind, cost in each.items():
        at = f"{kind}, {mutations:,} of them"
        grown = mutations if kind == "graft" else 0
        rows += [
            Row(f"{at}, nodes recomputed", None, mutations * cost, arms.recomputed[kind], unit="nodes"),
            Row(
                f"{at}, nodes in the end",
                PAPER_SIZE if (kind, mutations) == ("graft", PAPER_MUTATIONS) else None,
                NODES + grown,
                arms.sizes[kind],
                unit="nodes",
            ),
        ]
    return rows


def _lengths(arms: Arms) -> list[Row]:
    """The sizes that the paper prints, the input counted: at the ends of its halves, and the control's."""
    graft, control = arms.lengths["graft"], set(arms.lengths["redefinition"])
    middle = len(graft) // 2
    at = f"graft, {PAPER_MUTATIONS} of them, nodes and input"
    return [
        Row(f"{at}, before the first", PAPER_LENGTHS[0], NODES + 1, graft[0], unit="nodes"),
        Row(f"{at}, between the halves", PAPER_LENGTHS[1], NODES + 1 + middle, graft[middle], unit="nodes"),
        Row(f"{at}, after the last", PAPER_LENGTHS[2], NODES + 1 + PAPER_MUTATIONS, graft[-1], unit="nodes"),
        Row(
            f"redefinition, {PAPER_MUTATIONS} of them, nodes and input throughout",
            PAPER_LENGTHS[0],
            NODES + 1,
            control.pop() if len(control) == 1 else -1,
            unit="nodes",
        ),
    ]


def _timing(name: str, paper: str | None, milliseconds: float) -> Row:
    return Row(name, paper, None, milliseconds, exact=False, unit="ms")


def _drift_row(kind: str, mutations: int, slope: Estimate) -> Row:
    return Row(
        name=f"{kind}, drift per 1,000 mutations over {mutations:,}",
        paper=None,
        predicted=None,
        measured=slope.value,
        exact=False,
        unit="ms",
        facts={"low": slope.low, "high": slope.high, "contains_zero": slope.low <= 0.0 <= slope.high},
    )
