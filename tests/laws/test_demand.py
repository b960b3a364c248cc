"""Theorem 2: a demand computes what is both invalid and wanted, each site once, and nothing else."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

import conewise as cw
from tests.laws.oracle import cone, stale, stale_under_rules, support, wiring
from tests.laws.scenes import Scene, fresh_rule, fresh_value, scenes
from tests.laws.worlds import from_scratch, nothing_computed, patch_values, stale_sites, warm


@given(scenes())
def test_a_warm_world_computes_each_stale_site_once_and_no_other(scene: Scene) -> None:
    """Theorem 2."""
    world = warm(scene)
    patch_values(world, scene.patch)
    world.demand(scene.demand)
    assert Counter(world.ledger.recomputed) == Counter(stale(wiring(world.graph), scene.patch, scene.demand))


@given(scenes())
def test_sites_are_computed_inputs_first(scene: Scene) -> None:
    world = warm(scene)
    patch_values(world, scene.patch)
    world.demand(scene.demand)
    seen: set[str] = set()
    for site in world.ledger.recomputed:
        assert not cone(wiring(world.graph), [site]) & seen
        seen.add(site)


@given(scenes())
def test_values_equal_recomputation_from_scratch(scene: Scene) -> None:
    world = warm(scene)
    patches = patch_values(world, scene.patch)
    assert world.demand(scene.demand) == from_scratch(world.graph, patches, scene.demand)
    assert world.demand(scene.sites) == from_scratch(world.graph, patches, scene.sites)


@given(scenes())
def test_a_plan_is_what_the_demand_then_computes_in_that_order(scene: Scene) -> None:
    world = warm(scene)
    patch_values(world, scene.patch)
    before = stale_sites(world)
    plan = world.plan(scene.demand)
    assert stale_sites(world) == before, "a plan computes nothing"
    world.check()
    world.demand(scene.demand)
    assert world.ledger.recomputed == list(plan) == list(plan.own)
    assert len(world.plan(scene.demand)) == 0


@given(scenes())
def test_a_cold_world_computes_the_support_of_its_demand(scene: Scene) -> None:
    world = cw.World(scene.graph())
    world.demand(scene.demand)
    expected = support(wiring(world.graph), scene.demand) & set(scene.computed)
    assert Counter(world.ledger.recomputed) == Counter(expected)


@given(scenes())
def test_a_patched_cold_world_computes_the_support_cut_at_the_patches(scene: Scene) -> None:
    world = cw.World(scene.graph())
    patch_values(world, scene.patch)
    world.demand(scene.demand)
    wanted = support(wiring(world.graph), scene.demand, cut=scene.patch)
    assert Counter(world.ledger.recomputed) == Counter((wanted & set(scene.computed)) - set(scene.patch))


@given(scenes(), st.data())
def test_a_patch_whose_cone_misses_the_demand_computes_nothing(scene: Scene, data: st.DataObject) -> None:
    world = warm(scene)
    site = data.draw(st.sampled_from(scene.sites))
    reached = cone(wiring(world.graph), [site])
    missed = [other for other in scene.sites if other not in reached]
    world.patch(site, fresh_value())
    world.demand(missed)
    assert world.ledger.recomputed == []


@given(scenes())
def test_a_second_demand_computes_nothing(scene: Scene) -> None:
    world = warm(scene)
    patch_values(world, scene.patch)
    first = world.demand(scene.demand)
    with nothing_computed(world):
        again = world.demand(scene.demand)
    assert all(one is other for one, other in zip(first, again, strict=True))


@given(scenes(), st.data())
def test_many_small_demands_compute_what_one_large_demand_does(scene: Scene, data: st.DataObject) -> None:
    sites = data.draw(st.permutations(scene.sites))
    worlds = warm(scene), warm(scene)
    for world in worlds:
        for number, site in enumerate(scene.patch):
            world.patch(site, number << 80)
    at_once = worlds[0].demand(sites)
    one_by_one = tuple(worlds[1].demand(site) for site in sites)
    assert at_once == one_by_one
    assert Counter(worlds[0].ledger.recomputed) == Counter(worlds[1].ledger.recomputed)


@given(scenes(), st.data())
def test_rules_functions_and_edges_compute_their_readers_and_the_cone_of_those(
    scene: Scene, data: st.DataObject
) -> None:
    """Theorem 2 for changes that leave a site computed: it is then itself among what is recomputed."""
    world = warm(scene)
    changed: set[str] = set()
    for kind in data.draw(st.lists(st.sampled_from(["rule", "function", "edge"]), min_size=1, max_size=3)):
        if kind == "edge" and scene.edges:
            edge = data.draw(st.sampled_from(scene.edges))
            world.patch_edge(edge, fresh_rule())
            changed.add(edge[1])
            continue
        site = data.draw(st.sampled_from(scene.computed))
        world.patch_rule(site, fresh_rule()) if kind == "rule" else world.patch(site, fresh_rule())
        changed.add(site)
    reads = wiring(world.graph)
    world.demand(scene.demand)
    assert Counter(world.ledger.recomputed) == Counter(
        (changed | cone(reads, changed)) & support(reads, scene.demand)
    )


@given(scenes(), st.data())
def test_of_values_and_rules_together_the_rules_are_computed_too(scene: Scene, data: st.DataObject) -> None:
    """For values at V and rules or functions at R: ((cone(V ∪ R) ∪ R) − V) ∩ support(D, cut at V)."""
    world = warm(scene)
    ruled = [site for site in scene.patch if data.draw(st.booleans())]
    given_ = [site for site in scene.patch if site not in ruled]
    for site in data.draw(st.permutations(scene.patch)):
        if site in given_:
            world.patch(site, fresh_value())
        elif site in scene.computed and data.draw(st.booleans()):
            world.patch_rule(site, fresh_rule())
        else:
            world.patch(site, fresh_rule())
    world.demand(scene.demand)
    expected = stale_under_rules(wiring(world.graph), given_, ruled, scene.demand)
    assert Counter(world.ledger.recomputed) == Counter(expected)


@given(scenes())
def test_reused_are_the_valid_sites_that_the_computation_reads_and_the_valid_targets(scene: Scene) -> None:
    world = warm(scene)
    patch_values(world, scene.patch)
    world.demand(scene.demand)
    done, reads = set(world.ledger.recomputed), wiring(world.graph)
    touched = {read for site in done for read in reads[site]} | set(scene.demand)
    assert Counter(world.ledger.reused) == Counter((touched - done) & set(scene.computed))
