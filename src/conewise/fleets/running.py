"""The run of a sweep by a fleet: the driver plans, gives shares out, stores what comes back, adds it up."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from conewise.errors import SweepError
from conewise.fleets.payload import Payload, packed
from conewise.fleets.recipe import Recipe, recipe_of
from conewise.fleets.scheduling import Crew, FleetLedger, run_shares
from conewise.fleets.shares import ChunkCost, Share, cut_into_shares
from conewise.fleets.swept import Swept
from conewise.fleets.worker import Done, Failed
from conewise.program.tensors import Tensor
from conewise.runs.filling import joined, reordered
from conewise.sweeps.execution.executors import SERIAL_GROUP
from conewise.sweeps.execution.ledger import SweepLedger
from conewise.sweeps.planning.plan import SweepPlan, of_batches
from conewise.sweeps.running import Numbers, Options, Planned
from conewise.sweeps.storage.result_data import Missing
from conewise.sweeps.storage.store import Recorder


class Fleet(Protocol):
    """Workers that run a sweep beyond this process."""

    def numbers(
        self, sweep: Swept, planned: Planned, options: Options, record: Recorder, tell: Callable[[int], None]
    ) -> Numbers:
        """Run all worlds of a sweep; what is finished is given to `record`, and told."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """How workers are had: how many; `crew` gets them ready for a sweep, `ended` lets them forget it."""

    workers: int
    crew: Callable[[Work], Crew]
    ended: Callable[[Work], None]


@dataclass(frozen=True, slots=True)
class Work:
    """What workers are told of a sweep, each once: its model, what is asked, the plan of each batch."""

    key: str
    model: str
    recipe: Callable[[], Recipe]
    sweep: Payload
    plans: dict[int, str]


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


class FleetRunning:
    """One run of a sweep by a fleet."""

    def __init__(
        self, sweep: Swept, planned: Planned, dispatch: Dispatch, source: str | None, how: Mapping[str, Any]
    ) -> None:
        self._sweep, self._planned, self._dispatch = sweep, planned, dispatch
        self._source, self._how = source, how
        self.ledger = FleetLedger()

    def run(self, options: Options, record: Recorder, tell: Callable[[int], None]) -> Numbers:
        """Plan all batches, run what is not stored, and put everything together."""
        sweep = self._sweep
        batches = [self._begun(number, options, record) for number in range(sweep.batches)]
        shares: list[Share] = []
        wanted: list[ChunkCost] = []
        resumed = 0
        for number, batch in enumerate(batches):
            for chunk, worlds in enumerate(batch.chunks):
                stored = record.get(number, chunk, len(worlds))
                if stored is not None:
                    batch.rows[chunk] = stored
                    resumed += len(worlds)
                    tell(len(worlds))
                else:
                    wanted.append(ChunkCost(number, chunk, len(worlds), batch.costs[chunk]))
            if len(batch.rows) == len(batch.chunks):
                shares.append(Share(number, (), 0))
        shares += cut_into_shares(wanted, self._dispatch.workers)
        ledger = SweepLedger(resumed=resumed)
        missing: list[Missing] = []
        work = self._work(batches)

        def done(share: Share, found: Done) -> None:
            self._take(share, found, batches[share.batch], record, tell, ledger)

        def given_up(share: Share, failed: Failed) -> None:
            first, count = self._worlds_of(batches, share)
            order = _order(batches[share.batch].plan)
            cells = tuple(order[first : first + count])
            names = [sweep.cells[cell].name for cell in cells]
            missing.append(Missing(share.batch, cells, tuple(names), failed.said))
            tell(count)

        crew = self._dispatch.crew(work)
        try:
            self.ledger = run_shares(
                shares, crew, lambda share: self._worlds_of(batches, share), done, given_up
            )
        finally:
            self._dispatch.ended(work)
        return self._numbers(batches, ledger, missing)

    # -- before ------------------------------------------------------------------------------------

    def _begun(self, number: int, options: Options, record: Recorder) -> _BatchUnderWay:
        sweep = self._sweep
        batch = sweep.batch(number)
        cut = record.cut(number, options.evaluator)
        plan = self._planned(batch, options.max_memory, options.evaluator, cut)
        return _BatchUnderWay(plan, *chunks_of(plan))

    def _work(self, batches: list[_BatchUnderWay]) -> Work:
        sweep, model = self._sweep, self._sweep.model
        asked = packed((type(sweep), sweep.asked()), model)
        # The plan without what it is for: that travels beside it.
        plans = {number: replace(one.plan, spec={}).to_json() for number, one in enumerate(batches)}
        return Work(
            secrets.token_hex(8),
            str(id(model)),
            lambda: recipe_of(model, self._source, **self._how),
            asked,
            plans,
        )

    # -- meanwhile ---------------------------------------------------------------------------------

    def _worlds_of(self, batches: list[_BatchUnderWay], share: Share) -> tuple[int, int]:
        if share.worlds is not None:
            return share.first, share.worlds
        chunks = [batches[share.batch].chunks[chunk] for chunk in share.chunks]
        return (chunks[0].start, sum(map(len, chunks))) if chunks else (0, 0)

    def _take(
        self,
        share: Share,
        found: Done,
        batch: _BatchUnderWay,
        record: Recorder,
        tell: Callable[[int], None],
        ledger: SweepLedger,
    ) -> None:
        """Keep what came back, and store the chunks that are whole."""
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
        for chunk, rows in zip(share.chunks, map(torch.tensor, found.rows), strict=True):
            if share.worlds is not None:
                batch.parts.setdefault(chunk, {})[share.first] = rows
                pieces = batch.parts[chunk]
                if sum(len(one) for one in pieces.values()) < len(batch.chunks[chunk]):
                    tell(len(rows))
                    continue
                batch.rows[chunk] = torch.cat([pieces[first] for first in sorted(pieces)])
            else:
                batch.rows[chunk] = rows
            if record.keeps:
                record.put(share.batch, chunk, batch.rows[chunk])
            tell(len(rows))

    # -- afterwards --------------------------------------------------------------------------------

    def _numbers(self, batches: list[_BatchUnderWay], ledger: SweepLedger, missing: list[Missing]) -> Numbers:
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
        ledger.seconds = self.ledger.seconds
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


def shares_of(plans: Sequence[SweepPlan], workers: int) -> list[list[tuple[int, int]]]:
    """For each sweep that is run behind another, its shares as they would be given out: (batch, FLOPs)."""
    found = []
    for plan in plans:
        chunks, costs = chunks_of(plan)
        wanted = [
            ChunkCost(batch, number, len(one), cost)
            for batch in range(plan.batches)
            for number, (one, cost) in enumerate(zip(chunks, costs, strict=True))
        ]
        found.append([(share.batch, share.cost) for share in cut_into_shares(wanted, workers)])
    return found


def _order(plan: SweepPlan) -> tuple[int, ...]:
    assert plan.compiled is not None
    return tuple(plan.compiled.order)
