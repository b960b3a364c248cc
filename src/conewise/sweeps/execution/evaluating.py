"""The two evaluators of a sweep's plan: one world after another, or all worlds in one pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from conewise.program.precision import multiplying
from conewise.program.streaming import assembled
from conewise.program.tensors import Tensor, copy_of
from conewise.program.weights import Sums
from conewise.runs.filling import stacked
from conewise.runs.metrics import Metric, measured, measured_whole
from conewise.sweeps.execution.growth import Watch
from conewise.sweeps.execution.replay import Wave
from conewise.sweeps.execution.wavefront import Fill, WaveStep
from conewise.sweeps.planning.costs import synchronize
from conewise.sweeps.planning.passes import Chunk, Prepared, reader
from conewise.sweeps.planning.regions import Regions
from conewise.sweeps.planning.stacking import members
from conewise.sweeps.result import SweepLedger

if TYPE_CHECKING:
    from conewise.locations.located import Located
    from conewise.locations.places import Place
    from conewise.sweeps.sweep import Batch, Sweep

Fills = dict[tuple[str, int], list[Fill]]


class Evaluators:
    """Evaluate chunks of one sweep; waves are kept, so that a baseline of the same shape runs them again."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self._waves: dict[tuple[int, Chunk], tuple[tuple[Regions, Sums], Wave]] = {}
        self._fills: dict[tuple[int, Chunk], tuple[Batch, Fills]] = {}

    def serial(self, _: Prepared, batch: Batch, chunk: Chunk, ledger: SweepLedger, watch: Watch) -> Tensor:
        """The metrics of each world of `chunk`, one world after another: [world, metric, prompt]."""
        sweep = self.sweep
        started = time.perf_counter()
        rows = []
        for world in members(chunk.worlds):
            cell = sweep.cells[sweep._order[world]]
            with batch.base.fork() as fork:
                for place in cell.places:
                    fork.patch(place, batch.intervention.part(place, batch.base))
                rows.append(sweep._read_metrics(fork))
                ledger.node_evaluations += fork.ledger.count("recomputed")
            watch.settle()
        ledger.launches = ledger.node_evaluations
        ledger.compute_seconds += time.perf_counter() - started
        return stacked(rows)

    def wavefront(
        self, prepared: Prepared, batch: Batch, chunk: Chunk, ledger: SweepLedger, watch: Watch
    ) -> Tensor:
        """The metrics of all worlds of `chunk` in one pass: [world, metric, prompt]."""
        with ExitStack() as trusting:
            for run in (batch.base, batch.source):
                if run is not None:
                    trusting.enter_context(run.checked_once())
            trusting.enter_context(multiplying(self.sweep.precision))
            wave = self.wave(prepared, batch, chunk)
            watch.room_for(prepared.fills.held(chunk.worlds))
            fills = self._ready_fills(prepared, batch, chunk)
            started = time.perf_counter()
            outputs = wave.run(reader(batch.base), fills, watch.room_for)
        found = [self._of_stack(metric, outputs, len(chunk), prepared) for metric in self.sweep.metrics]
        synchronize(self.sweep.facts.device)
        ledger.compute_seconds += time.perf_counter() - started
        ledger.node_evaluations += wave.node_evaluations
        ledger.launches += wave.launches
        return stacked(found, dim=1)

    def _ready_fills(self, prepared: Prepared, batch: Batch, chunk: Chunk) -> Fills:
        """The fills of a chunk, kept where both runs are the sweep's own: they never change."""
        if not batch.is_lasting:
            return self.fills(prepared, batch, chunk)
        key = id(prepared), chunk
        known, fills = self._fills.get(key, (None, None))
        if known is None or fills is None or not known.is_same(batch):
            fills = self.fills(prepared, batch, chunk)
            self._fills[key] = batch, fills
        return fills

    def fills(self, prepared: Prepared, batch: Batch, chunk: Chunk) -> Fills:
        """What each world puts where, by node and world."""
        sweep, model = self.sweep, self.sweep.model
        fills: Fills = {}
        standing, computed = batch.base.edits, dict(prepared.schedule.steps)
        for world in members(chunk.worlds):
            cell = sweep.cells[sweep._order[world]]
            for edit in sweep.planner.reached(cell, standing):
                fill = Fill(edit.found.view, edit.found.part, edit.part)
                fills.setdefault((edit.node, world), []).append(fill)
            for place in cell.places:
                found = model.locate(place)
                part = batch.intervention.part(place, batch.base)
                if isinstance(part, Tensor):
                    found.expect(part, batch.base.read(place), place)
                else:
                    part = partial(_expected, found, place, part)
                    is_computed = computed.get(model.graph.number(found.node), 0) >> world & 1
                    if not is_computed and (found.node, world) not in fills:
                        part = part(copy_of(batch.base.read(place)))
                fills.setdefault((found.node, world), []).append(Fill(found.view, found.part, part))
        return fills

    def wave(self, prepared: Prepared, batch: Batch, chunk: Chunk) -> Wave:
        """The wave of a chunk, kept: a baseline of the same shape and the same weights runs it again."""
        sweep = self.sweep
        regions = sweep.planner.regions(prepared, chunk.start, batch.base)
        needed = regions, sweep.model.weights.addresses()
        known, wave = self._waves.get((id(prepared), chunk), (None, None))
        if wave is None or known != needed:
            one, name = sweep.planner.passing(prepared, chunk, regions), sweep.model.graph.name
            taken = sweep.planner.footprint(prepared, batch, chunk)
            steps = [
                WaveStep(
                    name(node),
                    worlds,
                    tuple(map(name, one.drops.get(node, ()))),
                    one.fused.get(name(node)),
                    rise,
                )
                for (node, worlds), rise in zip(one.plan.steps, taken.rises, strict=True)
            ]
            wave = Wave(
                sweep.model.program,
                prepared.layout,
                regions,
                steps,
                {name(node): worlds for node, worlds in one.plan.patched.items()},
                sweep.targets(),
                chunk.worlds,
                sweep.facts.device,
                prepared.columns,
                taken.reading,
            )
            self._waves[id(prepared), chunk] = needed, wave
        return wave

    def _of_stack(
        self, metric: Metric, outputs: Mapping[str, Tensor], worlds: int, prepared: Prepared
    ) -> Tensor:
        batch = prepared.layout.batch
        if not metric.whole:
            target = self.sweep._target(metric)
            if target in prepared.columns and metric.among is not None:
                metric = metric.among({token: at for at, token in enumerate(prepared.columns[target])})
            return measured(metric, self.sweep.facts.read.arranged(target, outputs[target], worlds, batch))
        rows, dims = [], prepared.layout.batch_dim
        for world in range(worlds):
            leaves = {
                name: value if (dim := dims.get(name)) is None else value.chunk(worlds, dim)[world]
                for name, value in outputs.items()
            }
            outputs_of_world = assembled(self.sweep.model.program, leaves, prepared.layout.sizes(1))
            rows.append(measured_whole(metric, outputs_of_world, batch)[0])
        return stacked(rows)


def _expected(found: Located, place: Place, part: Callable[[Tensor], Tensor], present: Tensor) -> Tensor:
    """What a function makes of the value that is present; of exactly its shape, dtype and device."""
    value = part(present)
    found.expect(value, present, place)
    return value
