"""Forks: a fork pays for its own cone, and shares all else with its parent, then and later."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import conewise as cw
from tests.laws.oracle import cone, stale, support, wiring
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

Change = Callable[[cw.World, str], None]


@given(scenes(), st.booleans())
def test_a_fork_computes_its_stale_sites_and_its_parent_the_rest_of_the_support(
    scene: Scene, is_warm: bool
) -> None:
    """Theorem 2 holds for a fork's own ledger, however cold the base is."""
    base = warm(scene) if is_warm else cw.World(scene.graph())
    fork = base.fork()
    patches = patch_values(fork, scene.patch)
    plan = fork.plan(scene.demand)

    assert fork.demand(scene.demand) == from_scratch(base.graph, patches, scene.demand)

    reads = wiring(base.graph)
    own = stale(reads, scene.patch, scene.demand)
    wanted = support(reads, scene.demand, cut=scene.patch) & set(scene.computed)
    assert Counter(fork.ledger.recomputed) == Counter(own)
    assert Counter(base.ledger.recomputed) == Counter(() if is_warm else wanted - own - set(scene.patch))
    assert list(plan.own) == fork.ledger.recomputed
    assert list(plan) == base.ledger.recomputed + fork.ledger.recomputed
    base.check()


@given(scenes())
def test_a_fork_owns_its_patches_and_their_cone_and_nothing_else(scene: Scene) -> None:
    """Memory is O(cone), before the demand and after it."""
    base = warm(scene)
    fork = base.fork()
    assert owned(fork) == set()
    patch_values(fork, scene.patch)
    expected = set(scene.patch) | cone(wiring(base.graph), scene.patch)
    assert owned(fork) == expected
    fork.demand(scene.sites)
    assert owned(fork) == expected


@given(scenes())
def test_a_fork_changes_nothing_in_its_parent_and_its_siblings(scene: Scene) -> None:
    base = warm(scene)
    sibling = base.fork()
    patch_values(sibling, scene.patch[:1])
    sibling.demand(scene.sites)
    before = [(world, values_at_hand(world), stale_sites(world)) for world in (base, sibling)]
    with nothing_computed(base, sibling), base.fork() as fork:
        patch_values(fork, scene.patch)
        fork.demand(scene.demand)
        fork.fork().patch(scene.patch[0], fresh_value())
    for world, values, stale_ones in before:
        assert stale_sites(world) == stale_ones
        assert all(value is world.demand(site) for site, value in values.items())
        assert world.ledger.count("invalidated") == (0 if world is base else len(world.ledger.invalidated))


@given(scenes(), st.data())
def test_a_fork_of_a_fork_is_a_fork(scene: Scene, data: st.DataObject) -> None:
    """Nested patches are one set of patches: each fork computes what its own patch makes stale."""
    world = warm(scene)
    graph, patches = world.graph, dict[str, int]()
    for site in scene.patch:
        world = world.fork()
        patches |= patch_values(world, [site])
        assert world.demand(scene.sites) == from_scratch(graph, patches, scene.sites)
        cut = [other for other in patches if other != site]
        assert Counter(world.ledger.recomputed) == Counter(cone(wiring(graph), [site], cut))


@given(scenes(), st.data())
def test_a_fork_is_a_live_view_of_its_parent(scene: Scene, data: st.DataObject) -> None:
    """What the parent changes later is seen by the fork, where the fork has no change of its own."""
    base = warm(scene)
    fork = base.fork()
    own = patch_values(fork, scene.patch)
    fork.demand(scene.sites)
    later = patch_values(base, data.draw(st.lists(st.sampled_from(scene.sites), max_size=3)))
    base.demand(data.draw(st.lists(st.sampled_from(scene.sites), max_size=2)))
    assert fork.demand(scene.sites) == from_scratch(base.graph, later | own, scene.sites)
    assert base.demand(scene.sites) == from_scratch(base.graph, later, scene.sites)
    base.check()


@given(scenes(), st.data())
def test_a_change_of_the_parent_invalidates_in_the_fork_what_reads_it_there(
    scene: Scene, data: st.DataObject
) -> None:
    """Theorem 1 seen from a fork: the cone of the parent's patch, cut at the fork's own."""
    base = warm(scene)
    fork = base.fork()
    patch_values(fork, scene.patch)
    fork.demand(scene.sites)
    site = data.draw(st.sampled_from(scene.sites))
    base.patch(site, fresh_value())
    seen = [] if site in scene.patch else [site]
    assert stale_sites(fork) == cone(wiring(base.graph), seen, cut=scene.patch)


def patch_value(world: cw.World, site: str) -> None:
    world.patch(site, fresh_value())


def patch_function(world: cw.World, site: str) -> None:
    world.patch(site, fresh_rule())


def patch_rule(world: cw.World, site: str) -> None:
    world.patch_rule(site, fresh_rule())


def set_source(world: cw.World, site: str) -> None:
    world.set(site, fresh_value())


def redefine(world: cw.World, site: str) -> None:
    world.graph.redefine(site, fresh_rule())


HIDING = [
    # what the fork does, then what is done above it at the same site, which the fork need not notice
    *itertools.product([patch_value, patch_function, patch_rule], [patch_value, patch_function, patch_rule]),
    *itertools.product([patch_value, patch_rule], [redefine]),
]
HIDING_AT_A_SOURCE = [(patch_value, patch_value), (patch_value, set_source), (set_source, set_source)]


@pytest.mark.parametrize(("own", "above"), HIDING + HIDING_AT_A_SOURCE)
@settings(max_examples=30)
@given(scene=scenes(), data=st.data())
def test_what_a_forks_own_change_hides_costs_the_fork_nothing(
    own: Change, above: Change, scene: Scene, data: st.DataObject
) -> None:
    """Own changes win: a later change of the same thing in the parent leaves the fork as it was."""
    base = warm(scene)
    fork = base.fork()
    is_source = (own, above) in HIDING_AT_A_SOURCE
    site = data.draw(st.sampled_from(scene.sources if is_source else scene.computed))
    own(fork, site)
    values = fork.demand(scene.sites)
    fork.ledger.clear()
    above(base, site)
    assert fork.ledger.invalidated == []
    with nothing_computed(base, fork):
        unchanged = [place for place in scene.sites if place in {site, *cone(wiring(base.graph), [site])}]
        assert all(fork.demand(place) is values[scene.sites.index(place)] for place in unchanged)
    base.check()


@given(scenes(), st.data())
def test_what_shows_through_a_forks_own_change_is_seen(scene: Scene, data: st.DataObject) -> None:
    """A function of what a source would have been is a function of what the parent sets it to."""
    base = warm(scene)
    fork = base.fork()
    site, function, value = data.draw(st.sampled_from(scene.sources)), fresh_rule(), fresh_value()
    fork.patch(site, function)
    fork.demand(scene.sites)
    base.set(site, value)
    assert fork.demand(site) == function(value)
    base.patch(site, fresh_value())
    base.set(site, value + 1)
    fork.restore(site)
    assert fork.demand(site) == value + 1, "a set beneath the parent's patch, bared by the fork"
    base.set(site, value + 2)
    assert fork.demand(site) == value + 2
    base.check()


@given(scenes(), st.data())
def test_structure_changed_after_the_fork_is_seen_by_it(scene: Scene, data: st.DataObject) -> None:
    base = warm(scene)
    graph = base.graph
    fork = base.fork()
    own = patch_values(fork, scene.patch)
    fork.demand(scene.sites)
    assume(scene.edges)
    graph.node("new", fresh_rule(), [data.draw(st.sampled_from(scene.sites))])
    site = data.draw(st.sampled_from(scene.computed))
    graph.redefine(site, fresh_rule(), [data.draw(st.sampled_from(scene.sources))])
    if graph.consumers(scene.sites[0]):
        graph.graft_after(scene.sites[0], cw.chain(fresh_rule(), fresh_rule()))
    graph.check()
    assert fork.demand(graph.sites) == from_scratch(graph, own, graph.sites)
    assert base.demand(graph.sites) == from_scratch(graph, {}, graph.sites)
    base.check()


@given(scenes(), st.booleans())
def test_a_commit_hands_over_changes_and_values_and_computes_nothing(scene: Scene, is_warm: bool) -> None:
    base = warm(scene) if is_warm else cw.World(scene.graph())
    fork, sibling = base.fork(), base.fork()
    patches = patch_values(fork, scene.patch)
    values = fork.demand(scene.demand)
    with nothing_computed(base, fork, sibling):
        fork.commit()
        for world in (base, fork, sibling):
            assert all(one is other for one, other in zip(values, world.demand(scene.demand), strict=True))
    base.check()
    assert owned(fork) == set()
    assert base.demand(scene.sites) == from_scratch(base.graph, patches, scene.sites)
    assert fork.demand(scene.sites) == sibling.demand(scene.sites) == base.demand(scene.sites)


@given(scenes())
def test_a_commit_invalidates_in_the_parent_what_the_fork_had_not_computed(scene: Scene) -> None:
    base = warm(scene)
    with base.fork() as fork:
        patch_values(fork, scene.patch)
        fork.demand(scene.demand)
        left = stale_sites(fork)
        fork.commit()
    assert stale_sites(base) == left
    assert Counter(base.ledger.invalidated) == Counter(left)


@given(scenes(), st.data())
def test_siblings_follow_a_commit_where_they_have_no_change_of_their_own(
    scene: Scene, data: st.DataObject
) -> None:
    base = warm(scene)
    fork, sibling = base.fork(), base.fork()
    own = patch_values(sibling, data.draw(st.lists(st.sampled_from(scene.sites), max_size=3)))
    sibling.demand(scene.sites)
    patches = patch_values(fork, scene.patch)
    fork.demand(scene.demand)
    fork.commit()
    base.check()
    assert sibling.demand(scene.sites) == from_scratch(base.graph, patches | own, scene.sites)


@given(scenes(), st.data())
def test_a_fork_that_undoes_its_parents_change_hands_its_values_further_up(
    scene: Scene, data: st.DataObject
) -> None:
    """Committed, its values mean what they mean in the world above the parent: nothing is lost."""
    base = cw.World(scene.graph())
    parent = base.fork()
    site = data.draw(st.sampled_from(scene.sites))
    parent.patch(site, fresh_value())
    fork = parent.fork()
    fork.restore(site)
    values = fork.demand(scene.demand)
    with nothing_computed(base, parent, fork):
        fork.commit()
        assert all(one is other for one, other in zip(values, parent.demand(scene.demand), strict=True))
        assert all(one is other for one, other in zip(values, base.demand(scene.demand), strict=True))
    assert owned(parent) == set()
    base.check()


@given(scenes(), st.data())
def test_a_patch_that_comes_and_goes_above_a_restored_site_costs_the_fork_nothing(
    scene: Scene, data: st.DataObject
) -> None:
    """The fork owns the site on account of what it reads, whatever the parent lets stand there."""
    base = warm(scene)
    assume(scene.edges)
    above, site = data.draw(st.sampled_from(scene.edges))
    base.patch(site, fresh_value())
    fork = base.fork()
    fork.restore(site)
    own = patch_values(fork, [above])
    fork.demand(scene.sites)
    fork.ledger.clear()
    for is_patched in (False, True):
        if is_patched:
            base.patch(site, fresh_value())
        else:
            base.restore(site)
        base.check()
        assert fork.ledger.invalidated == []
        with nothing_computed(fork):
            assert fork.demand(site) == from_scratch(base.graph, own, [site])[0]


# -- a site that a fork owns at one time and shares at another ------------------------------------


def forks_of_a_reader() -> tuple[cw.World, cw.World, cw.World]:
    """Return a base, its fork and a fork of that, over h = 10·x and y = x + h; in the last, y sees -x."""
    graph = cw.Graph()
    graph.source("x", 1)
    graph.node("h", lambda x: 10 * x, ["x"])
    graph.node("y", lambda x, h: x + h, ["x", "h"])
    base = cw.World(graph)
    parent = base.fork()
    fork = parent.fork()
    fork.patch_edge(("x", "y"), operator.neg)
    return base, parent, fork


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_patch_that_the_parent_takes_away_costs_the_fork_that_undid_it_nothing(is_warm: bool) -> None:
    """What the fork computed for itself means the same above, and is handed up where it is not there yet."""
    base, parent, fork = forks_of_a_reader()
    if is_warm:
        base.demand("h")
    parent.patch_rule("h", lambda x: 100 * x)
    fork.restore("h")
    assert fork.demand("y") == 9
    fork.ledger.clear()

    parent.restore("h")

    assert owned(fork) == {"y"}
    assert fork.ledger.invalidated == []
    with nothing_computed(base, parent, fork):
        assert fork.demand("y") == 9
        assert base.demand("h") == fork.demand("h") == 10
    base.check()


def test_what_a_fork_hands_up_outlasts_the_values_that_the_restored_patch_had_displaced() -> None:
    base, parent, fork = forks_of_a_reader()
    base.patch("h", 5)
    fork.restore("h")
    assert fork.demand("y") == 9

    base.restore("h")

    with nothing_computed(base, parent, fork):
        assert (base.demand("h"), fork.demand("y")) == (10, 9)
    assert base.demand("y") == 11
    base.check()


def test_what_a_fork_comes_to_own_has_no_value_yet_and_neither_has_what_reads_it() -> None:
    """The fork undid a patch that came and went; patched again, the value is no longer shared."""
    base, parent, fork = forks_of_a_reader()
    parent.patch("h", 5)
    fork.restore("h")
    parent.restore("h")
    below = fork.fork()
    below.patch_edge(("x", "y"), lambda x: 2 * x)
    assert (fork.demand("y"), below.demand("y")) == (9, 12)

    parent.patch("h", 6)

    assert stale_sites(fork) == stale_sites(below) == {"h", "y"}
    base.check()
    assert (parent.demand("y"), fork.demand("y"), below.demand("y")) == (7, 9, 12)


def test_a_source_that_a_fork_comes_to_own_leaves_valid_what_the_fork_owned_already() -> None:
    """Its value is given, so that the fork has it at once."""
    base, parent, fork = forks_of_a_reader()
    fork.patch("h", 10)
    parent.patch("x", 2)
    fork.restore("x")
    parent.restore("x")
    assert fork.demand("y") == 9

    parent.patch("x", 3)

    assert stale_sites(fork) == set()
    with nothing_computed(fork):
        assert (parent.demand("x"), fork.demand("x"), fork.demand("y")) == (3, 1, 9)
    base.check()


def test_a_patched_edge_that_the_parents_patch_hides_invalidates_nothing() -> None:
    base, parent, fork = forks_of_a_reader()
    parent.patch("h", 5)
    assert fork.demand("y") == 4
    fork.ledger.clear()

    fork.patch_edge(("x", "h"), 7)
    assert (fork.ledger.invalidated, stale_sites(fork)) == ([], set())
    parent.patch("h", 6)
    assert fork.demand("y") == 5
    fork.ledger.clear()
    fork.restore_edge(("x", "h"))
    assert (fork.ledger.invalidated, stale_sites(fork)) == ([], set())
    base.check()


def test_a_hidden_change_that_a_fork_commits_invalidates_nothing_in_its_siblings() -> None:
    base, parent, fork = forks_of_a_reader()
    parent.patch("h", 5)
    sibling = parent.fork()
    sibling.patch_edge(("x", "h"), 7)
    assert fork.demand("y") == 4
    fork.ledger.clear()

    sibling.commit()

    assert fork.ledger.invalidated == []
    assert not fork.is_stale("y")
    parent.restore("h")
    assert fork.demand("y") == 69
    base.check()


def test_a_commit_does_not_invalidate_what_a_sibling_then_hands_up() -> None:
    base, parent, fork = forks_of_a_reader()
    parent.patch_rule("h", lambda x: 100 * x)
    fork.restore("h")
    assert (parent.demand("y"), fork.demand("y")) == (101, 9)
    sibling = parent.fork()
    sibling.restore("h")

    sibling.commit()

    assert parent.ledger.invalidated == ["y"]
    with nothing_computed(base, parent, fork):
        assert (parent.demand("h"), fork.demand("y")) == (10, 9)
    base.check()
