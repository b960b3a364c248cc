"""Greedy searches: the ledger shows what each trial costs, the search itself what guesses take."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conewise.paper import theory
from conewise.paper.experiments.edges import expected, spent_on
from tests.laws.mutants import GREEDY_MUTANTS, SPECULATION_MUTANTS
from tests.laws.refuting import is_refuted
from tests.laws.searches import Search, searches

chances = st.integers(0, 6).map(lambda sixths: Fraction(sixths, 6))
lines = st.tuples(st.integers(1, 5), st.integers(1, 4), chances)


@given(searches())
def test_a_trial_costs_its_correction_the_cone_and_the_corrections_behind(search: Search) -> None:
    cost = theory.greedy_cost(
        search.scene.graph(), search.readers, search.visits, search.kept, search.scene.demand
    )
    assert list(cost.costs) == search.bills()
    assert cost.total == sum(cost.costs)


@settings(max_examples=30)
@given(searches())
def test_inputs_first_is_the_cheapest_order_of_readers_and_outputs_first_the_dearest(search: Search) -> None:
    """Two edges into each reader, all removed; readers at different sites."""
    graph = search.scene.graph()
    sites = tuple(dict.fromkeys(search.readers))[:4]
    order = sorted(range(len(sites)), key=lambda at: search.scene.computed.index(sites[at]))

    def surplus(readers: tuple[int, ...]) -> Fraction:
        return Fraction(theory.greedy_cost(graph, sites, [at for at in readers for _ in (0, 1)]).surplus)

    found = [surplus(readers) for readers in permutations(range(len(sites)))]
    assert surplus(tuple(order)) == min(found) == 0
    assert surplus(tuple(reversed(order))) == max(found)
    below = sum(other in graph.cone(site) for site in sites for other in sites)
    assert max(found) == 2 * below


@settings(max_examples=30)
@given(lines)
def test_guesses_take_on_average_what_the_closed_form_says(line: tuple[int, int, Fraction]) -> None:
    found = theory.speculation(*line)
    assert (found.stacks, found.worlds, found.in_vain) == expected(*line)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(2, 9))
def test_stacks_are_at_most_the_wrong_guesses_and_the_full_ones(script: list[bool], width: int) -> None:
    spent, wrong = spent_on(script, width), script.count(False)
    assert spent.stacks <= wrong + -(-(len(script) - wrong) // width)
    assert spent.in_vain == spent.worlds - spent.stacks - len(script)


@pytest.mark.parametrize("formula", GREEDY_MUTANTS)
def test_a_wrong_cost_of_a_search_is_refuted(formula: Callable[..., int]) -> None:
    def refutes(search: Search) -> bool:
        arguments = (search.scene.graph(), search.readers, search.visits, search.kept, search.scene.demand)
        return formula(*arguments) != sum(search.bills())

    assert is_refuted(searches(), refutes, examples=100)


@pytest.mark.parametrize("formula", SPECULATION_MUTANTS)
def test_a_wrong_count_of_guessed_worlds_is_refuted(formula: Callable[..., Fraction]) -> None:
    def refutes(line: tuple[int, int, Fraction]) -> bool:
        return formula(*line) != expected(*line)[1]

    assert is_refuted(lines, refutes, examples=20)
