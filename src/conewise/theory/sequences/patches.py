"""Persistent patches: sites that are given values one after the other, none restored, a demand after each.

Patches differ from grafts: a patched site is given, so it shields what is below it from what is above.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conewise.errors import TheoryError
from conewise.graph.graph import Graph, Site
from conewise.theory.weights import (
    Demand,
    Scale,
    Weight,
    Weights,
    answer,
    expect_demand,
    expect_graph,
    expect_permutation,
    expect_sites,
    total,
)


@dataclass(frozen=True, slots=True)
class PatchedCost:
    """The cost of patches that stay, with a demand after each: `costs` in the order they were made.

    batched ≤ total ≤ isolated, always: `batched` is one demand after all patches, `isolated` the sum
    over patches in worlds of their own; `shielded` = isolated − total ≥ 0 is what the patches that
    are already there spare the later ones.
    """

    costs: tuple[Weight, ...]
    total: Weight
    isolated: Weight
    batched: Weight
    shielded: Weight


@dataclass(frozen=True, slots=True)
class PatchExtremes:
    """The least and the most that the patches cost over all orders, and orders that attain them."""

    least: Weight
    most: Weight
    best: tuple[int, ...]
    worst: tuple[int, ...]


def patched_cost(
    graph: Graph,
    patches: Iterable[Site],
    demand: Demand = None,
    *,
    order: Iterable[int] | None = None,
    weights: Weights | None = None,
) -> PatchedCost:
    """The cost of patching distinct sites in `order`, values given, with `demand` after each.

    docs/theory.md#patches. The patch of s, when the sites A are patched already, recomputes what a path
    from s reaches without passing A, and from which the demand is reached without passing A:

        cost(s | A) = | cone(s, cut at A) ∩ support(demand, cut at A ∪ {s}) |

    a patched site itself never counts. The world has answered the demand before the first patch.
    """
    scale, sites = Scale(graph, weights), _expect_patched(graph, patches)
    chosen = expect_permutation(order, len(sites))
    targets = _targets(graph, demand)
    costs = [
        scale(_step(graph, sites[k], [sites[j] for j in chosen[:step]], targets))
        for step, k in enumerate(chosen)
    ]
    isolated = total(scale(_step(graph, site, (), targets)) for site in sites)
    batched = scale(set().union(*(_step(graph, s, [o for o in sites if o != s], targets) for s in sites)))
    spent = total(costs)
    handed_out = (answer(cost, scale.is_float) for cost in (spent, isolated, batched, isolated - spent))
    return PatchedCost(tuple(answer(cost, scale.is_float) for cost in costs), *handed_out)


def patch_extremes(
    graph: Graph, patches: Iterable[Site], demand: Demand = None, *, weights: Weights | None = None
) -> PatchExtremes:
    """The least and the most total over all orders: downstream first, and upstream first.

    Proof. A patch in A matters to cost(s | A) only if a path from s meets it, that is, if it is below
    s, and more of them can only take nodes away. Downstream first, all patches below s are there before
    s, so every term is least; upstream first, none is, so every term is most, which
    is its isolated cost. Both hold term by term, so no search is needed, on any DAG. The best order for
    patches is the worst for grafts.
    """
    sites, targets = _expect_patched(graph, patches), expect_demand(demand)
    worst = tuple(sorted(range(len(sites)), key=lambda k: graph.table.labels[sites[k]]))
    best = worst[::-1]
    names = graph.names(sites)
    return PatchExtremes(
        patched_cost(graph, names, targets, order=best, weights=weights).total,
        patched_cost(graph, names, targets, order=worst, weights=weights).total,
        best,
        worst,
    )


def best_patch_order(graph: Graph, patches: Iterable[Site]) -> tuple[int, ...]:
    """An order of the least total, for any demand and weights: downstream first; see `patch_extremes`."""
    sites = _expect_patched(graph, patches)
    return tuple(sorted(range(len(sites)), key=lambda k: -graph.table.labels[sites[k]]))


def _expect_patched(graph: Graph, patches: Iterable[Site]) -> list[int]:
    sites = expect_graph(graph).numbers(expect_sites(patches, "the list of patches"))
    twice = [site for place, site in enumerate(sites) if site in sites[:place]]
    if twice:
        raise TheoryError(
            f"{graph.name(twice[0])!r} is patched twice; a sequence of patches names each site once."
        )
    return sites


def _targets(graph: Graph, demand: Demand) -> list[int] | None:
    targets = expect_demand(demand)
    return None if targets is None else graph.numbers(targets)


def _step(graph: Graph, site: int, given: Sequence[int], targets: list[int] | None) -> set[int]:
    """What patching `site` makes stale and wanted, when the values at `given` are fixed already."""
    cut = {*given, site}
    reached: set[int] = set()
    stack = [site]
    while stack:
        for reader in graph.table.consumers[stack.pop()]:
            if reader not in cut and reader not in reached:
                reached.add(reader)
                stack.append(reader)
    return reached if targets is None else reached & graph.table.support(targets, cut)
