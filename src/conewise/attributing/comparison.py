"""Two results beside each other: how far approximate values, and the ranking by them, are off exact ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from conewise.arguments import Count, checked
from conewise.errors import SweepError
from conewise.extras import needs
from conewise.sweeps.result import Result
from conewise.templates import heading, table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

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
    both = _tied_rows(left, right)
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


def _tied(ordered: Numbers) -> int:
    """How many pairs of a sorted list are equal."""
    _, counts = np.unique(ordered, return_counts=True)
    return int((counts * (counts - 1) // 2).sum())


def _tied_rows(one: Numbers, other: Numbers) -> int:
    _, counts = np.unique(np.stack([one, other]), axis=1, return_counts=True)
    return int((counts * (counts - 1) // 2).sum())


def _inversions(values: Numbers) -> int:
    """How many pairs of a list stand in the wrong order, by merging sorted halves."""
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
    """How likely so many or fewer are; by logarithms, since ways to draw a large sample are too many."""
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
"""How far the bases' metrics of two results of the same runs may differ, relative to their size."""


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
        """The cells that are among the `k` largest by the exact effects, and not by the approximate ones."""
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
        """Those of them that are among the `k` largest exact effects: others may be as good as nothing."""
        first = {self.names[number] for number in largest(self.exact, self.k)}
        return tuple(name for name in self.sign_errors if name in first)

    def worst(self, count: Count = 5) -> list[tuple[str, float, float]]:
        """The cells that are off most: name, approximate effect, exact effect."""
        return [
            (self.names[number], float(self.approx[number]), float(self.exact[number]))
            for number in largest(self.approx - self.exact, count)
        ]

    def plot(self) -> Figure:
        """A Plotly figure: each cell at its exact and its approximate effect; on the line both are equal."""
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
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        lines = [f"{self.method} beside exact effects on {self.metric}, {len(self.names):,} cells:"]
        lines += [f"  {label:<{width}}  {value}" for label, value in rows]
        lines.append("  off most (approximate, exact):")
        lines += [f"    {approx:+.6g}  {exact:+.6g}  {name}" for name, approx, exact in self.worst()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return heading(repr(self)) + table(self.rows())


@checked
def compare(approx: Result, exact: Result, *, k: int | None = None, metric: str | None = None) -> Comparison:
    """How far an approximate result is off an exact one, over the cells that both have.

    `k` is where ranks are compared: by default 10, and of few cells a quarter. `metric` is one of several,
    the first unless it is named. Raises SweepError where the results have no cell in common, or are of
    other runs.
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
        _effects(approx, rows[0])[left],
        _effects(exact, rows[1])[right],
        name,
        approx.method or "the first result",
        k or max(1, min(10, len(both) // 4)),
    )


def _effects(result: Result, row: int) -> Numbers:
    return np.asarray((result.table[row] - result.base[row]).tolist(), dtype=np.float64)
