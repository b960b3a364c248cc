"""Greedy searches in closed form: the best width, the bound on what guessing gains, and what is refused."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conewise.errors import TheoryError
from conewise.paper import theory
from tests.laws.cost_scenes import line

chances = st.integers(0, 9).map(lambda part: Fraction(part, 10))
launches = st.integers(0, 400).map(lambda part: Fraction(part, 4))


@settings(max_examples=40)
@given(chances, launches)
def test_the_best_width_is_where_one_world_more_stops_paying(right: Fraction, launch: Fraction) -> None:
    gains = [theory.speculation_gain(width, right, launch) for width in range(1, 100)]
    best = theory.best_width(right, launch)
    assert best == gains.index(max(gains)) + 1
    behind = gains[1:]
    top = behind.index(max(behind))
    assert behind[: top + 1] == sorted(behind[: top + 1])
    assert behind[top:] == sorted(behind[top:], reverse=True)


@given(chances, launches, st.integers(2, 300))
def test_no_width_gains_more_than_the_bound(right: Fraction, launch: Fraction, width: int) -> None:
    gain, bound = theory.speculation_gain(width, right, launch), theory.speculation_bound(right, launch)
    assert bound == min(1 / (1 - right), 1 + launch)
    assert gain < bound


def test_both_bounds_are_approached() -> None:
    certain = theory.speculation_gain(10_000, 1, 9)
    assert theory.speculation_bound(1, 9) == 10
    assert 9.9 < certain < 10
    dear = theory.speculation_gain(60, Fraction(1, 2), 10**6)
    assert theory.speculation_bound(Fraction(1, 2), 10**6) == 2
    assert 1.999 < dear < 2


@given(st.integers(1, 300), st.integers(2, 20), chances)
def test_a_long_line_takes_what_the_gain_supposes(candidates: int, width: int, right: Fraction) -> None:
    """Stacks for each candidate tend to 1 over what a stack decides, and are never fewer."""
    decided = sum(right**step for step in range(width))
    stacks = theory.speculation(candidates, width, right).stacks
    assert candidates / decided <= stacks <= candidates / decided + width
    assert stacks >= math.ceil(candidates / width)


@given(st.integers(1, 50), chances)
def test_one_at_a_time_throws_nothing_away(candidates: int, right: Fraction) -> None:
    found = theory.speculation(candidates, 1, right)
    assert (found.stacks, found.worlds, found.in_vain) == (candidates, candidates, 0)


@given(st.integers(1, 40), st.integers(2, 9))
def test_where_every_guess_is_right_only_the_current_worlds_come_on_top(candidates: int, width: int) -> None:
    found = theory.speculation(candidates, width, 1)
    assert found.stacks == math.ceil(candidates / width)
    assert found.worlds == candidates + found.stacks
    assert found.in_vain == 0


def test_guessing_pays_only_where_a_launch_takes_time_and_guesses_hold() -> None:
    assert theory.best_width(Fraction(19, 20), 0) == 1
    assert theory.best_width(0, 100) == 1
    assert theory.best_width(Fraction(9, 10), 20) > theory.best_width(Fraction(9, 10), 5) > 1


def test_what_no_search_is_refused() -> None:
    with pytest.raises(TheoryError, match="from 0 to 1"):
        theory.speculation(5, 2, 1.5)
    with pytest.raises(TheoryError, match=r"as Fraction\(9, 10\), or fewer candidates"):
        theory.speculation(30_000, 2, 0.9)
    with pytest.raises(TheoryError, match="no width is the best"):
        theory.best_width(1, 3)
    with pytest.raises(TheoryError, match="above 100,000"):
        theory.best_width(1 - Fraction(1, 10**9), 10**9)
    with pytest.raises(TheoryError, match="nothing bounds the gain"):
        theory.speculation_bound(1, 3, 0)
    with pytest.raises(TheoryError, match="nothing to gain"):
        theory.speculation_gain(2, 0.5, 0, 0)
    with pytest.raises(TheoryError, match="there are 2, counted from 0"):
        theory.greedy_cost(line(nodes=3), ["n1", "n2"], [2])
    with pytest.raises(TheoryError, match="what is kept has 1"):
        theory.greedy_cost(line(nodes=3), ["n1", "n2"], [0], [1])
