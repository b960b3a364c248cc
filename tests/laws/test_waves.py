"""The law of locality, counted: what a wave touches, and what a demand looks at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conewise as cw
from conewise.paper import theory
from conewise.paper.experiments.result import scanning
from tests.laws import oracle
from tests.laws.cost_scenes import line
from tests.laws.refuting import is_refuted
from tests.laws.scenes import Scene, fresh_rule, fresh_value, scenes
from tests.laws.worlds import stale_sites, warm


@given(scenes(), st.booleans())
def test_a_wave_touches_its_cone_and_each_of_its_edges_once(scene: Scene, in_fork: bool) -> None:
    """The complexity of the locality theorem, with its constant: 1 + |V⁺| nodes, |E⁺| + d(s) edges."""
    for site in scene.sites:
        base = warm(scene)
        graph = base.graph
        cone, inside = edges_inside(graph, site)
        world = base.fork() if in_fork else base
        with scanning(graph) as scan:
            world.patch(site, fresh_value())
        assert set(graph.names(scan.down.nodes)) == {site, *cone}
        assert set(scan.down.nodes.values()) == {1}
        assert scan.down.touched == theory.wave_size(graph, site)
        assert scan.down.edges == inside + len(graph.consumers(site)) <= inside + len(cone)


def edges_inside(graph: cw.Graph, site: str) -> tuple[set[str], int]:
    """V⁺ and |E⁺|, by the oracle."""
    reads = oracle.wiring(graph)
    cone = oracle.cone(reads, {site})
    return cone, sum(len(set(reads[inside]) & cone) for inside in cone)


@settings(max_examples=50)
@given(st.data(), scenes())
def test_a_wave_stops_at_what_is_stale_already(data: st.DataObject, scene: Scene) -> None:
    world = warm(scene)
    graph = world.graph
    kinds = (world.patch_rule, graph.redefine)
    for site in data.draw(st.permutations(scene.computed)):
        before = stale_sites(world)
        with scanning(graph) as scan:
            data.draw(st.sampled_from(kinds))(site, fresh_rule())
        assert scan.down.touched == theory.wave_size(graph, site, before)


@settings(max_examples=50)
@given(st.data(), scenes(), st.booleans())
def test_a_wave_stops_at_what_was_never_computed(data: st.DataObject, scene: Scene, in_fork: bool) -> None:
    """In a root; a fork goes through it, as through all that is stale in its parent."""
    world = cw.World(scene.graph())
    graph = world.graph
    world.demand(data.draw(st.lists(st.sampled_from(scene.sites), max_size=2)))
    site = data.draw(st.sampled_from(scene.computed))
    stale = () if in_fork else stale_sites(world)
    changed = world.fork() if in_fork else world
    with scanning(graph) as scan:
        changed.patch_rule(site, fresh_rule())
    assert scan.down.touched == theory.wave_size(graph, site, stale)


def test_no_change_has_to_make_stale_what_ends_a_wave() -> None:
    graph = line(nodes=3)
    world = cw.World(graph)
    with scanning(graph) as scan:
        world.patch_rule("n1", fresh_rule())
    assert scan.down.touched == theory.wave_size(graph, "n1", ["n1", "n2", "n3"]) == theory.Touched(1, 1)
    world.demand("n3")
    with scanning(graph) as scan:
        world.patch_rule("n1", fresh_rule())
    assert scan.down.touched == theory.wave_size(graph, "n1") == theory.Touched(3, 2)


@settings(max_examples=50)
@given(st.data(), scenes())
def test_a_wave_of_a_fork_goes_through_what_is_stale_in_its_parent(data: st.DataObject, scene: Scene) -> None:
    """The fork takes it for its own; only what its own changes have made stale ends the wave."""
    world = warm(scene)
    graph = world.graph
    sites = st.lists(st.sampled_from(scene.computed), max_size=3, unique=True)
    for site in data.draw(sites, label="stale in the parent"):
        world.patch_rule(site, fresh_rule())
    fork, own = world.fork(), set[str]()
    for site in data.draw(sites, label="changed in the fork"):
        with scanning(graph) as scan:
            fork.patch_rule(site, fresh_rule())
        assert scan.down.touched == theory.wave_size(graph, site, own)
        own |= {site, *graph.cone(site)}


@given(scenes())
def test_a_demand_asks_for_no_other_value(scene: Scene) -> None:
    """What is neither stale, nor read by a stale node, nor demanded, nor patched, is not looked at."""
    world = warm(scene)
    graph = world.graph
    for site in scene.patch:
        world.patch(site, fresh_value())
    stale = theory.stale(graph, scene.patch, scene.demand)
    values = Asked(world._state.values)
    world._state.values = values
    world.demand(scene.demand)
    assert stale <= set(graph.names(values.asked))
    read = {site for node in stale for site in graph.inputs(node)}
    assert set(graph.names(values.asked)) <= stale | read | {*scene.demand, *scene.patch}


class Asked(list[Any]):
    """Values that remember which of them were asked for."""

    def __init__(self, values: Iterable[Any]) -> None:
        super().__init__(values)
        self.asked: set[int] = set()

    def __getitem__(self, node: Any) -> Any:
        self.asked.add(node)
        return super().__getitem__(node)


@given(scenes(), st.booleans())
def test_a_demand_looks_at_what_is_stale_and_at_nothing_else(scene: Scene, is_full: bool) -> None:
    """The engine's β, counted: of the graph's other nodes none is looked at."""
    world = warm(scene)
    graph, demand = world.graph, scene.sites if is_full else scene.demand
    with world.fork() as fork:
        for site in scene.patch:
            fork.patch(site, fresh_value())
        stale = theory.stale(graph, scene.patch, demand)
        predicted = theory.demand_size(graph, scene.patch, demand)
        with scanning(graph) as scan:
            fork.plan(demand)
            assert Counter(graph.names(scan.up.nodes.elements())) == Counter(stale)
            assert scan.up.touched == predicted
            scan.clear()
            fork.demand(demand)
            looked_at = set(graph.names(scan.up.nodes))
            assert stale <= looked_at <= stale | set(scene.patch)
            assert not scan.down.nodes
            scan.clear()
            fork.demand(demand)
            assert set(graph.names(scan.up.nodes)) <= set(scene.patch)


# -- that a law can fail ------------------------------------------------------------------------


def _inside_edges_alone(graph: cw.Graph, site: str) -> int:
    """The paper's E⁺, which has no edge that leaves s."""
    return edges_inside(graph, site)[1]


def _one_edge_a_node(graph: cw.Graph, site: str) -> int:
    """As on a chain, or as if a wave followed only the edges along which it marks."""
    return len(graph.cone(site))


def _edges_into_the_cone(graph: cw.Graph, site: str) -> int:
    """All that the cone reads, from outside of it too."""
    return sum(len(set(graph.inputs(inside))) for inside in graph.cone(site))


@pytest.mark.parametrize("wrong", [_inside_edges_alone, _one_edge_a_node, _edges_into_the_cone])
def test_a_wrong_count_of_edges_is_refuted(wrong: Callable[[cw.Graph, str], int]) -> None:
    def differs(scene: Scene) -> bool:
        world, site = warm(scene), scene.patch[0]
        with scanning(world.graph) as scan:
            world.patch(site, fresh_value())
        return scan.down.edges != wrong(world.graph, site)

    assert is_refuted(scenes(), differs, examples=100), wrong.__doc__
