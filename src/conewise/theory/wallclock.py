"""Wall clock: seconds = a · cone + β · graph (+ a fixed cost), fitted, and the ratio that follows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from conewise.errors import TheoryError
from conewise.theory.regression import Estimate, least_squares
from conewise.theory.weights import Weight, expect_number, expect_weight, ratio, total

Sample = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one demand costs: `a` seconds per recomputed node, `beta` per node of the graph, and `intercept`.

    `intercept` is None where none was fitted; then a fixed cost per demand hides in `beta`.
    """

    a: Estimate
    beta: Estimate
    intercept: Estimate | None
    r_squared: float

    @property
    def overhead(self) -> float:
        """β/a: what a node that is only walked past costs, in nodes computed."""
        return self.beta.value / self.a.value

    @property
    def ceiling(self) -> float:
        """`wallclock_ceiling` of the fit; a β fitted below zero counts as zero."""
        return float(wallclock_ceiling(self.a.value, max(self.beta.value, 0.0)))

    def seconds(self, cone: float, nodes: float) -> float:
        """The predicted time of one demand."""
        fixed = self.intercept.value if self.intercept else 0.0
        return self.a.value * cone + self.beta.value * nodes + fixed

    def ratio(self, cones: Sequence[float], nodes: float) -> float:
        """`wallclock_ratio` of a sweep at the fitted constants."""
        if not cones:
            raise TheoryError("no cones are given, and a ratio needs at least one.")
        return len(cones) * self.seconds(nodes, nodes) / sum(self.seconds(cone, nodes) for cone in cones)


def calibrate(samples: Iterable[Sample], *, intercept: bool = True, confidence: float = 0.95) -> Calibration:
    """Fit a and β to measurements (cone size, graph size, seconds) by least squares.

    With `intercept`, a fixed cost per demand is fitted too; the graph sizes must then vary. On one
    graph, β·N and a fixed cost are one number: pass `intercept=False` to read it all as β·N, as
    the paper does (2.24 ms on 412 nodes).
    """
    rows = [tuple(map(float, sample)) for sample in samples]
    if any(len(row) != 3 for row in rows):
        raise TheoryError("a sample is (cone size, graph size, seconds).")
    if intercept and len({nodes for _, nodes, _ in rows}) == 1:
        raise TheoryError(
            f"all samples are of one graph size, {rows[0][1]:g}: β and a fixed cost cannot be told "
            "apart. Measure graphs of several sizes, or pass `intercept=False`."
        )
    design = [(cone, nodes, 1.0) if intercept else (cone, nodes) for cone, nodes, _ in rows]
    fit = least_squares(design, [seconds for _, _, seconds in rows], confidence=confidence)
    fixed = fit.coefficients[2] if intercept else None
    return Calibration(fit.coefficients[0], fit.coefficients[1], fixed, fit.r_squared)


def wallclock_ratio(
    cones: Iterable[Weight], nodes: Weight, a: Weight, beta: Weight, intercept: Weight = 0
) -> Fraction | float:
    """ρ in time: a full run for each site over the sweep, each demand paying β·N and `intercept`.

    ρ = |cones| · (a·N + β·N + c) / Σ_cones (a·cone + β·N + c), exact at any depth and for any cones.
    """
    a, beta = _expect_constants(a, beta)
    fixed = beta * expect_weight(nodes, "the graph size") + expect_weight(intercept, "the intercept")
    sizes = [expect_weight(cone, "a cone size") for cone in cones]
    spent = total([a * size + fixed for size in sizes])
    if spent == 0:
        raise TheoryError("the sweep takes no time, so its ratio has no value: no cones, or all of size 0.")
    return ratio(len(sizes) * (a * nodes + fixed), spent)


def wallclock_ceiling(a: Weight, beta: Weight, mean_fraction: Weight = Fraction(1, 2)) -> Fraction | float:
    """The limit of ρ in time: (a+β) / (a·E[U]+β), with E[U] = 1/2 for the uniform profile.

    docs/theory.md#wall-clock. a = 0.042 and β = 2.24/412 give 1.794, the paper's 1.79; its β rounded
    to 0.0054 gives 1.795, which would print as 1.80.
    """
    a, beta = _expect_constants(a, beta)
    fraction = expect_weight(mean_fraction, "the mean fraction")
    if fraction == 0 and beta == 0:
        raise TheoryError("with β = 0 and an empty mean cone the ratio has no limit.")
    return ratio(a + beta, a * fraction + beta)


def _expect_constants(a: Weight, beta: Weight) -> tuple[Weight, Weight]:
    a, beta = expect_number(a, "a"), expect_number(beta, "β")
    if a <= 0:
        raise TheoryError(f"a is {a}; a node takes more than zero time to compute.")
    if beta < 0:
        raise TheoryError(
            f"β is {beta}; it is zero or more. A fitted β below zero cannot be told from zero: pass 0."
        )
    return a, beta
