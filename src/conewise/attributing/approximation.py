"""The result of an attribution: a sweep's, with values that are estimated by gradients."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from conewise.arguments import Count, checked
from conewise.errors import SweepError
from conewise.extras import needs
from conewise.jobs.pool import Pool
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.result import Result
from conewise.sweeps.statistics import student_quantile
from conewise.templates import aligned, bars, beside, heading, note, shown, table

if TYPE_CHECKING:
    import pandas as pd

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

LEVEL = 0.95
"""The confidence level of intervals."""


@dataclass(frozen=True, slots=True)
class SampleError:
    """The errors of a random sample of cells: exact − approximate effects.

    `bias` is their mean and `reach` how far another cell may be off around it: a prediction interval at
    `LEVEL`, which takes errors to be normal and alike, infinite for a sample of fewer than two.
    """

    bias: float
    reach: float
    count: int

    @classmethod
    def of(cls, errors: Sequence[float]) -> SampleError:
        """That of a sample."""
        count = len(errors)
        if count < 2:
            return cls(errors[0] if errors else 0.0, math.inf, count)
        bias = sum(errors) / count
        spread = math.sqrt(sum((one - bias) ** 2 for one in errors) / (count - 1))
        return cls(bias, student_quantile(LEVEL, count - 1) * spread * math.sqrt(1 + 1 / count), count)


@dataclass(frozen=True, eq=False, repr=False)
class Check:
    """Effects of all cells: `estimate`, between `low` and `high` for 95 % of cells.

    Cells of `computed` are exact. The estimate of another cell is its approximate effect plus the mean error
    of the sample, and its interval a prediction interval from the sample's errors (`error`). `top` are the
    cells with the largest effects, `sample` those drawn from the others; `result` is the exact sweep over
    both.
    """

    names: tuple[str, ...]
    approx: Numbers
    estimate: Numbers
    low: Numbers
    high: Numbers
    top: tuple[int, ...]
    sample: tuple[int, ...]
    error: SampleError
    result: Result
    metric: str
    method: str

    @property
    def computed(self) -> tuple[int, ...]:
        """The numbers of the cells that were computed exactly."""
        return (*self.top, *self.sample)

    @property
    def exceeding(self) -> tuple[str, ...]:
        """The cells of the sample whose exact effects are larger than the median of the top."""
        if not self.top:
            return ()
        middle = float(np.median(np.abs(self.estimate[list(self.top)])))
        return tuple(self.names[n] for n in self.sample if abs(float(self.estimate[n])) > middle)

    @property
    def missed_share(self) -> float:
        """An upper bound, at 95 %, on the share of other cells that exceed the median of the top."""
        return share_bound(len(self.exceeding), len(self.sample), LEVEL) if self.sample else 1.0

    @property
    def sign_errors(self) -> tuple[str, ...]:
        """The computed cells whose exact effects have the opposite sign."""
        return tuple(self.names[n] for n in self.computed if self.approx[n] * self.estimate[n] < 0)

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each cell: site, approx, estimate, low, high, and whether it was computed."""
        with needs("tables"):
            import pandas as pd  # noqa: PLC0415

        exact = set(self.computed)
        return pd.DataFrame(
            {
                "site": list(self.names),
                "approx": self.approx,
                "estimate": self.estimate,
                "low": self.low,
                "high": self.high,
                "exact": [number in exact for number in range(len(self.names))],
            }
        )

    def rows(self) -> list[tuple[str, str]]:
        """The check as lines of a table."""
        rest = len(self.names) - len(self.top)
        missed = math.ceil(self.missed_share * rest)
        return [
            ("computed exactly", f"{len(self.top)} largest, {len(self.sample)} of {rest:,} others at random"),
            ("sign errors", f"{len(self.sign_errors)} of {len(self.computed)}"),
            ("off, others", f"{self.error.bias:+.3g} ± {self.error.reach:.3g} (95 % of cells)"),
            (
                "larger than the middle of the top",
                f"{len(self.exceeding)} of the sample; at most {missed:,} of {rest:,} others (95 %)",
            ),
        ]

    def __repr__(self) -> str:
        return (
            f"Check of {self.method} on {self.metric}: {len(self.computed)} of {len(self.names):,} cells "
            f"exact, others within {self.error.bias:+.3g} ± {self.error.reach:.3g}"
        )

    def __str__(self) -> str:
        lines = [f"{self.method} on {self.metric}, {len(self.names):,} cells:", *aligned(self.rows(), "  ")]
        lines.append("  the largest (approximate, exact):")
        lines += [
            f"    {self.approx[number]:+.6g}  {self.estimate[number]:+.6g}  {self.names[number]}"
            for number in self.top[:8]
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        estimates = [
            (self.names[at], float(self.approx[at]), f"{self.approx[at]:+.4g}") for at in self.top[:8]
        ]
        exact = [
            (self.names[at], float(self.estimate[at]), f"{self.estimate[at]:+.4g}") for at in self.top[:8]
        ]
        compared = beside(heading("estimated") + bars(estimates), heading("exact") + bars(exact))
        return shown(heading(repr(self)), compared if self.top else "", table(self.rows()))


def drawn(effects: Numbers, top: int, sample: int, seed: int) -> tuple[list[int], list[int]]:
    """The cells with the largest effects, and others at random."""
    first = largest(effects, top)
    rest = sorted(set(range(len(effects))) - set(first))
    return first, sorted(random.Random(seed).sample(rest, min(sample, len(rest))))


def expect_whole(result: Result) -> None:
    """Raise SweepError where workers could not compute a cell: nothing is said of the others without it."""
    if result.missing:
        raise SweepError("; ".join(map(str, result.missing)))


def check_of(approx: Result, row: int, top: list[int], sample: list[int], exact: Result) -> Check:
    """Return the check that exact values of the cells `top` and `sample`, in this order, make of all."""
    effects, found = effects_of(approx, row), effects_of(exact, row)
    error = SampleError.of((found[len(top) :] - effects[sample]).tolist())
    estimate = effects + error.bias
    estimate[[*top, *sample]] = found
    reach = np.full(len(effects), error.reach)
    reach[[*top, *sample]] = 0.0
    return Check(
        tuple(cell.name for cell in approx.cells),
        effects,
        estimate,
        estimate - reach,
        estimate + reach,
        tuple(top),
        tuple(sample),
        error,
        exact,
        approx.metrics[row],
        approx.method,
    )


@dataclass(frozen=True, slots=True)
class Later:
    """A plan that is made when it is first asked for."""

    make: Callable[[], SweepPlan]


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Approximation(Result):
    """Estimated values by cell, with `method` as the estimator; supports the operations of `Result`.

    A value is the base's metric plus the estimated effect. `plan` and `ledger` count the nodes of recorded
    forward passes and of the backward passes through them; `plan.full_evaluations` is the cost of one full
    forward for each cell, as in a sweep. `exact` names the cells whose values were computed in their own
    worlds, as `method="hybrid"` does.
    """

    exact: tuple[str, ...] = ()

    @property  # type: ignore[misc]
    def plan(self) -> SweepPlan:
        """The plan, made when it is first requested: a rehearsal estimates its memory."""
        held = vars(self)["plan"]
        if isinstance(held, Later):
            held = vars(self)["plan"] = held.make()
        found: SweepPlan = held
        return found

    @plan.setter
    def plan(self, made: SweepPlan) -> None:
        vars(self)["plan"] = made

    def check(
        self,
        top: int = 50,
        n: int = 200,
        seed: int = 0,
        *,
        metric: str | None = None,
        workers: int | str | Pool | None = None,
    ) -> Check:
        """Compute some cells exactly, by one sweep, and estimate the error of all cells.

        The cells are the `top` largest, and `n` others at random; fewer if there are not enough. See `Check`.
        `workers` run the sweep: see `Runnable.run`.
        """
        if self.sweep is None:
            raise SweepError("a loaded result has no model at hand; attribute again to check it.")
        for name, count in (("top", top), ("n", n)):
            if isinstance(count, bool) or count < 0:
                raise SweepError(f"{name} is a number of cells, and not {count!r}.")
        if not top and not n:
            raise SweepError("a check of no cells: give `top`, `n` or both.")
        self.sweep.model.expect_program("check estimates from before that")
        self._expect_weights(self.sweep.model)
        row = self._number(metric)
        first, others = drawn(effects_of(self, row), top, n, seed)
        result = self.sweep.of_cells([*first, *others]).run(progress=False, workers=workers)
        expect_whole(result)
        found = vars(self)["_last_check"] = check_of(self, row, first, others, result)
        return found

    def _repr_html_(self) -> str:
        check: Check | None = vars(self).get("_last_check")
        words = (
            "Nothing of it was computed exactly so far: `check()` does it for the largest and some at random."
        )
        return shown(super()._repr_html_(), note(words) if check is None else check._repr_html_())


# -- two results beside each other -------------------------------

Numbers = npt.NDArray[np.float64]


def pearson(one: Numbers, other: Numbers) -> float:
    """The correlation of values; NaN where one of the lists is constant."""
    left, right = one - one.mean(), other - other.mean()
    size = math.sqrt(float((left**2).sum()) * float((right**2).sum()))
    return float((left * right).sum()) / size if size else math.nan


def spearman(one: Numbers, other: Numbers) -> float:
    """The correlation of ranks; equal values share theirs."""
    return pearson(_ranks(one), _ranks(other))


def kendall(one: Numbers, other: Numbers) -> float:
    """Kendall's τ-b: how many pairs stand in the same order less how many do not, ties counted out."""
    order = np.lexsort((other, one))
    left, right = one[order], other[order]
    pairs = len(one) * (len(one) - 1) // 2
    ties_left, ties_right = _tied(left), _tied(np.sort(right))
    both = _tied(np.stack([left, right]), axis=1)
    swaps = _inversions(right)
    size = math.sqrt((pairs - ties_left) * (pairs - ties_right))
    return (pairs - ties_left - ties_right + both - 2 * swaps) / size if size else math.nan


def _ranks(values: Numbers) -> Numbers:
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values), dtype=np.float64)
    _, group = np.unique(values, return_inverse=True)
    sums = np.bincount(group, weights=ranks)
    return np.asarray((sums / np.bincount(group))[group])


def _tied(ordered: Numbers, axis: int | None = None) -> int:
    """Return how many pairs of a list are equal, or of the slices along an axis."""
    _, counts = np.unique(ordered, return_counts=True, axis=axis)
    return int((counts * (counts - 1) // 2).sum())


def _inversions(values: Numbers) -> int:
    """Return the number of pairs of a list in the wrong order, by merging sorted halves."""
    if len(values) < 2:
        return 0
    middle = len(values) // 2
    first, second = values[:middle], values[middle:]
    inside = _inversions(first) + _inversions(second)
    before = np.sort(first)
    return inside + int((len(before) - np.searchsorted(before, second, side="right")).sum())


def share_bound(found: int, tried: int, level: float) -> float:
    """The largest share of which `found` or fewer of `tried` would still be seen, with 1 − level."""
    if found >= tried:
        return 1.0
    low, high = found / tried, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(found, tried, middle) > 1 - level else (low, middle)
    return high


def _at_most(found: int, tried: int, share: float) -> float:
    """Return the probability of so many or fewer; by logarithms, since binomials overflow."""
    ways = math.lgamma(tried + 1)
    return sum(
        math.exp(
            ways
            - math.lgamma(one + 1)
            - math.lgamma(tried - one + 1)
            + one * math.log(share)
            + (tried - one) * math.log1p(-share)
        )
        for one in range(found + 1)
    )


def largest(values: Sequence[float] | Numbers, count: int) -> list[int]:
    """The numbers of the largest values, either way, the first of equal ones first."""
    return sorted(range(len(values)), key=lambda number: -abs(float(values[number])))[:count]


ALIKE = 1e-3
"""The relative tolerance for the bases' metrics of two results of the same runs."""


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Effects of the same cells by an approximate and an exact result, of one metric.

    `names` are those of the cells, `approx` and `exact` their effects. Correlations are of signed effects.
    Ranks at `k` are by the size of effects, either way.
    """

    names: tuple[str, ...]
    approx: Numbers
    exact: Numbers
    metric: str
    method: str
    k: int

    @cached_property
    def pearson(self) -> float:
        """The correlation of the effects."""
        return pearson(self.approx, self.exact)

    @cached_property
    def spearman(self) -> float:
        """The correlation of their ranks."""
        return spearman(self.approx, self.exact)

    @cached_property
    def kendall(self) -> float:
        """Kendall's τ-b of their order."""
        return kendall(self.approx, self.exact)

    @cached_property
    def false_negatives(self) -> tuple[str, ...]:
        """The cells that are among the `k` largest exact effects, but not among the approximate ones."""
        found = set(largest(self.approx, self.k))
        return tuple(self.names[number] for number in largest(self.exact, self.k) if number not in found)

    @property
    def overlap(self) -> float:
        """The share of the `k` largest exact effects that are among the `k` largest approximate ones."""
        return 1 - len(self.false_negatives) / self.k

    @cached_property
    def sign_errors(self) -> tuple[str, ...]:
        """The cells whose effects have opposite signs, the largest exact effect first."""
        wrong = [number for number, one in enumerate(self.approx * self.exact) if one < 0]
        return tuple(self.names[n] for n in sorted(wrong, key=lambda n: -abs(float(self.exact[n]))))

    @property
    def sign_errors_at_k(self) -> tuple[str, ...]:
        """The sign errors among the `k` largest exact effects; smaller effects can be close to zero."""
        first = {self.names[number] for number in largest(self.exact, self.k)}
        return tuple(name for name in self.sign_errors if name in first)

    def worst(self, count: Count = 5) -> list[tuple[str, float, float]]:
        """Return the cells with the largest errors: name, approximate effect, exact effect."""
        return [
            (self.names[number], float(self.approx[number]), float(self.exact[number]))
            for number in largest(self.approx - self.exact, count)
        ]

    def plot(self) -> Figure:
        """Draw each cell at its exact and its approximate effect; on the line both are equal."""
        with needs("plots"):
            import plotly.graph_objects as go  # noqa: PLC0415

        ends = [
            float(min(self.approx.min(), self.exact.min(), 0)),
            float(max(self.approx.max(), self.exact.max(), 0)),
        ]
        line = go.Scatter(x=ends, y=ends, mode="lines", line={"color": "gray", "width": 1}, hoverinfo="skip")
        points = go.Scatter(
            x=self.exact.tolist(),
            y=self.approx.tolist(),
            mode="markers",
            marker={"color": "#2166ac", "size": 6},
            text=list(self.names),
            hovertemplate="<b>%{text}</b><br>exact %{x:+.6g}<br>approximate %{y:+.6g}<extra></extra>",
        )
        return go.Figure([line, points]).update_layout(
            title=f"{self.method} and exact effects on {self.metric}: rank correlation {self.spearman:.3f}",
            xaxis_title="exact effect",
            yaxis_title=f"effect by {self.method}",
            showlegend=False,
        )

    def rows(self) -> list[tuple[str, str]]:
        """The comparison as lines of a table."""
        missed = ", ".join(self.false_negatives[:5]) + (", ..." if len(self.false_negatives) > 5 else "")
        wrong = ", ".join(self.sign_errors[:5]) + (", ..." if len(self.sign_errors) > 5 else "")
        return [
            ("Pearson", f"{self.pearson:.3f}"),
            ("Spearman", f"{self.spearman:.3f}"),
            ("Kendall", f"{self.kendall:.3f}"),
            (f"overlap at {self.k}", f"{self.overlap:.0%}"),
            (
                f"false negatives at {self.k}",
                f"{len(self.false_negatives)}" + (f": {missed}" if missed else ""),
            ),
            (
                "sign errors",
                f"{len(self.sign_errors)} of {len(self.names):,}"
                + (
                    f", {len(self.sign_errors_at_k) or 'none'} of the {self.k} largest: {wrong}"
                    if wrong
                    else ""
                ),
            ),
        ]

    def __repr__(self) -> str:
        return (
            f"Comparison of {self.method} with exact effects on {self.metric}, {len(self.names):,} cells: "
            f"rank correlation {self.spearman:.3f}, overlap {self.overlap:.0%} at {self.k}"
        )

    def __str__(self) -> str:
        lines = [f"{self.method} beside exact effects on {self.metric}, {len(self.names):,} cells:"]
        lines += aligned(self.rows(), "  ")
        lines.append("  off most (approximate, exact):")
        lines += [f"    {approx:+.6g}  {exact:+.6g}  {name}" for name, approx, exact in self.worst()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return heading(repr(self)) + table(self.rows())


@checked
def compare(approx: Result, exact: Result, *, k: int | None = None, metric: str | None = None) -> Comparison:
    """Compare an approximate result with an exact one, over the cells that both have.

    Ranks are compared at `k`: by default 10, or a quarter of the cells if there are few. `metric` names one
    of several metrics, by default the first. Raises SweepError if the results have no cell in common, or
    belong to different runs.
    """
    if exact.method:
        raise SweepError(f"the second result is approximate as well ({exact.method}): give an exact one.")
    name = approx.metrics[0] if metric is None else metric
    for one in (approx, exact):
        if name not in one.metrics:
            raise SweepError(f"no metric {name!r} in both results; one has {', '.join(one.metrics)}.")
    rows = approx.metrics.index(name), exact.metrics.index(name)
    before, other = float(approx.base[rows[0]]), float(exact.base[rows[1]])
    if abs(before - other) > ALIKE * max(abs(before), abs(other), 1e-6):
        raise SweepError(
            f"{name} is {before:.6g} in the base of one result and {other:.6g} in the other: they are of "
            "other runs. Compare results of the same base and source."
        )
    numbers = {cell.name: number for number, cell in enumerate(exact.cells)}
    both = [(at, numbers[cell.name]) for at, cell in enumerate(approx.cells) if cell.name in numbers]
    if not both:
        raise SweepError("these results have no cell in common: compare results of the same sites.")
    if k is not None and not 1 <= k <= len(both):
        raise SweepError(f"k is a number from 1 to {len(both)}, the cells that are compared, and not {k!r}.")
    left, right = (list(column) for column in zip(*both, strict=True))
    return Comparison(
        tuple(approx.cells[at].name for at in left),
        effects_of(approx, rows[0])[left],
        effects_of(exact, rows[1])[right],
        name,
        approx.method or "the first result",
        k or max(1, min(10, len(both) // 4)),
    )


def effects_of(result: Result, row: int) -> Numbers:
    """Return the effects of one metric, by cell."""
    return np.asarray((result.table[row] - result.base[row]).tolist(), dtype=np.float64)
