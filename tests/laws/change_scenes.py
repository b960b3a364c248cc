"""Scenes with changes to come: sites, edges and rules patched, rules redefined; and the bills for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from hypothesis import strategies as st

import conewise as cw
from conewise.paper.theory import ChangeAt
from tests.laws.cost_scenes import Weight, bill
from tests.laws.oracle import NaiveGraph, NaiveWorld, cone, wiring
from tests.laws.scenes import Scene, fresh_rule, fresh_value, scenes


@dataclass(frozen=True)
class ChangeScene:
    """A scene with changes to come, each place once, and the order in which they come."""

    scene: Scene
    changes: tuple[ChangeAt, ...]
    order: tuple[int, ...]

    @property
    def is_rewiring(self) -> bool:
        return any(change.inputs is not None for change in self.changes)

    def is_possible(self, order: Sequence[int]) -> bool:
        """Whether the graph and its worlds permit this order, found by trying it."""
        graph = self.scene.graph()
        world = cw.World(graph)
        try:
            for k in order:
                make(world, self.changes[k])
        except cw.ConewiseError:
            return False
        return True

    def possible_orders(self) -> list[tuple[int, ...]]:
        return [order for order in permutations(range(len(self.changes))) if self.is_possible(order)]


def make(world: cw.World, change: ChangeAt) -> None:
    """Make one change in a real world, or in its graph."""
    if isinstance(change.at, tuple):
        world.patch_edge(change.at, fresh_value() if change.kind == "value" else fresh_rule())
    elif change.kind == "rule":
        world.patch_rule(change.at, fresh_rule())
    elif change.kind == "redefine":
        world.graph.redefine(change.at, fresh_rule(), change.inputs)
    else:
        world.patch(change.at, fresh_value() if change.kind == "value" else fresh_rule())


def naively_make(world: NaiveWorld, change: ChangeAt) -> None:
    """The same in the naive engine."""
    kind, what = ("value", fresh_value()) if change.kind == "value" else ("function", fresh_rule())
    if isinstance(change.at, tuple):
        world.patch_edge(change.at, "value" if kind == "value" else "function", what)
    elif change.kind == "redefine":
        world.graph.redefine(change.at, fresh_rule(), change.inputs)
    else:
        world.patch(change.at, "rule" if change.kind == "rule" else change.kind, what)


@st.composite
def change_scenes(draw: st.DrawFn, most: int = 4, rewiring: bool = True) -> ChangeScene:
    """Up to `most` changes of all kinds, each place once; with `rewiring`, some redefine what is read.

    It favours what wrong formulas trip over: changes above others that shield, two at one place, and
    redefinitions that read what the demand has not looked at.
    """
    scene = draw(scenes(max_nodes=9).filter(lambda scene: bool(scene.edges)))
    site, computed = st.sampled_from(scene.sites), st.sampled_from(scene.computed)
    edge = st.sampled_from(scene.edges)
    value, function = st.just("value"), st.just("function")
    kinds = [
        st.builds(ChangeAt, site, st.one_of(value, function)),
        st.builds(ChangeAt, edge, st.one_of(value, value, function)),
        st.builds(ChangeAt, computed, st.sampled_from(["rule", "redefine"])),
    ]
    if rewiring and draw(st.booleans()):
        scene = draw(_strands(scene))
        kinds = [kinds[2], _elsewhere(scene)]
    several = draw(st.sampled_from([3, 2, 3, 2, 1]))
    chosen = draw(st.lists(st.one_of(kinds), min_size=several, max_size=several))
    if draw(st.booleans()):
        # At a place where something hides, or is hidden; or right above an edge that may shield.
        near = chosen[0].at if isinstance(chosen[0].at, str) else chosen[0].at[1]
        beside = [pair for pair in scene.edges if pair[1] == near]
        here = [ChangeAt(near, "value"), *(ChangeAt(pair, "value") for pair in beside)]
        here += [ChangeAt(near, "redefine"), ChangeAt(near, "rule")] if near in scene.computed else []
        here = [ChangeAt(chosen[0].at[0], "function")] if isinstance(chosen[0].at, tuple) else here
        chosen.append(draw(st.sampled_from(here)))
    by_place = {(change.at, change.kind == "redefine"): change for change in chosen}
    changes = list(by_place.values())[:most]
    order = draw(st.permutations(range(len(changes))))
    if draw(st.booleans()):
        # Downstream first: what shields stands before what is above it.
        order.sort(key=lambda k: -scene.sites.index(seed(changes[k])))
    return ChangeScene(scene, tuple(changes), tuple(order))


@st.composite
def _strands(draw: st.DrawFn, scene: Scene) -> Scene:
    """The scene with some nodes reading a source alone: strands, of which the demand looks at one or so."""
    source = (scene.sources[0],)
    nodes = [
        (site, rule, inputs if draw(st.integers(0, 2)) else source) for site, rule, inputs in scene.nodes
    ]
    return replace(scene, nodes=tuple(nodes), demand=(draw(st.sampled_from(scene.computed)),))


def _elsewhere(scene: Scene) -> st.SearchStrategy[ChangeAt]:
    """A redefinition that reads other sites than before, mostly such as do not depend on it."""
    reads = wiring(scene.graph())

    def reading(reader: str) -> st.SearchStrategy[ChangeAt]:
        free = [site for site in scene.sites if site != reader and site not in cone(reads, {reader})]
        site = st.one_of(st.sampled_from(free), st.sampled_from(free), st.sampled_from(scene.sites))
        return st.lists(site, min_size=1, max_size=3).map(
            lambda inputs: ChangeAt(reader, "redefine", tuple(inputs))
        )

    # What is demanded, mostly: then what it reads next comes into sight.
    return st.one_of(st.sampled_from(scene.demand), st.sampled_from(scene.computed)).flatmap(reading)


def seed(change: ChangeAt) -> str:
    """The site where the wave of a change begins: its own, or the reader of its edge."""
    return change.at if isinstance(change.at, str) else change.at[1]


def changed_bills(
    made: ChangeScene,
    order: Sequence[int],
    demand: tuple[str, ...] | None,
    prices: dict[str, Weight] | None = None,
    *,
    in_fork: bool = False,
) -> list[Weight]:
    """The engine's bill for each change, with a demand after each."""
    base = cw.World(made.scene.graph())
    bill(base, demand)
    world = base.fork() if in_fork else base
    computed: list[str] = []
    base.listen(lambda event: computed.extend(event.sites) if event.kind == "recomputed" else None)
    bills: list[Weight] = []
    for k in order:
        computed.clear()
        make(world, made.changes[k])
        world.demand(world.graph.computed if demand is None else demand)
        if demand is None:
            world.demand(world.graph.sites)
        bills.append(sum((1 if prices is None else prices[site] for site in computed), start=0))
    return bills


def changed_batch(made: ChangeScene, order: Sequence[int], demand: tuple[str, ...] | None) -> list[str]:
    """What the engine computes for one demand after all changes."""
    world = cw.World(made.scene.graph())
    bill(world, demand)
    for k in order:
        make(world, made.changes[k])
    with world.ledger.interval() as ledger:
        world.demand(world.graph.sites if demand is None else demand)
    return ledger.recomputed


def naive_bills(made: ChangeScene, order: Sequence[int], demand: tuple[str, ...] | None) -> list[int]:
    """The bill of the naive engine, which finds what is stale by comparing what everything means."""
    graph = NaiveGraph()
    for number, site in enumerate(made.scene.sources):
        graph.source(site, (1 << 80) + number)
    for site, rule, inputs in made.scene.nodes:
        graph.node(site, rule, inputs)
    world = NaiveWorld(graph)
    wanted = tuple(graph.rules) if demand is None else demand
    world.computed(world.needed(wanted))
    bills = []
    for k in order:
        naively_make(world, made.changes[k])
        needed = world.needed(wanted)
        world.computed(needed)
        bills.append(len(needed))
    return bills
