"""A sweep by workers: the driver plans and stores, a worker runs chunks of the plan."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from conewise.anatomy.selectors import Cell
from conewise.arguments import shown_bytes
from conewise.errors import SweepError
from conewise.jobs.payload import packed
from conewise.jobs.scheduling import ChunkCost, Done, Failed, Share, Work, cut_into_shares
from conewise.program.tensors import Tensor
from conewise.program.weights import Contents
from conewise.runs.captured import Captured
from conewise.runs.fillings import joined, reordered
from conewise.status import Phases
from conewise.sweeps.execution.batch import Batch
from conewise.sweeps.execution.executors import SERIAL_GROUP, Execution, Executor
from conewise.sweeps.execution.growth import watching
from conewise.sweeps.execution.reading import PHASES, MetricReader, SweepLedger
from conewise.sweeps.planning.plan import SweepPlan, of_batches
from conewise.sweeps.planning.planner import Planner, facts_of
from conewise.sweeps.planning.spec import SweepSpec
from conewise.sweeps.running import Numbers, Options, Planned, Running, executor_for, plan_for, trusting
from conewise.sweeps.storage.result_data import Missing
from conewise.sweeps.storage.store import NullStore, Recorder
from conewise.threads import uncollected


class Swept(Protocol):
    """A sweep."""

    model: Captured
    spec: SweepSpec

    @property
    def cells(self) -> Sequence[Cell]:
        """Its cells."""

    @property
    def batches(self) -> int:
        """How many baselines there are."""

    def batch(self, number: int) -> Batch:
        """One of the baselines, and what is put into it."""

    def asked(self) -> dict[str, Any]:
        """What it was given, as its class takes it beside the model."""


class SweepShares:
    """Runs shares of a sweep: `kind` makes the sweep of what it was asked."""

    def __init__(self, model: Captured, kind: Any, asked: dict[str, Any]) -> None:
        self._sweep: Swept = kind(model, **asked)
        self._plans: dict[int, SweepPlan] = {}
        self._at: int | None = None
        self._under_way: tuple[Batch, Executor, Execution] | None = None

    def know_plan(self, batch: int, text: str) -> None:
        """Be told the plan of a batch."""
        self._plans[batch] = SweepPlan.from_json(text)

    def rest(self) -> None:
        """Let go of the baselines."""
        self._at = self._under_way = None

    def run(self, share: Share, memory: int | None) -> Done:
        """Run a share."""
        batch, _, execution = self._begun(share.batch)
        plan = self._plans[share.batch]
        ledger, rows = SweepLedger(), list[Tensor]()
        with watching(facts_of(self._sweep.model).devices, plan.peak_bytes, memory) as watch:
            if share.worlds is not None:
                rows.append(self._part(plan, batch, share, ledger, memory))
            else:
                for chunk in share.chunks:
                    rows.append(execution.start(chunk, ledger, watch)())
        base, source = execution.base, execution.source
        return Done(
            tuple(row.double().cpu().numpy() for row in rows),
            base.double().cpu().numpy(),
            None if source is None else source.double().cpu().numpy(),
            ledger.node_evaluations,
            ledger.launches,
            0.0,
            watch.peak,
        )

    def lacking(self, share: Share, memory: int | None) -> str:
        """What is lacking where a whole chunk is known not to fit into this worker; else nothing."""
        plan = self._plans[share.batch]
        if memory is None or share.worlds is not None or not share.chunks or plan.peak_bytes <= memory:
            return ""
        return f"a chunk takes {shown_bytes(plan.peak_bytes)}, and this worker has {shown_bytes(memory)}"

    def _begun(self, number: int) -> tuple[Batch, Executor, Execution]:
        """A batch under way: its baselines are computed once for all shares of it that follow."""
        if self._at != number or self._under_way is None:
            self._at = self._under_way = None
            sweep, plan = self._sweep, self._plans[number]
            with uncollected():
                batch = sweep.batch(number)
                executor = executor_for(sweep.model, sweep.spec, plan, batch)
                for put in (batch.intervention, *batch.own):
                    if put.begin is not None:
                        put.begin(sweep.model.weights.contents().whole)
                reader = MetricReader(facts_of(sweep.model), batch.metrics, sweep.spec.tokens, batch.base)
                execution = executor.over(batch, reader)
            self._at, self._under_way = number, (batch, executor, execution)
        return self._under_way

    def _part(
        self, plan: SweepPlan, batch: Batch, share: Share, ledger: SweepLedger, memory: int | None
    ) -> Tensor:
        """Some worlds of a chunk, cut anew to fit."""
        assert plan.compiled is not None
        assert share.worlds is not None
        sweep, spec = self._sweep, self._sweep.spec
        numbers = plan.compiled.order[share.first : share.first + share.worlds]
        own = SweepSpec(
            tuple(spec.cells[number] for number in numbers),
            tuple(spec.names[number] for number in numbers),
            spec.metrics,
            spec.precision,
            spec.is_function,
            spec.from_run,
        )
        planner = Planner(sweep.model, own)

        def planned(given: Batch, max_memory: int | None, evaluator: str, cut: Any = None) -> SweepPlan:
            return planner.plan(given.base, given.source, max_memory=max_memory, evaluator=evaluator, cut=cut)

        weights = sweep.model.weights.whole_contents()
        running = Running(sweep.model, own, _One(batch), planned, weights, Phases(PHASES))  # type: ignore[arg-type]
        found = running.run(Options(plan.evaluator, memory, None), NullStore(), lambda _: None)
        ledger.node_evaluations += found.ledger.node_evaluations
        ledger.launches += found.ledger.launches
        return found.per_prompt.transpose(0, 1)


class _One:
    """One batch, as a run wants its batches."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> Batch:
        assert number == 0
        return self._batch

    def forget(self) -> None:
        """There is nothing to be forgotten."""


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


ENOUGH = 0.9
"""Workers are worth having as long as their number times the gain of one more is at least so much of it."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of what a fleet does: setting a worker up, a batch's baselines, a FLOP, a share's way there."""

    setup: float
    baseline: float
    flop: float
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a fleet would take. `makespan`: seconds until all is done; `busy`: those of each worker."""

    workers: int
    makespan: float
    busy: tuple[float, ...]
    setup: float
    baselines: float

    @property
    def balance(self) -> float:
        """The busiest worker over the mean, after it was set up: 1 is even."""
        mean = sum(self.busy) / len(self.busy)
        return max(self.busy) / mean if mean else 1.0


def simulate(shares: Sequence[tuple[int, int]], workers: int, rates: Rates) -> Simulated:
    """Give shares, (batch, FLOPs) in the order in which they are given out, to whoever is free first.

    A worker computes the baselines of a batch once as long as it has shares of the same.
    """
    free = [(rates.setup, number) for number in range(workers)]
    heapq.heapify(free)
    busy, batches, baselines = [0.0] * workers, [-1] * workers, 0.0
    for batch, cost in shares:
        start, number = heapq.heappop(free)
        seconds = rates.share + cost * rates.flop
        if batches[number] != batch:
            seconds += rates.baseline
            baselines += rates.baseline
            batches[number] = batch
        busy[number] += seconds
        heapq.heappush(free, (start + seconds, number))
    return Simulated(workers, max(end for end, _ in free), tuple(busy), rates.setup * workers, baselines)


def worth_having(shares: Sequence[tuple[int, int]], most: int, rates: Rates) -> int:
    """Beyond how many workers, up to `most`, more hardly help: the least that comes near the best span."""
    spans = [simulate(shares, count, rates).makespan for count in range(1, most + 1)]
    best = min(spans)
    return next(count for count, span in enumerate(spans, 1) if best >= ENOUGH * span)
