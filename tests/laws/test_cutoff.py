"""Cutoff: a recomputed value that is the same, bit for bit, stops the wave. Off by default."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st

import conewise as cw
from conewise.reactive.changes import OWN
from tests.laws.oracle import stale, wiring
from tests.laws.scenes import Scene, fresh_rule, fresh_value, scenes
from tests.laws.worlds import from_scratch, patch_values, values_at_hand, warm


def must_compute(scene: Scene, reads: dict[str, tuple[str, ...]], old: Any, new: Any) -> set[str]:
    """Of what is stale, the sites that read a value which is not what it was."""
    return {
        site
        for site in stale(reads, scene.patch, scene.demand)
        if any(old[read] != new[read] for read in reads[site])
    }


@given(scenes(coarse=True), st.booleans())
def test_the_wave_stops_exactly_where_a_value_is_the_same(scene: Scene, is_fork: bool) -> None:
    base = warm(scene, cutoff=True)
    world = base.fork() if is_fork else base
    old = values_at_hand(base)
    patches = patch_values(world, scene.patch)
    plan = world.plan(scene.demand)

    assert world.demand(scene.demand) == from_scratch(base.graph, patches, scene.demand)

    reads = wiring(base.graph)
    new = dict(zip(scene.sites, from_scratch(base.graph, patches, scene.sites), strict=True))
    computed, spared = world.ledger.recomputed, world.ledger.cut_off
    assert Counter(computed) == Counter(must_compute(scene, reads, old, new))
    assert Counter(computed + spared) == Counter(stale(reads, scene.patch, scene.demand)) == Counter(plan)
    world.check()
    event("something was cut off" if spared else "nothing was cut off")


@given(scenes(coarse=True))
def test_what_is_the_same_stays_the_same_object(scene: Scene) -> None:
    world = warm(scene, cutoff=True)
    old = values_at_hand(world)
    patch_values(world, scene.patch)
    world.demand(scene.sites)
    for site in set(scene.computed) - set(scene.patch):
        assert (world.demand(site) == old[site]) == (world.demand(site) is old[site])


@given(scenes(coarse=True))
def test_a_patch_with_the_value_that_was_there_computes_nothing(scene: Scene) -> None:
    world = warm(scene, cutoff=True)
    for site in scene.patch:
        world.patch(site, world.demand(site) + 0)
    world.demand(scene.demand)
    assert world.ledger.recomputed == []


@given(scenes(coarse=True))
def test_without_cutoff_nothing_is_ever_cut_off(scene: Scene) -> None:
    world = warm(scene)
    for site, value in zip(scene.patch, world.demand(scene.patch), strict=True):
        world.patch(site, value + 0)
    world.demand(scene.demand)
    assert world.ledger.cut_off == []
    assert Counter(world.ledger.recomputed) == Counter(stale(wiring(world.graph), scene.patch, scene.demand))


@given(scenes(coarse=True), st.data())
def test_with_forks_patches_restores_and_commits_the_values_are_those_without_cutoff(
    scene: Scene, data: st.DataObject
) -> None:
    pairs = [(warm(scene, cutoff=cutoff), cutoff) for cutoff in (True, False)]
    families = [[world] for world, _ in pairs]
    for _ in range(data.draw(st.integers(3, 8))):
        number = data.draw(st.integers(0, len(families[0]) - 1))
        action = data.draw(
            st.sampled_from(["patch", "function", "set", "restore", "fork", "commit", "demand"])
        )
        site = data.draw(st.sampled_from(scene.sites))
        # A few values only, so that one often comes back.
        value, function = (1 << 80) + data.draw(st.integers(0, 1)), fresh_rule()
        for family in families:
            act(family, number, action, site, value, function)
    for one, other in zip(*families, strict=True):
        assert one.demand(scene.sites) == other.demand(scene.sites)
        assert not other.ledger.cut_off
        one.check()


def act(family: list[cw.World], number: int, action: str, site: str, value: int, function: Any) -> None:
    world = family[number]
    if action == "patch":
        world.patch(site, value)
    elif action == "function":
        world.patch(site, function)
    elif action == "set" and world.graph.is_source(site):
        world.set(site, value)
    elif action == "restore" and site in world.patched:
        if OWN in world._state.changes[world.graph.number(site)].patches and world is family[0]:
            world.restore(site)
    elif action == "fork":
        family.append(world.fork())
    elif action == "commit" and number > 0:
        world.commit()
    elif action == "demand":
        world.demand(site)


@given(scenes(coarse=True))
def test_a_comparison_of_ones_own_decides_what_is_the_same(scene: Scene) -> None:
    world = cw.World(scene.graph(), cutoff=lambda old, new: False)
    world.demand(scene.sites)
    world.ledger.clear()
    for site in scene.patch:
        world.patch(site, fresh_value())
    world.demand(scene.demand)
    assert Counter(world.ledger.recomputed) == Counter(stale(wiring(world.graph), scene.patch, scene.demand))
