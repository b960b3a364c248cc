"""Scenes for the laws of cost: a graph, weights, grafts to come, an order, and the engine's bill for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations

from hypothesis import strategies as st

import conewise as cw
from conewise.paper.theory import GraftAt
from tests.laws.scenes import Mix, Scene, fresh_value, scenes

Weight = int | float | Fraction
At = str | tuple[str, str]


def line(*, nodes: int, source: str = "x") -> cw.Graph:
    """A chain: x -> n1 -> n2 -> ..."""
    graph = cw.Graph()
    before = graph.source(source, 1)
    for number in range(1, nodes + 1):
        before = graph.node(f"n{number}", Mix(number), [before])
    return graph


def straight(size: int) -> cw.Block:
    """A block of `size` nodes in a row."""
    return cw.chain(*(Mix(number) for number in range(size)))


def lopsided() -> cw.Block:
    """A block of three computed nodes of which one, made from a parameter, does not depend on the input."""
    inside = cw.Graph()
    inside.source("in", 0)
    inside.source("p", 5, param=True)
    inside.node("prepared", Mix(1), ["p"])
    inside.node("first", Mix(2), ["in"])
    inside.node("last", Mix(3), ["first", "prepared"])
    return cw.block(inside)


BLOCKS: tuple[Callable[[], cw.Block], ...] = (
    lambda: straight(1),
    lambda: straight(3),
    lambda: straight(5),
    lopsided,
)


def part_prices(block: cw.Block) -> dict[str, Weight]:
    """A weight for each computed node of a block, all different but for one that weighs nothing."""
    computed = [part.name for part in block.nodes if part.rule is not None]
    return {name: Fraction(place * (place + 3), 2) for place, name in enumerate(computed)}


@dataclass(frozen=True)
class GraftScene:
    """A scene with grafts to come: places, block by number, and the order in which they come."""

    scene: Scene
    places: tuple[tuple[At, int], ...]
    order: tuple[int, ...]

    def grafts(self, *, priced: bool = False) -> list[GraftAt]:
        """The grafts as the theory takes them; `priced`: with the weights of `part_prices`."""
        blocks = [(at, BLOCKS[block]()) for at, block in self.places]
        return [GraftAt(at, block, part_prices(block) if priced else None) for at, block in blocks]

    def possible_orders(self) -> list[tuple[int, ...]]:
        """All orders that the graph permits, found by trying each on a real graph."""
        found = []
        for order in permutations(range(len(self.places))):
            graph = self.scene.graph()
            try:
                for k in order:
                    apply(graph, self.places[k])
            except cw.ConewiseError:
                continue
            found.append(order)
        return found


def apply(graph: cw.Graph, place: tuple[At, int]) -> cw.Graft:
    """Make one graft in a real graph."""
    at, block = place
    if isinstance(at, str):
        return graph.graft_after(at, BLOCKS[block]())
    return graph.graft(at, BLOCKS[block]())


@st.composite
def graft_scenes(draw: st.DrawFn, most: int = 4) -> GraftScene:
    """Up to `most` grafts on edges (each edge once) and after sites (any number of times), in any order."""
    scene = draw(scenes(max_nodes=9).filter(lambda scene: bool(scene.edges)))
    # Few places, so that grafts meet at one site, share a reader, or lie below each other.
    edge, site = st.sampled_from(scene.edges), st.sampled_from(scene.sites)
    place: st.SearchStrategy[At] = st.one_of(edge, edge, site)
    chosen = draw(st.lists(place, min_size=1, max_size=most))
    if draw(st.booleans()):
        near = chosen[0] if isinstance(chosen[0], str) else chosen[0][0]
        beside = [pair for pair in scene.edges if pair[0] == near]
        here: list[At] = [near, *beside]
        chosen.append(draw(st.sampled_from(here)))
    places: list[At] = []
    for at in chosen[:most]:
        if isinstance(at, str) or at not in places:
            places.append(at)
    blocks = draw(st.lists(st.integers(0, 3), min_size=len(places), max_size=len(places)))
    order = draw(st.permutations(range(len(places))))
    return GraftScene(scene, tuple(zip(places, blocks, strict=True)), tuple(order))


@st.composite
def stacks(draw: st.DrawFn) -> tuple[cw.Graph, list[str]]:
    """Layers of two nodes that read the layer before, in part or in full; one output; a site per layer."""
    graph = cw.Graph()
    before, sites = [graph.source("x", 1)], []
    for layer in range(draw(st.integers(2, 6))):
        reads = st.lists(st.sampled_from(before), min_size=1, unique=True)
        before = [graph.node(f"{name}{layer}", Mix(), draw(reads)) for name in "ab"]
        sites.append(draw(st.sampled_from(before)))
    graph.node("y", Mix(), before)
    return graph, sites


def weights(scene: Scene) -> st.SearchStrategy[dict[str, Weight]]:
    """A weight for each computed site: whole numbers, or halves and thirds."""
    whole = st.integers(0, 9)
    parts = st.fractions(min_value=0, max_value=9, max_denominator=6)
    one = st.one_of(whole, whole, parts)
    return st.fixed_dictionaries(dict.fromkeys(scene.computed, one))


def bill(world: cw.World, demand: Iterable[str] | None, prices: dict[str, Weight] | None = None) -> Weight:
    """What the world computes to answer `demand` (None: everything), read off the ledger, and priced."""
    with world.ledger.interval() as ledger:
        world.demand(tuple(world.graph.computed if demand is None else demand))
    return sum((1 if prices is None else prices[site] for site in ledger.recomputed), start=0)


def patched_bills(
    graph: cw.Graph, patches: Sequence[str], demand: Sequence[str] | None, prices: dict[str, Weight] | None
) -> list[Weight]:
    """The bill of each patch, when they are made in one fork of a warm world and stay."""
    world = cw.World(graph)
    bill(world, demand)
    bills = []
    with world.fork() as fork:
        for site in patches:
            fork.patch(site, fresh_value())
            bills.append(bill(fork, demand, prices))
    return bills


def restored_bills(
    graph: cw.Graph,
    patches: Sequence[Sequence[str]],
    demand: Sequence[str] | None,
    prices: dict[str, Weight] | None,
    *,
    is_late: bool,
) -> tuple[list[Weight], Weight]:
    """The bill of each patch in one world that restores in place, and that of the baseline in the end.

    With `is_late`, a patch is taken away after the next is made. A restore brings nothing back here, since
    something else has changed after the patch: a source that no node reads.
    """
    graph.source("clock", 0)
    world, bills = cw.World(graph), []
    bill(world, demand)
    standing: Sequence[str] = ()

    def restore(sites: Sequence[str]) -> None:
        world.set("clock", fresh_value())
        for site in sites:
            world.restore(site)

    for patch in patches:
        for site in patch:
            world.patch(site, fresh_value())
        if is_late:
            restore(standing)
        bills.append(bill(world, demand, prices))
        standing = patch
        if not is_late:
            restore(patch)
    if is_late:
        restore(standing)
    return bills, bill(world, demand, prices)
