"""Sweeps: what it costs to patch each of many sites, one world each, against a full run for each.

A layered profile (a list of layer weights) and a graph are two descriptions of the same thing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from fractions import Fraction
from typing import Literal

from conewise.errors import TheoryError
from conewise.graph.graph import Graph, Site
from conewise.theory.weights import (
    Demand,
    Scale,
    Weight,
    Weights,
    expect_number,
    expect_profile,
    expect_weight,
    ratio,
    total,
    wanted,
)

Orientation = Literal["output-heavy", "input-heavy"]
Patch = Site | Collection[Site]


def stale(graph: Graph, patch: Patch, demand: Demand = None) -> frozenset[Site]:
    """The sites that answering `demand` under `patch` must recompute.

    docs/theory.md#exact-cost. A warm world (one that has answered `demand` unpatched) whose sites
    `patch` are given values computes each of these once, and no other:

        stale = (cone(patch) − patch) ∩ support(demand, cut at patch)

    The support stops at patched sites: their values are given, so nothing above them is wanted on
    their account. Without a demand every site is demanded. Where a cutoff fires, an upper bound.
    """
    return frozenset(graph.names(_stale(graph, graph.numbers(patch), demand)))


def _stale(graph: Graph, patch: Collection[int], demand: Demand) -> set[int]:
    dirty = graph.table.cone(patch) - set(patch)
    support = wanted(graph, demand, set(patch))
    return dirty if support is None else dirty & support


def sweep_costs(
    graph: Graph, sites: Iterable[Patch], demand: Demand = None, weights: Weights | None = None
) -> tuple[Weight, ...]:
    """The cost of each world of a sweep: the weight of what is stale under its patch.

    An element of `sites` is one site, or the collection of sites that one world patches together.
    """
    scale = Scale(graph, weights)
    support = wanted(graph, demand)
    return tuple(scale(nodes) for nodes in _stale_sets(graph, sites, demand, support))


def _stale_sets(
    graph: Graph, sites: Iterable[Patch], demand: Demand, support: set[int] | None
) -> Iterator[set[int]]:
    if demand is not None and not isinstance(demand, str):
        demand = tuple(demand)
    for patch in (sites,) if isinstance(sites, str) else sites:
        numbers = graph.numbers(patch)
        if len(numbers) > 1:
            yield _stale(graph, numbers, demand)
            continue
        # What is below a single site reaches the demand without passing it again, so the
        # support need not be cut, and one serves the whole sweep.
        cone = graph.table.cone(numbers)
        yield cone if support is None else cone & support


def sweep_cost(
    graph: Graph, sites: Iterable[Patch], demand: Demand = None, weights: Weights | None = None
) -> Weight:
    """Σ over `sites` of the weight of the cone; with a demand, of what is stale (see `stale`).

    docs/theory.md#sweep. This is what a sweep computes whose worlds are forks of one warm baseline.
    """
    return total(sweep_costs(graph, sites, demand, weights))


def full_cost(graph: Graph, demand: Demand = None, weights: Weights | None = None) -> Weight:
    """N: the weight of all computed nodes, or of those in the support of `demand`."""
    support = wanted(graph, demand)
    nodes: Iterable[int] = graph.table.order if support is None else support
    return Scale(graph, weights)(nodes)


def sweep_ratio(
    profile: Graph | Iterable[Weight],
    sites: Iterable[Patch] | None = None,
    *,
    terminal: Weight = 0,
    demand: Demand = None,
    weights: Weights | None = None,
) -> Fraction | float:
    """ρ: one full run per site, over the cost of the sweep. A Fraction when the weights are exact.

    docs/theory.md#sweep. For a layered profile w_1..w_L, whose one site per layer ends the layer,
    with an output node of weight `terminal` after the last layer (in N and in every cone):

        ρ = L · (Σ_j w_j + terminal) / Σ_i (Σ_{j>i} w_j + terminal)

    For a graph, `sites` must be given: ρ = |sites| · full_cost / sweep_cost.
    """
    return ratio(1, mean_fraction(profile, sites, terminal=terminal, demand=demand, weights=weights))


def downstream_fractions(
    profile: Graph | Iterable[Weight],
    sites: Iterable[Patch] | None = None,
    *,
    terminal: Weight = 0,
    demand: Demand = None,
    weights: Weights | None = None,
) -> tuple[Fraction | float, ...]:
    """U of each site: the share of the full cost that a patch there makes stale."""
    full, costs = _costs(profile, sites, terminal, demand, weights)
    return tuple(ratio(cost, full) for cost in costs)


def mean_fraction(
    profile: Graph | Iterable[Weight],
    sites: Iterable[Patch] | None = None,
    *,
    terminal: Weight = 0,
    demand: Demand = None,
    weights: Weights | None = None,
) -> Fraction | float:
    """E[U] over the sites, each as likely as the other; ρ = 1 / E[U] exactly."""
    full, costs = _costs(profile, sites, terminal, demand, weights)
    swept = total(costs)
    if swept == 0:
        raise TheoryError(
            f"a sweep of these {len(costs)} sites recomputes nothing, so its ratio has no value: no "
            "node of any weight is both below a site and wanted. (A profile of one layer needs a "
            "`terminal` node.)"
        )
    return ratio(swept, len(costs) * full)


def _costs(
    profile: Graph | Iterable[Weight],
    sites: Iterable[Patch] | None,
    terminal: Weight,
    demand: Demand,
    weights: Weights | None,
) -> tuple[Weight, tuple[Weight, ...]]:
    """The full cost, and the cost at each site."""
    terminal = expect_weight(terminal, "`terminal`")
    if isinstance(profile, Graph):
        if sites is None:
            raise TheoryError("which sites of the graph are swept? Pass them: `sweep_ratio(graph, sites)`.")
        if terminal:
            raise TheoryError("a graph has its output node in it; `terminal` belongs to a profile.")
        if demand is not None and not isinstance(demand, str):
            demand = tuple(demand)
        costs = sweep_costs(profile, sites, demand, weights)
        if not costs:
            raise TheoryError("no sites are given, and a ratio needs at least one.")
        return full_cost(profile, demand, weights), costs
    if sites is not None or demand is not None or weights is not None:
        raise TheoryError(
            "a profile is swept at one site per layer and is its own weights; `sites`, `demand` and "
            "`weights` belong to a graph."
        )
    below = suffix_sums([*expect_profile(profile), terminal])
    return below[0], below[1:]


def suffix_sums(weights: Collection[Weight]) -> tuple[Weight, ...]:
    """Σ_{j≥i} w_j for i = 0, 1, ...; floats are summed exactly and rounded once, each."""
    if any(isinstance(weight, float) for weight in weights):
        exact = suffix_sums([Fraction(weight) for weight in weights])
        return tuple(map(float, exact))
    sums: list[Weight] = []
    for weight in reversed(list(weights)):
        sums.append(weight + sums[-1] if sums else weight)
    return tuple(reversed(sums))


def limit_ratio(q: Weight, profile: Orientation = "output-heavy") -> Fraction | float:
    """The limit of ρ for a profile that varies regularly with depth, of Karamata index q ≥ 0.

    docs/theory.md#limits. (q+2)/(q+1) where the weight grows towards the output like j^q, q+2 where
    it grows towards the input like (L+1-j)^q; 2 for q = 0. A Fraction for an exact q.
    """
    q = expect_number(q, "the index q")
    if q < 0:
        raise TheoryError(
            f"the index q is {q}; it is 0 or more. Weight that falls towards the output is a profile "
            'of positive index that is "input-heavy".'
        )
    if profile not in ("output-heavy", "input-heavy"):
        raise TheoryError(
            f'the profile is {profile!r}; it is "output-heavy" (weight grows with depth) or "input-heavy".'
        )
    return ratio(q + 2, q + 1 if profile == "output-heavy" else 1)


def effective_index(rho: Weight) -> tuple[Fraction | float, Orientation]:
    """The index q, and the orientation, whose limit is the ratio `rho` > 1: `limit_ratio` undone.

    It sums up a real network in one number without fitting a power law to it.
    """
    rho = expect_number(rho, "the ratio")
    if rho <= 1:
        raise TheoryError(f"the ratio is {rho}; every limit of a sweep ratio is above 1.")
    if rho < 2:
        return ratio(2 - rho, rho - 1), "output-heavy"
    return ratio(rho - 2, 1), "input-heavy"
