"""Stacks of worlds: launches and what is held, against what the engine computes in each world."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conewise.paper import theory
from tests.laws.mutants import LAUNCH_MUTANTS, PEAK_MUTANTS
from tests.laws.refuting import is_refuted
from tests.laws.stacks import Stacked, stacked


@given(stacked(), st.integers(1, 5))
def test_stacks_launch_the_union_of_what_their_worlds_compute(given: Stacked, at_once: int) -> None:
    graph, demand = given.scene.graph(), given.scene.demand
    assert theory.stack_launches(graph, given.sites, at_once, demand) == given.launches(at_once)
    assert theory.stack_launches(graph, given.sites, 1, demand) == theory.sweep_cost(
        graph, given.sites, demand
    )


@settings(max_examples=50)
@given(stacked())
def test_a_stack_holds_in_every_order_what_the_theory_says_and_never_less_than_its_bound(
    given: Stacked,
) -> None:
    graph, demand = given.scene.graph(), given.scene.demand
    for order in islice(given.orders(), 20):
        found = theory.stack_peak(graph, given.sites, order, demand)
        assert found.peak == given.peak(order)
        assert found.bound <= found.peak
    own = [site for site in given.scene.computed if site in set().union(*given.computed())]
    assert theory.stack_peak(graph, given.sites, None, demand).peak == given.peak(own)


@pytest.mark.parametrize("formula", LAUNCH_MUTANTS)
def test_a_wrong_count_of_launches_is_refuted(formula: Callable[..., int]) -> None:
    def refutes(given: Stacked) -> bool:
        return formula(given.scene.graph(), given.sites, 2, given.scene.demand) != given.launches(2)

    assert is_refuted(stacked(), refutes, examples=100)


@pytest.mark.parametrize("formula", PEAK_MUTANTS)
def test_a_wrong_peak_is_refuted(formula: Callable[..., int]) -> None:
    def refutes(given: Stacked) -> bool:
        own = [site for site in given.scene.computed if site in set().union(*given.computed())]
        return formula(given.scene.graph(), given.sites, given.scene.demand) != given.peak(own)

    assert is_refuted(stacked(), refutes, examples=100)
