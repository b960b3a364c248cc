"""Sequences of grafts: what each costs in a given order, what all cost as a batch, and the best order.

Everything is computed from the graph as it was before the first graft.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, permutations
from math import comb

from conewise.errors import TheoryError
from conewise.paper import expect
from conewise.paper.expect import Weight, shown
from conewise.paper.theory.weights import Amount, Demand, Scale, Weights, amount, total, wanted
from conewise.reactive.graph import Block, BlockNode, Edge, Graph, Site


@dataclass(frozen=True, slots=True)
class GraftAt:
    """A graft to come: where, and how large.

    `at` is an edge (u, w), as `graph.graft` takes it, or a site u, as `graph.graft_after` does;
    or (u, (v, w)), the edges to several readers of a site, which all read one block.
    `size` is h, the weight of the fresh nodes, or the block itself, whose computed nodes count 1 each or what
    `weights` gives for each of them, by the name of the part. Where the nodes of a graph are weighed,
    so must be those of a block.
    """

    at: Site | Edge | tuple[Site, tuple[Site, ...]]
    size: Weight | Block
    weights: Mapping[str, Weight] | None = None

    @property
    def fresh(self) -> Weight:
        """h: what computing the block for the first time costs."""
        return self.sum(only_fed=False).weight()

    @property
    def reach(self) -> Weight:
        """The cost of computing the block again: its nodes that depend on its input.

        The rest of a block, such as a product of its own parameters, is computed once. A size
        given as a number is taken to depend on the input throughout.
        """
        return self.sum(only_fed=True).weight()

    def sum(self, *, only_fed: bool) -> Amount:
        """`fresh` or, of `only_fed` nodes, `reach`: exactly."""
        if not isinstance(self.size, Block):
            if self.weights is not None:
                raise TheoryError(
                    f"the size of the graft at {shown(self.at)} is a number, and `weights` are for the nodes "
                    "of a block. Give one or the other."
                )
            return amount(self.size, f"the size of the graft at {shown(self.at)}")
        parts = [part.name for part in _computed(self.size, only_fed=only_fed)]
        if self.weights is None:
            return Amount(len(parts))
        given = expect.mapping(self.weights, "`weights` of a graft", "a weight for each node of the block")
        known = {part.name for part in self.size.nodes}
        computed = [part.name for part in self.size.nodes if part.rule is not None]
        for name in [*given, *computed]:
            if name not in known or name not in given:
                raise TheoryError(
                    f"`weights` of the graft at {shown(self.at)} and the nodes of its block do not agree "
                    f"about {shown(name)}. The block computes {', '.join(computed)}; give each a weight."
                )
        found = {name: amount(weight, f"the weight of {name!r}") for name, weight in given.items()}
        return total(found[name] for name in parts) + 0 * total(found.values())


AnyGraft = GraftAt | tuple[Site | Edge, Weight | Block]


@dataclass(frozen=True, slots=True)
class InterleavedCost:
    """The cost of grafts with a demand after each: `costs` in the order they were applied.

    total = isolated + overcount, where `isolated` is the sum over grafts on fresh copies of the graph.
    """

    costs: tuple[Weight, ...]
    total: Weight
    isolated: Weight
    overcount: Weight


@dataclass(frozen=True, slots=True)
class OrderExtremes:
    """The overcount Δ over all orders that the graph permits: least, most, and its mean.

    `best` and `worst` are orders that attain the least and the most.
    """

    least: Weight
    most: Weight
    expected: Fraction | float
    best: tuple[int, ...]
    worst: tuple[int, ...]


def interleaved_cost(
    graph: Graph,
    grafts: Iterable[AnyGraft],
    order: Iterable[int] | None = None,
    *,
    demand: Demand = None,
    weights: Weights | None = None,
) -> InterleavedCost:
    """The cost of each graft when they are applied in `order` with a full demand after each.

    docs/theory.md#interleaved. The graft k, applied to a warm graph, costs

        |disturbed(k)| + h_k + Σ reach_j over the earlier grafts j with u_j ∈ front(k)

    where a graft on the edge (u, w) has disturbed = front = {w} ∪ cone(w), and one after the site u
    has disturbed = cone(u), front = {u} ∪ cone(u); all cones are those of the graph before any graft.
    With a demand, what is outside of its support does not count.

    Two grafts at one site: after graft_after(u), u feeds the block alone, so an edge graft (u, w)
    must come before it (else TheoryError), and each later graft_after(u) recomputes every block
    that already hangs on u. One edge takes one graft.
    """
    placed, none = _placed(graph, grafts, demand, weights)
    chosen = expect.permutation(order, len(placed))
    _expect_possible(graph, placed, chosen)
    again = [
        sum((placed[j].reach for j in chosen[:step] if placed[k].is_before(placed[j])), none)
        for step, k in enumerate(chosen)
    ]
    isolated, over = sum((graft.cost for graft in placed), none), sum(again, none)
    return InterleavedCost(
        tuple((placed[k].cost + more).weight("a cost") for k, more in zip(chosen, again, strict=True)),
        *(cost.weight("a cost") for cost in (isolated + over, isolated, over)),
    )


def isolated_cost(
    graph: Graph, grafts: Iterable[AnyGraft], *, demand: Demand = None, weights: Weights | None = None
) -> Weight:
    """Σ |disturbed| + h: the cost of the grafts, each on its own copy of the graph."""
    placed, none = _placed(graph, grafts, demand, weights)
    return sum((graft.cost for graft in placed), none).weight("a cost")


def overcount(
    graph: Graph,
    grafts: Iterable[AnyGraft],
    order: Iterable[int] | None = None,
    *,
    demand: Demand = None,
    weights: Weights | None = None,
) -> Weight:
    """Δ(order) ≥ 0: what interleaving in this order costs beyond the isolated sum.

    Δ = Σ reach_j over the pairs of j applied before k with u_j ∈ front(k); see `interleaved_cost`.
    """
    return interleaved_cost(graph, grafts, order, demand=demand, weights=weights).overcount


def batched_cost(
    graph: Graph, grafts: Iterable[AnyGraft], *, demand: Demand = None, weights: Weights | None = None
) -> Weight:
    """The cost of one demand after all grafts: |∪ disturbed| + Σ h, whatever the order.

    docs/theory.md#batched. The sites themselves are not taken off the union: one that is in it is
    below another graft, and is computed.
    """
    placed, none = _placed(graph, grafts, demand, weights)
    disturbed = Scale(graph, weights)(set().union(*(graft.disturbed for graft in placed)))
    return sum((graft.fresh for graft in placed), none + disturbed).weight("a cost")


def best_order(
    graph: Graph, grafts: Iterable[AnyGraft], *, demand: Demand = None, weights: Weights | None = None
) -> tuple[int, ...]:
    """An order of the least overcount: upstream first. Δ = 0 whenever any order has Δ = 0.

    Proof. A pair (j before k) adds reach_j iff u_j ∈ front(k), and then u_j is u_k or strictly below
    it. Sorted by a topological order of the sites, no earlier u_j is strictly below a later
    u_k, so pairs at different sites add nothing, and Δ = 0 if all sites differ. At one site u: edge
    grafts add nothing to each other (w is below u, so u ∉ {w} ∪ cone(w)); an edge graft and a
    graft_after(u) stand in the one order that is possible, and add the reach of the edge's block; two
    grafts after u add the reach of whichever comes first. With m of them, the i-th
    adds its reach m − i times, so smaller ones go first. These sums are over disjoint sets of pairs and
    each is least, hence so is Δ. Ties keep the order given.
    """
    return _sorted(_placed(graph, grafts, demand, weights)[0], upstream_first=True)


def order_extremes(
    graph: Graph, grafts: Iterable[AnyGraft], *, demand: Demand = None, weights: Weights | None = None
) -> OrderExtremes:
    """The least and the most Δ over all possible orders, orders that attain them, and the mean.

    docs/theory.md#orders. Downstream first, and larger blocks first at one site, attains every pair that any
    order can: u_j ∈ front(k) at different sites means u_j strictly below u_k, and "below" is a partial
    order, so one reverse topological order has every such j before its k. The mean is over the
    orders that the graph permits, each as likely as the other: a pair at different
    sites counts half its reach, unless edge and site grafts mix at one site; those pairs have the
    exact probability of a random shuffle.
    """
    placed, none = _placed(graph, grafts, demand, weights)
    best, worst = (_sorted(placed, upstream_first=is_first) for is_first in (True, False))
    least, most = (
        sum((placed[j].reach for j, k in combinations(order, 2) if placed[k].is_before(placed[j])), none)
        for order in (best, worst)
    )
    ranks = _ranks(placed)
    pairs = permutations(range(len(placed)), 2)
    chances = (
        _chance_before(placed, ranks, j, k) * placed[j].reach
        for j, k in pairs
        if placed[k].is_before(placed[j])
    )
    return OrderExtremes(least.weight("a cost"), most.weight("a cost"), sum(chances, none).ratio, best, worst)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A graft against the original graph, by node number; a block that no demand wants weighs 0."""

    site: int
    is_edge: bool
    depth: float
    disturbed: frozenset[int]
    front: frozenset[int]
    fresh: Amount
    reach: Amount
    cost: Amount

    def is_before(self, other: _Placed) -> bool:
        """True if this graft, applied later, computes the block of `other` again."""
        return other.site in self.front


def _placed(
    graph: Graph, grafts: Iterable[AnyGraft], demand: Demand, weights: Weights | None
) -> tuple[list[_Placed], Amount]:
    """Return the grafts in the order in which they are listed; and 0, a float where a weight is one."""
    scale = Scale(graph, weights)
    support = wanted(graph, demand)
    edges: set[tuple[int, int]] = set()
    placed, none = [], scale(())
    of = "GraftAt((u, w), size) for an edge, GraftAt(u, size) for a site, or the same as plain pairs"
    for place, entry in enumerate(expect.items(grafts, "the list of grafts", of)):
        graft = _expect_graft(entry, place)
        if weights is not None and isinstance(graft.size, Block) and graft.weights is None:
            raise TheoryError(
                f"the nodes of the graph have weights, and those of the block at {shown(graft.at)} have "
                "none. Give them: `GraftAt(at, block, weights={part: weight, ...})`, or give the size as a "
                "number."
            )
        if isinstance(graft.at, tuple):
            origin, ends = graft.at
            readers = set()
            for end in ends if isinstance(ends, tuple) else (ends,):
                site, reader = graph.edge((origin, end))
                if (site, reader) in edges:
                    raise TheoryError(
                        f"the edge {shown((origin, end))} is given two grafts. After the first, {origin!r} "
                        f"no longer feeds {end!r}; put both blocks into one graft, or graft after the site "
                        f"{origin!r}."
                    )
                edges.add((site, reader))
                readers.add(reader)
            disturbed = readers | graph.table.cone(readers)
            front = disturbed
        else:
            site = graph.number(graft.at)
            readers = set(graph.table.consumers[site])
            disturbed = graph.table.cone([site])
            front = disturbed | {site}
        fresh, reach = graft.sum(only_fed=False), graft.sum(only_fed=True)
        none += 0 * fresh
        if support is not None:
            disturbed = disturbed & support
            if not readers & support:
                fresh = reach = Amount()
        placed.append(
            _Placed(
                site,
                isinstance(graft.at, tuple),
                graph.table.labels[site],
                frozenset(disturbed),
                frozenset(front),
                fresh,
                reach,
                scale(disturbed) + fresh,
            )
        )
    return placed, none


def _expect_graft(entry: object, place: int) -> GraftAt:
    if isinstance(entry, GraftAt):
        return entry
    if isinstance(entry, tuple) and len(entry) == 2 and not isinstance(entry[1], str):
        return GraftAt(*entry)
    raise TheoryError(
        f"graft {place} is {shown(entry)}; write GraftAt((u, w), size) for an edge, GraftAt(u, size) for a "
        "site, or the same as a plain pair."
    )


def _expect_possible(graph: Graph, placed: Sequence[_Placed], order: Sequence[int]) -> None:
    closed: set[int] = set()
    for k in order:
        site = placed[k].site
        if placed[k].is_edge and site in closed:
            raise TheoryError(
                f"graft {k} is on an edge that leaves {graph.name(site)!r}, and the order puts a graft after "
                f"that site before it: then {graph.name(site)!r} feeds that block alone, and the edge is no "
                "more. Apply the edge grafts of a site before those after the site."
            )
        if not placed[k].is_edge:
            closed.add(site)


def _sorted(placed: Sequence[_Placed], *, upstream_first: bool) -> tuple[int, ...]:
    way = 1 if upstream_first else -1

    def key(k: int) -> tuple[float, bool, Amount]:
        return way * placed[k].depth, not placed[k].is_edge, way * placed[k].reach

    return tuple(sorted(range(len(placed)), key=key))


def _ranks(placed: Sequence[_Placed]) -> list[tuple[range, int]]:
    """For each graft: the places it can take among those of its site, and how many those are."""
    edges: dict[int, int] = {}
    counts: dict[int, int] = {}
    for graft in placed:
        edges[graft.site] = edges.get(graft.site, 0) + graft.is_edge
        counts[graft.site] = counts.get(graft.site, 0) + 1
    return [
        (
            range(edges[graft.site]) if graft.is_edge else range(edges[graft.site], counts[graft.site]),
            counts[graft.site],
        )
        for graft in placed
    ]


def _chance_before(placed: Sequence[_Placed], ranks: Sequence[tuple[range, int]], j: int, k: int) -> Fraction:
    """The probability that a random possible order has j before k."""
    if placed[j].site == placed[k].site:
        if placed[j].is_edge != placed[k].is_edge:
            return Fraction(int(placed[j].is_edge))
        return Fraction(1, 2)
    (places_j, count_j), (places_k, count_k) = ranks[j], ranks[k]
    if len(places_j) == count_j and len(places_k) == count_k:
        return Fraction(1, 2)
    # The grafts of two sites are shuffled into each other; j comes after r of its own. It is before
    # k iff at most s of k's own, which are before k, are before j.
    ways = sum(
        comb(r + before, before) * comb(count_j - 1 - r + count_k - before, count_k - before)
        for r in places_j
        for s in places_k
        for before in range(s + 1)
    )
    return Fraction(ways, len(places_j) * len(places_k) * comb(count_j + count_k, count_k))


def _computed(block: Block, *, only_fed: bool) -> list[BlockNode]:
    """The computed nodes of a block, or those of them that depend on its input.

    Every node of a block leads to its output, and that depends on the input, as `block(graph)` sees to.
    """
    fed: set[int] = {-1}
    for place, part in enumerate(block.nodes):
        if not fed.isdisjoint(part.inputs):
            fed.add(place)
    if block.output not in fed:
        raise TheoryError("the block's output does not depend on its input: a graft of it cuts the edge.")
    read = {block.output, *(source for part in block.nodes for source in part.inputs)}
    idle = [
        part.name for place, part in enumerate(block.nodes) if part.rule is not None and place not in read
    ]
    if idle:
        raise TheoryError(
            f"no node of the block reads {shown(idle[0])}, and it is not its output: what no demand reaches "
            "through the block is not computed by one. Leave it out."
        )
    computed = enumerate(block.nodes)
    return [part for place, part in computed if part.rule is not None and (place in fed or not only_fed)]
