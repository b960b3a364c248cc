"""What is estimated: the sweep, the method, and the pieces in which it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conewise.amounts import as_bytes
from conewise.attributing.costs import Counts
from conewise.attributing.methods import Cells, Method, method_of
from conewise.attributing.pieces import Piece, peak_bytes, pieces_of, prompts_at_once
from conewise.attributing.plan import AttributionPlan
from conewise.program.weights import Contents
from conewise.sweeps.planning.model_facts import facts_of
from conewise.sweeps.storage.provenance import provenance
from conewise.sweeps.storage.store import StoredSweep
from conewise.sweeps.sweep import Sweep


@dataclass(frozen=True, slots=True)
class Asked:
    """What is estimated, how, and in which pieces."""

    sweep: Sweep
    method: Method
    cells: Cells
    steps: int
    max_memory: int | None
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, sweep: Sweep, method: str, steps: int | None, max_memory: int | str | None) -> Asked:
        """What a sweep would find, to be estimated by a method. Raises SweepError for what cannot be."""
        sweep.model.expect_program("attribute effects")
        chosen, budget = method_of(method), as_bytes(max_memory)
        count = chosen.steps(steps)
        cells = chosen.cells(sweep.model, sweep.cells)
        return cls(sweep, chosen, cells, count, budget, pieces_of(sweep, chosen, cells, count, budget))

    @property
    def described(self) -> str:
        """The method in words."""
        return self.method.described(self.steps)

    @property
    def plan(self) -> AttributionPlan:
        """What it takes."""
        return AttributionPlan(
            self.described,
            len(self.sweep.cells),
            self.sweep.batches,
            len(self.pieces),
            prompts_at_once(self.pieces),
            self.max_memory,
            sum((piece.counts for piece in self.pieces), Counts()),
            self.peak_bytes,
        )

    def peak_bytes(self) -> int:
        """Return the most that a piece holds at a time."""
        return max(self.peak_of(piece) for piece in self.pieces)

    def peak_of(self, piece: Piece) -> int:
        """Return the most that this piece holds at a time."""
        return peak_bytes(self.sweep, self.method, self.cells, self.steps, piece)

    @property
    def said(self) -> dict[str, Any]:
        """The method, as provenance says it."""
        steps = {} if self.method.default_steps is None else {"steps": self.steps}
        return {"method": self.method.name, **steps}

    def stored(self, weights: Contents) -> StoredSweep:
        """What a store has to know of it."""
        sweep = self.sweep

        def identity() -> dict[str, Any]:
            own = provenance(sweep.model, sweep.spec, sweep._given, weights.whole, strict=True)
            at_once = prompts_at_once(self.pieces)
            return {**own, "attribution": self.said, "prompts at once": at_once or "all"}

        def order() -> list[str]:
            return [cell.name for cell in sweep.cells]

        device = facts_of(sweep.model).device
        return StoredSweep(len(sweep.cells), len(self.pieces), identity, order, device)
