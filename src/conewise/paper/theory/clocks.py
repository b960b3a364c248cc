"""Least squares with honest error bars: coefficients, standard errors, confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from conewise.errors import TheoryError
from conewise.paper import expect
from conewise.paper.expect import Weight, as_float, shown
from conewise.paper.theory.sweeps import saturating_worlds
from conewise.paper.theory.weights import Amount, amount, total

Matrix = npt.NDArray[np.float64]

MAX_CONFIDENCE = 1 - 1e-9
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
    rows: Sequence[Sequence[Weight]], targets: Sequence[Weight], *, confidence: float = 0.95, lags: int = 0
) -> Fit:
    """Fit targets ≈ rows · coefficients; intervals by Student's t at n − p degrees of freedom.

    With `lags` > 0, neighbouring residuals may be correlated up to that distance: the standard
    error is then the larger of the classical one and that of Newey and West.
    """
    design, target = _expect_table(rows, targets)
    lags = expect.count(lags, "`lags`", least=0)
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
        [expect.real(value, "a measurement") for value in expect.items(row, f"row {place}", "its columns")]
        for place, row in enumerate(expect.items(rows, "the list of rows", "the columns of each measurement"))
    ]
    wanted = [
        expect.real(value, "a measurement")
        for value in expect.items(targets, "the list of targets", "one number for each row")
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
    given = expect.number(confidence, "the confidence")
    if not 0 < given <= MAX_CONFIDENCE:
        raise TheoryError(
            f"the confidence is {shown(given)}; it is a probability between 0 and 1, such as 0.95, and at "
            f"most {MAX_CONFIDENCE}."
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


# -- Wallclock -------------------------------------------------------------------------------------
# Wall clock: seconds = a · cone + β · graph (+ a fixed cost), fitted, and the ratio that follows.


Sample = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The cost of a demand: `a` seconds per recomputed node, `beta` per node of the graph, and `intercept`.

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
        return float(
            (Amount.of(expect.number(self.beta.value, "the fitted β")) / self._constants[0]).weight("β/a")
        )

    @property
    def ceiling(self) -> float:
        """`wallclock_ceiling` of the fit."""
        a, beta, _ = self._constants
        return as_float(Fraction(wallclock_ceiling(a.exact, beta.exact)), "the ceiling")

    def seconds(self, cone: float, nodes: float) -> float:
        """The predicted time of one demand."""
        (size,), whole = expect_cones([cone], nodes)
        a, beta, fixed = self._constants
        return as_float((a * size + beta * whole + fixed).exact, "the predicted time")

    def ratio(self, cones: Iterable[float], nodes: float) -> float:
        """`wallclock_ratio` of a sweep."""
        a, beta, fixed = (constant.exact for constant in self._constants)
        return as_float(Fraction(wallclock_ratio(cones, nodes, a, beta, fixed)), "the ratio")

    @property
    def _constants(self) -> tuple[Amount, Amount, Amount]:
        """a, β and the fixed cost that predictions are made with."""
        a = _fitted(self.a, "a")
        if a <= 0:
            raise TheoryError(
                f"a was fitted as {shown(a)}: a node that takes no time to compute. Measure cones that "
                "differ more in size, or more often."
            )
        fixed = _fitted(self.intercept, "intercept") if self.intercept else Amount()
        return a, max(_fitted(self.beta, "β"), Amount()), max(fixed, Amount())


def _fitted(constant: Estimate, what: str) -> Amount:
    return Amount.of(expect.number(constant.value, f"the fitted {what}"))


def calibrate(samples: Iterable[Sample], *, intercept: bool = True, confidence: float = 0.95) -> Calibration:
    """Fit a and β to measurements (cone size, graph size, seconds) by least squares.

    With `intercept`, a fixed cost per demand is fitted too; the graph sizes must then vary. On one
    graph, β·N and a fixed cost are one number: pass `intercept=False` to read it all as β·N, as
    the paper does (2.24 ms on 412 nodes).
    """
    rows = _expect_samples(samples, "cone size", "graph size", "time")
    for cone, nodes, _ in rows:
        expect_cones([cone], nodes)
    has_fixed = expect.flag(intercept, "`intercept`")
    if has_fixed and len({nodes for _, nodes, _ in rows}) == 1:
        raise TheoryError(
            f"all samples are of one graph size, {float(rows[0][1]):g}: β and a fixed cost cannot be told "
            "apart. Measure graphs of several sizes, or pass `intercept=False`."
        )
    design = [(cone, nodes, 1.0) if has_fixed else (cone, nodes) for cone, nodes, _ in rows]
    fit = least_squares(design, [seconds for _, _, seconds in rows], confidence=confidence)
    fixed = fit.coefficients[2] if has_fixed else None
    return Calibration(fit.coefficients[0], fit.coefficients[1], fixed, fit.r_squared)


def _expect_samples(samples: object, *names: str) -> list[tuple[Weight, Weight, Weight]]:
    """Return the samples of a calibration: three numbers of zero or more each, of these names."""
    of = f"({', '.join(names)})"
    found = []
    for place, sample in enumerate(expect.items(samples, "the list of samples", f"{of} for each")):
        numbers = expect.items(sample, f"sample {place}", of)
        if len(numbers) != 3:
            raise TheoryError(f"sample {place} is {shown(sample)}; a sample is {of}.")
        first, second, third = (
            expect.weight(number, f"the {name} of sample {place}")
            for number, name in zip(numbers, names, strict=True)
        )
        found.append((first, second, third))
    if not found:
        raise TheoryError("no samples are given; a calibration needs more of them than constants.")
    return found


def wallclock_ratio(
    cones: Iterable[Weight], nodes: Weight, a: Weight, beta: Weight, intercept: Weight = 0
) -> Fraction | float:
    """ρ in time: a full run for each site over the sweep, each demand paying β·N and `intercept`.

    ρ = |cones| · (a·N + β·N + c) / Σ_cones (a·cone + β·N + c), exact at any depth and for any cones, of
    which none can be larger than the graph. So it is never below 1.
    """
    sizes, N = expect_cones(cones, nodes)
    per_node, per_graph = expect_constants(a, beta)
    overhead = per_graph * N + amount(intercept, "the intercept")
    spent = per_node * total(sizes) + len(sizes) * overhead
    if not spent:
        raise TheoryError("the sweep takes no time, so its ratio has no value: no cones, or all of size 0.")
    return (len(sizes) * (per_node * N + overhead) / spent).ratio


def wallclock_ceiling(a: Weight, beta: Weight, mean_fraction: Weight = Fraction(1, 2)) -> Fraction | float:
    """The limit of ρ in time: (a+β) / (a·E[U]+β), with E[U] = 1/2 for the uniform profile.

    docs/theory.md#wall-clock. a = 0.042 and β = 2.24/412 give 1.794, the paper's 1.79; its β rounded
    to 0.0054 gives 1.795, which would print as 1.80.
    """
    per_node, per_graph = expect_constants(a, beta)
    share = _expect_share(mean_fraction)
    if not share and not per_graph:
        raise TheoryError("with β = 0 and an empty mean cone the ratio has no limit.")
    return ((per_node + per_graph) / (per_node * share + per_graph)).ratio


def _expect_share(mean_fraction: object) -> Amount:
    share = expect.number(mean_fraction, "the mean fraction")
    if not 0 <= share <= 1:
        raise TheoryError(
            f"the mean fraction is {shown(share)}; it is the part of a graph that lies below a site, from 0 "
            "to 1."
        )
    return Amount.of(share)


def expect_cones(cones: object, nodes: object) -> tuple[list[Amount], Amount]:
    """The sizes of cones, none larger than the graph, and the size of the graph."""
    N = amount(nodes, "the graph size")
    given = expect.items(cones, "the list of cones", "the size of each")
    sizes = [amount(cone, "a cone size") for cone in given]
    for size in sizes:
        if size > N:
            raise TheoryError(
                f"a cone has the size {shown(size)} in a graph of the size {shown(N)}: what "
                "lies below a site is a part of the graph. Both count computed nodes, in the same unit."
            )
    return sizes, N


def expect_constants(a: object, beta: object) -> tuple[Amount, Amount]:
    """A, more than zero, and β, zero or more."""
    per_node, per_graph = expect.number(a, "a"), expect.number(beta, "β")
    if per_node <= 0:
        raise TheoryError(f"a is {shown(per_node)}; a node takes more than zero time to compute.")
    if per_graph < 0:
        raise TheoryError(
            f"β is {shown(per_graph)}; it is zero or more. Where noise puts a fitted β below zero, pass 0."
        )
    return Amount.of(per_node), Amount.of(per_graph)


# -- Compiled --------------------------------------------------------------------------------------
# Compiled sweeps, in the terms of the wall clock: one walk for a plan, one launch for all its worlds.


def compiled_ratio(
    cones: Iterable[Weight],
    nodes: Weight,
    a: Weight,
    beta: Weight,
    *,
    runs: int = 1,
    launch: Weight = 0,
    launches: Weight | None = None,
) -> Fraction | float:
    """ρ in time where plans are compiled: full runs, planned once, over a sweep that is planned once.

    docs/theory.md#compiled-plans. A plan walks the graph, β·N, and serves `runs` runs of all worlds; a node
    takes `a`, of which the part `launch` is paid once for all worlds that are computed together. A
    sweep of K worlds launches `launches` times, each node once where all worlds are one stack: the
    weight of the union of the cones; less where one launch computes several nodes, more where the worlds are
    several stacks. None: once for each world, as one after another do.

        ρ = (R·K·a·N + β·N) / (R·((a − λ)·Σ cone + λ·launches) + β·N)

    With R·K = 1 it is `wallclock_ratio`; as R·K grows, β is paid by ever more demands.
    """
    sizes, N = expect_cones(cones, nodes)
    per_node, per_graph = expect_constants(a, beta)
    together = _expect_launch(launch, per_node)
    count, spread = expect.count(runs, "the number of runs"), total(sizes)
    often = spread if launches is None else amount(launches, "the number of launches")
    if often > spread or (not often and spread):
        raise TheoryError(
            f"the sweep launches {shown(often)}; that is more than nothing and no more than all cones "
            f"together, {shown(spread)}."
        )
    walk = per_graph * N
    spent = count * ((per_node - together) * spread + together * often) + walk
    if not sizes or not spent:
        raise TheoryError("the sweep takes no time, so its ratio has no value: no cones, or all of size 0.")
    return ((count * len(sizes) * per_node * N + walk) / spent).ratio


def compiled_ceiling(
    a: Weight, launch: Weight = 0, mean_fraction: Weight = Fraction(1, 2)
) -> Fraction | float:
    """The limit of `compiled_ratio` as worlds grow in number: a / ((a − λ)·E[U]).

    docs/theory.md#compiled-plans. Without stacking, λ = 0, it is 1/E[U], and the limit of ever more runs too:
    2 for the uniform profile, whatever β was. E[U] is the mean share of the graph that lies below a site.
    """
    per_node, _ = expect_constants(a, 0)
    together = _expect_launch(launch, per_node)
    share = _expect_share(mean_fraction)
    if not share:
        raise TheoryError("the mean fraction is 0; here it is more than 0 and at most 1.")
    if together == per_node:
        raise TheoryError(
            "a node takes nothing but its launch, which all worlds share: the ratio grows with their number "
            "and has no limit."
        )
    return (per_node / ((per_node - together) * share)).ratio


def _expect_launch(launch: object, per_node: Amount) -> Amount:
    together = amount(launch, "`launch`")
    if together > per_node:
        raise TheoryError(
            f"`launch` is {shown(together)}, and a node takes {shown(per_node)} in all, its launch included."
        )
    return together


# -- Stacks ----------------------------------------------------------------------------------------
# The clock of stacks: seconds = launches · c + work / rate, fitted; and how many worlds are enough.


StackSample = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class StackClock:
    """The time of a stack of worlds: `launch` seconds for each launch, `work` for each unit of work.

    docs/theory.md#wavefront. Work is FLOPs, or node evaluations; 1/`work` is the rate. Noise can put either
    constant below zero, which nothing can take; predictions then take it for zero. Both at once predict
    nothing: TheoryError.
    """

    launch: Estimate
    work: Estimate
    r_squared: float

    @property
    def rate(self) -> float:
        """Units of work a second."""
        _, each = self._constants
        if not each:
            raise TheoryError("work was fitted to take no time, so there is no rate. Measure larger stacks.")
        return as_float((1 / each).exact, "the rate")

    def seconds(self, launches: Weight, work: Weight) -> float:
        """The predicted time of so many launches and so much work."""
        c, each = self._constants
        spent = c * amount(launches, "`launches`") + each * amount(work, "`work`")
        return as_float(spent.exact, "the predicted time")

    def enough_worlds(self, node: Weight, share: Weight) -> int:
        """With more worlds at once than that, stacks of nested cones save less than `share` of the work.

        `node` is the work of one node in one world: see `saturating_worlds`.
        """
        c, each = self._constants
        return saturating_worlds(c.exact, (each * amount(node, "the work of a node")).exact, share)

    @property
    def _constants(self) -> tuple[Amount, Amount]:
        c = max(_fitted(self.launch, "launch"), Amount())
        each = max(_fitted(self.work, "work"), Amount())
        if not c and not each:
            raise TheoryError("neither launches nor work were fitted to take any time. Measure more often.")
        return c, each


def calibrate_stacks(samples: Iterable[StackSample], *, confidence: float = 0.95) -> StackClock:
    """Fit the two constants to measurements (launches, work, seconds) by least squares.

    Stacks of several widths tell them apart: the work stays, and the launches fall.
    """
    found = _expect_samples(samples, "launches", "work", "time")
    fit = least_squares(
        [(launches, work) for launches, work, _ in found],
        [seconds for _, _, seconds in found],
        confidence=confidence,
    )
    launch, work = fit.coefficients
    return StackClock(launch, work, fit.r_squared)
