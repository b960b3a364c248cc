"""The result of a sweep: the metric in every world, in natural axes, with its cost and its provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from conewise.errors import SweepError
from conewise.frontends.torch.filling import stacked
from conewise.frontends.torch.tensors import Tensor
from conewise.workloads.plan import SweepPlan
from conewise.workloads.selectors import Cell, Spread

if TYPE_CHECKING:
    from conewise.workloads.sweep import Sweep


@dataclass(slots=True)
class SweepLedger:
    """What a run of a sweep did: counted while it did it."""

    node_evaluations: int = 0
    launches: int = 0
    resumed: int = 0
    seconds: float = 0.0
    compute_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CellCheck:
    """Cells of a result against plain full forwards of the original module, with hooks.

    `hooked` cells were run again by the module itself; the sites of the `interpreted` ones lie at no
    boundary of a module, so that the captured operations were all run again, one by one, without an engine.
    """

    cells: int
    hooked: int
    interpreted: int
    largest_deviation: float
    relative: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the deviation is within the tolerance."""
        return self.relative <= self.tolerance

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        ways = [f"{self.hooked} with hooks on the module"] if self.hooked else []
        ways += (
            [f"{self.interpreted} operation by operation (no module shows the site)"]
            if self.interpreted
            else []
        )
        return (
            f"{'passed' if self.ok else 'FAILED'}: {self.cells} random cells against full forwards, "
            f"{' and '.join(ways)}: largest deviation {self.largest_deviation:.3g}, {self.relative:.2g} of the largest value "
            f"(allowed: {self.tolerance:.0e})"
        )


@dataclass(frozen=True)
class Result:
    """Values by cell, in the order of the sites.

    `table` is [metric, cell] in float64, averaged over prompts; `per_prompt` is [metric, cell, prompt].
    `base` and `source` are the metrics of the runs themselves, [metric]; `source` is None where the values
    did not come from a run.
    """

    plan: SweepPlan
    ledger: SweepLedger
    spreads: tuple[Spread, ...]
    metrics: tuple[str, ...]
    table: Tensor
    per_prompt: Tensor
    base: Tensor
    source: Tensor | None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    verification: CellCheck | None = None
    sweep: Sweep | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        sweep: Sweep,
        plan: SweepPlan,
        ledger: SweepLedger,
        values: Sequence[Sequence[Tensor]],
        base: Sequence[Tensor],
        source: Sequence[Tensor | None],
    ) -> Result:
        """A result from rows [world][metric, prompt] of each batch, worlds in the sweep's own order."""
        from conewise.frontends.torch.filling import joined  # noqa: PLC0415

        place = {number: world for world, number in enumerate(sweep._order)}
        cells = range(len(sweep.cells))
        batches = [stacked([rows[place[number]] for number in cells], dim=1) for rows in values]
        per_prompt = joined(batches)
        return cls(
            plan,
            ledger,
            sweep.spreads,
            tuple(metric.name for metric in sweep.metrics),
            per_prompt.mean(-1),
            per_prompt,
            joined(list(base)).mean(-1),
            None if any(one is None for one in source) else joined(list(source)).mean(-1),  # type: ignore[arg-type]
            sweep.provenance(),
            None,
            sweep,
        )

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every cell, in the order of the sites."""
        return tuple(cell for part in self.spreads for cell in part.cells)

    @property
    def values(self) -> Tensor:
        """The first metric: in natural axes for one selector, flat for a sum of several."""
        return self._shaped(self.table[0])

    def metric(self, name: str) -> Tensor:
        """One of several metrics, shaped like `values`."""
        if name not in self.metrics:
            raise SweepError(f"no metric {name!r} in this result; there are {', '.join(self.metrics)}.")
        return self._shaped(self.table[self.metrics.index(name)])

    def __getitem__(self, name: str) -> Tensor:
        """The part of the first metric that belongs to one selector, in its natural axes."""
        start = 0
        for part in self.spreads:
            stop = start + len(part.cells)
            if part.name == name:
                return self.table[0][start:stop].reshape(part.shape)
            start = stop
        names = ", ".join(part.name for part in self.spreads)
        raise SweepError(f"no part {name!r} in this result; its parts are {names}.")

    @property
    def normalised(self) -> Tensor:
        """The first metric with 0 for the base and 1 for the source."""
        return self._shaped(self._normalised(0))

    def _shaped(self, row: Tensor) -> Tensor:
        return row.reshape(self.spreads[0].shape) if len(self.spreads) == 1 else row

    def _normalised(self, metric: int) -> Tensor:
        if self.source is None:
            raise SweepError("nothing to normalise by: the values did not come from a source run.")
        span = self.source[metric] - self.base[metric]
        if float(span) == 0:
            raise SweepError("nothing to normalise by: base and source have the same value of the metric.")
        return (self.table[metric] - self.base[metric]) / span

    def to_dataframe(self) -> Any:
        """A tidy table: one row for each cell and metric."""
        import pandas as pd  # noqa: PLC0415  # only those who want a DataFrame need pandas

        rows = []
        for number, name in enumerate(self.metrics):
            base = float(self.base[number])
            source = None if self.source is None else float(self.source[number])
            for cell, value in zip(self.cells, self.table[number].tolist(), strict=True):
                span = None if source is None else source - base
                rows.append(
                    {
                        "site": cell.name,
                        "kind": cell.kind,
                        "layer": cell.at.get("layer"),
                        "head": cell.at.get("head", cell.at.get("kv_head")),
                        "pos": cell.at.get("pos"),
                        "metric": name,
                        "value": value,
                        "base": base,
                        "source": source,
                        "effect": value - base,
                        "normalised": None if not span else (value - base) / span,
                    }
                )
        frame = pd.DataFrame(rows)
        return frame.astype(dict.fromkeys(("layer", "head", "pos"), "Int64"))

    def verify(self, n: int = 32, seed: int = 0) -> CellCheck:
        """Run `n` random cells again as plain full forwards of the original module, with hooks."""
        if self.sweep is None:
            raise SweepError("a loaded result has no model at hand; run its sweep again to verify it.")
        from conewise.workloads.recheck import recheck  # noqa: PLC0415

        return recheck(self, n, seed)

    def __repr__(self) -> str:
        shown = ", ".join(f"{part.name}{list(part.shape)}" for part in self.spreads)
        return f"Result of {', '.join(self.metrics)} over {shown}: {len(self.cells)} cells, {self.plan.evaluator}"
