"""Restore: what a patch displaced comes back with it, unless something else has changed."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

import conewise as cw
from tests.laws.oracle import cone, wiring
from tests.laws.scenes import Scene, fresh_rule, fresh_value, scenes
from tests.laws.worlds import (
    from_scratch,
    nothing_computed,
    owned,
    patch_values,
    stale_sites,
    values_at_hand,
    warm,
)

Place = str | tuple[str, str]


def patch_somehow(world: cw.World, scene: Scene, data: st.DataObject) -> Place:
    """A patch of any kind at any place that has none; returns the place."""
    standing = set(world.patched)
    places: list[Place] = [site for site in scene.sites if site not in standing]
    places += [edge for edge in scene.edges if " -> ".join(edge) not in standing]
    assume(places)
    place = data.draw(st.sampled_from(places))
    value = data.draw(st.sampled_from([fresh_value, fresh_rule]))()
    if isinstance(place, tuple):
        world.patch_edge(place, value)
    else:
        world.patch(place, value)
    return place


def restore(world: cw.World, place: Place) -> None:
    if isinstance(place, tuple):
        world.restore_edge(place)
    else:
        world.restore(place)


@given(scenes(), st.data(), st.booleans())
def test_patches_taken_back_in_reverse_order_leave_everything_as_it_was(
    scene: Scene, data: st.DataObject, is_fork: bool
) -> None:
    """Demands in between included: no value is computed again, each is the very object that it was."""
    base = warm(scene)
    world = base.fork() if is_fork else base
    layers = []
    for _ in range(data.draw(st.integers(1, 3))):
        values, stale_ones = values_at_hand(world), stale_sites(world)
        layers.append((patch_somehow(world, scene, data), values, stale_ones))
        world.demand(data.draw(st.lists(st.sampled_from(scene.sites), max_size=3)))
    with nothing_computed(base, world):
        for place, values, stale_ones in reversed(layers):
            restore(world, place)
            world.check()
            assert stale_sites(world) <= stale_ones
            assert all(world.demand(site) is value for site, value in values.items())
    assert world.patched == ()
    assert not is_fork or owned(world) == set()


@given(scenes(), st.data())
def test_patches_taken_back_in_any_order_leave_the_values_as_they_were(
    scene: Scene, data: st.DataObject
) -> None:
    world = warm(scene)
    before = world.demand(scene.sites)
    places = [patch_somehow(world, scene, data) for _ in range(data.draw(st.integers(1, 4)))]
    world.demand(scene.demand)
    for place in data.draw(st.permutations(places)):
        restore(world, place)
        world.check()
    assert world.demand(scene.sites) == before


@given(scenes(), st.data())
def test_after_another_change_a_restore_invalidates_the_site_and_its_cone(
    scene: Scene, data: st.DataObject
) -> None:
    world = warm(scene)
    site = data.draw(st.sampled_from(scene.sites))
    world.patch(site, fresh_value())
    other = data.draw(st.sampled_from(scene.sources))
    world.set(other, fresh_value())
    world.demand(scene.sites)
    world.ledger.clear()
    world.restore(site)
    reads = wiring(world.graph)
    assert stale_sites(world) == cone(reads, [site]) | ({site} & set(scene.computed))
    patches = {other: world.demand(other)}
    assert world.demand(scene.sites) == from_scratch(world.graph, patches, scene.sites)


@given(scenes(), st.data())
def test_a_patch_over_a_patch_is_taken_back_with_it(scene: Scene, data: st.DataObject) -> None:
    world = warm(scene)
    values = values_at_hand(world)
    site = data.draw(st.sampled_from(scene.sites))
    for _ in range(3):
        world.patch(site, data.draw(st.sampled_from([fresh_value, fresh_rule]))())
        world.demand(scene.demand)
    with nothing_computed(world):
        world.restore(site)
        assert all(world.demand(each) is value for each, value in values.items())


@given(scenes(), st.data())
def test_a_fork_can_take_back_for_itself_what_its_parent_patched(scene: Scene, data: st.DataObject) -> None:
    base = warm(scene)
    patches = patch_values(base, scene.patch)
    fork = base.fork()
    site = data.draw(st.sampled_from(scene.patch))
    fork.restore(site)
    left = {other: value for other, value in patches.items() if other != site}
    assert fork.demand(scene.sites) == from_scratch(base.graph, left, scene.sites)
    assert base.demand(scene.sites) == from_scratch(base.graph, patches, scene.sites)
    base.restore(site)
    assert owned(fork) == set(), "now both let the same stand there"
    again = patch_values(base, [site])
    assert fork.demand(scene.sites) == from_scratch(base.graph, left, scene.sites)
    assert base.demand(scene.sites) == from_scratch(base.graph, left | again, scene.sites)
    base.check()


@given(scenes(), st.data())
def test_nodes_that_were_added_under_a_patch_are_not_left_behind(scene: Scene, data: st.DataObject) -> None:
    base = warm(scene)
    fork = base.fork()
    site = data.draw(st.sampled_from(scene.sites))
    fork.patch(site, fresh_value())
    base.graph.node("new", fresh_rule(), [site])
    fork.demand("new")
    fork.restore(site)
    base.check()
    value = fresh_value()
    base.patch(site, value)
    assert fork.demand("new") == from_scratch(base.graph, {site: value}, ["new"])[0]


@given(scenes(), st.data())
def test_a_patch_taken_back_after_a_commit_leaves_the_commit_alone(scene: Scene, data: st.DataObject) -> None:
    base = warm(scene)
    site, other = (data.draw(st.sampled_from(scene.sites)) for _ in range(2))
    base.patch(site, fresh_value())
    with base.fork() as fork:
        kept = patch_values(fork, [other] if other != site else [])
        fork.demand(scene.demand)
        fork.commit()
    base.restore(site)
    base.check()
    assert base.demand(scene.sites) == from_scratch(base.graph, kept, scene.sites)
