"""The little statistics that timings need: a trimmed median, and a drift with its confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from conewise.errors import TheoryError
from conewise.theory.clocks.regression import Estimate, least_squares
from conewise.theory.weights import expect_count, expect_float, expect_items, expect_number, shown


def trimmed_median(values: Iterable[float], trim: float = 0.1) -> float:
    """The median of `values` without the largest `trim` of them.

    Whatever disturbs a timing makes it longer, so only the upper end is trimmed (trimming both
    ends alike would leave the median where it is).
    """
    share = expect_number(trim, "`trim`")
    if not 0 <= share < 1:
        raise TheoryError(f"trim is a fraction from 0 up to 1, and {shown(share)} is not.")
    ordered = sorted(_expect_timings(values))
    if not ordered:
        raise TheoryError("the median of no values is not defined.")
    kept = max(1, len(ordered) - math.floor(share * len(ordered)))
    return statistics.median(ordered[:kept])


def block_medians(values: Iterable[float], size: int) -> list[float]:
    """The trimmed median of each block of `size` values, in order; `size` divides their number."""
    timings, length = _expect_timings(values), expect_count(size, "the size of a block")
    if not timings or len(timings) % length:
        raise TheoryError(f"{len(timings)} values do not fall into blocks of {shown(length)}.")
    return [trimmed_median(timings[first : first + length]) for first in range(0, len(timings), length)]


def drift(x: Iterable[float], y: Iterable[float], lags: int = 5) -> Estimate:
    """The slope of the least-squares line through (x, y), with its 95 % confidence interval.

    Neighbouring timings on one machine are alike, so the interval allows for residuals that are
    correlated over `lags` points. It allows for too little where they stay alike for long: it is then
    narrower than it says (docs/theory.md#index).
    """
    rows = [(at, 1.0) for at in _expect_timings(x)]
    return least_squares(rows, _expect_timings(y), lags=lags).coefficients[0]


def _expect_timings(values: object) -> list[float]:
    given = expect_items(values, "the list of values", "numbers")
    return [expect_float(value, "a value") for value in given]
