"""The simulation against the schedule itself, played with the same costs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conewise.jobs.scheduling import Rates, simulate, worth_having

COSTS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 1000)), min_size=1, max_size=40)


@given(COSTS, st.integers(1, 16))
def test_a_schedule_is_between_its_bounds(shares: list[tuple[int, int]], workers: int) -> None:
    """No share waits while a worker is free: so says the bound for lists of tasks (Graham, 1969)."""
    found = simulate(shares, workers, Rates(setup=2.0, baseline=0.0, flop=0.5))
    total, largest = sum(cost for _, cost in shares) * 0.5, max(cost for _, cost in shares) * 0.5
    least = 2 + max(total / workers, largest)
    assert least - 1e-9 <= found.makespan <= 2 + total / workers + largest * (1 - 1 / workers) + 1e-9
    assert math.isclose(sum(found.busy), total)
    assert found.balance >= 1 - 1e-9


def test_one_worker_takes_the_sum() -> None:
    found = simulate([(0, 10), (0, 20), (1, 5)], 1, Rates(setup=3, baseline=1, flop=2, share=0.5))
    assert found.makespan == pytest.approx(3 + 35 * 2 + 2 * 1 + 3 * 0.5)
    assert found.baselines == 2


def test_more_workers_than_shares_are_worth_nothing() -> None:
    shares = [(0, 100)] * 4
    rates = Rates(setup=0.0, baseline=0.0, flop=1.0)
    assert worth_having(shares, 64, rates) == 4
    assert simulate(shares, 64, rates).makespan == simulate(shares, 4, rates).makespan
