"""Wrong calls on a world, and rules that raise: all is explained, and nothing is lost."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import conewise as cw
from conewise.errors import (
    BusyError,
    ClosedWorldError,
    GraphError,
    InUseError,
    NotPatchedError,
    NoValueError,
    OpError,
    UnknownEdgeError,
    UnknownSiteError,
    WorldError,
)
from tests.laws.worlds import stale_sites, values_at_hand


def network() -> cw.Graph:
    graph = cw.Graph()
    graph.source("x", 3.0)
    graph.source("w", 2.0, param=True)
    graph.node("h", lambda x, w: x * w, ["x", "w"])
    graph.node("y", lambda h: h + 1.0, ["h"])
    graph.node("z", lambda x: -x, ["x"])
    return graph


WRONG: list[tuple[str, Callable[[cw.World], object], type[Exception], str]] = [
    (
        "demand",
        lambda w: w.demand("hh"),
        UnknownSiteError,
        "no site 'hh' in this graph of 5 sites. Nearest: h",
    ),
    ("demand of many", lambda w: w.demand(["h", "nope"]), UnknownSiteError, "no site 'nope'"),
    ("patch", lambda w: w.patch("hh", 1), UnknownSiteError, "no site 'hh'"),
    ("patch_rule", lambda w: w.patch_rule("hh", abs), UnknownSiteError, "no site 'hh'"),
    ("patch_rule of a source", lambda w: w.patch_rule("x", abs), WorldError, "'x' is a source.*`world.set`"),
    ("patch_rule by a value", lambda w: w.patch_rule("h", 3), WorldError, "is 3, which cannot be called"),  # type: ignore[arg-type]
    (
        "set of a computed site",
        lambda w: w.set("h", 1),
        WorldError,
        r"computed, so it cannot be set.*world.patch\('h'",
    ),
    (
        "patch_edge",
        lambda w: w.patch_edge(("x", "y"), 1),
        UnknownEdgeError,
        "no edge 'x' -> 'y': 'y' reads h",
    ),
    (
        "restore without patch",
        lambda w: w.restore("h"),
        NotPatchedError,
        "'h' is not patched in this world, so there is nothing to restore. Patched here: z",
    ),
    (
        "restore_edge without patch",
        lambda w: w.restore_edge(("h", "y")),
        NotPatchedError,
        "the edge 'h' -> 'y' is not patched",
    ),
    ("commit of a root", lambda w: w.commit(), WorldError, "this world is no fork: it has no parent"),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG]
)
def test_a_wrong_call_is_explained_and_changes_nothing(
    call: Callable[[cw.World], object], error: type[Exception], message: str
) -> None:
    world = cw.World(network())
    world.patch("z", 5.0)
    world.demand("y")
    before = values_at_hand(world), stale_sites(world), world.patched
    with pytest.raises(error, match=message):
        call(world)
    world.check()
    assert (values_at_hand(world), stale_sites(world), world.patched) == before


def test_a_source_without_value_is_named_and_can_be_given_one_later() -> None:
    graph = network()
    graph.source("late")
    graph.node("sum", lambda y, late: y + late, ["y", "late"])
    world = cw.World(graph)
    for ask in (world.demand, world.plan):
        with pytest.raises(NoValueError, match=r"the source 'late' has no value.*world.set\('late', value\)"):
            ask("sum")
        world.check()
        assert world.ledger.recomputed == []
    assert world.demand("y") == 7.0, "what does not need it is computed"
    with world.fork() as fork:
        fork.set("late", 1.0)
        assert fork.demand("sum") == 8.0
    with world.fork() as fork, pytest.raises(NoValueError):
        fork.demand("sum")
    world.patch("late", lambda v: v + 1)
    with pytest.raises(NoValueError):
        world.demand("sum")
    world.set("late", 2.0)
    assert world.demand("sum") == 10.0
    world.restore("late")
    assert world.demand("sum") == 9.0


# -- a rule that raises ---------------------------------------------------------------------------


def failing(h: float) -> float:
    raise ZeroDivisionError("not today")


def test_a_rule_that_raises_is_named_with_its_inputs_and_their_shapes() -> None:
    graph = cw.Graph()
    graph.source("a", np.zeros((2, 3), dtype=np.float32))
    graph.source("b", "a text that is much longer than what can be shown here")
    graph.node("bad", lambda a, b: 1 / 0, ["a", "b"])
    with pytest.raises(OpError) as caught:
        cw.World(graph).demand("bad")
    message = str(caught.value)
    assert "the rule of 'bad' raised ZeroDivisionError: division by zero" in message
    assert "a: ndarray of shape (2, 3), float32" in message
    assert "b: str 'a text that is much longer than" in message
    assert "...)" in message
    assert "'bad' stays invalid and all other values stay" in message
    assert "graph.redefine" in message
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (caught.value.site, caught.value.inputs) == ("bad", ("a", "b"))


def test_after_a_rule_raised_all_other_values_stay_and_a_repair_goes_on_from_there() -> None:
    graph = network()
    graph.node("bad", failing, ["y"])
    graph.node("after", lambda bad, z: bad + z, ["bad", "z"])
    world = cw.World(graph)
    with pytest.raises(OpError, match="the rule of 'bad' raised ZeroDivisionError: not today"):
        world.demand(["after", "z"])
    world.check()
    assert stale_sites(world) >= {"bad", "after"}
    done = set(world.ledger.recomputed)
    assert {"h", "y"} <= done
    assert done.isdisjoint({"bad", "after"})

    world.ledger.clear()
    graph.redefine("bad", lambda y: y * 10.0)
    assert world.demand("after") == 67.0
    assert set(world.ledger.recomputed) == {"bad", "after", "z"} - done


def test_a_rule_that_raises_in_the_parent_leaves_fork_and_parent_consistent() -> None:
    graph = network()
    graph.node("bad", failing, ["y"])
    graph.node("after", lambda bad, z: bad + z, ["bad", "z"])
    base = cw.World(graph)
    fork = base.fork()
    fork.patch("z", 1.0)
    with pytest.raises(OpError, match="'bad'"):
        fork.demand("after")
    base.check()
    assert fork.ledger.recomputed == []
    fork.patch("bad", 5.0)
    assert fork.demand("after") == 6.0
    assert base.is_stale("bad")


def test_an_interrupt_leaves_a_consistent_world() -> None:
    graph = network()
    is_on = [True]

    def interrupted(y: float) -> float:
        if is_on[0]:
            raise KeyboardInterrupt
        return y

    graph.node("long", interrupted, ["y"])
    graph.node("after", lambda v: v, ["long"])
    base = cw.World(graph)
    fork = base.fork()
    fork.patch("w", 1.0)
    for world in (base, fork):
        with pytest.raises(KeyboardInterrupt):
            world.demand("after")
        base.check()
        assert world.is_stale("long")
        assert not world.is_stale("y")
    is_on[0] = False
    assert (base.demand("after"), fork.demand("after")) == (7.0, 4.0)


class Stubborn:
    """A value that cannot even be shown."""

    shape = 7

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_an_input_that_cannot_be_shown_does_not_hide_what_happened() -> None:
    graph = cw.Graph()
    graph.source("odd", Stubborn())
    graph.node("bad", lambda odd: 1 / 0, ["odd"])
    with pytest.raises(OpError, match=r"the rule of 'bad' raised ZeroDivisionError.*odd: Stubborn"):
        cw.World(graph).demand("bad")


# -- a rule that meddles --------------------------------------------------------------------------

MEDDLING: list[tuple[str, Callable[[cw.World], object]]] = [
    ("graph.source", lambda w: w.graph.source("new", 1)),
    ("graph.node", lambda w: w.graph.node("new", abs, ["x"])),
    ("graph.redefine", lambda w: w.graph.redefine("z", abs)),
    ("graph.graft", lambda w: w.graph.graft(("x", "z"), cw.chain(abs))),
    ("graph.graft", lambda w: w.graph.graft_after("x", cw.chain(abs))),
    ("graph.discard", lambda w: w.graph.discard(["z"])),
    ("world.patch", lambda w: w.patch("z", 1)),
    ("world.patch_rule", lambda w: w.patch_rule("z", abs)),
    ("world.patch_edge", lambda w: w.patch_edge(("x", "z"), 1)),
    ("world.set", lambda w: w.set("x", 1)),
    ("world.demand", lambda w: w.demand("z")),
    ("world.fork", lambda w: w.fork()),
    ("world.close", lambda w: w.close()),
]


@pytest.mark.parametrize(("action", "meddle"), MEDDLING)
def test_a_rule_that_changes_something_in_the_middle_of_a_demand_is_refused(
    action: str, meddle: Callable[[cw.World], object]
) -> None:
    graph = network()
    world = cw.World(graph)
    graph.node("meddler", lambda y: meddle(world), ["y"])
    sites = graph.sites
    with pytest.raises(
        BusyError, match=rf"{action} was called while a demand over the same graph is running"
    ):
        world.demand("meddler")
    graph.check()
    world.check()
    assert graph.sites == sites
    assert world.is_stale("meddler")
    assert world.demand("y") == 7.0


@pytest.mark.parametrize(("action", "meddle"), MEDDLING)
def test_a_listener_that_changes_something_in_the_middle_of_a_demand_is_refused(
    action: str, meddle: Callable[[cw.World], object]
) -> None:
    """A fork's demand computes in its parent first: between the two there is a demand running."""
    base = cw.World(network())
    fork = base.fork()
    fork.patch("w", 1.0)

    def listener(event: cw.Event) -> None:
        if event.world is base:
            meddle(fork)

    base.listen(listener)
    with pytest.raises(BusyError, match=action):
        fork.demand(["y", "z"])
    base.unlisten(listener)
    base.check()
    assert fork.demand(["y", "z"]) == (4.0, -3.0)


def test_a_rule_may_demand_from_another_graph() -> None:
    inner = cw.World(network())
    graph = cw.Graph()
    graph.node("outer", lambda: inner.demand("y"), [])
    assert cw.World(graph).demand("outer") == 7.0


# -- closed worlds --------------------------------------------------------------------------------

USES: list[Callable[[cw.World], object]] = [
    lambda w: w.demand("y"),
    lambda w: w["y"],
    lambda w: w.plan("y"),
    lambda w: w.is_stale("y"),
    lambda w: w.patch("h", 1),
    lambda w: w.patch_rule("h", abs),
    lambda w: w.patch_edge(("h", "y"), 1),
    lambda w: w.restore("h"),
    lambda w: w.restore_edge(("h", "y")),
    lambda w: w.set("x", 1),
    lambda w: w.fork(),
    lambda w: w.commit(),
]


@pytest.mark.parametrize("use", USES)
def test_a_closed_world_refuses_everything_and_so_do_its_forks(use: Callable[[cw.World], object]) -> None:
    base = cw.World(network())
    with base.fork() as fork:
        fork.patch("h", 1.0)
        below = fork.fork()
    for world in (fork, below):
        with pytest.raises(ClosedWorldError, match=r"this world is closed.*fork its parent again"):
            use(world)
        assert repr(world) == "World(closed)"
    base.graph.redefine("h", lambda x, w: x - w)
    base.check()
    assert base.demand("y") == 2.0


def test_closing_a_root_closes_its_forks_and_the_graph_lives_on() -> None:
    graph = network()
    with cw.World(graph) as base:
        fork = base.fork()
    with pytest.raises(ClosedWorldError):
        fork.demand("y")
    graph.redefine("h", lambda x, w: x - w)
    assert cw.World(graph).demand("y") == 2.0


def test_an_error_inside_a_with_block_closes_the_fork_and_is_passed_on() -> None:
    base = cw.World(network())
    with pytest.raises(UnknownSiteError), base.fork() as fork:
        fork.patch("nowhere", 1.0)
    with pytest.raises(ClosedWorldError):
        fork.demand("y")
    assert base.demand("y") == 7.0


# -- what a world holds on to ---------------------------------------------------------------------


def test_the_graph_refuses_to_take_away_what_a_world_has_patched() -> None:
    graph = network()
    graft = graph.graft(("h", "y"), cw.chain(lambda v: v * 2, lambda v: v + 1))
    world = cw.World(graph)
    fork = world.fork()
    fork.patch(graft.sites[0], 5.0)
    with pytest.raises(
        InUseError, match=r"removing 'h->y' would take away 'h->y.0', which is patched in a world"
    ):
        graph.remove(graft)
    fork.restore(graft.sites[0])
    fork.patch_edge(("x", "z"), 1.0)
    with pytest.raises(
        InUseError, match=r"grafting 'x->z' would take away the edge 'x' -> 'z'.*Restore it there"
    ):
        graph.graft(("x", "z"), cw.chain(abs))
    with pytest.raises(InUseError, match="redefining 'z' would take away the edge 'x' -> 'z'"):
        graph.redefine("z", inputs=["w"])
    graph.check()
    fork.close()
    graph.redefine("z", inputs=["w"])
    graph.remove(graft)
    assert world.demand(["y", "z"]) == (7.0, -2.0)


def test_a_dropped_fork_is_gone_at_once_and_refuses_nothing() -> None:
    graph = network()
    base = cw.World(graph)
    gc.disable()
    try:
        fork = base.fork()
        fork.patch_edge(("x", "z"), 1.0)
        fork.demand("z")
        del fork
        graph.redefine("z", inputs=["w"])
    finally:
        gc.enable()
    assert base.demand("z") == -2.0


def test_a_demand_that_is_interrupted_while_it_gathers_announces_nothing() -> None:
    graph = cw.Graph()
    graph.source("x", 1.0)
    graph.node("y", lambda x: x + 1.0, ["x"])
    graph.node("z", lambda y: y + 1.0, ["y"])
    world = cw.World(graph)

    class Interrupting(list[tuple[int, ...]]):
        def __getitem__(self, node: Any) -> Any:
            if node == graph.number("y"):
                raise KeyboardInterrupt
            return super().__getitem__(node)

    inputs = graph.table.inputs
    graph.table.inputs = Interrupting(inputs)
    with pytest.raises(KeyboardInterrupt):
        world.demand("z")
    graph.table.inputs = inputs
    world.check()
    assert world.demand("z") == 3.0


def test_a_demand_of_what_is_no_name_says_so() -> None:
    graph = cw.Graph()
    graph.source("x", 1.0)
    with pytest.raises(GraphError, match="expected a site's name, or several of them, and 5 is neither"):
        cw.World(graph).demand(5)  # type: ignore[call-overload]
