"""Statistics over prompts, against formulas and against worlds in which the truth is known."""

from __future__ import annotations

import itertools
import math

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


def test_the_interval_is_the_mean_and_as_many_standard_errors_as_students_table_says() -> None:
    for prompts, expected in (
        (2, 12.7062),
        (3, 4.3027),
        (5, 2.7764),
        (8, 2.3646),
        (30, 2.0452),
        (400, 1.9659),
    ):
        found = statistics_of(effects(3, prompts), resamples=10)
        torch.testing.assert_close(found.high - found.mean, expected * found.sem, rtol=1e-4, atol=0)
        torch.testing.assert_close(found.mean - found.low, expected * found.sem, rtol=1e-4, atol=0)
    narrow, wide = statistics_of(effects(3, 5), level=0.5), statistics_of(effects(3, 5), level=0.999)
    torch.testing.assert_close(narrow.high - narrow.mean, 0.7407 * narrow.sem, rtol=1e-4, atol=0)
    torch.testing.assert_close(wide.high - wide.mean, 8.6103 * wide.sem, rtol=1e-4, atol=0)


def test_tests_reject_the_truth_as_often_as_they_say() -> None:
    """A thousand cells whose true effect is 0: about 5% of p are below 0.05."""
    found = statistics_of(effects(1000, 25, seed=1), resamples=1000)
    assert 0.03 < float((found.p < 0.05).double().mean()) < 0.07
    assert float((statistics_of(effects(100, 25, shift=2.0), resamples=1000).p < 0.01).double().mean()) == 1


@pytest.mark.parametrize("prompts", [2, 3, 5, 8, 10, 30])
def test_intervals_hold_the_truth_as_often_as_they_say_however_few_prompts_there_are(prompts: int) -> None:
    """Percentiles of a bootstrap, in their place, held it in 50, 74, 84, 89, 90 and 93 %."""
    found = statistics_of(effects(20_000, prompts, seed=prompts, shift=3.0), resamples=1)
    held = float(((found.low <= 3) & (found.high >= 3)).double().mean())
    assert held == pytest.approx(0.95, abs=0.008)  # five standard errors of 20,000 trials


def test_statistics_of_few_prompts_say_what_they_rest_on() -> None:
    assert statistics_of(effects(2, 5)).note == ""
    assert "normally distributed" not in repr(statistics_of(effects(2, 5)))
    found = statistics_of(effects(2, 3))
    assert found.note.startswith("3 prompts: the intervals take effects to be normally distributed")
    assert found.note.endswith("p is 0.25 or more whatever they are")
    assert found.note in repr(found)
    assert float(statistics_of(effects(100, 3, shift=9.0)).p.min()) == 0.25


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


@pytest.mark.parametrize("prompts", [3, 8, 40])
def test_p_is_the_same_however_few_signs_are_held_at_a_time(
    prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(prompts)
    effects = torch.randn(30, prompts, generator=generator, dtype=torch.float64) + 0.2
    whole = statistics_of(effects, resamples=500, seed=3)
    if prompts < 9:
        signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=prompts)), dtype=torch.float64).T
    else:
        coins = torch.randint(2, (prompts, 500), generator=torch.Generator().manual_seed(4))
        signs = 2.0 * coins.double() - 1.0
    far = ((effects @ signs).abs() >= effects.sum(-1).abs()[:, None] - 1e-9).sum(-1)
    exact = whole.is_exact
    assert exact == (prompts < 9)
    torch.testing.assert_close(whole.p, far / len(signs[0]) if exact else (far + 1) / 501, check_dtype=False)
    for held in (1, 700, 5000):
        monkeypatch.setattr("conewise.sweeps.statistics.AT_ONCE", held)
        assert torch.equal(statistics_of(effects, resamples=500, seed=3).p, whole.p)


def test_more_resamples_than_can_be_drawn_are_refused() -> None:
    with pytest.raises(
        SweepError, match=r"resamples is 1000000000000000000000000000000; .* from 1 to 1,000,000"
    ):
        statistics_of(torch.randn(2, 200), resamples=10**30)
