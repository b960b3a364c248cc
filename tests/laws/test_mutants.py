"""The laws can fail: each wrong formula is refuted, by the shared strategy, within the normal budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import conewise as cw
from tests.laws.mutants import DEMAND_MUTANTS, GRAFT_MUTANTS, RULE_MUTANTS
from tests.laws.oracle import cone, stale, stale_under_rules, wiring
from tests.laws.scenes import Scene, fresh_rule, scenes
from tests.laws.worlds import patch_values, stale_sites, warm

# Refuting is enough; nobody reads the smallest example.
no_shrinking = settings(phases=[Phase.generate])


@pytest.mark.parametrize("formula", DEMAND_MUTANTS)
def test_a_wrong_formula_for_a_demand_is_refuted_by_the_engine(formula: Callable[..., set[str]]) -> None:
    @no_shrinking
    @given(scenes())
    def law(scene: Scene) -> None:
        world = warm(scene)
        patch_values(world, scene.patch)
        world.demand(scene.demand)
        expected = formula(wiring(world.graph), scene.patch, scene.demand)
        assert Counter(world.ledger.recomputed) == Counter(expected)

    with pytest.raises(AssertionError):
        law()


@pytest.mark.parametrize("formula", RULE_MUTANTS)
def test_a_wrong_formula_for_rules_is_refuted_by_the_engine(formula: Callable[..., set[str]]) -> None:
    @no_shrinking
    @given(scenes())
    def law(scene: Scene) -> None:
        world = warm(scene)
        for site in scene.patch:
            world.patch(site, fresh_rule())
        world.demand(scene.demand)
        expected = formula(wiring(world.graph), scene.patch, scene.demand)
        assert Counter(world.ledger.recomputed) == Counter(expected)

    with pytest.raises(AssertionError):
        law()


@pytest.mark.parametrize("formula", GRAFT_MUTANTS)
def test_a_wrong_formula_for_a_graft_is_refuted_by_the_engine(formula: Callable[..., set[str]]) -> None:
    @no_shrinking
    @given(scenes().filter(lambda scene: bool(scene.edges)), st.data())
    def law(scene: Scene, data: st.DataObject) -> None:
        world = warm(scene)
        reads, edge = wiring(world.graph), data.draw(st.sampled_from(scene.edges))
        graft = world.graph.graft(edge, cw.chain(fresh_rule(), fresh_rule()))
        assert stale_sites(world) == formula(reads, edge) | set(graft.sites)

    with pytest.raises(AssertionError):
        law()


def test_at_least_one_scene_in_ten_tells_each_wrong_formula_from_the_right_one() -> None:
    """Else a law could hold for a hundred scenes by chance."""
    told: Counter[str] = Counter()
    scenes_seen = 0

    @settings(max_examples=200, phases=[Phase.generate])
    @given(scenes())
    def look(scene: Scene) -> None:
        nonlocal scenes_seen
        scenes_seen += 1
        reads: dict[str, tuple[str, ...]] = dict.fromkeys(scene.sources, ()) | {
            site: inputs for site, _, inputs in scene.nodes
        }
        right = stale(reads, scene.patch, scene.demand)
        for formula in DEMAND_MUTANTS:
            told[formula.__name__] += formula(reads, scene.patch, scene.demand) != right
        right = stale_under_rules(reads, (), scene.patch, scene.demand)
        for formula in RULE_MUTANTS:
            told[formula.__name__] += formula(reads, scene.patch, scene.demand) != right
        for wrong in GRAFT_MUTANTS:
            told[wrong.__name__] += any(
                wrong(reads, edge) != {edge[1]} | cone(reads, [edge[1]]) for edge in scene.edges
            )

    look()
    assert all(count >= scenes_seen / 10 for count in told.values()), told
    assert len(told) == len(DEMAND_MUTANTS) + len(RULE_MUTANTS) + len(GRAFT_MUTANTS)
