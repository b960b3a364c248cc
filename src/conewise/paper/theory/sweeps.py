"""Sweeps: the cost of patching each of many sites, one world each; waves; and stacks of worlds.

A layered profile (a list of layer weights) and a graph are two descriptions of the same thing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Final, Literal

from conewise.errors import TheoryError
from conewise.paper import expect
from conewise.paper.expect import Weight, shown
from conewise.paper.theory.weights import Amount, Demand, Scale, Weights, amount, total, wanted
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
    sites = expect.graph(graph).numbers(expect.sites(patch, "the patch"))
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
    costs = world_costs(graph, sites, expect.demand(demand), Scale(graph, weights))
    return tuple(cost.weight("the cost of a world") for cost in costs)


def world_costs(
    graph: Graph, sites: Iterable[Patch], demand: tuple[Site, ...] | None, scale: Scale
) -> list[Amount]:
    """`sweep_costs`, exactly."""
    support = wanted(graph, demand)
    costs = []
    for numbers in patches_of(graph, sites):
        if len(numbers) > 1:
            nodes = stale_numbers(graph, numbers, demand)
        else:
            # What is below a single site reaches the demand without passing it again, so the
            # support need not be cut, and one serves the whole sweep.
            cone = graph.table.cone(numbers)
            nodes = cone if support is None else cone & support
        costs.append(scale(nodes))
    return costs


def patches_of(graph: Graph, sites: Iterable[Patch]) -> list[list[int]]:
    """Return the nodes that each world of a sweep patches, by number."""
    of = "one site, or several that one world patches together, for each world"
    entries = (sites,) if isinstance(sites, str) else expect.items(sites, "the list of sites", of)
    return [graph.numbers(expect.sites(entry, "what one world patches")) for entry in entries]


def sweep_cost(
    graph: Graph, sites: Iterable[Patch], demand: Demand = None, weights: Weights | None = None
) -> Weight:
    """Σ over `sites` of the weight of the cone; with a demand, of what is stale (see `stale`).

    docs/theory.md#sweep. This is what a sweep computes whose worlds are forks of one warm baseline.
    """
    scale = Scale(graph, weights)
    costs = world_costs(graph, sites, expect.demand(demand), scale)
    return sum(costs, scale(())).weight("the cost")


def full_cost(graph: Graph, demand: Demand = None, weights: Weights | None = None) -> Weight:
    """N: the weight of all computed nodes, or of those in the support of `demand`."""
    return full_weight(graph, demand, Scale(graph, weights)).weight("the full cost")


def full_weight(graph: Graph, demand: Demand, scale: Scale) -> Amount:
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
    return (1 / _mean_fraction(*_swept(profile, sites, terminal, demand, weights))).ratio


def downstream_fractions(
    profile: Graph | Iterable[Weight],
    sites: Iterable[Patch] | None = None,
    *,
    terminal: Weight = 0,
    demand: Demand = None,
    weights: Weights | None = None,
) -> tuple[Fraction | float, ...]:
    """U of each site: the share of the full cost that a patch there makes stale."""
    full, costs = _swept(profile, sites, terminal, demand, weights)
    if not full:
        raise TheoryError("a full run weighs nothing, so shares of it have no value. Give other `weights`.")
    return tuple((cost / full).ratio for cost in costs)


def mean_fraction(
    profile: Graph | Iterable[Weight],
    sites: Iterable[Patch] | None = None,
    *,
    terminal: Weight = 0,
    demand: Demand = None,
    weights: Weights | None = None,
) -> Fraction | float:
    """E[U] over the sites, each as likely as the other; ρ is 1 / E[U]."""
    return _mean_fraction(*_swept(profile, sites, terminal, demand, weights)).ratio


def _swept(
    profile: Graph | Iterable[Weight],
    sites: Iterable[Patch] | None,
    terminal: Weight,
    demand: Demand,
    weights: Weights | None,
) -> tuple[Amount, list[Amount]]:
    """Return the full cost of a sweep, and the cost at each of its sites."""
    end = amount(terminal, "`terminal`")
    if isinstance(profile, Graph):
        if sites is None:
            raise TheoryError("which sites of the graph are swept? Pass them: `sweep_ratio(graph, sites)`.")
        if end:
            raise TheoryError("a graph has its output node in it; `terminal` belongs to a profile.")
        targets, scale = expect.demand(demand), Scale(profile, weights)
        costs = world_costs(profile, sites, targets, scale)
        if not costs:
            raise TheoryError("no sites are given, and a ratio needs at least one.")
        return full_weight(profile, targets, scale), costs
    if sites is not None or demand is not None or weights is not None:
        raise TheoryError(
            "a profile is swept at one site per layer and is its own weights; `sites`, `demand` and "
            "`weights` belong to a graph."
        )
    full, *below = suffix_sums([*expect.profile(profile), end])
    return full, below


def _mean_fraction(full: Amount, costs: list[Amount]) -> Amount:
    """E[U], which is above zero."""
    swept = total(costs)
    if not swept:
        raise TheoryError(
            f"a sweep of these {len(costs)} sites recomputes nothing, so its ratio has no value: no node of "
            "any weight is both below a site and wanted. (A profile of one layer needs a `terminal` node.)"
        )
    return swept / (len(costs) * full)


def suffix_sums(weights: Iterable[Weight | Amount]) -> list[Amount]:
    """Σ_{j≥i} w_j for i = 0, 1, ..., exactly."""
    return list(accumulate(reversed(list(map(Amount.of, weights)))))[::-1]


def limit_ratio(q: Weight, profile: Orientation = "output-heavy") -> Fraction | float:
    """The limit of ρ for a profile that varies regularly with depth, of Karamata index q ≥ 0.

    docs/theory.md#limits. (q+2)/(q+1) where the weight grows towards the output like j^q, q+2 where
    it grows towards the input like (L+1-j)^q; 2 for q = 0. A Fraction for an exact q.
    """
    index = expect.number(q, "the index q")
    if index < 0:
        raise TheoryError(
            f"the index q is {shown(index)}; it is 0 or more. Weight that falls towards the output is a "
            'profile of positive index that is "input-heavy".'
        )
    heavy = expect.one_of(profile, _ORIENTATIONS, "the profile")
    return ((Amount.of(index) + 2) / (Amount.of(index) + 1 if heavy == "output-heavy" else 1)).ratio


def effective_index(rho: Weight) -> tuple[Fraction | float, Orientation]:
    """The index q, and the orientation, whose limit is the ratio `rho` > 1: `limit_ratio` undone.

    It sums up a real network in one number without fitting a power law to it.
    """
    given = expect.number(rho, "the ratio")
    if given <= 1:
        raise TheoryError(f"the ratio is {shown(given)}; every limit of a sweep ratio is above 1.")
    limit = Amount.of(given)
    if limit < 2:
        return ((2 - limit) / (limit - 1)).ratio, "output-heavy"
    return (limit - 2).ratio, "input-heavy"


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
    table = expect.graph(graph).table
    stopped = set(graph.numbers(expect.sites(already, "the list of stale sites")))
    valid = table.cone(stopped) - stopped
    if valid:
        raise TheoryError(
            f"{graph.name(min(valid))!r} depends on a site of `already`, and is not in it: what reads a "
            "stale site is stale. List the cones too."
        )
    seed = graph.number(expect.site(site, "the site"))
    nodes = {seed} | (table.cone([seed]) - stopped)
    return Touched(len(nodes), sum(len(table.consumers[node]) for node in nodes))


def demand_size(graph: Graph, patch: Patch, demand: Demand = None) -> Touched:
    """Count the stale nodes, and the edges into them, that a demand looks at after a patch.

    docs/theory.md#waves. Nothing of it depends on the size of the graph: a node that is neither stale,
    nor read by one that is, nor demanded, nor patched, is not looked at. A site that a node reads twice
    counts as two edges.
    """
    nodes = expect.graph(graph).numbers(stale(graph, patch, demand))
    return Touched(len(nodes), sum(len(graph.table.inputs[node]) for node in nodes))


# -- Stacks: worlds computed together. How often a stack launches, and what it holds at most -------
# A stack launches a node once, for all of its worlds that compute it.


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
    scale, count = Scale(expect.graph(graph), weights), expect.count(at_once, "`at_once`")
    targets = expect.demand(demand)
    worlds = [stale_numbers(graph, patch, targets) for patch in patches_of(graph, sites)]
    unions = (set().union(*worlds[first : first + count]) for first in range(0, len(worlds), count))
    return sum(map(scale, unions), scale(())).weight("the launches")


def saturating_worlds(launch: Weight, world: Weight, share: Weight) -> int:
    """Return the stack width that is enough: beyond it, launches save less than `share` of the work.

    docs/beyond-the-paper.md#wavefront. A launch takes c, and a node u for each world: stacks of B worlds take
    at most c·W/B more than a single stack, which is at most `share` of the work u·W from B = c/(share·u) on.
    That holds where cones are nested, in the order of depth, however deep and however many they are.
    """
    c, u, part = amount(launch, "`launch`"), amount(world, "`world`"), amount(share, "`share`")
    if not u or not part:
        raise TheoryError(
            f"a world takes {shown(u)} and the share is {shown(part)}: without either, more "
            "worlds at once always save something."
        )
    return max(1, math.ceil((c / (part * u)).exact))


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
    table, scale = expect.graph(graph).table, Scale(graph, weights)
    targets = expect.demand(demand)
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
    peak = bound = scale(())
    for at, node in enumerate(line):
        live |= {node, *reads[node]}
        peak = max(peak, total(held[one] for one in live))
        bound = max(bound, total(held[one] for one in {node, *reads[node]}))
        live = {one for one in live if last[one] > at}
    return StackPeak(peak.weight("the peak"), bound.weight("the peak"))


def branch_order(branches: Iterable[tuple[Weight, Weight]]) -> tuple[tuple[int, ...], Weight]:
    """The best order of branches that do not read each other, and what it holds at most.

    docs/beyond-the-paper.md#wavefront. Each branch is (what it holds at most, what it leaves behind). The
    peak of an order is the largest peak plus what those before left; the best goes from the greatest
    difference of the two to the smallest.
    """
    found = expect.items(branches, "the list of branches", "a peak and what is left, for each")
    pairs: list[tuple[Amount, Amount]] = []
    for one in found:
        numbers = expect.items(one, "a branch", "its peak, and what it leaves behind")
        if len(numbers) != 2:
            raise TheoryError(f"a branch is {shown(one)}; it has a peak, and what it leaves behind.")
        peak, left = (amount(number, "a branch's size") for number in numbers)
        if left > peak:
            raise TheoryError(
                f"a branch leaves {shown(left)} and holds {shown(peak)} at most, which is less."
            )
        pairs.append((peak, left))
    order = sorted(range(len(pairs)), key=lambda at: pairs[at][1] - pairs[at][0])
    standing = most = 0 * total(one for pair in pairs for one in pair)
    for at in order:
        most = max(most, standing + pairs[at][0])
        standing += pairs[at][1]
    return tuple(order), most.weight("the peak")


def _expect_order(graph: Graph, order: object, launched: set[int]) -> list[int]:
    """`order` as numbers: each launched node once, after those that it reads."""
    if order is None:
        return sorted(launched, key=graph.table.labels.__getitem__)
    found = graph.numbers(expect.sites(order, "the order"))
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
