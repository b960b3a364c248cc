"""Least squares with honest error bars: coefficients, standard errors, confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from conewise.errors import TheoryError
from conewise.theory.weights import as_float, expect_count, expect_float, expect_items, expect_number, shown

Matrix = npt.NDArray[np.float64]

MOST_CONFIDENT = 1 - 1e-9
"""Nearer to 1 the quantiles would be rounding errors."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A fitted number, its standard error and its confidence interval."""

    value: float
    standard_error: float
    low: float
    high: float

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.6g} [{self.low:.6g}, {self.high:.6g}]"


@dataclass(frozen=True, slots=True)
class Fit:
    """A least-squares fit: one estimate per column, and how much of the variance it explains.

    `r_squared` is 1 where all targets are equal. It can be below zero in a fit without a constant column.
    """

    coefficients: tuple[Estimate, ...]
    residual_squares: float
    degrees_of_freedom: int
    r_squared: float


def least_squares(
    rows: Sequence[Sequence[float]], targets: Sequence[float], *, confidence: float = 0.95, lags: int = 0
) -> Fit:
    """Fit targets ≈ rows · coefficients; intervals by Student's t at n − p degrees of freedom.

    With `lags` > 0, neighbouring residuals may be correlated up to that distance: the standard
    error is then the larger of the classical one and that of Newey and West.
    """
    design, target = _expect_table(rows, targets)
    lags = expect_count(lags, "`lags`", least=0)
    count, width = design.shape
    if count <= width:
        raise TheoryError(
            f"{count} measurements cannot fix {width} coefficients with an error bar; at least "
            f"{width + 1} are needed."
        )
    freedom = count - width
    reach = student_quantile(confidence, freedom)
    # Columns and targets of size one: a node count of 10^5 beside seconds of 10^-5 would look
    # rank-deficient, and squares of 10^200 would not be floats.
    size, unit = _sizes(design), float(_sizes(target)) or 1.0
    scaled, target = design / np.where(size > 0, size, 1.0), target / unit
    if (size == 0).any() or np.linalg.matrix_rank(scaled, tol=1e-9) < width:
        raise TheoryError(
            "the measurements cannot tell the coefficients apart: one column is a combination of the "
            "others. Vary what they measure (for a calibration: cone sizes and graph sizes)."
        )
    inverse: Matrix = np.linalg.inv(scaled.T @ scaled).astype(np.float64)
    solution = np.linalg.lstsq(scaled, target, rcond=None)[0]
    residuals = target - scaled @ solution
    squares = float(residuals @ residuals)
    variances = np.diag(inverse) * squares / freedom
    if lags:
        variances = np.maximum(variances, _newey_west(scaled, residuals, inverse, lags))
    errors = np.sqrt(variances)
    spread = float(((target - target.mean()) ** 2).sum())
    return Fit(
        tuple(
            _estimate(value, error, reach, Fraction(unit) / Fraction(column))
            for value, error, column in zip(
                solution.tolist(), errors.tolist(), np.atleast_1d(size).tolist(), strict=True
            )
        ),
        as_float(Fraction(squares) * Fraction(unit) ** 2, "the sum of the squared residuals"),
        freedom,
        1.0 if (target == target[0]).all() else 1.0 - squares / spread,
    )


def _expect_table(rows: object, targets: object) -> tuple[Matrix, Matrix]:
    """The design, of at least one column, and as many targets as it has rows; all finite."""
    table = [
        [expect_float(value, "a measurement") for value in expect_items(row, f"row {place}", "its columns")]
        for place, row in enumerate(expect_items(rows, "the list of rows", "the columns of each measurement"))
    ]
    wanted = [
        expect_float(value, "a measurement")
        for value in expect_items(targets, "the list of targets", "one number for each row")
    ]
    widths = {len(row) for row in table}
    if len(widths) != 1 or 0 in widths:
        raise TheoryError(
            f"the rows have {', '.join(map(str, sorted(widths))) or 'no'} columns; each has the same number "
            "of them, at least one."
        )
    if len(wanted) != len(table):
        raise TheoryError(f"{len(table)} rows have {len(wanted)} targets; give one target for each row.")
    return np.array(table), np.array(wanted)


def _sizes(columns: Matrix) -> Matrix:
    """The length of each column, which no square overflows; the largest float where it is larger."""
    largest = np.abs(columns).max(axis=0)
    unit = np.where(largest > 0, largest, 1.0)
    with np.errstate(over="ignore"):
        lengths: Matrix = np.minimum(np.linalg.norm(columns / unit, axis=0) * unit, np.finfo(np.float64).max)
    return np.where(largest > 0, lengths, 0.0)


def _estimate(value: float, error: float, reach: float, unit: Fraction) -> Estimate:
    """A coefficient of the scaled columns, in `unit` of the given ones."""
    bounds = value, error, value - reach * error, value + reach * error
    return Estimate(*(as_float(Fraction(bound) * unit, "a coefficient") for bound in bounds))


def _newey_west(design: Matrix, residuals: Matrix, inverse: Matrix, lags: int) -> Matrix:
    scores = design * residuals[:, None]
    meat = scores.T @ scores
    for lag in range(1, min(lags, len(scores) - 1) + 1):
        cross = scores[lag:].T @ scores[:-lag]
        meat += (1 - lag / (lags + 1)) * (cross + cross.T)
    count, width = design.shape
    variances: Matrix = np.diag(inverse @ meat @ inverse) * count / (count - width)
    return variances


def student_quantile(confidence: float, freedom: int) -> float:
    """The t within which a Student variable lies with probability `confidence`, on both sides."""
    given = expect_number(confidence, "the confidence")
    if not 0 < given <= MOST_CONFIDENT:
        raise TheoryError(
            f"the confidence is {shown(given)}; it is a probability between 0 and 1, such as 0.95, and at "
            f"most {MOST_CONFIDENT}."
        )
    return _quantile(float(given), freedom)


@lru_cache
def _quantile(confidence: float, freedom: int) -> float:
    if freedom > 500:
        # Cornish-Fisher, to far below any error bar's own accuracy at this size.
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    low, high = 0.0, math.pi / 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(freedom)


def _within(theta: float, freedom: int) -> float:
    """P(|T| ≤ √n·tan θ) for n degrees of freedom: a finite trigonometric sum for whole n."""
    sine, cosine = math.sin(theta), math.cos(theta)
    if freedom % 2 == 0:
        term, series = 1.0, 1.0
        for step in range(1, freedom // 2):
            term *= (2 * step - 1) / (2 * step) * cosine**2
            series += term
        return sine * series
    term, series = cosine, cosine if freedom > 1 else 0.0
    for step in range(1, (freedom - 1) // 2):
        term *= 2 * step / (2 * step + 1) * cosine**2
        series += term
    return 2 / math.pi * (theta + sine * series)
