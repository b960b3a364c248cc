"""The numbers of a sweep, with what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from conewise.anatomy.selectors import Cell, Spread
from conewise.program.tensors import Tensor
from conewise.program.weights import Sums
from conewise.runs.metrics import Vector
from conewise.sweeps.execution.reading import SweepLedger
from conewise.sweeps.planning.plan import SweepPlan
from conewise.templates import verdict


@dataclass(frozen=True, slots=True)
class Missing:
    """Cells of a batch that could not be computed, by number and by name, and why."""

    batch: int
    cells: tuple[int, ...]
    names: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        some = ", ".join(self.names[:3]) + (", ..." if len(self.names) > 3 else "")
        count = f"{len(self.names)} cell{'s' if len(self.names) > 1 else ''}"
        return f"{count} of batch {self.batch} could not be computed ({some}): {self.why}"


@dataclass(frozen=True, slots=True)
class CellCheck:
    """Cells of a result against plain full forwards of the original module, with hooks.

    `hooked` cells were run again by the module itself. The sites of the `interpreted` ones lie at no boundary
    of a module, so that the captured operations were all run again, one by one, without an engine: they do
    not show that the program itself is right. `largest_deviation` is from these forwards.

    `relative` has to be at most `tolerance`; both are shares of the metric's largest value. With a
    `reference`, the module in that higher precision, `relative` is the result's distance from it, or from the
    module's own forwards where that is larger, and `own_error` is that of these forwards from the reference;
    else it is the largest deviation. `unchecked` says why there is no reference where there has to be one,
    and is empty otherwise.
    """

    cells: int
    hooked: int
    interpreted: int
    largest_deviation: float
    relative: float
    tolerance: float
    own_error: float | None = None
    reference: str = ""
    unchecked: str = ""

    @property
    def ok(self) -> bool:
        """True if nothing was found to be wrong; `passed` is True if the module itself says so."""
        return self.relative <= self.tolerance and not self.unchecked

    @property
    def excess(self) -> float:
        """The deviation as a factor of what is allowed; 0 where there is none."""
        return self.relative / self.tolerance if self.tolerance else math.inf if self.relative else 0.0

    @property
    def passed(self) -> bool:
        """True if every cell was run again by the module itself, and was right."""
        return self.ok and not self.interpreted

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return f"{self._verdict()}: largest deviation {self.largest_deviation:.3g}, {self._sizes()}"

    def _verdict(self) -> str:
        alone = "the captured program alone, operation by operation (no module shows the site)"
        with_hooks = f"{self.hooked} with hooks on the module"
        if self.ok and not self.hooked:
            return f"not checked by the module: {self.cells} random cells agree with {alone}"
        word = "passed in part" if self.interpreted else "passed"
        if not self.ok:
            word = "FAILED" if self.excess > 1 else "NOT CHECKED"
        ways = [with_hooks] if self.hooked else []
        ways += [f"{self.interpreted} against {alone}"] if self.interpreted else []
        return f"{word}: {self.cells} random cells against full forwards, {' and '.join(ways)}"

    def _sizes(self) -> str:
        if self.unchecked:
            return f"{self.relative:.2g} of the largest value, which says nothing here: {self.unchecked}"
        if not self.reference:
            return f"{self.relative:.2g} of the largest value (allowed: {self.tolerance:.0e})"
        return (
            f"{self.relative:.2g} of the largest value from the module in {self.reference}, where the "
            f"module's own forwards are {self.own_error:.2g} off (allowed: {self.tolerance:.2g})"
        )

    def __repr__(self) -> str:
        return f"CellCheck {self}"

    def _repr_html_(self) -> str:
        return verdict(self.ok, str(self))


@dataclass(frozen=True, eq=False)
class ResultData:
    """Values by cell, in the order of the sites.

    `table` is [metric, cell] in float64, averaged over prompts; `per_prompt` is [metric, cell, prompt].
    `base` and `source` are the metrics of the runs themselves, [metric], and `base_per_prompt` and
    `source_per_prompt` those of each prompt, [metric, prompt]; `source` is None if the values did not come
    from a run. `origin` holds the dependencies of the numbers; see `provenance`. `method` is empty if every
    value was computed in its world; else values are approximate, and it names the method. `story` describes
    the question if it is known: the prompts with their tokens, the metric in words. If any metric is a
    vector, `vectors` has the axes of each metric, and `metrics` a name for each number. `missing` are the
    cells that distributed workers could not compute: their values are NaN.
    """

    plan: SweepPlan
    ledger: SweepLedger
    spreads: tuple[Spread, ...]
    metrics: tuple[str, ...]
    table: Tensor
    per_prompt: Tensor
    base: Tensor
    source: Tensor | None
    origin: Mapping[str, Any] = field(default_factory=dict, repr=False)
    verification: CellCheck | None = None
    sweep: Any = field(default=None, repr=False)
    base_per_prompt: Tensor | None = None
    source_per_prompt: Tensor | None = None
    weights: Sums | None = field(default=None, repr=False)
    method: str = ""
    story: Any = field(default=None, repr=False)
    missing: tuple[Missing, ...] = ()
    vectors: tuple[Vector, ...] = ()

    def _each_metric(self) -> list[tuple[Vector, slice]]:
        """Each metric with its axes, none for a number, and the rows of `table` that it is."""
        found = self.vectors or tuple([Vector(name, (), ()) for name in self.metrics])
        stops = accumulate(one.size for one in found)
        return [(one, slice(stop - one.size, stop)) for one, stop in zip(found, stops, strict=True)]

    def _metric_at(self, row: int) -> tuple[Vector, slice]:
        """The metric that a row of `table` is of, and all of its rows."""
        return next((one, rows) for one, rows in self._each_metric() if rows.start <= row < rows.stop)

    @property
    def numbers(self) -> dict[str, Tensor | None]:
        """The tensors by name; the first axis of each is the metric axis."""
        names = ("table", "per_prompt", "base", "source", "base_per_prompt", "source_per_prompt")
        return {name: getattr(self, name) for name in names}

    @property
    def provenance(self) -> dict[str, Any]:
        """Everything that the numbers depend on, as plain values. The first access hashes the weights."""
        return dict(self.origin)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every cell, in the order of the sites."""
        return tuple(cell for part in self.spreads for cell in part.cells)

    def parts(self) -> list[tuple[Spread, int]]:
        """The cells of each selector, and its start in the order of all cells."""
        starts = accumulate((len(spread.cells) for spread in self.spreads), initial=0)
        return list(zip(self.spreads, starts, strict=False))
