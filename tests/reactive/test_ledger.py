"""The ledger: what it keeps, for how long, and who else is told."""

from __future__ import annotations

import pytest

import conewise as cw


def network() -> cw.Graph:
    graph = cw.Graph()
    graph.source("x", 3.0)
    graph.node("h", lambda x: x * 2.0, ["x"])
    graph.node("y", lambda h: h + 1.0, ["h"])
    graph.node("z", lambda x: -x, ["x"])
    graph.node("out", lambda y, z: y * z, ["y", "z"])
    return graph


def test_it_tells_what_was_invalidated_recomputed_and_reused() -> None:
    world = cw.World(network())
    assert world.demand("out") == -21.0
    assert world.ledger.recomputed == ["h", "y", "z", "out"]
    assert (world.ledger.invalidated, world.ledger.reused, world.ledger.cut_off) == ([], [], [])

    world.ledger.clear()
    world.patch("h", 1.0)
    world.demand("out")
    assert sorted(world.ledger.invalidated) == ["out", "y"]
    assert world.ledger.recomputed == ["y", "out"]
    assert sorted(world.ledger.reused) == ["h", "z"], "the patched value and the one outside of the cone"

    world.ledger.clear()
    world.demand("out")
    assert (world.ledger.recomputed, world.ledger.reused) == ([], ["out"])
    assert repr(world.ledger) == "Ledger(0 invalidated, 0 recomputed, 1 reused, 0 cut_off)"


def test_an_interval_is_a_ledger_of_its_own_and_intervals_nest() -> None:
    world = cw.World(network())
    world.demand("y")
    with world.ledger.interval() as outer:
        world.patch("h", 1.0)
        with world.ledger.interval() as inner:
            world.demand("y")
        world.ledger.clear()
        world.demand("z")
    world.set("x", 1.0)
    assert inner.recomputed == ["y"]
    assert inner.invalidated == []
    assert outer.recomputed == ["y", "z"]
    assert outer.invalidated == ["y"]
    assert world.ledger.recomputed == ["z"], "clearing one ledger clears no other"
    assert world.ledger.invalidated == ["z"]


def test_an_interval_ends_with_its_block_whatever_happens_in_it() -> None:
    world = cw.World(network())
    with pytest.raises(cw.ConewiseError), world.ledger.interval() as span:
        world.demand("nowhere")
    world.demand("y")
    assert span.recomputed == []


def test_a_ledger_of_tallies_counts_and_says_how_to_keep_sites() -> None:
    world = cw.World(network(), keep_sites=False)
    fork = world.fork()
    fork.patch("h", 1.0)
    with fork.ledger.interval() as span:
        fork.demand("out")
    assert [ledger.count("recomputed") for ledger in (world.ledger, fork.ledger, span)] == [1, 2, 2]
    for ledger in (world.ledger, fork.ledger, span):
        with pytest.raises(
            ValueError, match=r"tallies only: ask `ledger.count\('recomputed'\)`.*keep_sites=True"
        ):
            _ = ledger.recomputed


def test_listeners_hear_of_a_world_and_of_its_forks_and_no_others() -> None:
    base = cw.World(network())
    fork, sibling = base.fork(), base.fork()
    below = fork.fork()
    heard: dict[str, list[tuple[str, cw.World, tuple[str, ...]]]] = {"base": [], "fork": []}
    base.listen(lambda event: heard["base"].append((event.kind, event.world, event.sites)))
    fork.listen(lambda event: heard["fork"].append((event.kind, event.world, event.sites)))

    below.patch("y", 1.0)
    below.demand("out")
    sibling.patch("z", 1.0)

    assert heard["base"] == [
        ("recomputed", base, ("z",)),
        ("recomputed", below, ("out",)),
        ("reused", below, ("y",)),
    ]
    assert heard["fork"] == heard["base"][1:]


def test_a_listener_is_told_what_the_ledger_keeps_until_it_is_dismissed() -> None:
    world = cw.World(network())
    events: list[cw.Event] = []
    world.listen(events.append)
    world.demand("out")
    world.patch("h", 2.0)
    world.demand("out")
    told = {
        kind: [site for event in events if event.kind == kind for site in event.sites]
        for kind in ("invalidated", "recomputed", "reused")
    }
    assert told == {
        "invalidated": world.ledger.invalidated,
        "recomputed": world.ledger.recomputed,
        "reused": world.ledger.reused,
    }
    world.unlisten(events.append)
    before = len(events)
    world.set("x", 1.0)
    assert world.ledger.count("invalidated") > len(told["invalidated"])
    assert len(events) == before


def test_removed_sites_keep_their_names_in_the_record() -> None:
    graph = network()
    world = cw.World(graph)
    graft = graph.graft(("h", "y"), cw.chain(lambda v: v))
    world.demand("y")
    graph.remove(graft)
    assert "h->y.0" in world.ledger.recomputed


def test_a_source_patched_with_a_function_is_computed_and_so_is_counted() -> None:
    world = cw.World(network())
    world.demand("out")
    world.ledger.clear()
    world.patch("x", lambda x: x + 1.0)
    assert set(world.ledger.invalidated) == {"x", "h", "y", "z", "out"}
    assert list(world.plan("z")) == ["x", "z"]
    world.demand("z")
    assert world.ledger.recomputed == ["x", "z"]
