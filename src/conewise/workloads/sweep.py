"""A sweep: many worlds, one baseline, one demand. Planned before it runs, exact, in one pass if possible."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conewise.errors import InputMismatchError, MetricError, NoEffectWarning, SweepError, describe
from conewise.frontends.torch.costs import Costs, matmul_rate, synchronize, versions
from conewise.frontends.torch.digests import inputs_digest
from conewise.frontends.torch.filling import stacked
from conewise.frontends.torch.identity import identity
from conewise.frontends.torch.metrics import Metric, as_metric, measured, measured_whole
from conewise.frontends.torch.mixing import try_stacking
from conewise.frontends.torch.regions import last_region
from conewise.frontends.torch.replay import Wave
from conewise.frontends.torch.stacking import Layout
from conewise.frontends.torch.streaming import assembled
from conewise.frontends.torch.tensors import Tensor, computing, copy_of
from conewise.frontends.torch.wavefront import Fill, WaveStep
from conewise.graph.graph import Graph
from conewise.workloads.facts import facts_of
from conewise.workloads.interventions import Intervention, as_intervention
from conewise.workloads.memory import peak_bytes
from conewise.workloads.plan import SweepPlan, as_bytes, shown_bytes
from conewise.workloads.result import Result, SweepLedger
from conewise.workloads.run import Edit, Reading
from conewise.workloads.schedule import Schedule, schedule
from conewise.workloads.selectors import Cell, SelectorLike, Spread, as_selectors, spread

if TYPE_CHECKING:
    from conewise.workloads.model import Located, Model
    from conewise.workloads.places import Place
    from conewise.workloads.store import Agreed

DEFAULT_MEMORY = 2 << 30
"""What a sweep may hold beside the model and its baseline, where nothing else is said."""


@dataclass(frozen=True)
class Batch:
    """One baseline of a sweep, and what is put into it."""

    base: Reading
    source: Reading | None
    intervention: Intervention


@dataclass(frozen=True)
class Prepared:
    """What planning found out for baselines of one shape."""

    layout: Layout
    schedule: Schedule
    costs: Costs
    whole_costs: Costs
    last: frozenset[str]
    columns: Mapping[str, Sequence[int]]
    obstacle: str


@contextmanager
def _unreported() -> Iterator[None]:
    """Without warnings of patches without effect: a sweep reads more than a patch of its base reaches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)
        yield


class Sweep:
    """Patch every cell in a world of its own, and read the metric there.

    `base` is the run that is changed, `source` where the values come from (a run, or an intervention).
    A base may be a world, in which something is patched already: its patches stand in every world of the
    sweep.
    """

    @_unreported()
    def __init__(
        self,
        model: Model,
        sites: SelectorLike,
        *,
        base: Reading | Iterable[Mapping[str, Any] | Reading],
        source: Any,
        metric: Any,
    ) -> None:
        self.model = model
        self.facts = facts_of(model)
        self.selectors = as_selectors(sites)
        self.metrics = tuple(
            as_metric(one) for one in (metric if isinstance(metric, list | tuple) else [metric])
        )
        names = [one.name for one in self.metrics]
        if not names:
            raise SweepError("no metric: give one, or a list of several.")
        if len(set(names)) != len(names):
            raise SweepError(f"two metrics are named {names!r}; give each its own with `name=`.")
        self._base, self._source = base, source
        first = self._batch(0)
        self._is_function = first.intervention.is_function
        self.spreads: tuple[Spread, ...] = spread(self.selectors, first.base)
        self.cells: tuple[Cell, ...] = tuple(cell for part in self.spreads for cell in part.cells)
        self._prepared: dict[tuple[Any, ...], Prepared] = {}
        self._cones: dict[frozenset[int], frozenset[int]] = {}
        self._waves: dict[tuple[int, int], Wave] = {}
        self._order = self._world_order()

    # -- what is swept -----------------------------------------------------------------------

    @property
    def batches(self) -> int:
        """How many baselines there are."""
        return len(self._base) if isinstance(self._base, Sequence) else 1

    def _given(self, place: int) -> tuple[Any, Any]:
        """What was given as base and source of one batch."""
        base: Any = self._base
        source: Any = self._source
        if isinstance(base, Reading):
            return base, source
        if not isinstance(base, Sequence) or isinstance(base, str):
            base = [base]
        if not base:
            raise SweepError("base is a run, or a list of runs or of inputs; it has at least one.")
        if isinstance(source, list | tuple):
            if len(source) != len(base):
                raise SweepError(f"base has {len(base)} batches and source {len(source)}; they go in pairs.")
            source = source[place]
        return base[place], source

    def _batch(self, place: int) -> Batch:
        base, source = self._given(place)
        base = self._as_run(base)
        if isinstance(source, Mapping):
            source = self._as_run(source)
        if base.model is not self.model:
            raise SweepError(f"base is a run of another model ({base.model.name}), not of {self.model.name}.")
        run = source if isinstance(source, Reading) else None
        if run is not None:
            self._expect_alike(base, run)
        return Batch(base, run, as_intervention(source, self.model))

    def _as_run(self, given: Any) -> Reading:
        if isinstance(given, Reading):
            return given
        if not isinstance(given, Mapping):
            raise SweepError(
                f"base is a run, or a list of runs or of inputs, and {describe(given)} is neither. Inputs "
                "are written as for `model.run`: {'input_ids': ...}."
            )
        return self.model.run(**given)

    def _expect_alike(self, base: Reading, source: Reading) -> None:
        for name, value in base.inputs.items():
            other = source.inputs.get(name)
            if other is not None and other.shape != value.shape:
                raise SweepError(
                    f"base and source differ in shape: {name!r} is {tuple(value.shape)} in the base and "
                    f"{tuple(other.shape)} in the source. Pad or cut the prompts to one length, so that "
                    "position means the same in both."
                )

    def _world_order(self) -> list[int]:
        """The cells in the order of their worlds: the patch that stands first in the graph, first."""
        graph = self.model.graph
        labels = graph.table.labels

        def depth(cell: Cell) -> float:
            return min(labels[graph.number(self.model.locate(place).node)] for place in cell.places)

        return sorted(range(len(self.cells)), key=lambda number: depth(self.cells[number]))

    def targets(self) -> tuple[str, ...]:
        """The nodes that the metrics read."""
        fields = self.facts.fields
        names: list[str] = []
        for metric in self.metrics:
            if metric.whole:
                names += self.facts.outputs
            elif metric.output in fields:
                names.append(fields[metric.output])
            elif len(self.facts.outputs) == 1:
                names.append(self.facts.outputs[0])
            else:
                raise SweepError(
                    f"the metric {metric.name!r} reads {metric.output!r}, and the model's outputs are "
                    f"{', '.join(fields)}."
                )
        return tuple(dict.fromkeys(names))

    # -- plan --------------------------------------------------------------------------------

    @_unreported()
    def plan(self, max_memory: int | str | None = None, evaluator: str = "auto") -> SweepPlan:
        """What the sweep will compute, and at what cost; nothing of it is computed."""
        return self._plan(self._prepare(self._batch(0).base), as_bytes(max_memory), evaluator)[0]

    def _prepare(self, base: Reading) -> Prepared:
        given = {name: tuple(value.shape) for name, value in base.inputs.items()}
        standing = base.edits
        key = (*given.items(), *((str(edit.place), edit.covers) for edit in standing))
        if key not in self._prepared:
            program, graph = self.model.program, self.model.graph
            shapes = {leaf.name: leaf.shape for leaf in program.inputs}
            symbols = program.sizes.symbols_of(shapes, given)
            layout = Layout(program, symbols)
            worlds = [self._patches(self.cells[number], standing) for number in self._order]
            targets = self.targets()
            plan = schedule(graph, worlds, graph.numbers(targets))
            self._expect_effect(plan)
            again = {
                graph.name(node)
                for node, patched in plan.patched.items()
                if dict(plan.steps).get(node, 0) & patched
            }
            reads_last = all(metric.last for metric in self.metrics)
            with computing():
                last = (
                    last_region(program, layout, self._reader(base), targets, again)
                    if reads_last
                    else frozenset()
                )
            columns = self._columns(plan, layout)
            self._prepared[key] = Prepared(
                layout,
                plan,
                Costs(program, layout, columns),
                Costs(program, layout),
                last,
                columns,
                self._obstacle(base, layout, plan),
            )
        return self._prepared[key]

    def _columns(self, plan: Schedule, layout: Layout) -> dict[str, tuple[int, ...]]:
        """The columns of the unembedding that the metrics read, where they read few and it is a product."""
        tokens = sorted({token for metric in self.metrics for token in metric.tokens})
        targets = self.targets()
        if len(targets) != 1 or any(metric.among is None for metric in self.metrics):
            return {}
        number, record = self.model.graph.number(targets[0]), self.facts.records.get(targets[0])
        is_product = (
            record is not None
            and record.op == "linear"
            and len(record.inputs) == len(record.args)
            and layout.varying.isdisjoint(record.inputs[1:])
        )
        if not is_product or number in plan.patched or number not in dict(plan.steps):
            return {}
        return {targets[0]: tuple(tokens)}

    def _patches(self, cell: Cell, standing: Sequence[Edit]) -> dict[int, bool]:
        """The nodes that a world patches, and whether whole: the cell's, and what it must patch again."""
        patches: dict[int, bool] = {}
        for place in cell.places:
            found = self.model.locate(place)
            if found.result is not None:
                raise SweepError(
                    f"{place} is computed from z and is no node of the graph: it cannot be swept. Sweep z: "
                    "patching a head's z patches its result."
                )
            number = self.model.graph.number(found.node)
            patches[number] = patches.get(number, False) or not (found.part or self._is_function)
        for edit in self._reached(cell, standing):
            number = self.model.graph.number(edit.node)
            patches[number] = patches.get(number, False) or edit.covers
        return patches

    def _reached(self, cell: Cell, standing: Sequence[Edit]) -> list[Edit]:
        """Those of the base's own edits that lie downstream of the cell: its world makes them again."""
        if not standing:
            return []
        graph = self.model.graph
        sites = frozenset(graph.number(self.model.locate(place).node) for place in cell.places)
        if sites not in self._cones:
            self._cones[sites] = frozenset(graph.table.cone(sites))
        return [edit for edit in standing if graph.number(edit.node) in self._cones[sites]]

    def _expect_effect(self, plan: Schedule) -> None:
        reached = 0
        for _, worlds in plan.steps:
            reached |= worlds
        for target in plan.targets:
            reached |= plan.patched.get(target, 0)
        idle = [self.cells[self._order[world]] for world in range(plan.worlds) if not reached >> world & 1]
        if idle:
            raise SweepError(
                f"the metric does not depend on {len(idle)} of {plan.worlds} cells, {idle[0].name} for one. "
                "Leave them out, or choose a metric that reads more of the outputs."
            )

    def _obstacle(self, base: Reading, layout: Layout, plan: Schedule) -> str:
        """Why the worlds cannot be stacked, or nothing."""
        if any(edit.found.result is not None for edit in base.edits):
            return "the base patches `result`, which is no node of the graph"
        if self.model.batch_is_fixed:
            return "the batch size is fixed in this capture"
        graph = self.model.graph
        for node in plan.patched:
            if layout.batch_dim.get(graph.name(node)) is None:
                return f"{graph.name(node)!r} is patched and has no batch along which worlds could be stacked"
        if self.facts.trial is None:
            self.facts.trial = try_stacking(self.model.program, *self._short(base, layout))
        for node, _ in plan.steps:
            if graph.name(node) in self.facts.trial.mixing:
                return f"{graph.name(node)!r} mixes the rows of the batch"
        return ""

    def _short(self, base: Reading, layout: Layout) -> tuple[Layout, dict[str, Tensor]]:
        """The base's inputs cut to a few positions where the length may vary: mixing shows there as well."""
        places = set(self.model.program.sizes.symbols.values())
        short = {
            name: value[:, :4] if value.ndim > 1 and (name, 1) in places else value
            for name, value in base.inputs.items()
        }
        shapes = {leaf.name: leaf.shape for leaf in self.model.program.inputs}
        try:
            given = {name: tuple(value.shape) for name, value in short.items()}
            symbols = self.model.program.sizes.symbols_of(shapes, given)
        except InputMismatchError:
            return layout, dict(base.inputs)
        return Layout(self.model.program, symbols), short

    def _plan(
        self, prepared: Prepared, max_memory: int | None, evaluator: str, agreed: Agreed | None = None
    ) -> tuple[SweepPlan, list[int]]:
        if evaluator not in {"auto", "serial", "wavefront"}:
            raise SweepError(f"no evaluator {evaluator!r}: there are 'serial', 'wavefront' and 'auto'.")
        if evaluator == "wavefront" and prepared.obstacle:
            raise SweepError(f"this sweep cannot run as a wavefront: {prepared.obstacle}. Run it serially.")
        chosen = evaluator if evaluator != "auto" else "serial" if prepared.obstacle else "wavefront"
        chosen = agreed.evaluator if agreed else chosen
        why = (
            prepared.obstacle
            or ("one world after another, bit for bit a full re-run" if chosen == "serial" else "")
            or "all worlds in one pass, equal up to the rounding of batched kernels"
        )
        everything = (1 << len(self.cells)) - 1
        if agreed:
            chunks = _runs_of(agreed.chunks)
        elif chosen == "serial":
            chunks = [1 << world for world in range(len(self.cells))]
        else:
            chunks = self._chunks(prepared, max_memory or DEFAULT_MEMORY, everything)
        peak = max(self._peak(prepared, chunk, stacked=chosen == "wavefront") for chunk in chunks)
        if agreed and max_memory is not None and peak > max_memory and chosen == "wavefront":
            raise SweepError(
                f"the stored run was cut into chunks that take {shown_bytes(peak)}, more than the budget of "
                f"{shown_bytes(max_memory)}, and other chunks would round differently. Resume it with "
                f"max_memory={peak} or more, or start again in another folder."
            )
        plan = prepared.schedule
        name = self.model.graph.name
        costs = prepared.costs if chosen == "wavefront" else prepared.whole_costs
        last = prepared.last if chosen == "wavefront" else frozenset()
        flops = {node: costs.flops(name(node), last=name(node) in last) for node, _ in plan.steps}
        support = self.model.support(self.targets())
        rules = self.model.graph.table.rules
        computed = [number for number in support if rules[number] is not None]
        everywhere = prepared.whole_costs
        full = sum(everywhere.flops(name(number)) for number in computed)
        done = sum(flops[node] * worlds.bit_count() for node, worlds in plan.steps)
        rate = self.facts.rates.get(chosen)
        launches = (
            plan.node_evaluations if chosen == "serial" else sum(plan.of(chunk).launches for chunk in chunks)
        )
        return (
            SweepPlan(
                worlds=len(self.cells),
                batches=self.batches,
                node_evaluations=plan.node_evaluations * self.batches,
                full_evaluations=len(computed) * len(self.cells) * self.batches,
                launches=launches * self.batches,
                flops=done * self.batches,
                full_flops=full * len(self.cells) * self.batches,
                peak_bytes=peak,
                max_memory=max_memory,
                chunks=tuple(chunk.bit_count() for chunk in chunks),
                evaluator=chosen,
                why=why,
                seconds=(done * self.batches / (rate or self._calibrated())),
            ),
            chunks,
        )

    def _calibrated(self) -> float:
        """Operations a second, from one matrix product: an estimate until a sweep has been timed."""
        if "product" not in self.facts.rates:
            self.facts.rates["product"] = matmul_rate(self.facts.device, self.facts.dtype, time.perf_counter)
        return self.facts.rates["product"]

    def _chunks(self, prepared: Prepared, budget: int, everything: int) -> list[int]:
        """Runs of worlds that each fit the budget, as few as possible."""
        count = everything.bit_count()
        pieces = 1
        while True:
            size = math.ceil(count / pieces)
            chunks = [((1 << min(size, count - start)) - 1) << start for start in range(0, count, size)]
            peaks = [self._peak(prepared, chunk, stacked=True) for chunk in chunks]
            if max(peaks) <= budget:
                return chunks
            if size == 1:
                raise SweepError(
                    f"one world alone takes {shown_bytes(max(peaks))}, more than the budget of "
                    f"{shown_bytes(budget)}. The least that would do is max_memory={max(peaks)}."
                )
            pieces = min(count, max(pieces + 1, math.ceil(pieces * max(peaks) / budget)))

    def _peak(self, prepared: Prepared, chunk: int, *, stacked: bool) -> int:
        """The bytes held at most while the worlds of `chunk` are computed, together or one by one."""
        plan, graph = prepared.schedule.of(chunk), self.model.graph
        if not stacked:
            # A world holds all that it computed until it is dropped.
            costs = prepared.whole_costs
            return sum(costs.bytes(graph.name(node)) for node, _ in plan.steps) + sum(
                costs.bytes_of_copy(graph.name(node)) for node in plan.patched
            )
        drops: dict[int, list[int]] = {}
        for site, reader in _last_reads(plan, graph.table.inputs).items():
            drops.setdefault(reader, []).append(site)
        assert self.facts.trial is not None
        return peak_bytes(
            plan,
            graph.table.inputs,
            _NodeSizes(graph, prepared.costs, self.facts.trial.shown),
            last=lambda node: graph.name(node) in prepared.last,
            drops=drops,
            reading=self._reading(prepared),
        )

    def _reading(self, prepared: Prepared) -> int:
        """The bytes that the metrics take for one world, one metric after another."""
        costs = prepared.costs
        taken = [0]
        for metric in self.metrics:
            if not metric.whole and not prepared.columns:
                elements = costs.elements(self._target(metric), last=metric.last)
                wide = 0 if costs.itemsize(self._target(metric)) == 4 else 1
                taken.append((metric.copies + wide) * elements * 4 if metric.copies else 0)
        return max(taken)

    # -- run ---------------------------------------------------------------------------------

    @_unreported()
    def run(
        self,
        *,
        evaluator: str = "auto",
        max_memory: int | str | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        progress: bool | Callable[[int, int], None] | None = None,
        verify: int = 0,
    ) -> Result:
        """Run the plan.

        `out`: a folder; finished chunks are stored there as they finish, and `resume=True` goes on where a
        run was cut off, with the chunks that it was cut into. `progress`: True shows a bar on stderr, False
        nothing; None shows one if stderr is a terminal or a notebook and the run takes more than a second; a
        function is called with (cells done, cells in all). `verify`: check so many random cells against
        plain full forwards of the module.
        """
        started = time.perf_counter()
        budget = as_bytes(max_memory)
        values: list[Any] = []
        base_values: list[Tensor] = []
        source_values: list[Tensor | None] = []
        ledger = SweepLedger()
        plan: SweepPlan | None = None
        with self._recorder(out, resume) as recorder, self._bar(progress) as tell:
            for number in range(self.batches):
                batch = self._batch(number)
                prepared = self._prepare(batch.base)
                plan, chunks = self._plan(prepared, budget, evaluator, recorder.agreed(number, evaluator))
                base_values.append(self._read_of(batch.base, "base"))
                source_values.append(None if batch.source is None else self._read_of(batch.source, "source"))
                recorder.begin(number, plan, base_values[-1], source_values[-1])
                rows: dict[int, Tensor] = {}
                for piece, chunk in _grouped(chunks, plan.evaluator):
                    stored = recorder.get(number, piece, chunk.bit_count())
                    if stored is None:
                        evaluate = self._wave if plan.evaluator == "wavefront" else self._serial
                        stored = evaluate(prepared, batch, chunk, ledger)
                        recorder.put(number, piece, stored)
                    else:
                        done = prepared.schedule.of(chunk)
                        serial = plan.evaluator == "serial"
                        ledger.node_evaluations += done.node_evaluations
                        ledger.launches += done.node_evaluations if serial else done.launches
                        ledger.resumed += chunk.bit_count()
                    rows.update(zip(_members(chunk), stored, strict=True))
                    tell(chunk.bit_count())
                values.append([rows[world] for world in range(len(self.cells))])
                del batch  # before the next one is made
        assert plan is not None
        ledger.seconds = time.perf_counter() - started
        if not ledger.resumed and ledger.compute_seconds > 0:
            self.facts.rates[plan.evaluator] = plan.flops / ledger.compute_seconds
        result = Result.of(self, plan, ledger, values, base_values, source_values)
        if verify:
            result = replace(result, verification=result.verify(n=verify))
        return result

    def _recorder(self, out: str | Path | None, resume: bool) -> Any:
        from conewise.workloads.store import recorder  # noqa: PLC0415  # needed by long runs only

        return recorder(self, out, resume)

    def _bar(self, progress: bool | Callable[[int, int], None] | None) -> Any:
        from conewise.workloads.progress import bar  # noqa: PLC0415  # needed where it is shown only

        return bar(progress, len(self.cells) * self.batches, self.facts.device)

    def _read_of(self, run: Reading, which: str) -> Tensor:
        """Every metric of the base or the source itself."""
        try:
            return self._read_metrics(run)
        except MetricError as error:
            raise MetricError(f"in the {which} itself: {error}") from error

    def _read_metrics(self, run: Any) -> Tensor:
        """Every metric of a run, as [metric, prompt] in float64."""
        return stacked([self._metric_of(metric, run) for metric in self.metrics])

    def _metric_of(self, metric: Metric, run: Any) -> Tensor:
        batch = self._prompts(run)
        with computing():
            if metric.whole:
                return measured_whole(metric, run.outputs, batch)[0]
            target = self._target(metric)
            (value,) = run.demand([target])
            return measured(metric, self.facts.prompts_first(target, value), 1, batch)[0]

    def _prompts(self, run: Reading) -> int:
        """How many prompts a run has: the size of the batch, where that may vary."""
        leaves = [leaf for leaf in self.model.program.inputs if leaf.shape]
        varying = [leaf for leaf in leaves if not isinstance(leaf.shape[0], int)]
        for leaf in varying or leaves:
            return int(run.inputs[leaf.name].shape[0])
        return 1

    def _target(self, metric: Metric) -> str:
        fields = self.facts.fields
        return fields.get(metric.output, self.facts.outputs[0])

    def _serial(self, _: Prepared, batch: Batch, chunk: int, ledger: SweepLedger) -> Tensor:
        """The metrics of each world of `chunk`, one world after another: [world, metric, prompt]."""
        started = time.perf_counter()
        rows = []
        for world in _members(chunk):
            cell = self.cells[self._order[world]]
            with batch.base.fork() as fork:
                for place in cell.places:
                    fork.patch(place, batch.intervention.part(place, batch.base))
                rows.append(self._read_metrics(fork))
                ledger.node_evaluations += fork.ledger.count("recomputed")
        ledger.launches = ledger.node_evaluations
        ledger.compute_seconds += time.perf_counter() - started
        return stacked(rows)

    def _wave(self, prepared: Prepared, batch: Batch, chunk: int, ledger: SweepLedger) -> Tensor:
        """The metrics of all worlds of `chunk` in one pass: [world, metric, prompt]."""
        wave = self._ready_wave(prepared, chunk)
        fills: dict[tuple[str, int], list[Fill]] = {}
        standing, computed = batch.base.edits, dict(prepared.schedule.steps)
        for world in _members(chunk):
            cell = self.cells[self._order[world]]
            for edit in self._reached(cell, standing):
                fill = Fill(edit.found.view, edit.found.part, edit.part)
                fills.setdefault((edit.node, world), []).append(fill)
            for place in cell.places:
                found = self.model.locate(place)
                part = batch.intervention.part(place, batch.base)
                if isinstance(part, Tensor):
                    found.expect(part, batch.base[place], place)
                else:
                    part = partial(_expected, found, place, part)
                    is_computed = computed.get(self.model.graph.number(found.node), 0) >> world & 1
                    if not is_computed and (found.node, world) not in fills:
                        part = part(copy_of(batch.base[place]))
                fills.setdefault((found.node, world), []).append(Fill(found.view, found.part, part))
        started = time.perf_counter()
        outputs = wave.run(self._reader(batch.base), fills)
        worlds = chunk.bit_count()
        found_rows = [self._of_stack(metric, outputs, worlds, prepared) for metric in self.metrics]
        synchronize(self.facts.device)
        ledger.compute_seconds += time.perf_counter() - started
        ledger.node_evaluations += wave.node_evaluations
        ledger.launches += wave.launches
        return stacked(found_rows, dim=1)

    def _ready_wave(self, prepared: Prepared, chunk: int) -> Wave:
        """The wave of a chunk, kept: a baseline of the same shape runs it again."""
        key = id(prepared), chunk
        if key not in self._waves:
            plan = prepared.schedule.of(chunk)
            name = self.model.graph.name
            drops: dict[int, list[str]] = {}
            for site, reader in _last_reads(plan, self.model.graph.table.inputs).items():
                drops.setdefault(reader, []).append(name(site))
            self._waves[key] = Wave(
                self.model.program,
                prepared.layout,
                prepared.last,
                [WaveStep(name(node), worlds, tuple(drops.get(node, ()))) for node, worlds in plan.steps],
                {name(node): worlds for node, worlds in plan.patched.items()},
                self.targets(),
                chunk,
                self.facts.device,
                prepared.columns,
            )
        return self._waves[key]

    def _of_stack(
        self, metric: Metric, outputs: Mapping[str, Tensor], worlds: int, prepared: Prepared
    ) -> Tensor:
        batch = prepared.layout.batch
        if not metric.whole:
            target = self._target(metric)
            if target in prepared.columns and metric.among is not None:
                metric = metric.among({token: at for at, token in enumerate(prepared.columns[target])})
            return measured(metric, self.facts.prompts_first(target, outputs[target]), worlds, batch)
        rows, dims = [], prepared.layout.batch_dim
        for world in range(worlds):
            leaves = {
                name: value if (dim := dims.get(name)) is None else value.narrow(dim, world * batch, batch)
                for name, value in outputs.items()
            }
            rows.append(measured_whole(metric, assembled(self.model.program, leaves), batch)[0])
        return stacked(rows)

    def _reader(self, base: Reading) -> Callable[[str], Any]:
        known: dict[str, Any] = {}

        def read(name: str) -> Any:
            if name not in known:
                (known[name],) = base.demand([name])
            return known[name]

        return read

    def provenance(self) -> dict[str, Any]:
        """All that the numbers depend on, as plain values: equal sweeps have equal provenance."""
        batches = []
        for number in range(self.batches):
            base, source = self._given(number)
            is_run = isinstance(source, Reading | Mapping)
            put = None if is_run else as_intervention(source, self.model)
            batches.append(
                {
                    "base": self._digest(base),
                    "source": self._digest(source) if is_run else None,
                    "patch": ["source"] if put is None else _told(*(put.described or (put.name, put.part))),
                }
            )
        return {
            "model": self.model.name,
            "weights": self.facts.fingerprint,
            "dtype": str(self.facts.dtype),
            "device": str(self.facts.device),
            "sites": [cell.name for cell in self.cells],
            "metrics": [
                _told(metric.name, *(metric.described or (metric.compute, metric.output, metric.last)))
                for metric in self.metrics
            ],
            "batches": batches,
            "versions": versions(),
        }

    def _digest(self, given: Reading | Mapping[str, Any]) -> str:
        """A digest of the inputs, and of what is patched in them; nothing is run for it."""
        if not isinstance(given, Reading):
            return inputs_digest(self.model.signature.bind((), given))
        values, functions = dict(given.inputs), []
        for number, edit in enumerate(given.edits):
            if isinstance(edit.part, Tensor):
                values[f"{number} {edit.place}"] = edit.part
            else:
                functions.append(f"{number} {edit.place} {identity(edit.part)}")
        return " + ".join([inputs_digest(values), *functions])

    def __repr__(self) -> str:
        parts = " + ".join(
            str(part) if not isinstance(part, tuple) else f"{len(part)} sites"
            for part in self.selectors.parts
        )
        metrics = ", ".join(metric.name for metric in self.metrics)
        return f"Sweep over {parts}: {len(self.cells)} worlds of {self.model.name}, reading {metrics}"


def _expected(found: Located, place: Place, part: Callable[[Tensor], Tensor], present: Tensor) -> Tensor:
    """What a function makes of the value that is present; of exactly its shape, dtype and device."""
    value = part(present)
    found.expect(value, present, place)
    return value


def _told(*parts: Any) -> list[str]:
    """What can be told of values and functions, so that another one is told differently."""
    return [part if isinstance(part, str) else identity(part) for part in parts]


def _runs_of(sizes: Sequence[int]) -> list[int]:
    """Chunks of these sizes, as sets of worlds: each takes up where the one before it ends."""
    starts = accumulate(sizes, initial=0)
    return [((1 << size) - 1) << start for size, start in zip(sizes, starts, strict=False)]


class _NodeSizes:
    """Bytes of one world's value of a node, by the node's number; each found once."""

    def __init__(self, graph: Graph, costs: Costs, shown: Mapping[str, str]) -> None:
        self._graph, self._costs, self._shown = graph, costs, shown

    def value(self, node: int, last: bool) -> int:
        return self._costs.bytes_of_copy(self._graph.name(node), last=last)

    def repeated(self, node: int, last: bool) -> int:
        return self._costs.bytes_of_repeating(self._graph.name(node), last=last)

    def workspace(self, node: int, last: bool) -> int:
        return self._costs.workspace(self._graph.name(node), last=last)

    def shown(self, node: int) -> int | None:
        name = self._graph.name(node)
        return self._graph.number(self._shown[name]) if name in self._shown else None


def _members(worlds: int) -> list[int]:
    return [place for place in range(worlds.bit_length()) if worlds >> place & 1]


def _grouped(chunks: list[int], evaluator: str) -> Iterator[tuple[int, int]]:
    """The chunks with their numbers; single worlds of a serial run in groups, so that storing is cheap."""
    if evaluator == "wavefront":
        yield from enumerate(chunks)
        return
    size = 16
    for piece, start in enumerate(range(0, len(chunks), size)):
        yield piece, sum(chunks[start : start + size])


def _last_reads(plan: Schedule, inputs: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """For each node that steps read, the last step that does; targets are kept to the end."""
    last: dict[int, int] = {}
    for node, _ in plan.steps:
        for site in inputs[node]:
            last[site] = node
    return {site: reader for site, reader in last.items() if site not in plan.targets}
