"""The reverse pass: its count from the forward graph alone is that of the graph that holds its gradients."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings

from conewise.paper import theory
from conewise.reactive.gradients import gradients
from tests.laws.mutants import REVERSE_MUTANTS
from tests.laws.refuting import is_refuted
from tests.laws.reverse_scenes import ReverseScene, reverse_scenes


@settings(max_examples=150)
@given(reverse_scenes())
def test_the_reverse_pass_is_counted_as_the_ledger_counts_it(scene: ReverseScene) -> None:
    cost = theory.reverse_cost(scene.graph(), scene.patches, "loss", scene.wrt)
    full, bills = scene.bills()
    assert (cost.forward, cost.backward) == full
    assert list(zip(cost.stale_forward, cost.stale_backward, strict=True)) == bills


@given(reverse_scenes())
def test_it_is_the_exact_cost_on_the_graph_that_holds_the_gradients(scene: ReverseScene) -> None:
    graph = scene.graph()
    cost = theory.reverse_cost(graph, scene.patches, "loss", scene.wrt)
    demand = ("loss", *gradients(graph, "loss", scene.wrt).values())
    both = map(sum, zip(cost.stale_forward, cost.stale_backward, strict=True))
    assert tuple(both) == theory.sweep_costs(graph, scene.patches, demand)
    assert cost.forward + cost.backward == theory.full_cost(graph, demand)
    spent = sum(cost.stale_forward) + sum(cost.stale_backward)
    if spent:
        assert cost.ratio == theory.sweep_ratio(graph, scene.patches, demand=demand)


@given(reverse_scenes())
def test_the_ratio_of_both_passes_is_that_of_the_forward_pass_and_of_the_share(scene: ReverseScene) -> None:
    """ρ_joint = (1 + b) / (1/ρ + b·σ)."""
    cost = theory.reverse_cost(scene.graph(), scene.patches, "loss", scene.wrt)
    if cost.backward and cost.forward and sum(cost.stale_forward):
        weight = Fraction(cost.backward, cost.forward)
        assert cost.ratio == theory.dense_joint_ratio(cost.forward_ratio, weight, stale=cost.share)


@pytest.mark.parametrize("formula", REVERSE_MUTANTS)
def test_a_wrong_count_of_the_reverse_pass_is_refuted(formula: Callable[..., int]) -> None:
    def refutes(scene: ReverseScene) -> bool:
        site = scene.patches[0][0]
        found = ReverseScene(scene.nodes, scene.wrt, ((site,),)).bills()[1][0][1]
        return formula(scene.graph(), site, "loss", scene.wrt) != found

    assert is_refuted(reverse_scenes(), refutes, examples=100)
