"""Worlds by example, and at sizes at which a careless engine fails."""

from __future__ import annotations

import operator
import sys
import time

import numpy as np
import pytest

import conewise as cw
from conewise.errors import InUseError
from conewise.reactive.demand import bitwise_same
from tests.laws.worlds import nothing_computed, owned


def network() -> cw.Graph:
    graph = cw.Graph()
    graph.source("x", 3.0)
    graph.source("w", 2.0, param=True)
    graph.node("h", lambda x, w: x * w, ["x", "w"])
    graph.node("y", lambda h: h + 1.0, ["h"])
    graph.node("z", lambda x: -x, ["x"])
    return graph


def chain_of(count: int) -> cw.Graph:
    graph = cw.Graph()
    graph.source("0", 0)
    for number in range(1, count):
        graph.node(str(number), _increment, [str(number - 1)])
    return graph


def _increment(value: int) -> int:
    return value + 1


def test_the_first_example() -> None:
    g = network()
    base = cw.World(g)
    assert base.demand("y") == 7.0
    with base.fork() as world:
        world.patch("h", 10.0)
        assert world.demand("y") == 11.0
        assert world.ledger.recomputed == ["y"]
    assert base["y"] == 7.0
    base.ledger.clear()
    g.graft(("h", "y"), cw.chain(lambda v: v * 10.0, lambda v: v - 1.0))
    assert base.demand("y") == 60.0
    assert len(base.ledger.recomputed) == 3
    assert base.demand("z") == -3.0


def test_one_site_gives_a_value_and_several_give_a_tuple_in_their_order() -> None:
    world = cw.World(network())
    assert world.demand("y") == 7.0
    assert world.demand(["y"]) == (7.0,)
    assert world.demand(site for site in ("z", "y", "z")) == (-3.0, 7.0, -3.0)
    assert world.demand([]) == ()
    assert world.demand("x") == 3.0


def test_nothing_is_computed_before_a_demand_and_a_batch_is_computed_once() -> None:
    calls = []

    def counted(x: float, w: float) -> float:
        calls.append("h")
        return x * w

    graph = network()
    graph.redefine("h", counted)
    world = cw.World(graph)
    world.set("x", 1.0)
    world.set("x", 2.0)
    world.patch_edge(("w", "h"), lambda w: w * 100.0)
    world.patch("y", lambda y: -y)
    assert calls == []
    assert world.demand(["y", "h"]) == (-401.0, 400.0)
    assert calls == ["h"]


def test_an_edge_patch_is_seen_by_one_reader_only() -> None:
    world = cw.World(network())
    world.demand(["y", "z"])
    world.patch_edge(("x", "h"), 100.0)
    assert world.demand(["h", "z", "x"]) == (200.0, -3.0, 3.0)
    world.restore_edge(("x", "h"))
    with nothing_computed(world):
        assert world.demand(["h", "z"]) == (6.0, -3.0)


def test_none_and_callables_and_arrays_are_values_like_any_other() -> None:
    graph = network()
    world = cw.World(graph)
    world.patch("h", None)
    world.patch("y", lambda own: abs)
    assert world.demand("h") is None
    graph.redefine("y", lambda h: np.ones(3) * (h is None))
    world.restore("y")
    assert world.demand("y").tolist() == [1.0, 1.0, 1.0]
    world.set("x", None)
    world.patch("z", np.zeros(2))
    world.patch("z", np.zeros(3))
    assert world.demand("z").shape == (3,)


def test_the_same_value_set_again_invalidates_all_the_same() -> None:
    """Without cutoff the engine compares nothing, so that the counts of the theorems hold."""
    world = cw.World(network())
    world.set("x", 3.0)
    world.demand(["y", "z"])
    world.ledger.clear()
    world.set("x", 3.0)
    assert set(world.ledger.invalidated) == {"h", "y", "z"}


def test_what_stands_patched_is_listed() -> None:
    base = cw.World(network())
    base.patch("h", 1.0)
    base.set("x", 1.0)
    base.patch_edge(("h", "y"), 1.0)
    assert base.patched == ("h", "x", "h -> y")
    assert base.fork().patched == ()


# -- what is the same, bit for bit ----------------------------------------------------------------

SAME = [
    (1, 1),
    (float("nan"), float("nan")),
    ("a", "a"),
    (np.arange(3), np.arange(3)),
    (np.float32(1), np.float32(1)),
    ((1.0, [2, None]), (1.0, [2, None])),
    ({"a": np.arange(2)}, {"a": np.arange(2)}),
    (memoryview(b"ab"), memoryview(b"ab")),
]
NOT_SAME = [
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    (complex(0.0, 0.0), complex(0.0, -0.0)),
    (np.zeros(2), -np.zeros(2)),
    (np.zeros(2), np.zeros(2, dtype=np.float32)),
    (np.zeros((2, 1)), np.zeros((1, 2))),
    ((1,), (1.0,)),
    ((0.0,), (-0.0,)),
    ([1, 2], [1, 2, 3]),
    ({"a": 0.0}, {"a": -0.0}),
    ([np.zeros(2)], [np.ones(2)]),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_values_that_cannot_be_told_apart_are_the_same(one: object, other: object) -> None:
    assert bitwise_same(one, other)


@pytest.mark.parametrize(("one", "other"), NOT_SAME)
def test_values_that_differ_in_type_shape_or_any_bit_are_not_the_same(one: object, other: object) -> None:
    assert not bitwise_same(one, other)


class Incomparable:
    """A value whose comparison has no truth, as that of a tensor with several elements."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


def test_values_that_cannot_be_compared_are_not_the_same() -> None:
    graph = cw.Graph()
    graph.source("x", 1)
    graph.node("odd", lambda x: Incomparable(), ["x"])
    graph.node("after", lambda odd: 1, ["odd"])
    world = cw.World(graph, cutoff=True)
    world.demand("after")
    world.set("x", 2)
    assert world.demand("after") == 1
    assert world.ledger.recomputed == ["odd", "after"] * 2


def test_with_cutoff_a_wave_ends_at_the_first_value_that_is_the_same() -> None:
    graph = cw.Graph()
    graph.source("x", 3)
    graph.node("parity", lambda x: x % 2, ["x"])
    graph.node("text", str, ["parity"])
    graph.node("double", lambda x: 2 * x, ["x"])
    world = cw.World(graph, cutoff=True)
    assert world.demand(["text", "double"]) == ("1", 6)
    world.ledger.clear()
    world.set("x", 5)
    assert world.demand(["text", "double"]) == ("1", 10)
    assert set(world.ledger.recomputed) == {"parity", "double"}
    assert world.ledger.cut_off == ["text"]


# -- size -----------------------------------------------------------------------------------------


def test_a_chain_of_a_million_nodes_is_built_demanded_and_patched() -> None:
    count = 1_000_000
    graph = chain_of(count)
    last = str(count - 1)
    world = cw.World(graph, keep_sites=False)
    assert world.demand(last) == count - 1
    assert world.ledger.count("recomputed") == count - 1
    world.ledger.clear()
    with world.fork() as fork:
        fork.patch(str(count - 11), 0)
        assert len(owned(fork)) == 11
        assert fork.demand(last) == 10
        assert fork.ledger.count("recomputed") == 10
    world.patch("1", -1)
    assert world.ledger.count("invalidated") == count - 2
    assert world.demand(last) == count - 3
    world.restore("1")
    with nothing_computed(world):
        assert world.demand(last) == count - 1


def test_a_short_cone_costs_the_same_in_a_long_chain() -> None:
    """β = 0: the time of a patch and its demand does not grow with the graph. The bound is generous."""
    seconds = []
    for count in (1_000, 100_000):
        world = cw.World(chain_of(count), keep_sites=False)
        last = str(count - 1)
        world.demand(last)
        best = float("inf")
        for _ in range(50):
            begun_at = time.perf_counter()
            with world.fork() as fork:
                fork.patch(str(count - 11), 0)
                assert fork.demand(last) == 10
            best = min(best, time.perf_counter() - begun_at)
        seconds.append(best)
    assert seconds[1] < 5 * seconds[0]


def test_forks_nest_five_thousand_deep() -> None:
    depth = 5_000
    assert depth > sys.getrecursionlimit()
    base = cw.World(chain_of(50))
    worlds = [base]
    for number in range(depth):
        worlds.append(worlds[-1].fork())
        if number % 100 == 0:
            worlds[-1].patch(str(number % 40 + 1), 1_000 * number)
    deepest = worlds[-1]
    value = deepest.demand("49")
    # The patches come back to sites 1 and 21 in turn; the last one at 21 is the nearest to the end.
    assert value == 1_000 * 4_900 + (49 - 21)
    base.set("0", 5)
    base.graph.redefine("45", lambda v: v + 10)
    assert deepest.demand("49") == value + 9
    assert base.demand("49") == 49 + 5 + 9
    deepest.commit()
    worlds[1].close()
    assert base.demand("49") == 63


def test_a_deep_nest_of_forks_can_be_dropped() -> None:
    world = cw.World(chain_of(3))
    for _ in range(20_000):
        world = world.fork()
    assert world.demand("2") == 2
    del world


def test_a_wide_node_and_a_hub_are_computed_once() -> None:
    graph = cw.Graph()
    graph.source("x", 1)
    sites = [graph.node(f"n{number}", operator.neg, ["x"]) for number in range(20_000)]
    graph.node("sum", lambda *values: sum(values), sites)
    world = cw.World(graph)
    assert world.demand("sum") == -20_000
    world.ledger.clear()
    world.patch("n7", 0)
    assert world.demand("sum") == -19_999
    assert world.ledger.recomputed == ["sum"]


@pytest.mark.parametrize("cutoff", [False, True])
def test_a_world_calls_rules_in_one_module_alone(cutoff: bool) -> None:
    callers: set[tuple[str, str]] = set()

    def noted(*values: float) -> float:
        frame = sys._getframe(1)
        while frame.f_globals["__name__"] == "conewise.reactive.changes":  # a patch around a rule
            assert frame.f_back is not None
            frame = frame.f_back
        callers.add((frame.f_globals["__name__"], frame.f_code.co_name))
        return sum(values)

    graph = cw.Graph()
    graph.source("x", 1.0)
    graph.node("h", noted, ["x"])
    graph.node("y", noted, ["h", "x"])
    world = cw.World(graph, cutoff=cutoff)
    world.plan("y")
    world.demand("y")
    with world.fork() as fork:
        fork.patch("h", noted)
        fork.patch("x", noted)
        fork.patch_edge(("x", "y"), noted)
        fork.demand("y")
        fork.restore("h")
        fork.patch_rule("h", noted)
        fork.demand("y")
        fork.commit()
    graph.redefine("h", noted)
    graph.graft_after("h", cw.chain(noted))
    world.demand("y")
    world.check()
    assert callers == {("conewise.reactive.demand", "compute_with_cutoff" if cutoff else "compute")}


def test_a_closed_world_is_in_the_way_of_no_change() -> None:
    graph = network()
    known = cw.World.partial(graph, {"x": 3.0, "h": 6.0})
    assert known.demand("y") == 7.0
    with pytest.raises(InUseError, match="holds only part of its values"):
        graph.redefine("z", lambda x: x)
    known.close()
    graph.redefine("z", lambda x: 10 * x)
    assert cw.World(graph).demand("z") == 30.0
