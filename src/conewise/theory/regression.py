"""Least squares with honest error bars: coefficients, standard errors, confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from conewise.errors import TheoryError

Matrix = npt.NDArray[np.float64]


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
    """A least-squares fit: one estimate per column, and how much of the variance it leaves."""

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
    design, target = np.array(rows, dtype=np.float64), np.array(targets, dtype=np.float64)
    count, width = design.shape if design.ndim == 2 else (len(design), 0)
    if width == 0 or count <= width:
        raise TheoryError(
            f"{count} measurements cannot fix {max(width, 1)} coefficients with an error bar; at least "
            f"{max(width, 1) + 1} are needed."
        )
    if not (np.isfinite(design).all() and np.isfinite(target).all()):
        raise TheoryError("a measurement is not a finite number.")
    # Columns of one size: a node count of 10^5 beside seconds of 10^-5 would look rank-deficient.
    size = np.linalg.norm(design, axis=0)
    if (size == 0).any() or np.linalg.matrix_rank(design / size, tol=1e-9) < width:
        raise TheoryError(
            "the measurements cannot tell the coefficients apart: one column is a combination of the "
            "others. Vary what they measure (for a calibration: cone sizes and graph sizes)."
        )
    scaled = design / size
    inverse = np.linalg.inv(scaled.T @ scaled)
    solution = np.linalg.lstsq(scaled, target, rcond=None)[0]
    residuals = target - scaled @ solution
    freedom = count - width
    squares = float(residuals @ residuals)
    variances = np.diag(inverse) * squares / freedom
    if lags:
        variances = np.maximum(variances, _newey_west(scaled, residuals, inverse, lags))
    errors = np.sqrt(variances) / size
    reach = student_quantile(confidence, freedom)
    spread = float(((target - target.mean()) ** 2).sum())
    return Fit(
        tuple(
            Estimate(float(value), float(error), float(value - reach * error), float(value + reach * error))
            for value, error in zip(solution / size, errors, strict=True)
        ),
        squares,
        freedom,
        1.0 - squares / spread if spread > 0 else 1.0,
    )


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
    if not 0 < confidence < 1:
        raise TheoryError(
            f"the confidence is {confidence}; it is a probability between 0 and 1, such as 0.95."
        )
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
