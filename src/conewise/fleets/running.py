"""A sweep as the driver of a fleet has it: it plans, stores what comes back, and adds it up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from conewise.errors import SweepError
from conewise.fleets.jobs import Work
from conewise.fleets.outcomes import Done, Failed
from conewise.fleets.payload import packed
from conewise.fleets.shares import ChunkCost, Share, cut_into_shares
from conewise.fleets.sweep_shares import SweepShares
from conewise.fleets.swept import Swept
from conewise.phases import Phases
from conewise.program.tensors import Tensor
from conewise.program.weights import Contents
from conewise.runs.interventions.filling import joined, reordered
from conewise.sweeps.execution.executors import SERIAL_GROUP
from conewise.sweeps.execution.ledger import SweepLedger
from conewise.sweeps.planning.plan import SweepPlan, of_batches
from conewise.sweeps.running import Numbers, Options, Planned, plan_for, trusting
from conewise.sweeps.storage.result_data import Missing
from conewise.sweeps.storage.store import Recorder


@dataclass(slots=True)
class _BatchUnderWay:
    """A batch of which some chunks are done. `parts` are worlds of chunks that were cut in half."""

    plan: SweepPlan
    chunks: list[range]
    costs: list[int]
    rows: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    base: Tensor | None = None
    source: Tensor | None = None
    is_stored: bool = False


class SweepJob:
    """One run of a sweep by a fleet: it is planned here, what is not stored is given out as shares."""

    def __init__(
        self,
        sweep: Swept,
        planned: Planned,
        options: Options,
        record: Recorder,
        tell: Callable[[int], None],
        weights: Contents,
        phases: Phases,
    ) -> None:
        self._sweep, self._planned, self._record, self._tell = sweep, planned, record, tell
        self._weights, self._phases = weights, phases
        self._ledger = SweepLedger()
        self._missing: list[Missing] = []
        self._batches = [self._begun(number, options) for number in range(sweep.batches)]
        # The plan without what it is for: that travels beside it.
        plans = {number: replace(one.plan, spec={}).to_json() for number, one in enumerate(self._batches)}
        asked = {"kind": type(sweep), "asked": sweep.asked()}
        self.work = Work(sweep.model, packed((SweepShares, asked), sweep.model), plans)

    @property
    def seconds(self) -> float | None:
        """What all of it is predicted to take in one process; None where nothing was timed."""
        known = [one.plan.seconds for one in self._batches if one.plan.seconds is not None]
        each = [seconds / len(self._batches) for seconds in known]
        return sum(each) if len(each) == len(self._batches) else None

    def wanted(self) -> tuple[list[ChunkCost], list[Share]]:
        """The chunks that are not stored, and of batches that are stored whole the baselines."""
        chunks: list[ChunkCost] = []
        baselines: list[Share] = []
        for number, batch in enumerate(self._batches):
            for chunk, worlds in enumerate(batch.chunks):
                stored = self._record.get(number, chunk, len(worlds))
                if stored is not None:
                    batch.rows[chunk] = stored
                    self._ledger.resumed += len(worlds)
                    self._tell(len(worlds))
                else:
                    chunks.append(ChunkCost(number, chunk, len(worlds), batch.costs[chunk]))
            if len(batch.rows) == len(batch.chunks):
                baselines.append(Share(number, (), 0))
        return chunks, baselines

    def given_up(self, share: Share, failed: Failed) -> None:
        """Worlds will not be there: the result says which and why."""
        first, count = self.worlds_of(share)
        order = _order(self._batches[share.batch].plan)
        cells = tuple(order[first : first + count])
        names = [self._sweep.cells[cell].name for cell in cells]
        self._missing.append(Missing(share.batch, cells, tuple(names), failed.said))
        self._tell(count)

    def _begun(self, number: int, options: Options) -> _BatchUnderWay:
        batch = self._sweep.batch(number)
        cut = self._record.cut(number, options.evaluator)
        with trusting(batch, self._weights, self._phases):  # refuses runs of other weights
            plan = plan_for(self._sweep.model, self._sweep.spec, self._planned, number, batch, options, cut)
        return _BatchUnderWay(plan, *chunks_of(plan))

    def worlds_of(self, share: Share) -> tuple[int, int]:
        """Which worlds of its batch a share has: the first, and how many."""
        if share.worlds is not None:
            return share.first, share.worlds
        chunks = [self._batches[share.batch].chunks[chunk] for chunk in share.chunks]
        return (chunks[0].start, sum(map(len, chunks))) if chunks else (0, 0)

    def done(self, share: Share, found: Done) -> int:
        """Keep what came back, and store the chunks that are whole."""
        batch, record, ledger = self._batches[share.batch], self._record, self._ledger
        ledger.node_evaluations += found.node_evaluations
        ledger.launches += found.launches
        ledger.compute_seconds += found.seconds
        ledger.note_memory(found.peak_bytes, None)
        if batch.base is None:
            batch.base = torch.tensor(found.base)
            batch.source = None if found.source is None else torch.tensor(found.source)
        if record.keeps and not batch.is_stored:
            record.begin(share.batch, batch.plan, batch.base, batch.source)
            batch.is_stored = True
        worlds = 0
        for chunk, rows in zip(share.chunks, map(torch.tensor, found.rows), strict=True):
            self._take(batch, share, chunk, rows)
            self._tell(len(rows))
            worlds += len(rows)
        return worlds

    def _take(self, batch: _BatchUnderWay, share: Share, chunk: int, rows: Tensor) -> None:
        if share.worlds is not None:
            pieces = batch.parts.setdefault(chunk, {})
            pieces[share.first] = rows
            if sum(len(one) for one in pieces.values()) < len(batch.chunks[chunk]):
                return
            rows = torch.cat([pieces[first] for first in sorted(pieces)])
        batch.rows[chunk] = rows
        if self._record.keeps:
            self._record.put(share.batch, chunk, rows)

    def numbers(self) -> Numbers:
        """What was found, all batches together. Raises SweepError where there is nothing of a batch."""
        batches, ledger, missing = self._batches, self._ledger, self._missing
        known = [one for one in batches if one.base is not None]
        if not known or all(not one.rows and not one.parts for one in batches):
            raise SweepError(
                f"no share of this sweep could be run: {'; '.join(dict.fromkeys(one.why for one in missing))}"
            )
        values: list[Tensor] = []
        for number, batch in enumerate(batches):
            if batch.base is None:
                whys = dict.fromkeys(one.why for one in missing if one.batch == number)
                raise SweepError(f"no share of batch {number} could be run: {'; '.join(whys)}")
            values.append(reordered(self._rows(batch), _order(batch.plan)))
        sources = [one.source for one in batches if one.source is not None]
        plan = of_batches([one.plan for one in batches])
        return Numbers(
            plan,
            ledger,
            joined([numbers.transpose(0, 1) for numbers in values]),
            joined([one.base for one in batches if one.base is not None]),
            joined(sources) if len(sources) == len(batches) else None,
            tuple(missing),
        )

    def _rows(self, batch: _BatchUnderWay) -> list[Tensor]:
        """The chunks in order; NaN where worlds are missing."""
        assert batch.base is not None
        metrics, prompts = batch.base.shape
        found = []
        for chunk, worlds in enumerate(batch.chunks):
            if chunk in batch.rows:
                found.append(batch.rows[chunk])
                continue
            rows = torch.full((len(worlds), metrics, prompts), np.nan, dtype=torch.float64)
            for first, part in batch.parts.get(chunk, {}).items():
                at = first - worlds.start
                rows[at : at + len(part)] = part
            found.append(rows)
        return found


def chunks_of(plan: SweepPlan) -> tuple[list[range], list[int]]:
    """The worlds of each chunk of a batch's plan, and what it costs, in FLOPs."""
    assert plan.compiled is not None
    compiled = plan.compiled
    if plan.evaluator == "serial":
        worlds = len(compiled.order)
        chunks = [range(at, min(at + SERIAL_GROUP, worlds)) for at in range(0, worlds, SERIAL_GROUP)]
        return chunks, [plan.flops // plan.batches * len(one) // worlds for one in chunks]
    chunks = [range(one.first, one.first + one.worlds) for one in compiled.passes]
    return chunks, [compiled.programs[one.program].flops for one in compiled.passes]


def shares_of(plans: Sequence[SweepPlan], workers: int) -> list[tuple[int, int]]:
    """The shares of sweeps that are run together, as they would be given out: (batch, FLOPs).

    Batches are counted through all sweeps.
    """
    wanted: list[ChunkCost] = []
    before = 0
    for plan in plans:
        chunks, costs = chunks_of(plan)
        wanted += [
            ChunkCost(before + batch, number, len(one), cost)
            for batch in range(plan.batches)
            for number, (one, cost) in enumerate(zip(chunks, costs, strict=True))
        ]
        before += plan.batches
    return [(share.batch, share.cost) for share in cut_into_shares(wanted, workers)]


def _order(plan: SweepPlan) -> tuple[int, ...]:
    assert plan.compiled is not None
    return tuple(plan.compiled.order)
