"""The clock of stacks: constants that are put in are found, and say how many worlds at once are enough."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conewise.errors import TheoryError
from conewise.paper import theory
from conewise.paper.theory import Estimate, StackClock


def clock(launch: float, work: float) -> StackClock:
    return StackClock(Estimate(launch, 0, launch, launch), Estimate(work, 0, work, work), 1.0)


def test_the_fit_finds_what_a_launch_and_a_unit_of_work_take() -> None:
    samples = [(n, w, 0.25 * n + 0.5 * w) for n, w in ((100, 64), (50, 64), (25, 64), (7, 32), (3, 8))]
    found = theory.calibrate_stacks(samples)
    assert float(found.launch) == pytest.approx(0.25)
    assert float(found.work) == pytest.approx(0.5)
    assert found.rate == pytest.approx(2.0)
    assert found.seconds(8, 3) == pytest.approx(3.5)
    assert found.r_squared == pytest.approx(1.0)


def test_constants_below_zero_count_as_zero_and_both_predict_nothing() -> None:
    assert clock(-1.0, 2.0).seconds(10, 3) == 6.0
    assert clock(1.0, -2.0).seconds(10, 3) == 10.0
    with pytest.raises(TheoryError, match="no time, so there is no rate"):
        clock(1.0, -2.0).rate  # noqa: B018  # a property that refuses
    with pytest.raises(TheoryError, match="neither launches nor work"):
        clock(-1.0, -2.0).seconds(1, 1)


def test_samples_that_are_none_are_refused() -> None:
    with pytest.raises(TheoryError, match="no samples are given"):
        theory.calibrate_stacks([])
    with pytest.raises(TheoryError, match=r"sample 1 is \(1, 2\)"):
        theory.calibrate_stacks([(1, 2, 3), (1, 2)])  # type: ignore[list-item]


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 20), st.integers(1, 99))
def test_with_enough_worlds_at_once_launches_take_less_than_the_share(
    launch: int, work: int, node: int, percent: int
) -> None:
    """Stacks of B worlds that all compute every node: c·N·K/B against the work u·N·K."""
    share = Fraction(percent, 100)
    worlds = clock(launch, work).enough_worlds(node, share)
    assert Fraction(launch, worlds) <= share * work * node
    assert worlds == 1 or Fraction(launch, worlds - 1) > share * work * node
