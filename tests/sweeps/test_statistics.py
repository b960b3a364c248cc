"""Statistics over prompts, against formulas and against worlds in which the truth is known."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from conewise.errors import SweepError
from conewise.sweeps import statistics
from conewise.sweeps.statistics import statistics_of


def effects(cells: int, prompts: int, seed: int = 0, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(cells, prompts, generator=generator, dtype=torch.float64) + shift


def test_mean_and_standard_error_are_those_of_the_formulas() -> None:
    given = effects(3, 9)
    found = statistics_of(given)
    for cell, row in enumerate(given.tolist()):
        mean = sum(row) / 9
        variance = sum((value - mean) ** 2 for value in row) / 8
        assert float(found.mean[cell]) == pytest.approx(mean)
        assert float(found.sem[cell]) == pytest.approx(math.sqrt(variance / 9))


def test_p_is_the_share_of_all_signs_that_lie_as_far_from_zero() -> None:
    given = effects(4, 6, shift=0.5)
    given[3] = torch.tensor([1.0, 1, 1, 1, 1, 1])
    found = statistics_of(given)
    assert found.is_exact
    for cell, row in enumerate(given.tolist()):
        own = abs(sum(row))
        signs = list(itertools.product((1, -1), repeat=6))
        sums = [abs(sum(sign * value for sign, value in zip(one, row, strict=True))) for one in signs]
        count = sum(total >= own - 1e-9 for total in sums)
        assert float(found.p[cell]) == count / 64
    assert float(found.p[3]) == 2 / 64


def test_random_signs_estimate_what_all_of_them_say() -> None:
    given = effects(20, 12, shift=0.4)
    exact, drawn = statistics_of(given), statistics_of(given, resamples=4000)
    assert exact.is_exact
    assert not drawn.is_exact
    worst = 5 * (0.25 / 4000) ** 0.5
    torch.testing.assert_close(drawn.p, exact.p, rtol=0, atol=worst)
    assert float(drawn.p.min()) >= 1 / 4001, "an estimate of 0 would claim more than was tried"


def test_the_interval_is_that_of_a_bootstrap_by_hand() -> None:
    given = effects(2, 8)
    found = statistics_of(given, resamples=20_000)
    drawing = random.Random(3)
    for cell, row in enumerate(given.tolist()):
        means = sorted(sum(drawing.choices(row, k=8)) / 8 for _ in range(20_000))
        assert float(found.low[cell]) == pytest.approx(means[500], abs=0.03)
        assert float(found.high[cell]) == pytest.approx(means[19_499], abs=0.03)
    narrow = statistics_of(given, level=0.5)
    assert (narrow.high - narrow.low < found.high - found.low).all()


def test_intervals_hold_the_truth_and_tests_reject_it_as_often_as_they_say() -> None:
    """A thousand cells whose true effect is 0: about 5% of p are below 0.05, and 95% of intervals hold it."""
    found = statistics_of(effects(1000, 25, seed=1), resamples=1000)
    assert 0.03 < float((found.p < 0.05).double().mean()) < 0.07
    held = ((found.low <= 0) & (found.high >= 0)).double().mean()
    assert 0.89 < float(held) < 0.97  # a percentile interval of 25 prompts is a little too narrow
    assert float((statistics_of(effects(100, 25, shift=2.0), resamples=1000).p < 0.01).double().mean()) == 1


def test_cells_that_are_gone_through_in_turns_have_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    given = effects(7, 5)
    whole = statistics_of(given)
    monkeypatch.setattr(statistics, "AT_ONCE", 20_001)
    parts = statistics_of(given)
    for name in ("mean", "sem", "low", "high", "p"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-12, atol=1e-12)


def test_equal_effects_have_no_spread_and_infinite_ones_none_that_is_known() -> None:
    given = torch.tensor([[2.0] * 6, [0.0] * 6, [math.inf, 1, 1, 1, 1, 1]], dtype=torch.float64)
    found = statistics_of(given)
    assert found.sem[:2].tolist() == [0, 0]
    assert found.low[:2].tolist() == pytest.approx([2, 0])
    assert found.p[:2].tolist() == [2 / 64, 1]
    assert float(found.mean[2]) == math.inf
    assert all(math.isnan(float(row[2])) for row in (found.sem, found.low, found.high, found.p))


@pytest.mark.parametrize(
    ("given", "how", "said"),
    [
        ((3, 1), {}, "need two or more of them"),
        ((3, 4), {"level": 95}, "level is 95; it is a share between 0 and 1"),
        ((3, 4), {"level": True}, "level is True"),
        ((3, 4), {"level": "high"}, "level is 'high'"),
        ((3, 4), {"resamples": 0}, "resamples is 0"),
        ((3, 4), {"resamples": 2.5}, "resamples is 2.5"),
    ],
)
def test_what_is_no_level_or_number_is_refused(
    given: tuple[int, int], how: dict[str, object], said: str
) -> None:
    with pytest.raises(SweepError, match=said):
        statistics_of(effects(*given), **how)  # type: ignore[arg-type]
