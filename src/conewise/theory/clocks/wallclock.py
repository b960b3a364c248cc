"""Wall clock: seconds = a · cone + β · graph (+ a fixed cost), fitted, and the ratio that follows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from conewise.errors import TheoryError
from conewise.theory.clocks.regression import Estimate, least_squares
from conewise.theory.weights import (
    Exact,
    Weight,
    answer_ratio,
    any_float,
    as_float,
    exact,
    expect_flag,
    expect_float,
    expect_items,
    expect_number,
    expect_weight,
    ratio,
    shown,
    total,
)

Sample = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one demand costs: `a` seconds per recomputed node, `beta` per node of the graph, and `intercept`.

    `intercept` is None where none was fitted; then a fixed cost per demand hides in `beta`. Noise can put
    β or the intercept below zero, which no demand can cost; predictions then take it for zero. An a that
    is not above zero predicts nothing: TheoryError.
    """

    a: Estimate
    beta: Estimate
    intercept: Estimate | None
    r_squared: float

    @property
    def overhead(self) -> float:
        """β/a as fitted: what a node that is only walked past costs, in nodes computed."""
        (a, _, _), beta = self._constants, expect_number(self.beta.value, "the fitted β")
        return as_float(ratio(exact(beta), a), "β/a")

    @property
    def ceiling(self) -> float:
        """`wallclock_ceiling` of the fit."""
        a, beta, _ = self._constants
        return as_float(exact(wallclock_ceiling(a, beta)), "the ceiling")

    def seconds(self, cone: float, nodes: float) -> float:
        """The predicted time of one demand."""
        (size,), whole = expect_cones([cone], nodes)
        a, beta, fixed = self._constants
        return as_float(a * exact(size) + beta * exact(whole) + fixed, "the predicted time")

    def ratio(self, cones: Iterable[float], nodes: float) -> float:
        """`wallclock_ratio` of a sweep."""
        return as_float(exact(wallclock_ratio(cones, nodes, *self._constants)), "the ratio")

    @property
    def _constants(self) -> tuple[Exact, Exact, Exact]:
        """a, β and the fixed cost that predictions are made with."""
        a, beta = expect_number(self.a.value, "the fitted a"), expect_number(self.beta.value, "the fitted β")
        fixed = expect_number(self.intercept.value, "the fitted intercept") if self.intercept else 0
        if a <= 0:
            raise TheoryError(
                f"a was fitted as {shown(a)}: a node that takes no time to compute. Measure cones that "
                "differ more in size, or more often."
            )
        return exact(a), max(exact(beta), 0), max(exact(fixed), 0)


def calibrate(samples: Iterable[Sample], *, intercept: bool = True, confidence: float = 0.95) -> Calibration:
    """Fit a and β to measurements (cone size, graph size, seconds) by least squares.

    With `intercept`, a fixed cost per demand is fitted too; the graph sizes must then vary. On one
    graph, β·N and a fixed cost are one number: pass `intercept=False` to read it all as β·N, as
    the paper does (2.24 ms on 412 nodes).
    """
    rows = [_expect_sample(sample, place) for place, sample in enumerate(expect_items(samples, *_SAMPLES))]
    has_fixed = expect_flag(intercept, "`intercept`")
    if has_fixed and len({nodes for _, nodes, _ in rows}) == 1:
        raise TheoryError(
            f"all samples are of one graph size, {rows[0][1]:g}: β and a fixed cost cannot be told "
            "apart. Measure graphs of several sizes, or pass `intercept=False`."
        )
    design = [(cone, nodes, 1.0) if has_fixed else (cone, nodes) for cone, nodes, _ in rows]
    if not design:
        raise TheoryError("no samples are given; a calibration needs more of them than constants.")
    fit = least_squares(design, [seconds for _, _, seconds in rows], confidence=confidence)
    fixed = fit.coefficients[2] if has_fixed else None
    return Calibration(fit.coefficients[0], fit.coefficients[1], fixed, fit.r_squared)


_SAMPLES = "the list of samples", "(cone size, graph size, seconds) for each"


def _expect_sample(sample: object, place: int) -> tuple[float, float, float]:
    what = f"sample {place}"
    numbers = expect_items(sample, what, "cone size, graph size, seconds")
    if len(numbers) != 3:
        raise TheoryError(f"{what} is {shown(sample)}; a sample is (cone size, graph size, seconds).")
    (cone,), nodes = expect_cones(numbers[:1], numbers[1])
    seconds = expect_weight(numbers[2], f"the time of {what}")
    return expect_float(cone, what), expect_float(nodes, what), expect_float(seconds, what)


def wallclock_ratio(
    cones: Iterable[Weight], nodes: Weight, a: Weight, beta: Weight, intercept: Weight = 0
) -> Fraction | float:
    """ρ in time: a full run for each site over the sweep, each demand paying β·N and `intercept`.

    ρ = |cones| · (a·N + β·N + c) / Σ_cones (a·cone + β·N + c), exact at any depth and for any cones, of
    which none can be larger than the graph. So it is never below 1.
    """
    sizes, N = expect_cones(cones, nodes)
    per_node, per_graph = expect_constants(a, beta)
    fixed = expect_weight(intercept, "the intercept")
    overhead = exact(per_graph) * exact(N) + exact(fixed)
    spent = exact(per_node) * total(sizes) + len(sizes) * overhead
    if spent == 0:
        raise TheoryError("the sweep takes no time, so its ratio has no value: no cones, or all of size 0.")
    full = len(sizes) * (exact(per_node) * exact(N) + overhead)
    return answer_ratio(ratio(full, spent), any_float([*sizes, N, per_node, per_graph, fixed]))


def wallclock_ceiling(a: Weight, beta: Weight, mean_fraction: Weight = Fraction(1, 2)) -> Fraction | float:
    """The limit of ρ in time: (a+β) / (a·E[U]+β), with E[U] = 1/2 for the uniform profile.

    docs/theory.md#wall-clock. a = 0.042 and β = 2.24/412 give 1.794, the paper's 1.79; its β rounded
    to 0.0054 gives 1.795, which would print as 1.80.
    """
    per_node, per_graph = expect_constants(a, beta)
    share = expect_number(mean_fraction, "the mean fraction")
    if not 0 <= share <= 1:
        raise TheoryError(
            f"the mean fraction is {shown(share)}; it is the part of a graph that lies below a site, from 0 "
            "to 1."
        )
    if share == 0 and per_graph == 0:
        raise TheoryError("with β = 0 and an empty mean cone the ratio has no limit.")
    spent = exact(per_node) * exact(share) + exact(per_graph)
    limit = ratio(exact(per_node) + exact(per_graph), spent)
    return answer_ratio(limit, any_float([per_node, per_graph, share]))


def expect_cones(cones: object, nodes: object) -> tuple[list[Weight], Weight]:
    """The sizes of cones, none larger than the graph, and the size of the graph."""
    N = expect_weight(nodes, "the graph size")
    given = expect_items(cones, "the list of cones", "the size of each")
    sizes = [expect_weight(cone, "a cone size") for cone in given]
    for size in sizes:
        if size > N:
            raise TheoryError(
                f"a cone has the size {shown(size)} in a graph of the size {shown(N)}: what lies below a "
                "site is a part of the graph. Both count computed nodes, in the same unit."
            )
    return sizes, N


def expect_constants(a: object, beta: object) -> tuple[Weight, Weight]:
    """A, more than zero, and β, zero or more."""
    per_node, per_graph = expect_number(a, "a"), expect_number(beta, "β")
    if per_node <= 0:
        raise TheoryError(f"a is {shown(per_node)}; a node takes more than zero time to compute.")
    if per_graph < 0:
        raise TheoryError(
            f"β is {shown(per_graph)}; it is zero or more. Where noise puts a fitted β below zero, pass 0."
        )
    return per_node, per_graph
