"""Wrong closed forms, each plausible, kept so that the laws of cost can be seen to refute them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, permutations

import conewise as cw
from conewise.paper.theory import GraftAt


def ratio_without_the_terminal_in_cones(profile: Sequence[int], terminal: int) -> Fraction:
    """Off by one: the terminal node is in N, and missing from every cone."""
    suffixes = [sum(profile[i + 1 :]) for i in range(len(profile))]
    return Fraction(len(profile) * (sum(profile) + terminal), sum(suffixes))


def ratio_without_the_terminal_in_n(profile: Sequence[int], terminal: int) -> Fraction:
    """Off by one: the terminal node is in every cone, and missing from N, as in the paper's ρ(L, H)."""
    suffixes = [sum(profile[i + 1 :]) + terminal for i in range(len(profile))]
    return Fraction(len(profile) * sum(profile), sum(suffixes))


def _anchor(graft: GraftAt) -> str:
    return graft.at if isinstance(graft.at, str) else graft.at[0]


def graft_cost_by_the_cone_of_u(graph: cw.Graph, graft: GraftAt) -> float | Fraction:
    """V⁺ᵤ for a graft on the edge (u, w): counts u's other readers, which see no change."""
    return len(graph.cone(_anchor(graft))) + graft.fresh


def _disturbed(graph: cw.Graph, graft: GraftAt) -> set[str]:
    if isinstance(graft.at, str):
        return set(graph.cone(graft.at))
    readers = (graft.at[1],) if isinstance(graft.at[1], str) else graft.at[1]
    return set(readers).union(*map(graph.cone, readers))


def batched_without_the_sites(graph: cw.Graph, grafts: Sequence[GraftAt]) -> float | Fraction:
    """The sites taken off the union, as if they were in it once too often."""
    union = set().union(*(_disturbed(graph, graft) for graft in grafts))
    return len(union - {_anchor(graft) for graft in grafts}) + sum(graft.fresh for graft in grafts)


def batched_less_one_per_site(graph: cw.Graph, grafts: Sequence[GraftAt]) -> float | Fraction:
    """One node subtracted for each site, in the union or not."""
    union = set().union(*(_disturbed(graph, graft) for graft in grafts))
    return len(union) - len(grafts) + sum(graft.fresh for graft in grafts)


def batched_is_less_where_disturbed_sets_meet(graph: cw.Graph, grafts: Sequence[GraftAt]) -> bool:
    """As if what they share were always demanded, and of some weight."""
    return any(_disturbed(graph, a) & _disturbed(graph, b) for a, b in combinations(grafts, 2))


def mean_over_comparable_sites(graph: cw.Graph, grafts: Sequence[GraftAt]) -> Fraction:
    """Half the lower block for each pair of comparable sites, whatever lies between."""
    total = Fraction(0)
    for above, below in permutations(grafts, 2):
        if _anchor(below) in graph.cone(_anchor(above)):
            total += Fraction(below.reach) / 2
    return total


def interleaved_by_strict_cones(
    graph: cw.Graph, grafts: Sequence[GraftAt], order: Sequence[int]
) -> float | Fraction:
    """The paper's overcount: pairs with u_j in V⁺ of u_k, which is wrong for edges and at one site."""
    total: float | Fraction = sum(len(_disturbed(graph, graft)) + graft.fresh for graft in grafts)
    for step, k in enumerate(order):
        for j in order[:step]:
            if _anchor(grafts[j]) in graph.cone(_anchor(grafts[k])):
                total += grafts[j].reach
    return total


def interleaved_below_the_reader(
    graph: cw.Graph, grafts: Sequence[GraftAt], order: Sequence[int]
) -> float | Fraction:
    """For an edge graft, pairs with u_j strictly below w_k: a block that hangs on w_k itself is left out."""
    total: float | Fraction = sum(len(_disturbed(graph, graft)) + graft.fresh for graft in grafts)
    for step, k in enumerate(order):
        at = grafts[k].at
        front = {at, *graph.cone(at)} if isinstance(at, str) else set(graph.cone(at[1]))
        total += sum(grafts[j].reach for j in order[:step] if _anchor(grafts[j]) in front)
    return total


def interleaved_with_whole_blocks(
    graph: cw.Graph, grafts: Sequence[GraftAt], order: Sequence[int]
) -> float | Fraction:
    """Counts all h of an earlier block again, its part that does not depend on its input included."""
    total: float | Fraction = sum(len(_disturbed(graph, graft)) + graft.fresh for graft in grafts)
    for step, k in enumerate(order):
        own = {_anchor(grafts[k])} if isinstance(grafts[k].at, str) else set()
        for j in order[:step]:
            if _anchor(grafts[j]) in _disturbed(graph, grafts[k]) | own:
                total += grafts[j].fresh
    return total


def patched_by_union(graph: cw.Graph, patches: Sequence[str]) -> int:
    """The plain union of the cones, patched sites included."""
    return len(graph.cone(patches))


def patched_step_uncut(graph: cw.Graph, patches: Sequence[str]) -> int:
    """The last patch's cone without the patched sites, seen through the patches that shield it."""
    return len(set(graph.cone(patches[-1])) - set(patches))


def patched_step_with_the_patches(graph: cw.Graph, patches: Sequence[str]) -> int:
    """What a path from the last patch reaches without going past the others: those that it meets included."""
    reached, stack = set[str](), [patches[-1]]
    while stack:
        for reader in graph.consumers(stack.pop()):
            if reader not in reached:
                reached.add(reader)
                stack.extend(() if reader in patches else (reader,))
    return len(reached)


def restored_by_both_cones(graph: cw.Graph, first: str, second: str, demand: Sequence[str]) -> int:
    """What is wanted of both cones, as if the second patch did not hide what is above it."""
    return len(
        (set(graph.cone([first, second])) - {second}) & set(graph.support(demand)) - set(graph.sources)
    )


def restored_by_site_and_both_cones(graph: cw.Graph, first: str, second: str, demand: Sequence[str]) -> int:
    """The same with the restored site, which is computed again."""
    invalid = {first, *graph.cone([first, second])} - {second} - set(graph.sources)
    return len(invalid & set(graph.support(demand)))


def restoring_costs_more_unless_nested(graph: cw.Graph, first: str, second: str) -> bool:
    """More unless the cone of the restored site lies within that of the next."""
    return not set(graph.cone(first)) <= set(graph.cone(second))


def training_of_consecutive_layers(L: int) -> Fraction:
    """The closed form for layers of two nodes, as soon as no edge passes a layer by."""
    return Fraction(L * (2 * L + 1), L * 2 * L)


def training_from_forward_with_weights(forward: Fraction, nodes: int) -> Fraction:
    """The identity of unit weights, under any weights."""
    return 1 / (2 / forward + Fraction(1, nodes))


def wallclock_from_above(ratio: Fraction, limit: Fraction) -> bool:
    """The ratio in time comes down to its limit from above, whatever a demand costs besides."""
    return ratio > limit
