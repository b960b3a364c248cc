"""The numbers of a sweep, with what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from conewise.anatomy.selectors import Cell, Spread
from conewise.checks.recheck import CellCheck
from conewise.program.tensors import Tensor
from conewise.program.weights import Sums
from conewise.sweeps.execution.reading import SweepLedger
from conewise.sweeps.planning.plan import SweepPlan


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


@dataclass(frozen=True, eq=False)
class ResultData:
    """Values by cell, in the order of the sites.

    `table` is [metric, cell] in float64, averaged over prompts; `per_prompt` is [metric, cell, prompt].
    `base` and `source` are the metrics of the runs themselves, [metric], and `base_per_prompt` and
    `source_per_prompt` those of each prompt, [metric, prompt]; `source` is None where the values did not
    come from a run. `origin` is what they depend on; see `provenance`. `method` is empty where every value
    was computed in its world; else values are approximate, and it says by which method. `story` says what was
    asked, where that is known: the prompts with their tokens, the metric in words. `missing` are the cells
    that could not be computed where a fleet ran the sweep: their values are NaN.
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

    @property
    def numbers(self) -> dict[str, Tensor | None]:
        """The tensors by name; the first axis of each are the metrics."""
        names = ("table", "per_prompt", "base", "source", "base_per_prompt", "source_per_prompt")
        return {name: getattr(self, name) for name in names}

    @property
    def provenance(self) -> dict[str, Any]:
        """All that the numbers depend on, as plain values. The weights are hashed when it is first read."""
        return dict(self.origin)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every cell, in the order of the sites."""
        return tuple(cell for part in self.spreads for cell in part.cells)

    def parts(self) -> list[tuple[Spread, int]]:
        """The selectors' cells, and where each begins in the order of all cells."""
        starts = accumulate((len(spread.cells) for spread in self.spreads), initial=0)
        return list(zip(self.spreads, starts, strict=False))
