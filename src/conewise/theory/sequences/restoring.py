"""Restoring in place: what a sweep costs in one world, each patch taken away before the next is made.

Taking a patch away invalidates its site and what is below, as making it did. A fork restores nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from conewise.graph.graph import Graph
from conewise.theory.sweeps import Patch, patches_of, world_costs
from conewise.theory.weights import Demand, Scale, Weight, Weights, answer, expect_demand, total, wanted


@dataclass(frozen=True, slots=True)
class RestoredCost:
    """The cost of a sweep that restores in place: `costs` in the order in which the sites are patched.

    `forked` is what the same sweep costs over forks (`sweep_cost`), and `surplus` = total − forked ≥ 0.
    `left` is what a demand of the baseline computes after the last restore.
    """

    costs: tuple[Weight, ...]
    total: Weight
    forked: Weight
    surplus: Weight
    left: Weight


def restored_cost(
    graph: Graph, sites: Iterable[Patch], demand: Demand = None, *, weights: Weights | None = None
) -> RestoredCost:
    """What a sweep costs in one world: patch a site, demand, take the patch away; then the next site.

    docs/theory.md#restoring. The world has answered `demand`, D, before the first patch; values are given,
    and a restore keeps nothing. Let A(P) = P ∪ cone(P), what a restore of P invalidates, and
    W(P) = support(D, cut at P), what the demand wants under the patch P. The demand under the i-th patch
    computes what is below it and what earlier restores have left stale, as far as it is wanted:

        ((cone(Pᵢ) ∪ Sᵢ₋₁) − Pᵢ) ∩ W(Pᵢ),   Sᵢ = (Sᵢ₋₁ − W(Pᵢ)) ∪ A(Pᵢ),   S₀ empty

    An element of `sites` is one site, or the collection of sites that are patched together.
    """
    scale, targets = Scale(graph, weights), expect_demand(demand)
    patches = patches_of(graph, sites)
    costs = []
    stale: set[int] = set()
    for patch in patches:
        below = graph.table.cone(patch)
        needed = wanted(graph, targets, set(patch))
        invalid = (below | stale) - set(patch)
        costs.append(scale(invalid if needed is None else invalid & needed))
        stale = (set() if needed is None else stale - needed) | below | set(patch)
    support = wanted(graph, targets)
    spent = total(costs)
    forked = total(world_costs(graph, [graph.names(patch) for patch in patches], targets, scale))
    left = scale(stale if support is None else stale & support)
    return RestoredCost(
        tuple(answer(cost, scale.is_float) for cost in costs),
        *(answer(cost, scale.is_float) for cost in (spent, forked, spent - forked, left)),
    )
