"""The little statistics that timings need: a trimmed median, and a drift with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from conewise.theory.regression import Estimate, least_squares


def trimmed_median(values: Sequence[float], trim: float = 0.1) -> float:
    """The median of `values` without the largest `trim` of them.

    Whatever disturbs a timing makes it longer, so only the upper end is trimmed (trimming both
    ends alike would leave the median where it is).
    """
    if not 0 <= trim < 1:
        raise ValueError(f"trim is a fraction from 0 up to 1, and {trim} is not.")
    if not len(values):
        raise ValueError("the median of no values is not defined.")
    ordered = np.sort(np.asarray(values, dtype=float))
    kept = max(1, len(ordered) - math.floor(trim * len(ordered)))
    return float(np.median(ordered[:kept]))


def block_medians(values: Sequence[float], size: int) -> list[float]:
    """The trimmed median of each block of `size` values, in order; `size` divides their number."""
    if not len(values) or len(values) % size:
        raise ValueError(f"{len(values)} values do not fall into blocks of {size}.")
    return [trimmed_median(values[first : first + size]) for first in range(0, len(values), size)]


def drift(x: Sequence[float], y: Sequence[float], lags: int = 5) -> Estimate:
    """The slope of the least-squares line through (x, y), with its 95 % confidence interval.

    Neighbouring timings on one machine are alike, so the interval allows for residuals that are
    correlated over `lags` points.
    """
    fit = least_squares([(float(at), 1.0) for at in x], [float(value) for value in y], lags=lags)
    return fit.coefficients[0]
