"""What workers would gain of a search: a batch costs what its longest part does."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import conewise as cw
from conewise.circuits.question import circuit_question
from conewise.jobs.search_job import BatchRates, batch_rates
from tests.circuits.small_models import small


@given(st.integers(2, 600), st.floats(0, 1), st.floats(1e-6, 1), st.integers(1, 64))
def test_gains_are_bounded_and_grow(worlds: int, launch: float, world: float, workers: int) -> None:
    rates = BatchRates(worlds, launch, world)
    gains = [rates.gain(count) for count in range(1, workers + 1)]
    assert gains[0] == 1
    assert all(1 <= gain <= count + 1e-9 for count, gain in enumerate(gains, 1))
    assert gains == sorted(gains)
    assert gains[-1] <= (launch + worlds * world) / (launch + world) + 1e-9
    enough = rates.worth_having(workers)
    assert rates.gain(enough) >= 0.9 * gains[-1]
    assert enough == 1 or rates.gain(enough - 1) < 0.9 * gains[-1]


def test_rates_are_read_off_two_batches() -> None:
    model = small("gpt2")
    given = circuit_question(
        model.model, base=model.base, source=model.source, metric=cw.logit_diff(answer=3, wrong=5)
    )
    with given.forward() as forward:
        few = forward.few
    # Each batch is timed three times: those of one world take 3 seconds, the others 3 more for each world.
    ticks = itertools.accumulate([0.0, *[3.0, 5.0] * 3, *[3.0 * (few + 1), 5.0] * 3])
    rates = batch_rates(given, lambda: next(ticks))
    assert rates.worlds == few + 1
    assert rates.world == pytest.approx(3.0)
    assert rates.launch == pytest.approx(0.0)
