"""The result of an attribution: a sweep's, with values that are estimated by gradients."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from conewise.arguments import checked
from conewise.attributing.comparison import Numbers, largest, share_bound
from conewise.errors import SweepError
from conewise.extras import needs
from conewise.jobs.pool import Pool
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.result import Result
from conewise.sweeps.statistics import student_quantile
from conewise.templates import bars, beside, heading, note, shown, table

if TYPE_CHECKING:
    import pandas as pd

LEVEL = 0.95
"""How much of the time an interval holds."""


@dataclass(frozen=True, slots=True)
class SampleError:
    """What is off in a random sample of cells: exact − approximate effects.

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

    Cells of `computed` are exact. The estimate of another is its approximate effect plus the mean error of
    the sample, and its interval a prediction interval from the sample's errors (`error`). `top` are the cells
    that were largest, `sample` those that were drawn among the others; `result` is the exact sweep over both.
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
        """The cells of the sample whose exact effects are larger than the middle one of the top."""
        if not self.top:
            return ()
        middle = float(np.median(np.abs(self.estimate[list(self.top)])))
        return tuple(self.names[n] for n in self.sample if abs(float(self.estimate[n])) > middle)

    @property
    def missed_share(self) -> float:
        """At most this share of the cells outside of the top exceeds the middle one of it, at 95 %."""
        return share_bound(len(self.exceeding), len(self.sample), LEVEL) if self.sample else 1.0

    @property
    def sign_errors(self) -> tuple[str, ...]:
        """The computed cells whose exact effects have the other sign."""
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
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        lines = [f"{self.method} on {self.metric}, {len(self.names):,} cells:"]
        lines += [f"  {label:<{width}}  {value}" for label, value in rows]
        lines.append("  the largest (approximate, exact):")
        for number in self.top[:8]:
            lines.append(
                f"    {self.approx[number]:+.6g}  {self.estimate[number]:+.6g}  {self.names[number]}"
            )
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
    """What exact values of the cells `top` and `sample`, in this order, say of all."""
    effects = np.asarray((approx.table[row] - approx.base[row]).tolist())
    found = np.asarray((exact.table[row] - exact.base[row]).tolist())
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
    """Estimated values by cell: `method` says how. See `Result` for all else that can be done with it.

    A value is the base's metric plus the estimated effect. `plan` and `ledger` have what was counted: nodes
    of recorded forward passes, and again of backward passes through them; `plan.full_evaluations` is what
    one full forward for each cell would take, as in a sweep. `exact` names the cells whose values were
    computed in their worlds all the same, as `method="hybrid"` does.
    """

    exact: tuple[str, ...] = ()

    @property  # type: ignore[misc]
    def plan(self) -> SweepPlan:
        """The plan, made when it is first asked for: a rehearsal says how much memory it takes."""
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
        """Compute some cells exactly, by one sweep, and say what that means for all.

        The `top` largest, and `n` others at random; fewer where there are no more. See `Check`.
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
        row = 0 if metric is None else self._number(metric)
        effects = np.asarray((self.table[row] - self.base[row]).tolist())
        first, others = drawn(effects, top, n, seed)
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
