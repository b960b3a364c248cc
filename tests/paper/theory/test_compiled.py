"""Compiled plans in the terms of the wall clock: what becomes of β, and of what a launch takes."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conewise.errors import TheoryError
from conewise.paper import theory

A, BETA = Fraction(42, 1000), Fraction(224, 41200)


def uniform(layers: int, nodes: int = 4) -> tuple[list[int], int]:
    """The cones of a uniform stack, one site at the end of each layer, and its size with a terminal node."""
    return [nodes * (layers - i) + 1 for i in range(1, layers + 1)], nodes * layers + 1


@given(st.integers(1, 50), st.integers(1, 50))
def test_one_demand_a_plan_is_the_paper_s_reading(cone: int, more: int) -> None:
    nodes = cone + more
    assert theory.compiled_ratio([cone], nodes, A, BETA) == theory.wallclock_ratio([cone], nodes, A, BETA)


@given(st.integers(2, 40), st.integers(1, 20))
def test_a_plan_that_serves_more_demands_comes_nearer_to_the_ratio_without_beta(
    layers: int, runs: int
) -> None:
    cones, nodes = uniform(layers)
    without = theory.wallclock_ratio(cones, nodes, A, 0)
    interpreted = theory.wallclock_ratio(cones, nodes, A, BETA)
    once, often = (theory.compiled_ratio(cones, nodes, A, BETA, runs=r) for r in (runs, runs + 1))
    assert interpreted <= once < often < without == theory.compiled_ratio(cones, nodes, A, 0)


def test_the_ceiling_of_the_paper_s_constants_goes_from_179_to_2() -> None:
    cones, nodes = uniform(400)
    assert float(theory.wallclock_ceiling(A, BETA)) == pytest.approx(1.794, abs=1e-3)
    assert theory.compiled_ceiling(A) == 2
    assert float(theory.compiled_ratio(cones, nodes, A, BETA)) == pytest.approx(2.0, abs=0.01)


@given(st.integers(2, 30), st.integers(0, 10))
def test_stacked_worlds_pay_a_launch_once(layers: int, tenths: int) -> None:
    """Between the serial ratio and K·N over the union; the more of a node is its launch, the larger."""
    cones, nodes = uniform(layers)
    union, launch = max(cones), Fraction(tenths, 10)
    stacked = theory.compiled_ratio(cones, nodes, 1, 0, launch=launch, launches=union)
    assert theory.compiled_ratio(cones, nodes, 1, 0) <= stacked <= Fraction(layers * nodes, union)
    assert theory.compiled_ratio(cones, nodes, 1, 0, launch=launch) == theory.wallclock_ratio(
        cones, nodes, 1, 0
    )
    if tenths == 10:
        assert stacked == Fraction(layers * nodes, union)


def test_the_limit_of_stacking_is_two_over_the_share_that_is_not_launch() -> None:
    limit = theory.compiled_ceiling(1, Fraction(3, 4))
    assert limit == 8
    gaps: list[Fraction] = []
    for layers in (100, 200, 400):
        cones, nodes = uniform(layers)
        ratio = theory.compiled_ratio(cones, nodes, 1, 0, launch=Fraction(3, 4), launches=max(cones))
        gaps.append(abs(Fraction(ratio) - Fraction(limit)))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < Fraction(1, 4)


def test_a_launch_may_compute_several_nodes() -> None:
    """So there may be fewer launches than the largest cone has nodes."""
    assert theory.compiled_ratio([5, 3], 6, 1, 0, launch=1, launches=2) == Fraction(12, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"launches": 0}, "more than nothing"),
        ({"launches": 9}, "no more than all cones"),
        ({"launch": 2}, "its launch included"),
        ({"runs": 0}, "the number of runs is 0"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(TheoryError, match=message):
        theory.compiled_ratio([5, 3], 6, 1, 0, **arguments)


def test_what_has_no_limit_is_refused() -> None:
    with pytest.raises(TheoryError, match="has no limit"):
        theory.compiled_ceiling(1, 1)
    with pytest.raises(TheoryError, match="more than 0 and at most 1"):
        theory.compiled_ceiling(1, 0, 0)
