"""The run of a sweep: batch after batch, chunk after chunk, each planned, executed, stored and counted."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from conewise.arguments import shown_bytes
from conewise.errors import BudgetError, SweepError, TheoryError
from conewise.jobs.job import Ahead, BatchPlan, Computed, Computing, Job, JobRun
from conewise.jobs.scheduling import Share
from conewise.jobs.store import Request
from conewise.paper.theory.clocks import StackClock, calibrate_stacks
from conewise.program.streaming import reads_of
from conewise.program.tensors import Tensor
from conewise.program.weights import Contents, Sums
from conewise.runs.captured import Captured
from conewise.status import Phases
from conewise.sweeps.execution.batch import Batch
from conewise.sweeps.execution.executors import (
    Execution,
    Executor,
    SerialExecutor,
    WavefrontExecutor,
)
from conewise.sweeps.execution.growth import watching
from conewise.sweeps.execution.reading import PHASES, MetricReader, SweepLedger
from conewise.sweeps.planning.compiler import DEFAULT_MEMORY
from conewise.sweeps.planning.costs import matmul_rate
from conewise.sweeps.planning.plan import SweepPlan, chunks_of, of_batches
from conewise.sweeps.planning.planner import EXECUTORS, Planner, facts_of, keep
from conewise.sweeps.planning.spec import StoredCut, SweepSpec
from conewise.threads import gc_paused

KEPT = 32
"""The number of runs of an evaluator that are looked at."""


@dataclass(slots=True)
class Calibration:
    """The speed of sweeps: launches · c + FLOPs / rate, as far as runs tell the two apart.

    `product` is the rate of a matrix product, in operations a second, where one was timed; `runs` are sweeps
    that were run, by evaluator: launches, FLOPs and seconds of each.
    """

    product: float | None = None
    runs: dict[str, deque[tuple[int, int, float]]] = field(default_factory=dict)

    def note(self, evaluator: str, launches: int, flops: int, seconds: float) -> None:
        """Keep how fast a sweep was."""
        if flops and seconds > 0:
            self.runs.setdefault(evaluator, deque(maxlen=KEPT)).append((launches, flops, seconds))

    def clock(self, evaluator: str) -> StackClock | None:
        """Return what a launch and an operation take, by the runs there were; None where they do not say."""
        found = self.runs.get(evaluator, ())
        if len({(launches, flops) for launches, flops, _ in found}) < 3:
            return None
        try:
            clock = calibrate_stacks(found)
        except TheoryError:  # runs that are multiples of one
            return None
        return clock if clock.launch.value >= 0 and clock.work.value > 0 else None

    def seconds(self, evaluator: str, launches: int, flops: int) -> float | None:
        """Return the seconds of so many launches and operations, as far as anything is known."""
        if (clock := self.clock(evaluator)) is not None:
            return clock.seconds(launches, flops)
        if found := self.runs.get(evaluator):
            _, known, taken = found[-1]
            return flops * taken / known
        return None if self.product is None else flops / self.product


_KNOWN: weakref.WeakKeyDictionary[Captured, Calibration] = weakref.WeakKeyDictionary()


def calibration_of(model: Captured) -> Calibration:
    """Return what is known of the speed of a model's device; nothing is measured for it."""
    if model not in _KNOWN:
        _KNOWN[model] = Calibration()
    return _KNOWN[model]


def calibrate(model: Captured) -> Calibration:
    """The same, with one matrix product timed where nothing was: milliseconds."""
    known = calibration_of(model)
    if not known.runs and known.product is None:
        facts = facts_of(model)
        known.product = matmul_rate(facts.device, facts.dtype, time.perf_counter)
    return known


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run; `plan` is the plan that was given."""

    evaluator: str
    max_memory: int | None
    plan: SweepPlan | None = None

    @classmethod
    def of(cls, evaluator: str, max_memory: int | None, plan: SweepPlan | None) -> Options:
        """Return the options of a run; with a plan, its budget is held for all batches.

        Raises SweepError where the plan has another evaluator, or takes more than the budget.
        """
        if plan is None:
            return cls(evaluator, max_memory, None)
        if evaluator not in {"auto", plan.evaluator}:
            raise SweepError(
                f"the plan is of evaluator={plan.evaluator!r}, and the run was asked for with {evaluator=}. "
                "Leave out one of the two, or plan again: `sweep.plan(evaluator=...)`."
            )
        if max_memory is not None and plan.peak_bytes > max_memory:
            raise BudgetError(
                f"this plan (`sweep.plan(max_memory=...)` makes one for less) takes "
                f"{shown_bytes(plan.peak_bytes)}",
                shown_bytes(max_memory),
                plan.peak_bytes,
            )
        return cls(evaluator, plan.max_memory if max_memory is None else max_memory, plan)


class SweepJob(Job[Any]):
    """One run of a sweep."""

    def __init__(self, sweep: Any, options: Options) -> None:
        super().__init__(sweep.model, len(sweep.cells), sweep.batches)
        self.sweep, self.options, self.max_memory = sweep, options, options.max_memory
        self._computing: SweepComputing | None = None

    def begin(self, weights: Contents, phases: Phases) -> None:
        """Begin: forget what was found out, and was run, with other weights."""
        super().begin(weights, phases)
        self.sweep._expect_weights(weights.whole)
        self._computing = SweepComputing(self.model, self.sweep.spec, self._batch, weights, phases)
        self._computing.count = self.batches

    def _batch(self, number: int) -> Batch:
        found: Batch = self.sweep.batch(number)
        return found

    def here(self) -> SweepComputing:
        """Return what computes chunks in this process."""
        assert self._computing is not None
        return self._computing

    def elsewhere(self) -> tuple[Any, dict[str, Any]]:
        """Return what makes the same of a worker's own model."""
        return SweepComputing.of, {"kind": type(self.sweep), "asked": self.sweep._asked()}

    def stored(self) -> Request:
        """Return what identifies the sweep."""
        found: Request = self.sweep._stored(self.weights.whole)
        return found

    def plan(self, batch: int, cut: Callable[[str], StoredCut | None]) -> BatchPlan:
        """Plan a batch. Raises WeightsChangedError where a run was made with other weights."""
        options, during, here = self.options, self.phases.during, self.here()
        with during("baselines", counted(batch, self.batches)):  # some make their runs when asked
            found = here.batch(batch)
        planning = during("planning", f"{self.cells:,} worlds")
        with trusting(found, self.weights, self.phases), planning, gc_paused():
            known = cut(options.evaluator)
            plan = self._plan(batch, found, known)
        here.plans[batch] = plan
        chunks, costs = chunks_of(plan)
        assert plan.compiled is not None
        text = replace(plan, spec={}).to_json  # what it is for travels beside it
        order, own = plan.compiled.order, StoredCut(plan.evaluator, plan.chunks)
        return BatchPlan(own, plan.max_memory, chunks, costs, order, text, plan=plan)

    def names(self, cells: Sequence[int]) -> tuple[str, ...]:
        """Return the names of cells."""
        return tuple(self.sweep.cells[cell].name for cell in cells)

    def expect_room(self) -> None:
        """Raise BudgetError where a batch takes more than the budget, however it is cut."""
        if self.options.max_memory is not None:
            self.sweep.expect_room(self.options.max_memory, self.options.evaluator)

    def forget(self) -> None:
        """Forget the runs that were made of inputs."""
        self.sweep.forget()

    def forget_all(self) -> None:
        """Forget all that was found out: what weights it is of is not known."""
        self.sweep.facts.forget()
        self.sweep.forget()

    def result(self, run: JobRun[Any]) -> Any:
        """Return all batches together. Raises SweepError where there is nothing of a batch."""
        batches, missing = run.batches, run.missing
        if all(one.base is None or not (one.rows or one.parts) for one in batches):
            raise SweepError(
                f"no share of this sweep could be run: {'; '.join(dict.fromkeys(one.why for one in missing))}"
            )
        values: list[Tensor] = []
        for number, batch in enumerate(batches):
            if batch.base is None:
                whys = dict.fromkeys(one.why for one in missing if one.batch == number)
                raise SweepError(f"no share of batch {number} could be run: {'; '.join(whys)}")
            values.append(_reordered([run.values(number)], batch.plan.order))
        plan, ledger = of_batches([one.plan.plan for one in batches]), run.ledger
        if run.is_here and not ledger.resumed:
            calibration_of(self.model).note(plan.evaluator, plan.launches, plan.flops, ledger.compute_seconds)
        whole, weights = (
            torch.cat([numbers.transpose(0, 1) for numbers in values], dim=-1),
            self.weights.whole,
        )
        return self.sweep._result(plan, ledger, whole, run.baselines(), weights, missing=tuple(missing))

    def _plan(self, number: int, batch: Batch, cut: StoredCut | None) -> SweepPlan:
        """The plan of a batch: the one that was given, where it is for runs of this shape.

        Raises SweepError where that is of something else.
        """
        options, spec, model = self.options, self.sweep.spec, self.model
        given, worlds = options.plan, len(spec.cells)
        if given is None or number:
            asked = options.evaluator if given is None else given.evaluator
            found: SweepPlan = self.sweep._planned(batch, options.max_memory, asked, cut)
            return found
        assert given.compiled is not None
        shape = tuple(facts_of(model).shape(batch.base.inputs).layout.symbols.items())
        if given.worlds != worlds or given.compiled.symbols != shape:
            raise SweepError(
                f"this plan is of {given.worlds} worlds and inputs of sizes {dict(given.compiled.symbols)}; "
                f"the sweep has {worlds} worlds and sizes {dict(shape)}. Plan it again."
            )
        fitted = Planner(model, spec).fitted(given, batch.base, batch.source)
        if fitted is None:
            raise SweepError(
                "this plan is of another sweep: other cells, other outputs that metrics read, other weights "
                "or runs that differ from another position on; or a conewise that plans otherwise made it. "
                "Plan it again."
            )
        chunks = given.chunks if given.evaluator == "wavefront" else None
        if cut is not None and (cut.evaluator, cut.chunks) != (given.evaluator, chunks or cut.chunks):
            raise SweepError(
                "the stored run was cut into other chunks than this plan has, and would round differently. "
                "Resume it without a plan, or start again in another folder."
            )
        return fitted


class SweepComputing(Computing):
    """Computes chunks of a sweep: `batch_of` makes a batch, `plans` are those of the batches."""

    def __init__(
        self,
        model: Captured,
        spec: SweepSpec,
        batch_of: Callable[[int], Batch],
        weights: Contents | None = None,
        phases: Phases | None = None,
    ) -> None:
        super().__init__()
        self.model, self.spec, self.facts = model, spec, facts_of(model)
        self.plans: dict[int, SweepPlan] = {}
        self.phases = phases or Phases(PHASES)
        self._weights, self._batch_of = weights, batch_of
        self._made: tuple[int, Batch] | None = None
        self.count = 1
        """The number of batches."""

    @classmethod
    def of(cls, model: Captured, kind: Any, asked: dict[str, Any]) -> SweepComputing:
        """Return that of a worker: `kind` makes the sweep of its model and of what was asked."""
        sweep = kind(model, **asked)
        found = cls(model, sweep.spec, sweep.batch)
        found.count = sweep.batches
        return found

    def know_plan(self, batch: int, text: str) -> None:
        """Be told the plan of a batch."""
        self.plans[batch] = SweepPlan.from_json(text)

    def lacking(self, share: Share, memory: int | None) -> str:
        """Return what is lacking where a whole chunk is known not to fit into this worker; else nothing."""
        plan = self.plans[share.batch]
        if memory is None or share.worlds is not None or not share.chunks or plan.peak_bytes <= memory:
            return ""
        return f"a chunk takes {shown_bytes(plan.peak_bytes)}, and this worker has {shown_bytes(memory)}"

    def batch(self, number: int) -> Batch:
        """Make a batch, or return the one that was made last."""
        if self._made is None or self._made[0] != number:
            self._made = None
            self._made = number, self._batch_of(number)
        return self._made[1]

    @contextmanager
    def begin(self, batch: int) -> Iterator[SweepUnderWay]:
        """Begin with a batch: its baselines are computed once for all chunks."""
        which, during = counted(batch, self.count), self.phases.during
        is_checked = self._made is not None and self._made[0] == batch  # when it was planned, just now
        with during("baselines", which), gc_paused():
            found = self.batch(batch)
        self._made = None  # it is held for as long as it is under way
        weights = self._weights or self.model.weights.contents()
        with trusting(found, weights, self.phases, is_checked=is_checked):
            plan = self.plans[batch]
            with during("planning"), gc_paused():
                executor = executor_for(self.model, self.spec, plan, found)
            with during("baselines", which), gc_paused():
                reader = MetricReader(self.facts, found.metrics, self.spec.tokens, found.base)
                execution = executor.over(found, reader)
            yield SweepUnderWay(self, plan, found, executor, execution)


@dataclass(frozen=True, slots=True)
class SweepUnderWay:
    """A batch of a sweep, whose baselines are computed."""

    of: SweepComputing
    plan: SweepPlan
    batch: Batch
    executor: Executor
    execution: Execution

    def count(self, chunk: int, ledger: SweepLedger) -> None:
        """Count what a chunk computes that was computed before."""
        self.executor.count(chunk, ledger)

    def compute(self, share: Share, ledger: SweepLedger, memory: int | None, ahead: Ahead = None) -> Computed:
        """Compute the chunks of a share, or some worlds of one."""
        if share.worlds is None:
            rows = self._rows(share.chunks, ledger, memory, ahead)
        else:
            rows = self._part(share.first, share.worlds, ledger, memory)
        return Computed(rows, lambda: self.execution.base, lambda: self.execution.source)

    def _rows(
        self, chunks: Sequence[int], ledger: SweepLedger, memory: int | None, ahead: Ahead
    ) -> Generator[Tensor]:
        """The metrics of each chunk; with `ahead`, one is begun before the one before it is waited for."""
        if not chunks:
            return
        facts, kept, during = self.of.facts, self.executor.kept, self.of.phases.during
        left = None if memory is None else max(0, memory - kept)
        waiting: deque[Callable[[], Tensor]] = deque()
        with watching(facts.devices, max(0, self.plan.peak_bytes - kept), left) as watch:
            for chunk in chunks:
                with during("passes"):
                    waiting.append(self.execution.start(chunk, ledger, watch))
                if len(waiting) > (ahead is not None):
                    with during("passes"):
                        rows = waiting.popleft()()
                    yield rows
            if ahead is not None:
                ahead()
            for fetch in waiting:
                with during("passes"):
                    rows = fetch()
                yield rows
        ledger.note_memory(watch.peak, watch.reserved, kept)

    def _part(self, first: int, worlds: int, ledger: SweepLedger, memory: int | None) -> Generator[Tensor]:
        """The metrics of some worlds of a chunk, cut anew to fit."""
        assert self.plan.compiled is not None
        spec, order = self.of.spec, self.plan.compiled.order
        numbers = order[first : first + worlds]
        own = replace(
            spec,
            cells=tuple(spec.cells[number] for number in numbers),
            names=tuple(spec.names[number] for number in numbers),
        )
        planner, batch = Planner(self.of.model, own), self.batch
        plan = planner.plan(batch.base, batch.source, max_memory=memory, evaluator=self.plan.evaluator)
        computing = SweepComputing(self.of.model, own, lambda _: batch)
        computing.plans[0] = plan
        assert plan.compiled is not None
        chunks = tuple(range(len(chunks_of(plan)[0])))
        with computing.begin(0) as under_way:
            rows = list(under_way.compute(Share(0, chunks, 0), ledger, memory).rows)
            yield _reordered(rows, plan.compiled.order)


def _reordered(chunks: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """Rows in chunks one behind the other, with row i at the place order[i]."""
    rows = torch.cat(list(chunks))
    found = torch.empty_like(rows)
    found[torch.tensor(list(order), device=rows.device)] = rows
    return found


def counted(number: int, count: int) -> str:
    """Return which batch of how many, where there are several."""
    return f"{number + 1:,}/{count:,}" if count > 1 else ""


@contextmanager
def trusting(batch: Batch, weights: Contents, phases: Phases, *, is_checked: bool = False) -> Iterator[None]:
    """Check that all runs of a batch were made with these weights; meanwhile, do not look for writes.

    Raises SweepError where a metric or an intervention changed the graph meanwhile.
    """
    put = (batch.intervention, *batch.own)
    readings = dict.fromkeys((*batch.runs, *(run for one in put for run in one.runs)))
    with ExitStack() as trusting:
        with phases.during("weights"):
            for reading in readings:
                if not is_checked:
                    reading.check(weights)
                trusting.enter_context(reading.trusted())
        begin = [one.begin for one in put if one.begin is not None]
        for begun in begin:
            begun(weights.whole)
        graph = batch.base.model.graph
        changes = graph.changes
        try:
            yield
            if graph.changes != changes:
                raise SweepError(
                    f"the graph of {batch.base.model.name} was changed while worlds were computed, by a "
                    "metric or an intervention, so that some have the change and others do not. Change it "
                    "before."
                )
        except BaseException:
            for begun in begin:
                begun(Sums(()))  # of what weights it found something out is not known
            raise


def executor_for(model: Captured, spec: SweepSpec, plan: SweepPlan, batch: Batch) -> Executor:
    """Return what runs a plan; kept with the model, so that runs of the same shape find it."""
    compiled, facts = plan.compiled, facts_of(model)
    assert compiled is not None
    if plan.evaluator == "serial":
        return SerialExecutor(compiled, spec)
    key = id(compiled), spec.precision
    known = facts.executors.get(key)
    if known is None or known.compiled is not compiled:
        # What moves from one device to another cannot be recorded.
        is_on_one = facts.devices == (facts.device,) == (facts.input_device,)
        # Nor what reads weights that come and go.
        is_held = reads_of(model.program).stream is None
        can_record = facts.device.type == "cuda" and is_on_one and is_held
        shape = facts.shape(batch.base.inputs)
        budget = plan.max_memory or DEFAULT_MEMORY
        pool = (lambda: facts.graph_pool) if can_record else None
        known = WavefrontExecutor(model, compiled, shape, spec, facts.rules, pool, budget)
        keep(facts.executors, key, known, EXECUTORS)
    executor: WavefrontExecutor = known
    return executor
