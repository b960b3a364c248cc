"""Theorem 1: a mutation invalidates exactly its cone, and everything outside keeps its value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import conewise as cw
from tests.laws.oracle import cone, wiring
from tests.laws.scenes import Scene, fresh_rule, fresh_value, scenes

Mutation = Callable[[cw.World, Scene, st.DataObject], tuple[set[str], set[str]]]


def warm(scene: Scene, patch: bool = False) -> cw.World:
    """A world over the scene in which every site holds a value; with `patch`, the scene's patches stand."""
    world = cw.World(scene.graph())
    if patch:
        for site in scene.patch:
            world.patch(site, fresh_value())
    world.demand(world.graph.sites)
    return world


def stale(world: cw.World) -> set[str]:
    return {site for site in world.graph.sites if world.is_stale(site)}


def any_site(scene: Scene, data: st.DataObject) -> str:
    return data.draw(st.sampled_from(scene.sites), label="site")


def any_computed(scene: Scene, data: st.DataObject) -> str:
    return data.draw(st.sampled_from(scene.computed), label="computed site")


def any_edge(scene: Scene, data: st.DataObject) -> tuple[str, str]:
    assume(scene.edges)
    return data.draw(st.sampled_from(scene.edges), label="edge")


# -- each kind of mutation, and the set that it has to invalidate, beside what is fresh -----------
# `cut` are the sites whose value is patched: a wave ends there.


def patch_a_value(world: cw.World, scene: Scene, data: st.DataObject) -> tuple[set[str], set[str]]:
    site, reads, cut = any_site(scene, data), wiring(world.graph), patched(world)
    world.patch(site, fresh_value())
    return cone(reads, [site], cut - {site}), set()


def patch_a_function(world: cw.World, scene: Scene, data: st.DataObject) -> tuple[set[str], set[str]]:
    site, reads, cut = any_computed(scene, data), wiring(world.graph), patched(world)
    world.patch(site, fresh_rule())
    return {site} | cone(reads, [site], cut - {site}), set()


def patch_a_rule(world: cw.World, scene: Scene, data: st.DataObject) -> tuple[set[str], set[str]]:
    site, reads, cut = any_computed(scene, data), wiring(world.graph), patched(world)
    world.patch_rule(site, fresh_rule())
    return {site} | cone(reads, [site], cut - {site}), set()


def patch_an_edge_with_a_value(
    world: cw.World, scene: Scene, data: st.DataObject
) -> tuple[set[str], set[str]]:
    edge, cut = any_edge(scene, data), patched(world)
    world.patch_edge(edge, fresh_value())
    return from_reader(world, edge[1], cut), set()


def patch_an_edge_with_a_function(
    world: cw.World, scene: Scene, data: st.DataObject
) -> tuple[set[str], set[str]]:
    edge, cut = any_edge(scene, data), patched(world)
    world.patch_edge(edge, fresh_rule())
    return from_reader(world, edge[1], cut), set()


def set_a_source(world: cw.World, scene: Scene, data: st.DataObject) -> tuple[set[str], set[str]]:
    site, reads, cut = data.draw(st.sampled_from(scene.sources)), wiring(world.graph), patched(world)
    world.set(site, fresh_value())
    return (set() if site in cut else cone(reads, [site], cut)), set()


def redefine_a_rule(world: cw.World, scene: Scene, data: st.DataObject) -> tuple[set[str], set[str]]:
    site, cut = any_computed(scene, data), patched(world)
    world.graph.redefine(site, fresh_rule())
    return from_reader(world, site, cut), set()


def redefine_the_inputs(world: cw.World, scene: Scene, data: st.DataObject) -> tuple[set[str], set[str]]:
    graph, cut = world.graph, patched(world)
    site = any_computed(scene, data)
    possible = sorted(set(graph.sites) - {site} - cone(wiring(graph), [site]))
    assume(possible)
    inputs = data.draw(st.lists(st.sampled_from(possible), min_size=1, max_size=3), label="inputs")
    graph.redefine(site, inputs=inputs)
    return from_reader(world, site, cut), set()


def graft_on_an_edge(world: cw.World, scene: Scene, data: st.DataObject) -> tuple[set[str], set[str]]:
    edge = any_edge(scene, data)
    invalid = from_reader(world, edge[1], patched(world))
    return invalid, set(world.graph.graft(edge, any_block(data)).sites)


def graft_after_a_site(world: cw.World, scene: Scene, data: st.DataObject) -> tuple[set[str], set[str]]:
    site, cut, reads = any_site(scene, data), patched(world), wiring(world.graph)
    fresh = world.graph.graft_after(site, any_block(data)).sites
    return cone(reads, [site], cut), set(fresh)


def remove_a_graft(world: cw.World, scene: Scene, data: st.DataObject) -> tuple[set[str], set[str]]:
    edge, cut, graph = any_edge(scene, data), patched(world), world.graph
    graft = graph.graft(edge, any_block(data))
    world.demand(graph.sites)
    world.ledger.clear()
    graph.remove(graft)
    return from_reader(world, edge[1], cut), set()


def remove_a_graft_after_a_site(
    world: cw.World, scene: Scene, data: st.DataObject
) -> tuple[set[str], set[str]]:
    site, cut, graph = any_site(scene, data), patched(world), world.graph
    graft = graph.graft_after(site, any_block(data))
    world.demand(graph.sites)
    world.ledger.clear()
    graph.remove(graft)
    return cone(wiring(graph), [site], cut), set()


MUTATIONS = [
    patch_a_value,
    patch_a_function,
    patch_a_rule,
    patch_an_edge_with_a_value,
    patch_an_edge_with_a_function,
    set_a_source,
    redefine_a_rule,
    redefine_the_inputs,
    graft_on_an_edge,
    graft_after_a_site,
    remove_a_graft,
    remove_a_graft_after_a_site,
]


def patched(world: cw.World) -> set[str]:
    """The sites whose value is patched (no scene here patches by function before the mutation)."""
    return {site for site in world.patched if "->" not in site}


def from_reader(world: cw.World, reader: str, cut: set[str]) -> set[str]:
    """{w} ∪ cone(w), cut at patched values: nothing at all when w itself is one."""
    return set() if reader in cut else {reader} | cone(wiring(world.graph), [reader], cut)


def any_block(data: st.DataObject) -> cw.Block:
    if data.draw(st.booleans(), label="is a chain"):
        return cw.chain(*[fresh_rule() for _ in range(data.draw(st.integers(1, 3)))])
    inside = cw.Graph()
    inside.source("in")
    inside.source("weight", fresh_value(), param=True)
    inside.node("left", fresh_rule(), ["in", "weight"])
    inside.node("right", fresh_rule(), ["in"])
    inside.node("out", fresh_rule(), ["left", "right", "in"])
    return cw.block(inside)


# -- the laws -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutate", MUTATIONS)
@pytest.mark.parametrize("is_patched", [False, True], ids=["alone", "over_patches"])
@given(scene=scenes(), data=st.data())
def test_a_mutation_invalidates_exactly_its_cone_and_all_else_keeps_its_value(
    mutate: Mutation, is_patched: bool, scene: Scene, data: st.DataObject
) -> None:
    """Theorem 1."""
    world = warm(scene, patch=is_patched)
    before = values(world)
    world.ledger.clear()

    invalid, fresh = mutate(world, scene, data)

    world.graph.check()
    world.check()
    assert stale(world) == invalid | fresh
    assert Counter(world.ledger.invalidated) == Counter(invalid)
    assert world.ledger.recomputed == []
    after = values(world)
    assert after.keys() >= before.keys() - invalid - removed_from(world, before)
    changed = {site for site in before.keys() & after.keys() if before[site] is not after[site]}
    assert changed <= set(world.patched)
    assert world.ledger.recomputed == []


def removed_from(world: cw.World, sites: Iterable[str]) -> set[str]:
    return {site for site in sites if site not in world.graph}


def values(world: cw.World) -> dict[str, Any]:
    """The values that are there, without computing any."""
    return {site: world.demand(site) for site in world.graph.sites if not world.is_stale(site)}


@given(scene=scenes(), data=st.data())
def test_a_batch_of_mutations_invalidates_the_union(scene: Scene, data: st.DataObject) -> None:
    world = warm(scene)
    reads, expected, sites = wiring(world.graph), set[str](), set[str]()
    for kind in data.draw(st.lists(st.sampled_from(["set", "rule", "function"]), min_size=1, max_size=4)):
        if kind == "set":
            site = data.draw(st.sampled_from(scene.sources))
            world.set(site, fresh_value())
        else:
            site = any_computed(scene, data)
            world.patch_rule(site, fresh_rule()) if kind == "rule" else world.patch(site, fresh_rule())
            expected.add(site)
        sites.add(site)

    expected |= cone(reads, sites)
    assert stale(world) == expected
    assert Counter(world.ledger.invalidated) == Counter(expected)


@given(scene=scenes())
def test_a_batch_of_value_patches_invalidates_the_union_of_cones_less_the_patches(scene: Scene) -> None:
    world = warm(scene)
    world.ledger.clear()
    for site in scene.patch:
        world.patch(site, fresh_value())

    reads = wiring(world.graph)
    assert stale(world) == cone(reads, scene.patch) - set(scene.patch)
    assert set(world.ledger.invalidated) <= cone(reads, scene.patch)


@given(scene=scenes(), data=st.data())
def test_a_mutation_of_a_cold_world_invalidates_nothing_more(scene: Scene, data: st.DataObject) -> None:
    world = cw.World(scene.graph())
    mutate = data.draw(st.sampled_from(MUTATIONS[:9]))
    mutate(world, scene, data)
    assert world.ledger.invalidated == []


@given(scene=scenes(), data=st.data())
def test_cones_and_supports_are_what_they_are_said_to_be(scene: Scene, data: st.DataObject) -> None:
    graph = scene.graph()
    reads = wiring(graph)
    sites = data.draw(st.lists(st.sampled_from(scene.sites), max_size=3))
    cut = data.draw(st.lists(st.sampled_from(scene.sites), max_size=3))
    assert set(graph.cone(sites)) == cone(reads, sites)
    assert set(graph.upstream(sites)) == {s for s in scene.sites if cone(reads, [s]) & set(sites)}
    inputs_first = {site: place for place, site in enumerate(graph.sites)}
    for found in (graph.cone(sites), graph.upstream(sites), graph.support(sites, cut)):
        assert len(set(found)) == len(found)
        assert list(found) == sorted(found, key=inputs_first.__getitem__)
