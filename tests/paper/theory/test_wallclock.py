"""Wall clock: the fit finds its constants, the paper's ceiling, and exact ratios at finite depth."""

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conewise.errors import TheoryError
from conewise.paper import theory

Weight = int | float | Fraction


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


COST = st.fractions(min_value=0, max_value=9, max_denominator=4)


@given(a=COST.map(lambda a: a + 1), beta=COST, fixed=COST, M=st.integers(1, 9), t=st.integers(0, 12))
def test_from_which_side_the_ratio_comes_to_its_limit(
    a: Fraction, beta: Fraction, fixed: Fraction, M: int, t: int
) -> None:
    """From above iff c < (a+β)(M−t), and nearer with every layer; from below it can come as well."""
    limit = Fraction(theory.wallclock_ceiling(a, beta))
    away = [uniform_ratio(L, M, t, a, beta, fixed) - limit for L in (1, 2, 3, 10) if M * (L - 1) + t or beta]
    side = (a + beta) * (M - t) - fixed
    for ratio in away:
        assert (ratio > 0, ratio < 0) == (side > 0, side < 0)
    assert all(abs(nearer) <= abs(ratio) for ratio, nearer in pairwise(away))


@given(a=COST.map(lambda a: a + 1), beta=COST, fixed=COST, M=st.integers(1, 9), data=st.data())
def test_from_which_side_it_comes_for_sites_within_layers(
    a: Fraction, beta: Fraction, fixed: Fraction, M: int, data: st.DataObject
) -> None:
    """The rest of a site's own layer, and the readout, are r on average: from above iff c < (a+β)(M+t−2r)."""
    t, L = data.draw(st.integers(0, 5)), data.draw(st.integers(2, 6))
    rests = data.draw(st.lists(st.integers(t, M - 1 + t), min_size=1, max_size=4))
    cones = [(L - i) * M + rest for i in range(1, L + 1) for rest in rests]
    ratio = theory.wallclock_ratio(cones, L * M + t, a, beta, fixed)
    limit = theory.wallclock_ceiling(a, beta)
    side = (a + beta) * (M + t - 2 * Fraction(sum(rests), len(rests))) - fixed
    assert (ratio > limit, ratio < limit) == (side > 0, side < 0)


def test_it_comes_from_below_where_the_fixed_cost_or_the_terminal_node_is_large() -> None:
    assert uniform_ratio(10, M=2, t=0, a=1, beta=0, fixed=5) < theory.wallclock_ceiling(1, 0) == 2
    assert uniform_ratio(10, M=1, t=3, a=1, beta=0, fixed=0) < 2
    assert uniform_ratio(10, M=1, t=1, a=1, beta=0, fixed=0) == 2


def uniform_ratio(L: int, M: int, t: int, a: Weight, beta: Weight, fixed: Weight) -> Fraction:
    """ρ in time of L layers of M nodes, the site at the end of each, and t nodes after the last."""
    cones = [(L - i) * M + t for i in range(1, L + 1)]
    return Fraction(theory.wallclock_ratio(cones, L * M + t, a, beta, fixed))


def test_constants_fitted_below_zero_count_as_zero() -> None:
    """With β = −0.9 as fitted, this sweep would take less than no time."""
    below = theory.Estimate(-0.9, 0.6, -2.1, 0.3)
    one = theory.Estimate(1.0, 0.1, 0.8, 1.2)
    fit = theory.Calibration(one, below, below, 0.5)
    cones = [10, 40, 70]
    assert fit.ratio(cones, 100) == theory.wallclock_ratio(cones, 100, 1, 0) == 2.5
    assert fit.ceiling == 2
    assert fit.seconds(10, 100) == 10
    assert fit.overhead == -0.9
    with pytest.raises(TheoryError, match=r"a was fitted as -0\.9: a node that takes no time to compute"):
        theory.Calibration(below, one, None, 0.5).ratio(cones, 100)
    unknown = theory.Estimate(math.nan, 0.0, 0.0, 0.0)
    with pytest.raises(TheoryError, match="the fitted β is nan, and a finite number was expected"):
        _ = theory.Calibration(one, unknown, None, 0.5).overhead


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.wallclock_ceiling(1, 0, 2), "the mean fraction is 2; it is the part of a graph"),
        (
            lambda: theory.wallclock_ratio([100], 10, 1, 0),
            "a cone has the size 100 in a graph of the size 10",
        ),
        (lambda: theory.calibrate([(3, 2, 1.0)] * 5), "a cone has the size 3 in a graph of the size 2"),
        (lambda: theory.calibrate([(1, 2, -1.0)] * 5), "the time of sample 0 is -1.0"),
        (lambda: theory.calibrate([]), "no samples are given"),
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
