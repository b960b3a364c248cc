"""Least squares: known coefficients come back, and Student's quantiles are those of the tables."""

import numpy as np
import pytest

from conewise.errors import TheoryError
from conewise.paper import theory
from conewise.paper.theory.clocks import student_quantile


@pytest.mark.parametrize(
    ("confidence", "freedom", "quantile"),
    [
        (0.95, 1, 12.7062047),
        (0.95, 2, 4.3026527),
        (0.95, 3, 3.1824463),
        (0.95, 10, 2.2281389),
        (0.99, 5, 4.0321430),
        (0.90, 30, 1.6972609),
        (0.95, 1000, 1.9623391),
    ],
)
def test_the_quantiles_are_those_of_the_tables(confidence: float, freedom: int, quantile: float) -> None:
    assert student_quantile(confidence, freedom) == pytest.approx(quantile, abs=1e-6)


def test_a_line_through_points_is_found_exactly() -> None:
    fit = theory.least_squares([(1, x) for x in range(5)], [3 + 2 * x for x in range(5)])
    assert [float(c) for c in fit.coefficients] == pytest.approx([3, 2])
    assert fit.r_squared == pytest.approx(1)
    assert fit.degrees_of_freedom == 3


def test_error_bars_match_a_textbook_example() -> None:
    """Of y = 1, 3, 2, 5, 4 at x = 1..5: slope 0.8, standard error 0.34641."""
    fit = theory.least_squares([(1, x) for x in range(1, 6)], [1, 3, 2, 5, 4])
    slope = fit.coefficients[1]
    assert slope.value == pytest.approx(0.8)
    assert slope.standard_error == pytest.approx(0.3464102)
    assert (slope.low, slope.high) == pytest.approx(
        (0.8 - 3.1824463 * 0.3464102, 0.8 + 3.1824463 * 0.3464102)
    )
    assert str(slope).startswith("0.8 [")


def test_correlated_residuals_never_shrink_the_error_bar() -> None:
    rng = np.random.default_rng(3)
    noise = np.cumsum(rng.normal(size=60))
    rows, targets = [(1.0, float(x)) for x in range(60)], [float(value) for value in noise]
    plain, robust = theory.least_squares(rows, targets), theory.least_squares(rows, targets, lags=4)
    assert robust.coefficients[1].value == plain.coefficients[1].value
    assert robust.coefficients[1].standard_error > plain.coefficients[1].standard_error


@pytest.mark.parametrize(("columns", "targets"), [(2.0**-900, 1.0), (2.0**900, 2.0**400), (1.0, 2.0**-500)])
def test_the_fit_does_not_depend_on_the_units(columns: float, targets: float) -> None:
    """Of columns around 1e270 and 1e-270 the squares are no floats, or 0."""
    x, y = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 3.0, 2.0, 5.0, 4.0]
    plain = theory.least_squares([(1, at) for at in x], y, lags=1)
    fit = theory.least_squares([(1, at * columns) for at in x], [value * targets for value in y], lags=1)
    slope, expected = fit.coefficients[1], plain.coefficients[1]
    unit = targets / columns
    assert slope.value == pytest.approx(expected.value * unit)
    assert slope.standard_error == pytest.approx(expected.standard_error * unit)
    assert fit.r_squared == pytest.approx(plain.r_squared)


def test_equal_targets_are_explained_in_full() -> None:
    assert theory.least_squares([(1, at) for at in range(7)], [0.1] * 7).r_squared == 1.0


def test_what_is_refused() -> None:
    with pytest.raises(TheoryError, match="cannot fix 2 coefficients"):
        theory.least_squares([(1, 1), (1, 2)], [1, 2])
    with pytest.raises(TheoryError, match="cannot tell the coefficients apart"):
        theory.least_squares([(1, 2)] * 5, [1, 2, 3, 4, 5])
    with pytest.raises(TheoryError, match="a measurement is inf, and a finite number was expected"):
        theory.least_squares([(1, x) for x in range(5)], [1, 2, 3, 4, float("inf")])
    with pytest.raises(TheoryError, match="the confidence is 95"):
        theory.least_squares([(1, x) for x in range(5)], [1, 2, 3, 4, 6], confidence=95)
