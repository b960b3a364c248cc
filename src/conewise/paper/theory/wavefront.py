"""Wavefronts: worlds computed together in stacks. How often a stack launches, and what it holds at most.

A stack launches a node once, for all of its worlds that compute it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from conewise.errors import TheoryError
from conewise.paper.theory.sweeps import Patch, patches_of, stale_numbers
from conewise.paper.theory.weights import (
    Demand,
    Exact,
    Scale,
    Weight,
    Weights,
    answer,
    any_float,
    exact,
    expect_count,
    expect_demand,
    expect_graph,
    expect_items,
    expect_sites,
    expect_weight,
    shown,
    total,
)
from conewise.reactive.graph import Graph, Site


def stack_launches(
    graph: Graph,
    sites: Iterable[Patch],
    at_once: int,
    demand: Demand = None,
    weights: Weights | None = None,
) -> Weight:
    """Count the launches of nodes if worlds, in the order given, are computed `at_once` together.

    docs/beyond-the-paper.md#wavefront. Σ over stacks of the union of their cones: one at a time Σ|cone|, all
    at once |∪cone|. Where cones are nested, the order from the largest cone to the smallest is the best,
    and with W = Σ|cone| the launches of stacks of B are at least W/B and at most W/B + |∪cone|.
    """
    scale, count = Scale(expect_graph(graph), weights), expect_count(at_once, "`at_once`")
    targets = expect_demand(demand)
    worlds = [stale_numbers(graph, patch, targets) for patch in patches_of(graph, sites)]
    unions = (set().union(*worlds[first : first + count]) for first in range(0, len(worlds), count))
    return answer(total(scale(union) for union in unions), scale.is_float, "the launches")


def saturating_worlds(launch: Weight, world: Weight, share: Weight) -> int:
    """Return the stack width that is enough: beyond it, launches save less than `share` of the work.

    docs/beyond-the-paper.md#wavefront. A launch takes c, and a node u for each world: stacks of B worlds take
    at most c·W/B more than a single stack, which is at most `share` of the work u·W from B = c/(share·u) on.
    It depends on neither the model nor the sweep.
    """
    c, u = expect_weight(launch, "`launch`"), expect_weight(world, "`world`")
    part = expect_weight(share, "`share`")
    if u == 0 or part == 0:
        raise TheoryError(
            f"a world takes {shown(u)} and the share is {shown(part)}: without either, more worlds at once "
            "always save something."
        )
    return max(1, -(-Fraction(exact(c)) // (Fraction(exact(part)) * exact(u))))


@dataclass(frozen=True, slots=True)
class StackPeak:
    """The peak of a stack of worlds in some order of launches, and a lower bound for any order."""

    peak: Weight
    bound: Weight


def stack_peak(
    graph: Graph,
    sites: Iterable[Patch],
    order: Sequence[Site] | None = None,
    demand: Demand = None,
    weights: Weights | None = None,
) -> StackPeak:
    """Return the peak of one stack of all worlds; `weights` are the sizes of values.

    docs/beyond-the-paper.md#wavefront. A value is held once for each world in which it is computed or given,
    from its launch, or from the first launch that reads a given one, to the last that reads it; what is
    demanded, to the end. `order` has the launched nodes, each after what it reads; None is the graph's own.
    The bound is the largest launch with all that it reads: no order holds less.
    """
    table, scale = expect_graph(graph).table, Scale(graph, weights)
    targets = expect_demand(demand)
    patches = patches_of(graph, sites)
    worlds = [stale_numbers(graph, patch, targets) for patch in patches]
    launched = set().union(*worlds)
    line = _expect_order(graph, order, launched)
    copies: dict[int, int] = {}
    for patch, stale in zip(patches, worlds, strict=True):
        for node in {*patch, *stale}:
            copies[node] = copies.get(node, 0) + 1
    held = {node: count * scale((node,)) for node, count in copies.items()}
    reads = {node: {one for one in table.inputs[node] if one in copies} for node in line}
    ends = set(graph.numbers(targets)) if targets is not None else set(graph.numbers(graph.computed))
    last: dict[int, int] = {}
    for at, node in enumerate(line):
        for one in (node, *reads[node]):
            last[one] = len(line) if one in ends else at
    live: set[int] = set()
    peak: Exact = 0
    for at, node in enumerate(line):
        live |= {node, *reads[node]}
        peak = max(peak, total(held[one] for one in live))
        live = {one for one in live if last[one] > at}
    bound = max((total(held[one] for one in {node, *reads[node]}) for node in line), default=0)
    return StackPeak(*(answer(one, scale.is_float, "the peak") for one in (peak, bound)))


def branch_order(branches: Iterable[tuple[Weight, Weight]]) -> tuple[tuple[int, ...], Weight]:
    """The best order of branches that do not read each other, and what it holds at most.

    docs/beyond-the-paper.md#wavefront. Each branch is (what it holds at most, what it leaves behind). The
    peak of an order is the largest peak plus what those before left; the best goes from the greatest
    difference of the two to the smallest.
    """
    found = expect_items(branches, "the list of branches", "a peak and what is left, for each")
    pairs: list[tuple[Weight, Weight]] = []
    for one in found:
        numbers = expect_items(one, "a branch", "its peak, and what it leaves behind")
        if len(numbers) != 2:
            raise TheoryError(f"a branch is {shown(one)}; it has a peak, and what it leaves behind.")
        peak, left = (expect_weight(number, "a branch's size") for number in numbers)
        if left > peak:
            raise TheoryError(
                f"a branch leaves {shown(left)} and holds {shown(peak)} at most, which is less."
            )
        pairs.append((peak, left))
    order = sorted(range(len(pairs)), key=lambda at: exact(pairs[at][1]) - exact(pairs[at][0]))
    standing: Exact = 0
    most: Exact = 0
    for at in order:
        most = max(most, standing + exact(pairs[at][0]))
        standing += exact(pairs[at][1])
    return tuple(order), answer(most, any_float(one for pair in pairs for one in pair), "the peak")


def _expect_order(graph: Graph, order: object, launched: set[int]) -> list[int]:
    """`order` as numbers: each launched node once, after those that it reads."""
    if order is None:
        return sorted(launched, key=graph.table.labels.__getitem__)
    found = graph.numbers(expect_sites(order, "the order"))
    if len(found) != len(launched) or set(found) != launched:
        raise TheoryError(
            f"the order has {len(found)} nodes, and {len(launched)} are launched; it names each of them once."
        )
    places = {node: place for place, node in enumerate(found)}
    for node in found:
        for read in graph.table.inputs[node]:
            if places.get(read, -1) > places[node]:
                raise TheoryError(
                    f"the order has {graph.name(node)!r} before {graph.name(read)!r}, which it reads."
                )
    return found
