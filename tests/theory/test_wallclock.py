"""Wall clock: the fit finds its constants, the paper's ceiling, and exact ratios at finite depth."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from conewise import theory
from conewise.errors import TheoryError


def test_the_fit_finds_a_and_beta_and_a_fixed_cost() -> None:
    rng = np.random.default_rng(0)
    samples = [
        (cone, nodes, 2e-6 * cone + 3e-8 * nodes + 5e-5 + rng.normal(0, 1e-6))
        for nodes in (400, 4_000, 40_000)
        for cone in range(0, nodes, nodes // 20)
    ]
    fit = theory.calibrate(samples, confidence=0.999)
    assert fit.intercept is not None
    for estimate, truth in ((fit.a, 2e-6), (fit.beta, 3e-8), (fit.intercept, 5e-5)):
        assert estimate.low < truth < estimate.high
        assert estimate.value == pytest.approx(truth, rel=0.05)
    assert fit.overhead == pytest.approx(0.015, rel=0.05)
    assert fit.ceiling == pytest.approx(1.015 / 0.515, rel=0.01)
    cones = range(400)
    exact = theory.wallclock_ratio(cones, 400, fit.a.value, fit.beta.value, fit.intercept.value)
    assert fit.ratio(cones, 400) == pytest.approx(exact)


def test_on_one_graph_the_paper_reads_the_intercept_as_beta() -> None:
    samples = [(cone, 412, 0.042 * cone + 2.24) for cone in range(0, 412, 4)]
    with pytest.raises(TheoryError, match="pass `intercept=False`"):
        theory.calibrate(samples)
    fit = theory.calibrate(samples, intercept=False)
    assert fit.a.value == pytest.approx(0.042)
    assert fit.beta.value == pytest.approx(2.24 / 412)
    assert f"{fit.ceiling:.2f}" == "1.79"


def test_the_paper_s_ceiling_needs_its_beta_unrounded() -> None:
    assert f"{theory.wallclock_ceiling(0.042, 2.24 / 412):.4f}" == "1.7943"
    assert f"{theory.wallclock_ceiling(0.042, 0.0054):.4f}" == "1.7955"
    assert theory.wallclock_ceiling(Fraction(42, 1000), Fraction(54, 10000)) == Fraction(79, 44)


def test_the_finite_ratio_tends_to_the_ceiling() -> None:
    L = 5_000
    ratio = theory.wallclock_ratio(range(L), L, Fraction(42, 1000), Fraction(54, 10000))
    assert isinstance(ratio, Fraction)
    assert float(ratio) == pytest.approx(float(Fraction(79, 44)), rel=1e-3)
    assert theory.wallclock_ratio([1, 2, 3], 4, 1, 0) == theory.sweep_ratio([1, 1, 1], terminal=1)
    assert theory.wallclock_ceiling(1, 0) == 2
    assert theory.wallclock_ceiling(1, 0, theory.mean_fraction([1, 2, 3])) == theory.sweep_ratio([1, 2, 3])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.wallclock_ceiling(0, 1), "a is 0"),
        (lambda: theory.wallclock_ceiling(1, -1e-9), "β is -1e-09; it is zero or more"),
        (lambda: theory.wallclock_ratio([], 4, 1, 0), "takes no time"),
        (lambda: theory.wallclock_ratio([-1], 4, 1, 0), "a cone size is -1"),
        (lambda: theory.calibrate([(1, 2)]), "a sample is"),  # type: ignore[list-item]
        (lambda: theory.calibrate([(1, 2, 3), (2, 3, 4)]), "cannot fix 3 coefficients"),
    ],
)
def test_what_is_refused(call: Any, message: str) -> None:
    with pytest.raises(TheoryError, match=message):
        call()
