"""Executors: they run worlds of a compiled sweep over the values of a batch, one by one or all in one pass.

An executor needs the program, the plan and the baseline's values, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

from conewise.program.precision import SPLIT, multiplying
from conewise.program.tensors import Tensor
from conewise.runs.captured import Captured
from conewise.runs.filling import stacked
from conewise.sweeps.execution.batch import Batch, BatchValues
from conewise.sweeps.execution.cuda_graph import PassRunner
from conewise.sweeps.execution.fills import PassFills
from conewise.sweeps.execution.growth import Watch
from conewise.sweeps.execution.ledger import SweepLedger
from conewise.sweeps.execution.reading import MetricReader
from conewise.sweeps.execution.wavefront import Wavefront
from conewise.sweeps.planning.model_facts import facts_of
from conewise.sweeps.planning.passes.compiled import Compiled
from conewise.sweeps.planning.shapes.costs import synchronize
from conewise.sweeps.planning.shapes.shape_facts import ShapeFacts
from conewise.sweeps.planning.spec import SweepSpec


class Executor(Protocol):
    """Runs chunks of worlds, numbered as the plan cuts them."""

    @property
    def chunks(self) -> Sequence[range]:
        """The worlds of each chunk, one behind the other."""

    def run(self, chunk: int, batch: Batch, ledger: SweepLedger, watch: Watch) -> Tensor:
        """The metrics of all worlds of a chunk: [world, metric, prompt]."""

    def count(self, chunk: int, ledger: SweepLedger) -> None:
        """Count what a chunk computes that was computed before, and is resumed."""


SERIAL_GROUP = 16
"""How many worlds of a serial run are one chunk, so that storing is cheap."""


class SerialExecutor:
    """One world after another, each a fork of the base: bit for bit a full re-run."""

    def __init__(self, compiled: Compiled, spec: SweepSpec, metrics: MetricReader) -> None:
        self._compiled, self._spec, self._metrics = compiled, spec, metrics
        worlds = len(compiled.order)
        self.chunks = [
            range(first, min(first + SERIAL_GROUP, worlds)) for first in range(0, worlds, SERIAL_GROUP)
        ]

    def run(self, chunk: int, batch: Batch, ledger: SweepLedger, watch: Watch) -> Tensor:
        """The metrics of each world of a chunk."""
        started = time.perf_counter()
        rows = []
        for world in self.chunks[chunk]:
            with batch.base.fork() as fork:
                for place in self._spec.cells[self._compiled.order[world]]:
                    fork.patch(place, batch.intervention.part(place, batch.base))
                rows.append(self._metrics.of_run(fork))
                ledger.node_evaluations += fork.ledger.count("recomputed")
            watch.settle()
        ledger.launches = ledger.node_evaluations
        ledger.compute_seconds += time.perf_counter() - started
        return stacked(rows)

    def count(self, chunk: int, ledger: SweepLedger) -> None:
        """Count what the worlds of a chunk compute."""
        own = self.chunks[chunk]
        for _, worlds in self._compiled.steps:
            done = sum(max(0, min(stop, own.stop) - max(start, own.start)) for start, stop in worlds)
            ledger.node_evaluations += done
        ledger.launches = ledger.node_evaluations


class WavefrontExecutor:
    """All worlds of a pass at once. It is kept: a baseline of the same shape and weights runs it again."""

    def __init__(
        self,
        model: Captured,
        compiled: Compiled,
        facts: ShapeFacts,
        spec: SweepSpec,
        metrics: MetricReader,
    ) -> None:
        self.compiled, self._facts, self._metrics = compiled, facts, metrics
        self._spec, self._precision = spec, spec.precision
        self._columns = dict(compiled.columns)
        columns = dict.fromkeys(self._columns, spec.tokens)
        self._model = model
        self._split_weights = facts_of(model).split_weights
        self._wavefront = Wavefront(facts.program, facts.layout, facts.fusions, columns, self._split_weights)
        self._runners: dict[int, PassRunner] = {}
        self.chunks = [range(one.first, one.first + one.worlds) for one in compiled.passes]
        self._split = tuple(
            dict.fromkeys(s.node for one in compiled.programs for s in one.steps if s.kernel == SPLIT)
        )

    def reads(self, metrics: MetricReader) -> WavefrontExecutor:
        """The same executor, reading other metrics of the same tokens."""
        self._metrics = metrics
        return self

    def run(self, chunk: int, batch: Batch, ledger: SweepLedger, watch: Watch) -> Tensor:
        """The metrics of all worlds of a pass."""
        with ExitStack() as trusting:
            for run in (batch.base, batch.source):
                if run is not None:
                    trusting.enter_context(run.checked_once())
            trusting.enter_context(multiplying(self._precision))
            self._split_weights.prepare(self._split)
            runner = self._runner(chunk, batch)
            values = BatchValues(batch, tuple(runner.fills.sites()))
            started = time.perf_counter()
            outputs = runner.run(batch.reader(), values, watch.room_for)
            self._split_weights.forget_value()
        worlds = self.compiled.passes[chunk].worlds
        found = self._metrics.of_stack(outputs, worlds, self._facts.layout, self._columns)
        synchronize(self._facts.device)
        ledger.compute_seconds += time.perf_counter() - started
        self.count(chunk, ledger)
        return found

    def count(self, chunk: int, ledger: SweepLedger) -> None:
        """Count what a pass computes."""
        program = self.compiled.programs[self.compiled.passes[chunk].program]
        ledger.node_evaluations += program.node_evaluations
        ledger.launches += program.launches

    def _runner(self, chunk: int, batch: Batch) -> PassRunner:
        edits = batch.base.edits
        if chunk not in self._runners or edits:
            one = self.compiled.passes[chunk]
            fills = PassFills(self.compiled, one, self._spec.cells, self._model.locate, edits)
            program = self.compiled.programs[one.program]
            can_replay = self._facts.device.type == "cuda" and not edits
            self._runners[chunk] = PassRunner(self._wavefront, program, fills, can_replay=can_replay)
        return self._runners[chunk]
