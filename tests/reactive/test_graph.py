"""The graph: its reads, its changes of structure, and the order that follows them."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import conewise as cw
from conewise.errors import CycleError, InUseError
from tests.laws.oracle import cone, support, wiring
from tests.laws.scenes import Mix, Scene, scenes


def diamond() -> cw.Graph:
    graph = cw.Graph()
    graph.source("x", 3.0)
    graph.source("w", 2.0, param=True)
    graph.node("h", lambda x, w: x * w, ["x", "w"])
    graph.node("left", lambda h: h + 1.0, ["h"])
    graph.node("right", lambda h: -h, ["h"])
    graph.node("y", lambda a, b: a * b, ["left", "right"])
    return graph


def test_a_graph_tells_what_it_is_made_of() -> None:
    graph = diamond()
    assert graph.sites == ("x", "w", "h", "left", "right", "y")
    assert graph.sources == ("x", "w")
    assert graph.computed == ("h", "left", "right", "y")
    assert graph.params == {"w"}
    assert graph.inputs("y") == ("left", "right")
    assert graph.consumers("h") == ("left", "right")
    assert list(graph.edges) == [
        ("x", "h"),
        ("w", "h"),
        ("h", "left"),
        ("h", "right"),
        ("left", "y"),
        ("right", "y"),
    ]
    assert "h" in graph
    assert "nothing" not in graph
    assert len(graph) == 6
    assert graph["w"].param
    assert [node.site for node in graph] == list(graph.sites)
    assert repr(graph) == "Graph(4 computed nodes, 2 sources of which 1 parameters, 6 edges)"


def test_a_site_is_in_neither_its_cone_nor_its_upstream_but_in_its_support() -> None:
    graph = diamond()
    assert graph.cone("h") == ("left", "right", "y")
    assert graph.upstream("h") == ("x", "w")
    assert graph.support("h") == ("x", "w", "h")
    assert graph.support("y", cut="h") == ("h", "left", "right", "y")
    assert graph.support("y", cut=["h", "left", "right"]) == ("left", "right", "y")
    assert graph.cone(["left", "right"]) == ("y",)


def test_a_site_read_twice_has_its_reader_once() -> None:
    graph = cw.Graph()
    graph.source("x", 2)
    graph.node("square", lambda a, b: a * b, ["x", "x"])
    assert graph.consumers("x") == ("square",)
    assert list(graph.edges) == [("x", "square")]
    graph.graft(("x", "square"), cw.chain(lambda v: v + 1))
    graph.check()
    assert graph.inputs("square") == ("x->square.0", "x->square.0")
    assert cw.World(graph).demand("square") == 9


@given(scenes(), st.data())
def test_upstream_mirrors_cone(scene: Scene, data: st.DataObject) -> None:
    graph = scene.graph()
    for site in scene.sites:
        assert set(graph.upstream(site)) == {other for other in scene.sites if site in graph.cone(other)}


@given(scenes(), st.data())
def test_supports_equal_those_by_fixpoint(scene: Scene, data: st.DataObject) -> None:
    graph = scene.graph()
    some = st.lists(st.sampled_from(scene.sites), max_size=3)
    sites, cut = data.draw(some), data.draw(some)
    assert set(graph.support(sites, cut)) == support(wiring(graph), sites, cut)


# -- redefinition ---------------------------------------------------------------------------------


def test_a_redefinition_that_overturns_the_order_moves_what_it_must() -> None:
    graph = cw.Graph()
    graph.source("x", 1)
    for site in "abc":
        graph.node(site, lambda *values: sum(values) + 1, ["x"])
    graph.node("late", lambda x: x * 100, ["x"])
    graph.redefine("a", inputs=["b"])
    graph.redefine("b", inputs=["c"])
    graph.redefine("c", inputs=["late"])
    graph.check()
    assert graph.upstream("a") == ("x", "late", "c", "b")
    assert cw.World(graph).demand("a") == 103


def test_a_redefinition_may_read_a_source_that_was_added_later() -> None:
    graph = diamond()
    graph.source("bias", 10.0)
    graph.redefine("h", lambda x, w, b: x * w + b, ["x", "w", "bias"])
    graph.check()
    assert cw.World(graph).demand("left") == 17.0


@given(st.integers(3, 40), st.randoms(use_true_random=False))
def test_random_redefinitions_keep_the_order_true(size: int, dice: random.Random) -> None:
    graph = cw.Graph()
    graph.source("0", 1)
    for number in range(1, size):
        graph.node(str(number), Mix(number), [str(number - 1)])
    refused = 0
    for _ in range(40):
        site, inputs = str(dice.randrange(1, size)), [str(dice.randrange(size)) for _ in range(2)]
        before = wiring(graph)
        is_cyclic = bool({site, *cone(before, [site])} & set(inputs))
        if is_cyclic:
            with pytest.raises(CycleError) as caught:
                graph.redefine(site, inputs=inputs)
            refused += 1
            assert_is_cycle(caught.value.cycle, before | {site: tuple(inputs)})
            assert wiring(graph) == before
        else:
            graph.redefine(site, inputs=inputs)
            assert graph.inputs(site) == tuple(inputs)
        graph.check()


def assert_is_cycle(cycle: tuple[str, ...], reads: dict[str, tuple[str, ...]]) -> None:
    assert cycle[0] == cycle[-1]
    assert len(set(cycle)) == len(cycle) - 1
    assert all(site in reads[reader] for site, reader in itertools.pairwise(cycle))


def test_a_hub_can_gain_and_lose_hundreds_of_readers() -> None:
    graph = cw.Graph()
    graph.source("hub", 1)
    graph.source("other", 2)
    readers = [graph.node(f"r{number}", lambda v: v, ["hub"]) for number in range(300)]
    graph.check()
    world = cw.World(graph)
    world.demand(readers)
    for reader in readers[::2]:
        graph.redefine(reader, inputs=["other"])
    graph.check()
    assert graph.consumers("hub") == tuple(readers[1::2])
    graft = graph.graft_after("hub", cw.chain(lambda v: v * 10))
    assert graph.consumers("hub") == graft.sites
    assert world.demand(readers) == (2, 10) * 150
    graph.remove(graft)
    graph.check()
    assert world.demand(readers) == (2, 1) * 150


# -- grafts ---------------------------------------------------------------------------------------


def two_branches() -> cw.Graph:
    """A block: v, w -> v * w + v."""
    inside = cw.Graph()
    inside.source("v")
    inside.source("w", 7.0, param=True)
    inside.node("times", lambda v, w: v * w, ["v", "w"])
    inside.node("plus", lambda t, v: t + v, ["times", "v"])
    return inside


def test_a_block_brings_its_parameters_along() -> None:
    graph = diamond()
    block = cw.block(two_branches())
    assert block.size == 2
    graft = graph.graft(("h", "left"), block, name="adapter")
    graph.check()
    assert graft.sites == ("adapter.times", "adapter.plus")
    assert graft.sources == ("adapter.w",)
    assert graft.at == "h"
    assert graft.rerouted == ("left",)
    assert graft.output == "adapter.plus"
    assert graph.params == {"w", "adapter.w"}
    world = cw.World(graph)
    assert world.demand(["left", "right"]) == (49.0, -6.0)
    world.set("adapter.w", 0.0)
    assert world.demand("left") == 7.0


def test_a_graft_on_an_edge_leaves_other_readers_alone_and_one_after_a_site_takes_all() -> None:
    one, all_ = diamond(), diamond()
    one.graft(("h", "left"), cw.chain(lambda v: v * 10.0))
    all_.graft_after("h", cw.chain(lambda v: v * 10.0))
    assert cw.World(one).demand(["left", "right"]) == (61.0, -6.0)
    assert cw.World(all_).demand(["left", "right"]) == (61.0, -60.0)


def test_a_graft_after_a_site_that_nobody_reads_just_adds_nodes() -> None:
    graph = diamond()
    graft = graph.graft_after("y", cw.chain(lambda v: v + 0.5))
    graph.check()
    assert cw.World(graph).demand(graft.output) == -41.5
    graph.remove(graft)
    assert graph.sites == diamond().sites


def test_readers_that_come_after_a_graft_read_the_site_itself() -> None:
    graph = diamond()
    graph.graft_after("h", cw.chain(lambda v: v * 10.0))
    graph.node("later", lambda h: h, ["h"])
    assert cw.World(graph).demand("later") == 6.0


def test_one_block_can_be_grafted_many_times() -> None:
    graph, block = diamond(), cw.chain(lambda v: v + 1.0)
    names = [graph.graft(("h", "left"), block).name, graph.graft_after("h", block).name]
    names += [graph.graft_after("h", block).name]
    assert names == ["h->left", "h->*", "h->*#2"]
    graph.check()
    assert cw.World(graph).demand(["left", "right"]) == (10.0, -8.0)


@given(st.randoms(use_true_random=False), scenes())
def test_grafts_removed_in_any_order_leave_the_graph_as_it_was(dice: random.Random, scene: Scene) -> None:
    """One that others were grafted into is refused until those are gone; the last one made never is."""
    graph = scene.graph()
    before = wiring(graph)
    grafts = []
    for _ in range(4):
        edges = list(graph.edges)
        if not edges:
            break
        edge, block = dice.choice(edges), dice.choice([cw.chain(Mix(1), Mix(2)), cw.block(two_branches())])
        is_edge = dice.random() < 0.5
        grafts.append(graph.graft(edge, block) if is_edge else graph.graft_after(edge[0], block))
        graph.check()
    while grafts:
        graft, standing = dice.choice(grafts), wiring(graph)
        try:
            graph.remove(graft)
            grafts.remove(graft)
        except InUseError:
            assert graft is not grafts[-1]
            assert wiring(graph) == standing
            graph.remove(grafts.pop())
        graph.check()
    assert wiring(graph) == before


def test_discarded_sites_are_gone_and_their_names_are_free() -> None:
    graph = diamond()
    world = cw.World(graph)
    world.demand("y")
    graph.discard(["y", "right"])
    graph.check()
    world.check()
    assert graph.sites == ("x", "w", "h", "left")
    graph.node("y", lambda left: left, ["left"])
    assert world.demand("y") == 7.0


def test_grafts_cost_what_they_touch_however_large_the_graph() -> None:
    """Neither numbers nor labels of the rest move."""
    graph = cw.Graph()
    graph.source("0", 1)
    for number in range(1, 20_000):
        graph.node(str(number), lambda v: v + 1, [str(number - 1)])
    before = list(graph.table.labels)
    graph.graft(("9999", "10000"), cw.chain(lambda v: v, lambda v: v))
    graph.redefine("15000", lambda a, b: a + b, ["14999", "5"])
    assert graph.table.labels[: len(before)] == before
    graph.check()


def test_the_nodes_of_a_block_are_numbered() -> None:
    assert [node.name for node in cw.chain(abs, abs).nodes] == ["0", "1"]
