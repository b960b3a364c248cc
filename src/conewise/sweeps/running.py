"""The run of a sweep: batch after batch, chunk after chunk, each planned, executed, stored and counted."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from conewise.arguments import shown_bytes
from conewise.errors import BudgetError, SweepError, TheoryError, WeightsChangedError
from conewise.paper.theory.clocks import StackClock, calibrate_stacks
from conewise.program.tensors import Tensor
from conewise.program.weights import Contents, Sums
from conewise.runs.captured import Captured
from conewise.runs.fillings import joined, reordered
from conewise.status import Phases
from conewise.sweeps.batches import Batches
from conewise.sweeps.execution.batch import Batch
from conewise.sweeps.execution.cuda_graph import GraphPool
from conewise.sweeps.execution.executors import Execution, Executor, SerialExecutor, WavefrontExecutor
from conewise.sweeps.execution.growth import Holes, Watch, watching
from conewise.sweeps.execution.reading import MetricReader, SweepLedger
from conewise.sweeps.planning.compiler import DEFAULT_MEMORY
from conewise.sweeps.planning.costs import matmul_rate
from conewise.sweeps.planning.plan import SweepPlan, of_batches
from conewise.sweeps.planning.planner import ModelFacts, Planner, facts_of
from conewise.sweeps.planning.spec import StoredCut, SweepSpec
from conewise.sweeps.storage.result_data import Missing
from conewise.sweeps.storage.store import Recorder
from conewise.threads import uncollected

KEPT = 32
"""So many runs of an evaluator are looked at."""


@dataclass(slots=True)
class Calibration:
    """How long sweeps take: launches · c + FLOPs / rate, as far as runs tell the two apart.

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
        """What a launch and an operation take, by the runs there were; None where they do not say."""
        found = self.runs.get(evaluator, ())
        if len({(launches, flops) for launches, flops, _ in found}) < 3:
            return None
        try:
            clock = calibrate_stacks(found)
        except TheoryError:  # runs that are multiples of one
            return None
        return clock if clock.launch.value >= 0 and clock.work.value > 0 else None

    def seconds(self, evaluator: str, launches: int, flops: int) -> float | None:
        """How long so many launches and operations take, as far as anything is known."""
        if (clock := self.clock(evaluator)) is not None:
            return clock.seconds(launches, flops)
        if found := self.runs.get(evaluator):
            _, known, taken = found[-1]
            return flops * taken / known
        return None if self.product is None else flops / self.product


_KNOWN: weakref.WeakKeyDictionary[Captured, Calibration] = weakref.WeakKeyDictionary()


def calibration_of(model: Captured) -> Calibration:
    """What is known of the speed of a model's device; nothing is measured for it."""
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


class Planned(Protocol):
    """Makes the plan of a batch."""

    def __call__(
        self, batch: Batch, max_memory: int | None, evaluator: str, cut: StoredCut | None = None
    ) -> SweepPlan:
        """The plan; `cut` is how a run that is resumed was cut."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a run was asked for; `plan` is the plan that was given."""

    evaluator: str
    max_memory: int | None
    plan: SweepPlan | None

    @classmethod
    def of(cls, evaluator: str, max_memory: int | None, plan: SweepPlan | None) -> Options:
        """The options of a run; with a plan, its budget is held for all batches.

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


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a run found: metrics of the worlds [metric, cell, prompt], of base and source [metric, prompt]."""

    plan: SweepPlan
    ledger: SweepLedger
    per_prompt: Tensor
    base: Tensor
    source: Tensor | None
    missing: tuple[Missing, ...] = ()


class Running:
    """One run of what `spec` asks over some batches. `weights` are those that it began with.

    `phases` were begun with the run.
    """

    def __init__(
        self,
        model: Captured,
        spec: SweepSpec,
        batches: Batches,
        planned: Planned,
        weights: Contents,
        phases: Phases,
    ) -> None:
        self.model, self.spec, self.batches, self.phases = model, spec, batches, phases
        self._planned, self._weights = planned, weights
        self._facts = facts_of(model)
        self._ledger = SweepLedger()
        self._ending: Contents | None = None

    def run(self, options: Options, record: Recorder, tell: Callable[[int], None]) -> Numbers:
        """Run all batches. `tell` is told how many worlds were done."""
        values: list[Tensor] = []
        bases: list[Tensor] = []
        sources: list[Tensor | None] = []
        plans: list[SweepPlan] = []
        during, holes = self.phases.during, Holes()
        for number in range(len(self.batches)):
            which = self._counted(number)
            with during("baselines", which):  # some make their runs when asked
                batch = self.batches[number]
            ledger, resumed = self._ledger, self._ledger.resumed
            with trusting(batch, self._weights, self.phases):
                with during("planning", f"{len(self.spec.cells):,} worlds"), uncollected():
                    cut = record.cut(number, options.evaluator)
                    plan = plan_for(self.model, self.spec, self._planned, number, batch, options, cut)
                    executor = executor_for(self.model, self.spec, plan, batch)
                plans.append(plan)
                with during("baselines", which), uncollected():
                    reader = MetricReader(self._facts, batch.metrics, self.spec.tokens, batch.base)
                    execution = executor.over(batch, reader)
                if record.keeps:
                    with during("storing"):
                        record.begin(number, plan, execution.base, execution.source)
                kept, budget = executor.kept, options.max_memory
                left = None if budget is None else max(0, budget - kept)
                with watching(self._facts.devices, max(0, plan.peak_bytes - kept), left) as watch:
                    rows = self._chunks(number, executor, execution, watch, record, tell)
                # Last, since reading them waits for a device.
                with during("baselines", which):
                    bases.append(execution.base)
                    sources.append(execution.source)
                if ledger.resumed - resumed < len(self.spec.cells):
                    ledger.note_memory(watch.peak, watch.reserved, kept)
                assert plan.compiled is not None
                values.append(reordered(rows, plan.compiled.order))
            del batch, executor, execution  # before the next one is made
            if len(self.batches) > 1:
                self.batches.forget()
                holes.settle()
        self._expect_unchanged()
        plan = of_batches(plans)
        ledger.phases = self.phases.seconds()
        ledger.seconds = sum(ledger.phases.values())
        if not ledger.resumed:
            calibration_of(self.model).note(plan.evaluator, plan.launches, plan.flops, ledger.compute_seconds)
        known = [one for one in sources if one is not None]
        return Numbers(
            plan,
            ledger,
            joined([numbers.transpose(0, 1) for numbers in values]),
            joined(bases),
            joined(known) if len(known) == len(sources) else None,
        )

    def _chunks(
        self,
        number: int,
        executor: Executor,
        execution: Execution,
        watch: Watch,
        record: Recorder,
        tell: Callable[[int], None],
    ) -> list[Tensor]:
        """The metrics of each chunk of a batch: computed, or found in the store.

        A chunk is begun before the one before it is waited for, where nothing has to be stored in between.
        """
        ledger, during, rows = self._ledger, self.phases.during, list[Tensor]()
        waiting: deque[tuple[Callable[[], Tensor], int]] = deque()

        def fetch() -> None:
            fetched, count = waiting.popleft()
            with during("passes"):
                rows.append(fetched())
            tell(count)

        for chunk, worlds in enumerate(executor.chunks):
            with during("storing"):
                stored = record.get(number, chunk, len(worlds))
            if stored is None and record.keeps:
                with during("passes"):
                    rows.append(execution.start(chunk, ledger, watch)())
                self._expect_unchanged()
                with during("storing"):
                    record.put(number, chunk, rows[-1])
                tell(len(worlds))
                continue
            if stored is None:
                with during("passes"):
                    waiting.append((execution.start(chunk, ledger, watch), len(worlds)))
                if len(waiting) > 1:
                    fetch()
                continue
            executor.count(chunk, ledger)
            ledger.resumed += len(worlds)
            rows.append(stored)
            tell(len(worlds))
        if number == len(self.batches) - 1 and not record.keeps and self.model.weights.are_on_gpu:
            # A device reads them behind all that it was given to do, and is waited for once.
            with during("weights"):
                self._ending = self.model.weights.whole_contents()
        while waiting:
            fetch()
        return rows

    def _counted(self, number: int) -> str:
        """Which batch of how many, where there are several."""
        return f"{number + 1:,}/{len(self.batches):,}" if len(self.batches) > 1 else ""

    def _expect_unchanged(self) -> None:
        """Raise WeightsChangedError where a weight was written to since the run began."""
        with self.phases.during("weights"):
            now, self._ending = self._ending or self.model.weights.whole_contents(), None
            expect_unchanged(self.model, self._weights, now)


def plan_for(
    model: Captured,
    spec: SweepSpec,
    planned: Planned,
    number: int,
    batch: Batch,
    options: Options,
    cut: StoredCut | None,
) -> SweepPlan:
    """The plan of a batch: the one that was given, where it is for runs of this shape.

    Raises SweepError where that is of something else.
    """
    given, worlds = options.plan, len(spec.cells)
    if given is None or number:
        asked = options.evaluator if given is None else given.evaluator
        return planned(batch, options.max_memory, asked, cut)
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


def expect_unchanged(model: Captured, before: Contents, now: Contents) -> None:
    """Raise WeightsChangedError where weights are not what they were before a sweep."""
    changed = model.weights.changed(before.whole, now.whole)
    if changed:
        raise WeightsChangedError(
            f"the weights of {model.name} were written to while the sweep ran: {changed}. Its cells "
            "are of no one model, and there is no result. Leave the weights alone until it has ended."
        )


@contextmanager
def trusting(batch: Batch, weights: Contents, phases: Phases) -> Iterator[None]:
    """Check that all runs of a batch were made with these weights; meanwhile, do not look for writes."""
    put = (batch.intervention, *batch.own)
    read = [run for one in put for run in one.runs]
    readings = [run for run in dict.fromkeys((batch.base, batch.source, *read)) if run is not None]
    with ExitStack() as trusting:
        with phases.during("weights"):
            for reading in readings:
                reading.check(weights)
                trusting.enter_context(reading.trusted())
        begin = [one.begin for one in put if one.begin is not None]
        for begun in begin:
            begun(weights.whole)
        try:
            yield
        except BaseException:
            for begun in begin:
                begun(Sums(()))  # of what weights it found something out is not known
            raise


def executor_for(model: Captured, spec: SweepSpec, plan: SweepPlan, batch: Batch) -> Executor:
    """What runs a plan; kept with the model, so that runs of the same shape find it."""
    compiled, facts = plan.compiled, facts_of(model)
    assert compiled is not None
    if plan.evaluator == "serial":
        return SerialExecutor(compiled, spec)
    key = id(compiled), spec.precision
    known = facts.executors.get(key)
    if known is None or known.compiled is not compiled:
        # What moves from one device to another cannot be recorded.
        is_on_one = facts.devices == (facts.device,) == (facts.input_device,)
        can_record = facts.device.type == "cuda" and is_on_one
        shape = facts.shape(batch.base.inputs)
        budget = plan.max_memory or DEFAULT_MEMORY
        pool = partial(_graph_pool, facts) if can_record else None
        known = WavefrontExecutor(model, compiled, shape, spec, facts.rules, pool, budget)
        facts.keep_executor(key, known)
    executor: WavefrontExecutor = known
    return executor


def _graph_pool(facts: ModelFacts) -> GraphPool:
    """The memory of a model's graphs, made when the first is recorded."""
    if facts.graph_pool is None:
        facts.graph_pool = GraphPool(facts.device)
    pool: GraphPool = facts.graph_pool
    return pool
