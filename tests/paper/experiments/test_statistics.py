import numpy as np

from conewise.paper.experiments.result import block_medians, fitted_slope, trimmed_median


def test_the_slowest_tenth_does_not_count() -> None:
    assert trimmed_median([1.0] * 5 + [2.0] * 4 + [99.0]) == 1.0
    assert trimmed_median([3.0]) == 3.0
    assert trimmed_median([1.0, 2.0, 3.0, 4.0], trim=0.5) == 1.5


def test_blocks_are_taken_in_order() -> None:
    assert block_medians([1.0, 1.0, 5.0, 5.0], 2) == [1.0, 5.0]


def test_a_drift_is_found_and_noise_is_not() -> None:
    noise = np.random.default_rng(0).normal(scale=0.1, size=100)
    x = list(range(100))
    flat, rising = fitted_slope(x, list(5 + noise)), fitted_slope(x, list(5 + 0.01 * np.arange(100) + noise))
    assert flat.low <= 0.0 <= flat.high
    assert rising.low > 0.0
    assert rising.low <= 0.01 <= rising.high
