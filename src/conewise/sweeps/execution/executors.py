"""Executors: they run worlds of a compiled sweep over the values of a batch, one by one or all in one pass.

An executor needs the program, the plan and the baselines, and nothing else.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch

from conewise.errors import MetricError
from conewise.program.streaming import WeightStream, first_uses, reads_of
from conewise.program.tensors import SPLIT, Tensor, computing
from conewise.program.walk import Rule
from conewise.runs.captured import Captured
from conewise.runs.interventions import as_intervention
from conewise.runs.reading import Reading
from conewise.runs.run import InputRun, PassRun
from conewise.runs.values import reader
from conewise.sweeps.execution.batch import Batch, Site, edge_stacks
from conewise.sweeps.execution.cuda_graph import GraphPool, Record, Replayed, replay_pays
from conewise.sweeps.execution.fills import PassFills, Values
from conewise.sweeps.execution.growth import ARENA, Watch, is_roomy
from conewise.sweeps.execution.reading import MetricReader, SweepLedger
from conewise.sweeps.execution.wavefront import ReadValue, Wavefront, kernels_of_passes
from conewise.sweeps.planning.compiler import DEFAULT_MEMORY
from conewise.sweeps.planning.layout import Constants, index_tensor
from conewise.sweeps.planning.passes import (
    PassProgram,
    baseline_pass,
    can_stack,
    merged_weights,
    read_of_base,
    weights_of,
)
from conewise.sweeps.planning.plan import Compiled
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.planning.shapes import ShapeFacts
from conewise.sweeps.planning.spec import SweepSpec

RUNNERS = 64
"""The passes of a plan that are kept ready, at most: thousands would hold more than a small budget."""


class Execution:
    """A batch under way: what is computed once for all its chunks is computed.

    The metrics of base and source are computed at once, and fetched when they are asked for.
    """

    def __init__(self, batch: Batch, metrics: MetricReader, *, is_along: bool = False) -> None:
        """With `is_along`, base and source are computed along with the worlds of the first chunk."""
        self._batch, self._metrics = batch, metrics
        if not is_along:
            _ = self._base, self._source

    @cached_property
    def _base(self) -> Callable[[], Tensor]:
        return self._metrics.of_baseline(self._batch.base, "base")

    @cached_property
    def _source(self) -> Callable[[], Tensor] | None:
        source = self._batch.source
        return None if source is None else self._metrics.of_baseline(source, "source")

    @cached_property
    def base(self) -> Tensor:
        """The metrics of the base itself: [metric, prompt]."""
        return self._base()

    @cached_property
    def source(self) -> Tensor | None:
        """The metrics of the source, where there is one."""
        return None if self._source is None else self._source()

    def start(self, chunk: int, ledger: SweepLedger, watch: Watch) -> Callable[[], Tensor]:
        """Begin with a chunk; the call waits for the metrics of all its worlds: [world, metric, prompt]."""
        raise NotImplementedError


@contextmanager
def streaming(
    stream: WeightStream | None, order: Sequence[int] | None, ledger: SweepLedger
) -> Iterator[None]:
    """Let weights stream for a chunk, in the order in which it reads them, and count what is moved."""
    if stream is None:
        yield
        return
    with stream.following(order) as moved:
        yield
        ledger.moved_bytes += moved()


# -- one by one --------------------------------------------------------------------------------


class SerialExecutor:
    """One world after another, each a fork of the base: bit for bit a full re-run."""

    kept = 0

    def __init__(self, compiled: Compiled, spec: SweepSpec) -> None:
        self.compiled, self.spec, self.chunks = compiled, spec, compiled.chunks
        self.has_edges = any(table.edges is not None for table in compiled.fills)

    def over(self, batch: Batch, metrics: MetricReader) -> Execution:
        """Begin with a batch."""
        return _SerialExecution(self, batch, metrics)

    def count(self, chunk: int, ledger: SweepLedger) -> None:
        """Count what a chunk computes that was computed before, and is resumed."""
        own = self.chunks[chunk]
        for _, worlds in self.compiled.steps:
            done = sum(max(0, min(stop, own.stop) - max(start, own.start)) for start, stop in worlds)
            ledger.node_evaluations += done
        readers = [self.compiled.of_readers(range(world, world + 1)) for world in own]
        ledger.node_evaluations += sum(evaluations for evaluations, _ in readers)
        ledger.launches = ledger.node_evaluations


class _SerialExecution(Execution):
    def __init__(self, executor: SerialExecutor, batch: Batch, metrics: MetricReader) -> None:
        super().__init__(batch, metrics)
        self._executor = executor
        _ = self.base, self.source  # looked at before anything is patched
        batch.expect_possible(executor.spec.cells)

    def start(self, chunk: int, ledger: SweepLedger, watch: Watch) -> Callable[[], Tensor]:
        """Compute the worlds of a chunk, one after another."""
        started, batch, executor = time.perf_counter(), self._batch, self._executor
        rows = []
        with streaming(reads_of(batch.base.model.program).stream, None, ledger):
            for world in executor.chunks[chunk]:
                with batch.base.fork() as fork:
                    for place in executor.spec.cells[executor.compiled.order[world]]:
                        fork.patch(place, batch.part(place))
                    rows.append(self._metrics.of_run(fork))
                    ledger.node_evaluations += fork.ledger.count("recomputed")
                watch.settle()
        if executor.has_edges:
            ledger.node_evaluations += batch.edges.counted()[0]
        ledger.launches = ledger.node_evaluations
        ledger.compute_seconds += time.perf_counter() - started
        return lambda: torch.stack(rows)


# -- all in one pass ---------------------------------------------------------------------------


class WavefrontExecutor:
    """All worlds of a pass at once. It is kept: baselines of the same shape and weights run it again.

    `rules` are those that other executors of the model made already. `pool` gives the memory in which
    graphs of a CUDA device keep what they compute, beside what a first run takes: both fit the budget.
    """

    def __init__(
        self,
        model: Captured,
        compiled: Compiled,
        facts: ShapeFacts,
        spec: SweepSpec,
        rules: dict[str, Rule],
        pool: Callable[[], GraphPool] | None = None,
        budget: int = DEFAULT_MEMORY,
    ) -> None:
        self.model, self.compiled, self.facts = model, compiled, facts
        self.cells, self.precision = spec.cells, spec.precision  # not its metrics, which are their owner's
        self.columns = dict(compiled.columns)
        self.has_edges = any(table.edges is not None for table in compiled.fills)
        self.chunks = compiled.chunks
        of_source = [table for table in compiled.fills if table.is_source]
        self.sites = tuple(dict.fromkeys(table.site for table in of_source))
        self.site_values: dict[Site, Tensor | None] = {}
        """The source's values that lie in the memory of a graph, where each next source's will lie."""
        self.split_weights = facts_of(model).split_weights
        self.streamed = reads_of(facts.program)
        self._rules = rules
        self._wavefront = self._own_wavefront()
        self.split = tuple(
            dict.fromkeys(s.node for one in compiled.programs for s in one.steps if s.kernel == SPLIT)
        )
        self._reads = [read_of_base(program) for program in compiled.programs]
        self._counts = [(one.node_evaluations, one.launches) for one in compiled.programs]
        self._runners: dict[int, PassRunner] = {}
        self._baselines: dict[int, BaselineRunner | None] = {}
        self._constants = Constants(facts.layout, facts.program.source_values.__getitem__)
        self._record: Record | None = None
        peak = max(program.peak for program in compiled.programs)
        dtype = facts.records[compiled.targets[0]].dtype
        if pool is not None and dtype is not None and is_roomy(peak, budget):
            programs = [compiled.programs[one.program] for one in compiled.passes]
            flops, launches = (
                sum(one) for one in zip(*((p.flops, p.launches) for p in programs), strict=True)
            )
            if replay_pays(flops, launches, dtype):
                own = pool()
                own.reserve(int(ARENA * peak))
                self._record = own.record

    @cached_property
    def kept(self) -> int:
        """Bytes of the parts of the weights that its products read."""
        return self.split_weights.taken_by(self.split)

    def over(self, batch: Batch, metrics: MetricReader) -> Execution:
        """Begin with a batch; base and source are computed as one where both are inputs."""
        self.split_weights.prepare(self.split)
        with kernels_of_passes(self.facts.device, self.precision):
            along = self._along(batch)
            if along is not None:
                found = self._of_runs(batch, along.runs)
                return WavefrontExecution(self, found, False, metrics, along)
            return WavefrontExecution(self, *self._computed(batch), metrics)

    def recorded(
        self, number: int, read: ReadValue, fills: PassFills, values: Values, *, records: bool
    ) -> dict[str, Tensor]:
        """The targets of a pass by the number of its program; recorded for a way back where that is asked."""
        return self._wavefront.run(self.compiled.programs[number], read, fills, values, records=records)

    def count(self, chunk: int, ledger: SweepLedger, batch: Batch | None = None) -> None:
        """Count what a chunk computes; with a batch, what readers of its edges have computed."""
        evaluations, launches = self._counts[self.compiled.passes[chunk].program]
        if self.has_edges:
            worlds = self.chunks[chunk]
            more, calls = self.compiled.of_readers(worlds) if batch is None else batch.edges.counted()
            evaluations, launches = evaluations + more, launches + calls
        ledger.node_evaluations += evaluations
        ledger.launches += launches

    def runner(self, chunk: int, batch: Batch) -> PassRunner:
        """Return what runs a pass; kept, but where edits stand in the base."""
        edits = batch.base.edits
        if chunk in self._runners and not edits:
            return self._runners[chunk]
        one = self.compiled.passes[chunk]
        program, reads = self.compiled.programs[one.program], tuple(self._reads[one.program])
        fills = PassFills(self.compiled, one, self.cells, self.model.locate, edits)
        runner = PassRunner(self._wavefront, program, fills, reads, None if edits else self._record)
        if not edits and len(self._runners) < RUNNERS:
            self._runners[chunk] = runner
        return runner

    # -- base and source -----------------------------------------------------------------------

    def _computed(self, batch: Batch) -> tuple[Batch, bool]:
        """The batch with runs that a pass computed, where they are inputs; whether values stay in place."""
        runs = [run for run in batch.runs if isinstance(run, InputRun)]
        # Runs that somebody has read meanwhile too: what was asked before must not change the rounding.
        if len(runs) < len(batch.runs):
            return batch, False
        runner = self._baseline(runs)
        if runner is None:
            return batch, False
        try:
            found: list[PassRun] = runner.run(runs)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            for run in runs:
                _ = run.world  # one by one they raise what says which operation it was, and what it was given
            raise
        return self._of_runs(batch, found), runner.stays

    def _of_runs(self, batch: Batch, found: Sequence[PassRun]) -> Batch:
        """The batch with these runs as base and source."""
        source: Reading | None = found[1] if len(found) > 1 else None
        put = batch.intervention if source is None else as_intervention(source, self.model)
        return Batch(found[0], source, put, batch.own, batch.metrics)

    def _along(self, batch: Batch) -> Along | None:
        """Return base and source as a pass that is computed along with the worlds; None where it is not.

        Weights that stream come by once for both.
        """
        runs = [run for run in batch.runs if isinstance(run, InputRun)]
        if self.streamed.stream is None or self.has_edges or len(runs) < len(batch.runs):
            return None
        runner = self._baseline(runs)
        return None if runner is None else Along(runner, runs, self._own_wavefront())

    def _own_wavefront(self) -> Wavefront:
        facts, rules = self.facts, self._rules
        return Wavefront(facts.program, facts.layout, facts.fusions, rules, self.split_weights)

    def _baseline(self, runs: Sequence[InputRun]) -> BaselineRunner | None:
        """Return what computes so many runs as one; None where they cannot be stacked."""
        worlds = len(runs)
        if worlds not in self._baselines:
            facts, exact = self.facts, runs[0]

            def exactly(name: str) -> Any:
                (value,) = exact.demand([name])
                return value

            masks = facts.masks(exactly)
            program = baseline_pass(self.model.graph, facts, self._wanted(), masks, worlds)
            nodes = [name for step in program.steps if step.worlds for name in (step.node, *step.inside)]
            is_one = worlds == 1 or (can_stack(facts, program) and not facts.mixing(tuple(nodes), exactly))
            runner = BaselineRunner(self._wavefront, program, facts, self._constants.value, self._record)
            self._baselines[worlds] = runner if is_one else None
        return self._baselines[worlds]

    def _wanted(self) -> list[str]:
        reads = [name for names in self._reads for name in names]
        if self.has_edges:
            reads += [name for facts in edge_stacks(self.model) for name in facts.reads]
        return [*reads, *(table.node for table in self.compiled.fills), *self.compiled.targets]

    def reader(self, batch: Batch) -> ReadValue:
        """Reads values of the base by the graph's own names."""
        base, weights, constants = batch.base, self.facts.program.source_values, self._constants.value
        if isinstance(base, PassRun):
            values = base.values

            def known(name: str) -> Any:
                if name in weights:
                    return weights[name]
                return values[name] if name in values else constants(name)

            return known
        if self.streamed.stream is not None:
            return reader(base)
        edited = {edit.node for edit in base.edits}
        own = {name: weight for name, weight in weights.items() if name not in edited}
        wanted = [name for name in dict.fromkeys(chain.from_iterable(self._reads)) if name not in own]
        return _Known(own, base, tuple(wanted)).__getitem__


class _Known(dict[str, Any]):
    """Values of a base by name: weights; what passes want, all at once; and others where they are asked for.

    Each demand takes as long as a small product. No closure holds it: its values go when it goes.
    """

    def __init__(self, weights: Mapping[str, Any], base: Reading, wanted: tuple[str, ...]) -> None:
        super().__init__(weights)
        self._base, self._wanted = base, wanted

    def __missing__(self, name: str) -> Any:
        names, self._wanted = self._wanted, ()
        names = names if name in names else (name, *names)
        self.update(zip(names, self._base.demand(names), strict=True))
        return self[name]


class WavefrontExecution(Execution):
    """A batch under way. With `stays`, its values lie in the memory of a graph."""

    def __init__(
        self,
        executor: WavefrontExecutor,
        batch: Batch,
        stays: bool,
        metrics: MetricReader,
        along: Along | None = None,
    ) -> None:
        super().__init__(batch, metrics, is_along=along is not None)
        self._executor, self._stays, self._along = executor, stays, along
        self._read = executor.reader(batch)
        where = {node: executor.facts.device_of(node) for node in executor.columns}
        self._columns = {node: index_tensor(metrics.tokens, device) for node, device in where.items()}
        wholes = executor.site_values if stays else None
        self._values = Values(batch, executor.sites, wholes, is_later=along is not None)
        batch.expect_possible(executor.cells)

    def start(self, chunk: int, ledger: SweepLedger, watch: Watch) -> Callable[[], Tensor]:
        """Compute all worlds of a pass; the call fetches their metrics."""
        executor, batch, started = self._executor, self._batch, time.perf_counter()
        with ExitStack() as trusting:
            for run in batch.runs:
                trusting.enter_context(run.checked_once())
            trusting.enter_context(kernels_of_passes(executor.facts.device, executor.precision))
            runner = executor.runner(chunk, batch)
            along, self._along = self._along, None
            before = None if along is None else along.before
            if executor.streamed.stream is not None:
                steps = weights_of(runner.program, executor.streamed, executor.columns)
                if along is not None:
                    steps = merged_weights(executor.facts.program, runner.program, steps, along.program)
                order = first_uses(steps)
                trusting.enter_context(streaming(executor.streamed.stream, order, ledger))
            outputs = runner.run(
                self._read, self._values, self._columns, watch.room_for, stays=self._stays, before=before
            )
            if along is not None:
                along.finish()
            executor.split_weights.forget_value()
        watch.note(runner.held)
        worlds, facts = executor.compiled.passes[chunk].worlds, executor.facts
        try:
            found = self._metrics.of_stack(outputs, worlds, facts.layout, executor.columns)
        except MetricError:
            self._explain(runner)
            raise
        ledger.compute_seconds += time.perf_counter() - started
        executor.count(chunk, ledger, self._batch)

        def fetch() -> Tensor:
            started = time.perf_counter()
            try:
                numbers = found()
            except MetricError:
                self._explain(runner)
                raise
            self._values.expect_no_nan(runner.fills)
            ledger.compute_seconds += time.perf_counter() - started
            return numbers

        return fetch

    def _explain(self, runner: PassRunner) -> None:
        """Raise what says more of where an error of a metric comes from, if anything does."""
        _ = self.base, self.source
        self._values.expect_no_nan(runner.fills)


# ------------------------------------------------------------------------------------------
# A pass that runs again and again: on CUDA it is recorded once as a graph, and then replayed.
#
# A replay launches no kernel from Python, so what is left is the work itself. Recording pays where shapes
# repeat: chunks of one size, prompts of one length, the same sweep run again.


class PassRunner:
    """One pass of a plan, ready to run over any baseline of its shape.

    The first run is eager. With `record`, and where all that is put in are tensors, the second one records a
    graph over slots for what the pass reads of baselines, and every further run is a replay. `reads` are the
    nodes whose values in the base it reads.
    """

    def __init__(
        self,
        wavefront: Wavefront,
        program: PassProgram,
        fills: PassFills,
        reads: tuple[str, ...] = (),
        record: Record | None = None,
    ) -> None:
        self._wavefront, self.program, self.fills = wavefront, program, fills
        self._names = tuple(name for name in reads if name in wavefront.layout.varying)
        self._record = record
        self._replayed: Replayed | None = None
        self._held: dict[str, Any] = {}  # constants that the graph reads: they must outlive their run
        self._runs = 0

    @property
    def held(self) -> int:
        """The bytes of the graph that is replayed; 0 where there is none."""
        return 0 if self._replayed is None else self._replayed.held

    def run(
        self,
        read: ReadValue,
        values: Values,
        columns: Mapping[str, Tensor],
        room_for: Callable[[int], None] = lambda _: None,
        *,
        stays: bool = False,
        before: Callable[[str], None] | None = None,
    ) -> dict[str, Tensor]:
        """The targets in all worlds, stacked. They hold until the next run. `before` is told of each node.

        `room_for` is told before bytes are taken, where operations are run one by one. With `stays`, what is
        read of the baselines lies where it lay at the last run and will lie at the next.
        """
        self._runs += 1
        given = None if self._record is None or self._runs == 1 else self._given(read, values, columns)
        if given is None:
            return self._wavefront.run(
                self.program, read, self.fills, values, room_for, columns=columns, before=before
            )
        with computing():
            if self._replayed is None:
                self._replayed = self._recorded(given, read, values, columns, stays)
            return self._replayed.run(given)

    def _given(
        self, read: ReadValue, values: Values, columns: Mapping[str, Tensor]
    ) -> dict[str, Tensor] | None:
        """All that changes from run to run, by name; None where some of it is no tensor."""
        if not self.fills.is_of_source:
            return None
        found: dict[str, Any] = {name: read(name) for name in self._names}
        found |= {_slot("site", site): values.whole(site) for site in self.fills.sites}
        found |= {_slot("columns", node): index for node, index in columns.items()}
        return found if all(isinstance(one, torch.Tensor) for one in found.values()) else None

    def _recorded(
        self,
        given: Mapping[str, Tensor],
        read: ReadValue,
        values: Values,
        columns: Mapping[str, Tensor],
        stays: bool,
    ) -> Replayed:
        """The pass, recorded over slots for all that changes from run to run."""
        assert self._record is not None
        own = {_slot("columns", node) for node in columns}
        slots = {name: value if stays and name not in own else value.clone() for name, value in given.items()}

        def action(slot: Mapping[str, Tensor]) -> dict[str, Tensor]:
            def from_slots(name: str) -> Any:
                if name in slot:
                    return slot[name]
                if name not in self._held:
                    self._held[name] = read(name)
                return self._held[name]

            sites: dict[Site, Tensor | None] = {site: slot[_slot("site", site)] for site in self.fills.sites}
            picked = {node: slot[_slot("columns", node)] for node in columns}
            put = values.in_slots(sites)
            return self._wavefront.run(self.program, from_slots, self.fills, put, columns=picked)

        return Replayed(action, slots, self._record)


# ------------------------------------------------------------------------------------------
# Base and source computed by a pass: as one batch where they can be, replayed where that pays.


class BaselineRunner:
    """Runs of one shape, as many as the pass has worlds; what the pass keeps of each is read of them.

    `constants` gives what depends on no input. The first time is eager; with `record`, the second records a
    graph, and every further one is a replay: values then lie where they lay before, and hold until the next.
    """

    def __init__(
        self,
        wavefront: Wavefront,
        program: PassProgram,
        facts: ShapeFacts,
        constants: Callable[[str], Any],
        record: Record | None = None,
    ) -> None:
        self._wavefront, self.program, self.constants = wavefront, program, constants
        self._batch_dim = facts.layout.batch_dim
        self._inputs = [leaf.name for leaf in facts.program.inputs]
        self._record = record
        self._replayed: Replayed | None = None
        self._parts: list[dict[str, Any]] = []
        self._runs = 0

    @property
    def stays(self) -> bool:
        """True if values lie in the memory of a graph, where those of the next runs will lie."""
        return self._replayed is not None

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def run(self, runs: Sequence[InputRun]) -> list[PassRun]:
        """These runs, computed together."""
        self._runs += 1
        given = [run.inputs for run in runs]
        parts = self._replay(given) if self._record is not None and self._runs > 1 else self._computed(given)
        return [PassRun(run, {**part, **run.inputs}) for run, part in zip(runs, parts, strict=True)]

    def _replay(self, given: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Any]]:
        slots = {_slot(name, w): one[name] for w, one in enumerate(given) for name in self._inputs}
        if self._replayed is None:
            assert self._record is not None

            def action(slot: Mapping[str, Tensor]) -> dict[str, Tensor]:
                inputs = [{name: slot[_slot(name, w)] for name in self._inputs} for w in range(len(given))]
                self._parts = self._computed(inputs)
                return {}

            own = {name: value.clone() for name, value in slots.items()}
            self._replayed = Replayed(action, own, self._record)
        self._replayed.run(slots)
        return self._parts

    def stacked(self, given: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The inputs of runs as the stacks that the pass begins with."""
        own = {name: [one[name] for one in given] for name in self._inputs}
        return {
            name: one[0] if len(one) == 1 else torch.cat(one, self._dim(name)) for name, one in own.items()
        }

    def of_world(self, name: str, value: Tensor, world: int) -> Tensor:
        """The value of one of the runs: a view of what was computed together."""
        worlds = self.program.worlds
        return value if worlds == 1 else value.chunk(worlds, self._dim(name))[world]

    def _dim(self, name: str) -> int:
        dim = self._batch_dim[name]
        assert dim is not None
        return dim

    def _computed(self, given: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Any]]:
        """The values of each run."""
        values = self._wavefront.run(self.program, self.constants, given=self.stacked(given))
        worlds = range(self.program.worlds)
        return [{n: self.of_world(n, value, world) for n, value in values.items()} for world in worlds]


class Along:
    """Runs that are computed along with another pass, each node before the other's; or when they are read."""

    def __init__(self, runner: BaselineRunner, runs: Sequence[InputRun], wavefront: Wavefront) -> None:
        self._order, self.program = runs[0].model.program.order, runner.program
        with computing():
            given = runner.stacked([run.inputs for run in runs])
            self._up_to, targets = wavefront.piecemeal(self.program, runner.constants, given)
        # Fused steps stand where the last of their nodes does.
        self._places = [self._order.get(step.node, -1) for step in self.program.steps]
        at = {step.node: number for number, step in enumerate(self.program.steps)}

        def value(name: str, world: int) -> Tensor:
            self._compute(at[name] + 1)
            return runner.of_world(name, targets[name](), world)

        self.runs = []
        for world, run in enumerate(runs):
            own: dict[str, Callable[[], Any]] = {name: partial(value, name, world) for name in targets}
            own |= {name: partial(run.inputs.__getitem__, name) for name in run.inputs}
            self.runs.append(PassRun(run, _Later(own)))

    def before(self, node: str) -> None:
        """Compute all that the program computes up to a node."""
        self._compute(bisect.bisect_right(self._places, self._order.get(node, -1)))

    def finish(self) -> None:
        """Compute what is left."""
        self._compute(len(self._places))

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _compute(self, stop: int) -> None:
        self._up_to(stop)


class _Later(Mapping[str, Any]):
    """Values that are computed when they are read."""

    def __init__(self, made: Mapping[str, Callable[[], Any]]) -> None:
        self._made = made

    def __getitem__(self, name: str) -> Any:
        return self._made[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._made

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def _slot(name: str, of: object) -> str:
    return f"{name} of {of}"


Executor = SerialExecutor | WavefrontExecutor
"""Runs the chunks of a plan, worlds as the plan cuts them: over one batch after another."""
