"""Sweeps: what it costs to patch each of many sites, one world each, against a full run for each.

A layered profile (a list of layer weights) and a graph are two descriptions of the same thing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Final, Literal

from conewise.errors import TheoryError
from conewise.paper.theory.weights import (
    Demand,
    Exact,
    Scale,
    Weight,
    Weights,
    answer,
    answer_ratio,
    any_float,
    exact,
    expect_demand,
    expect_graph,
    expect_items,
    expect_number,
    expect_one_of,
    expect_profile,
    expect_site,
    expect_sites,
    expect_weight,
    ratio,
    shown,
    total,
    wanted,
)
from conewise.reactive.graph import Graph, Site

Orientation = Literal["output-heavy", "input-heavy"]
_ORIENTATIONS: Final[tuple[Orientation, ...]] = ("output-heavy", "input-heavy")
Patch = Site | Collection[Site]


def stale(graph: Graph, patch: Patch, demand: Demand = None) -> frozenset[Site]:
    """The sites that answering `demand` under `patch` must recompute.

    docs/theory.md#exact-cost. A warm world without patches (one that has answered `demand`) whose sites
    `patch` are given values computes each of these once, and no other:

        stale = (cone(patch) − patch) ∩ support(demand, cut at patch)

    The support stops at patched sites: their values are given, so nothing above them is wanted on
    their account. Without a demand every site is demanded. Where a cutoff fires, an upper bound.
    """
    sites = expect_graph(graph).numbers(expect_sites(patch, "the patch"))
    return frozenset(graph.names(stale_numbers(graph, sites, demand)))


def stale_numbers(graph: Graph, patch: Collection[int], demand: Demand) -> set[int]:
    """`stale` by node number."""
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
    costs = world_costs(graph, sites, expect_demand(demand), scale)
    return tuple(answer(cost, scale.is_float, "the cost of a world") for cost in costs)


def world_costs(
    graph: Graph, sites: Iterable[Patch], demand: tuple[Site, ...] | None, scale: Scale
) -> list[Exact]:
    """`sweep_costs`, exactly."""
    support = wanted(graph, demand)
    return [scale(nodes) for nodes in _stale_sets(graph, sites, demand, support)]


def patches_of(graph: Graph, sites: Iterable[Patch]) -> list[list[int]]:
    """Return the nodes that each world of a sweep patches, by number."""
    of = "one site, or several that one world patches together, for each world"
    entries = (sites,) if isinstance(sites, str) else expect_items(sites, "the list of sites", of)
    return [graph.numbers(expect_sites(entry, "what one world patches")) for entry in entries]


def _stale_sets(
    graph: Graph, sites: Iterable[Patch], demand: tuple[Site, ...] | None, support: set[int] | None
) -> Iterator[set[int]]:
    for numbers in patches_of(graph, sites):
        if len(numbers) > 1:
            yield stale_numbers(graph, numbers, demand)
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
    scale = Scale(graph, weights)
    return answer(total(world_costs(graph, sites, expect_demand(demand), scale)), scale.is_float, "the cost")


def full_cost(graph: Graph, demand: Demand = None, weights: Weights | None = None) -> Weight:
    """N: the weight of all computed nodes, or of those in the support of `demand`."""
    scale = Scale(graph, weights)
    return answer(full_weight(graph, demand, scale), scale.is_float, "the full cost")


def full_weight(graph: Graph, demand: Demand, scale: Scale) -> Exact:
    """`full_cost`, exactly."""
    support = wanted(graph, demand)
    nodes: Iterable[int] = graph.table.order if support is None else support
    return scale(nodes)


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
    swept = _Swept.of(profile, sites, terminal, demand, weights)
    return answer_ratio(1 / swept.mean_fraction, swept.is_float)


def downstream_fractions(
    profile: Graph | Iterable[Weight],
    sites: Iterable[Patch] | None = None,
    *,
    terminal: Weight = 0,
    demand: Demand = None,
    weights: Weights | None = None,
) -> tuple[Fraction | float, ...]:
    """U of each site: the share of the full cost that a patch there makes stale."""
    swept = _Swept.of(profile, sites, terminal, demand, weights)
    if swept.full == 0:
        raise TheoryError("a full run weighs nothing, so shares of it have no value. Give other `weights`.")
    return tuple(answer_ratio(ratio(cost, swept.full), swept.is_float) for cost in swept.costs)


def mean_fraction(
    profile: Graph | Iterable[Weight],
    sites: Iterable[Patch] | None = None,
    *,
    terminal: Weight = 0,
    demand: Demand = None,
    weights: Weights | None = None,
) -> Fraction | float:
    """E[U] over the sites, each as likely as the other; ρ is 1 / E[U]."""
    swept = _Swept.of(profile, sites, terminal, demand, weights)
    return answer_ratio(swept.mean_fraction, swept.is_float)


@dataclass(frozen=True, slots=True)
class _Swept:
    """A sweep: the full cost, the cost at each site, and whether a weight was a float."""

    full: Exact
    costs: tuple[Exact, ...]
    is_float: bool

    @property
    def mean_fraction(self) -> Fraction:
        """E[U], which is above zero."""
        swept = total(self.costs)
        if swept == 0:
            raise TheoryError(
                f"a sweep of these {len(self.costs)} sites recomputes nothing, so its ratio has no value: no "
                "node of any weight is both below a site and wanted. (A profile of one layer needs a "
                "`terminal` node.)"
            )
        return ratio(swept, len(self.costs) * self.full)

    @classmethod
    def of(
        cls,
        profile: Graph | Iterable[Weight],
        sites: Iterable[Patch] | None,
        terminal: Weight,
        demand: Demand,
        weights: Weights | None,
    ) -> _Swept:
        terminal = expect_weight(terminal, "`terminal`")
        if isinstance(profile, Graph):
            if sites is None:
                raise TheoryError(
                    "which sites of the graph are swept? Pass them: `sweep_ratio(graph, sites)`."
                )
            if terminal:
                raise TheoryError("a graph has its output node in it; `terminal` belongs to a profile.")
            targets, scale = expect_demand(demand), Scale(profile, weights)
            costs = world_costs(profile, sites, targets, scale)
            if not costs:
                raise TheoryError("no sites are given, and a ratio needs at least one.")
            return cls(full_weight(profile, targets, scale), tuple(costs), scale.is_float)
        if sites is not None or demand is not None or weights is not None:
            raise TheoryError(
                "a profile is swept at one site per layer and is its own weights; `sites`, `demand` and "
                "`weights` belong to a graph."
            )
        layers = [*expect_profile(profile), terminal]
        full, *below = suffix_sums(layers)
        return cls(full, tuple(below), any_float(layers))


def suffix_sums(weights: Collection[Weight]) -> tuple[Exact, ...]:
    """Σ_{j≥i} w_j for i = 0, 1, ..., exactly."""
    sums = list(accumulate(map(exact, reversed(list(weights)))))
    return tuple(reversed(sums))


def limit_ratio(q: Weight, profile: Orientation = "output-heavy") -> Fraction | float:
    """The limit of ρ for a profile that varies regularly with depth, of Karamata index q ≥ 0.

    docs/theory.md#limits. (q+2)/(q+1) where the weight grows towards the output like j^q, q+2 where
    it grows towards the input like (L+1-j)^q; 2 for q = 0. A Fraction for an exact q.
    """
    index = expect_number(q, "the index q")
    if index < 0:
        raise TheoryError(
            f"the index q is {shown(index)}; it is 0 or more. Weight that falls towards the output is a "
            'profile of positive index that is "input-heavy".'
        )
    heavy = expect_one_of(profile, _ORIENTATIONS, "the profile")
    limit = ratio(exact(index) + 2, exact(index) + 1 if heavy == "output-heavy" else 1)
    return answer_ratio(limit, isinstance(index, float))


def effective_index(rho: Weight) -> tuple[Fraction | float, Orientation]:
    """The index q, and the orientation, whose limit is the ratio `rho` > 1: `limit_ratio` undone.

    It sums up a real network in one number without fitting a power law to it.
    """
    given = expect_number(rho, "the ratio")
    if given <= 1:
        raise TheoryError(f"the ratio is {shown(given)}; every limit of a sweep ratio is above 1.")
    limit, is_float = exact(given), isinstance(given, float)
    if limit < 2:
        return answer_ratio(ratio(2 - limit, limit - 1), is_float), "output-heavy"
    return answer_ratio(ratio(limit - 2, 1), is_float), "input-heavy"


# -- Waves -----------------------------------------------------------------------------------------
# Waves: what invalidation touches, node by node and edge by edge; and what a demand looks at.


@dataclass(frozen=True, slots=True)
class Touched:
    """The number of nodes that are looked at, and of edges that are followed from them, each once."""

    nodes: int
    edges: int

    @property
    def total(self) -> int:
        """Nodes and edges together: what the time is proportional to."""
        return self.nodes + self.edges


def wave_size(graph: Graph, site: Site, already: Iterable[Site] = ()) -> Touched:
    """Count what the wave of a change at `site` touches in a world where the sites `already` are stale.

    docs/theory.md#waves. The nodes are s itself and cone(s) less what is stale already, be it by a change or
    because it was never computed; the edges are all that leave these nodes, each once. (In a fork, only
    what its own changes have made stale ends a wave.) Where nothing is stale:

        nodes = 1 + |V⁺|,   edges = |E⁺| + d(s) ≤ |E⁺| + |V⁺|

    where E⁺ are the edges inside of the cone and d(s) the readers of s. All that depends on a stale
    site must be stale too, as it is in every world in which no value is given: TheoryError.
    """
    table = expect_graph(graph).table
    stopped = set(graph.numbers(expect_sites(already, "the list of stale sites")))
    valid = table.cone(stopped) - stopped
    if valid:
        raise TheoryError(
            f"{graph.name(min(valid))!r} depends on a site of `already`, and is not in it: what reads a "
            "stale site is stale. List the cones too."
        )
    seed = graph.number(expect_site(site, "the site"))
    nodes = {seed} | (table.cone([seed]) - stopped)
    return Touched(len(nodes), sum(len(table.consumers[node]) for node in nodes))


def demand_size(graph: Graph, patch: Patch, demand: Demand = None) -> Touched:
    """Count the stale nodes, and the edges into them, that a demand looks at after a patch.

    docs/theory.md#waves. Nothing of it depends on the size of the graph: a node that is neither stale,
    nor read by one that is, nor demanded, nor patched, is not looked at. A site that a node reads twice
    counts as two edges.
    """
    nodes = expect_graph(graph).numbers(stale(graph, patch, demand))
    return Touched(len(nodes), sum(len(graph.table.inputs[node]) for node in nodes))
