"""What a sweep will compute: worlds, their order, the rows that matter, the chunks that fit into memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from conewise.errors import SweepError
from conewise.frontends.torch.costs import Costs, matmul_rate
from conewise.frontends.torch.fusing import Fusion, fitting
from conewise.frontends.torch.mixing import Trial
from conewise.frontends.torch.regions import WHOLE, RegionFinder, Regions
from conewise.frontends.torch.shown import Lying, lying
from conewise.frontends.torch.stacking import Layout
from conewise.frontends.torch.tensors import computing
from conewise.graph.graph import Graph
from conewise.workloads.arrangement import LAUNCH_FLOPS, Arrangement, Beginnings, arranged, depths
from conewise.workloads.memory import peak_bytes
from conewise.workloads.plan import SweepPlan, shown_bytes
from conewise.workloads.schedule import Schedule, schedule

if TYPE_CHECKING:
    from conewise.workloads.run import Edit, Reading
    from conewise.workloads.selectors import Cell
    from conewise.workloads.store import Agreed
    from conewise.workloads.sweep import Batch, Sweep

DEFAULT_MEMORY = 2 << 30
"""What a sweep may hold beside the model and its baseline, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Worlds that are computed together, from the position `start` on."""

    worlds: int
    start: int = 0

    def __len__(self) -> int:
        return self.worlds.bit_count()


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
    finder: RegionFinder
    regions: dict[int, Regions] = field(default_factory=dict)
    peaks: dict[tuple[int, int], int] = field(default_factory=dict)
    work: dict[tuple[Chunk, ...], tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pass:
    """How a chunk is computed: what each step reads, what goes after it, and chains that are one operation.

    `plan` has no step for what is inside of such a chain.
    """

    plan: Schedule
    inputs: Mapping[int, tuple[int, ...]]
    drops: Mapping[int, Sequence[int]]
    fused: Mapping[str, Fusion]


class Planner:
    """Plans one sweep. Nothing of the sweep is computed."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self._graph = sweep.model.graph
        self._prepared: dict[tuple[Any, ...], Prepared] = {}
        self._cones: dict[frozenset[int], frozenset[int]] = {}
        self._layouts: dict[tuple[Any, ...], Layout] = {}
        self._arrangement: Arrangement | None = None
        self._starts: tuple[Batch | None, tuple[int, ...]] = None, ()

    # -- the shape of it -----------------------------------------------------------------------

    @property
    def arrangement(self) -> Arrangement:
        """The order of the worlds; the first batch determines it."""
        if self._arrangement is None:
            self._arrangement = self._arranged(self.sweep._batch(0))
        return self._arrangement

    def prepare(self, batch: Batch) -> Prepared:
        """All that depends on the shape of the baseline alone."""
        base = batch.base
        given = {name: tuple(value.shape) for name, value in base.inputs.items()}
        standing = base.edits
        key = (*given.items(), *((str(edit.place), edit.covers) for edit in standing))
        if key not in self._prepared:
            if self._arrangement is None:
                self._arrangement = self._arranged(batch)
            layout, targets = self._layout(base), self.sweep.targets()
            plan = self._schedule(self._arrangement.order, standing)
            self._expect_effect(plan)
            name, steps = self._graph.name, dict(plan.steps)
            again = {name(node) for node, patched in plan.patched.items() if steps.get(node, 0) & patched}
            finder = RegionFinder(layout)
            reads_last = all(metric.last for metric in self.sweep.metrics)
            last = finder.last(targets, again) if reads_last else frozenset()
            columns = self._columns(plan, layout)
            program = self.sweep.model.program
            self._prepared[key] = Prepared(
                layout,
                plan,
                Costs(program, layout, columns),
                Costs(program, layout),
                last,
                columns,
                self._obstacle(base, layout, plan),
                finder,
            )
        return self._prepared[key]

    def starts(self, prepared: Prepared, batch: Batch) -> tuple[int, ...]:
        """For each world, the first position that it changes."""
        if prepared.obstacle:
            return (0,) * len(self.sweep.cells)
        known, starts = self._starts
        if known is None or not (batch.is_lasting and batch.is_same(known)):
            begins = Beginnings(self.sweep, prepared.layout, prepared.finder).of(batch)
            starts = tuple(begins[cell] for cell in self.arrangement.order)
            if batch.is_lasting:
                self._starts = batch, starts
        return starts

    def regions(self, prepared: Prepared, start: int, base: Reading) -> Regions:
        """Which positions of which nodes are computed in worlds that change nothing before `start`."""
        if start not in prepared.regions or prepared.finder.masks_vary:
            found = self._regions(prepared.finder, prepared.schedule, start, base)
            prepared.regions[start] = found.ending(prepared.last)
        return prepared.regions[start]

    def _regions(self, finder: RegionFinder, plan: Schedule, start: int, base: Reading) -> Regions:
        if not start:
            return WHOLE
        name = self._graph.name
        computed, patched = {name(node) for node, _ in plan.steps}, {name(node) for node in plan.patched}
        with computing():
            return finder.changed(start, patched, computed, reader(base))

    def reached(self, cell: Cell, standing: Sequence[Edit]) -> list[Edit]:
        """Those of the base's own edits that lie downstream of the cell: its world makes them again."""
        if not standing:
            return []
        sites = frozenset(self._graph.number(self.sweep.model.locate(place).node) for place in cell.places)
        if sites not in self._cones:
            self._cones[sites] = frozenset(self._graph.table.cone(sites))
        return [edit for edit in standing if self._graph.number(edit.node) in self._cones[sites]]

    # -- the plan ------------------------------------------------------------------------------

    def plan(
        self,
        batch: Batch,
        max_memory: int | None,
        evaluator: str,
        agreed: Agreed | None = None,
    ) -> tuple[SweepPlan, list[Chunk]]:
        """The plan for a batch, and its chunks; `agreed` is how a run that is resumed was cut."""
        prepared, sweep = self.prepare(batch), self.sweep
        chosen, why = self._chosen(prepared, evaluator, agreed)
        if chosen == "serial":
            chunks = [Chunk(1 << world) for world in range(len(sweep.cells))]
        else:
            starts = self.starts(prepared, batch)
            if agreed:
                chunks = [_chunk(worlds, starts) for worlds in runs_of(agreed.chunks)]
            else:
                chunks = self._chunks(prepared, batch, max_memory or DEFAULT_MEMORY, starts)
        stacked = chosen == "wavefront"
        peak = max(self._peak(prepared, batch, chunk, stacked=stacked) for chunk in chunks)
        if agreed and max_memory is not None and peak > max_memory and stacked:
            raise SweepError(
                f"the stored run was cut into chunks that take {shown_bytes(peak)}, more than the budget of "
                f"{shown_bytes(max_memory)}, and other chunks would round differently. Resume it with "
                f"max_memory={peak} or more, or start again in another folder."
            )
        plan = prepared.schedule
        name, whole = self._graph.name, prepared.whole_costs
        support, rules = sweep.model.support(sweep.targets()), self._graph.table.rules
        computed = [number for number in support if rules[number] is not None]
        full = sum(whole.flops(name(number)) for number in computed)
        done, launches = self._work(prepared, batch, chunks, stacked=stacked)
        rate = sweep.facts.rates.get(chosen)
        return (
            SweepPlan(
                worlds=len(sweep.cells),
                batches=sweep.batches,
                node_evaluations=plan.node_evaluations * sweep.batches,
                full_evaluations=len(computed) * len(sweep.cells) * sweep.batches,
                launches=launches * sweep.batches,
                flops=done * sweep.batches,
                full_flops=full * len(sweep.cells) * sweep.batches,
                peak_bytes=peak,
                max_memory=max_memory,
                chunks=tuple(len(chunk) for chunk in chunks),
                evaluator=chosen,
                why=why,
                seconds=(done * sweep.batches / (rate or self._calibrated())),
            ),
            chunks,
        )

    def _chosen(self, prepared: Prepared, evaluator: str, agreed: Agreed | None) -> tuple[str, str]:
        """The evaluator, and why it was chosen."""
        if evaluator not in {"auto", "serial", "wavefront"}:
            raise SweepError(f"no evaluator {evaluator!r}: there are 'serial', 'wavefront' and 'auto'.")
        if evaluator == "wavefront" and prepared.obstacle:
            raise SweepError(f"this sweep cannot run as a wavefront: {prepared.obstacle}. Run it serially.")
        if evaluator == "serial" and self.sweep.precision:
            raise SweepError(
                f"a serial run is a full re-run bit for bit, and {self.sweep.precision} rounds more. Leave "
                "`precision` out, or run it as a wavefront."
            )
        chosen = evaluator if evaluator != "auto" else "serial" if prepared.obstacle else "wavefront"
        chosen = agreed.evaluator if agreed else chosen
        why = (
            prepared.obstacle
            or ("one world after another, bit for bit a full re-run" if chosen == "serial" else "")
            or "all worlds in one pass, equal up to the rounding of batched kernels"
        )
        return chosen, why

    def _work(
        self, prepared: Prepared, batch: Batch, chunks: Sequence[Chunk], *, stacked: bool
    ) -> tuple[int, int]:
        """Operations and launches of all chunks."""
        plan, name = prepared.schedule, self._graph.name
        if not stacked:
            whole = prepared.whole_costs
            done = sum(whole.flops(name(node)) * worlds.bit_count() for node, worlds in plan.steps)
            return done, plan.node_evaluations
        key = tuple(chunks)
        if key in prepared.work:
            return prepared.work[key]
        done = launches = 0
        for chunk in chunks:
            regions = self.regions(prepared, chunk.start, batch.base)
            launches += self.passing(prepared, chunk, regions).plan.launches
            for node, worlds in plan.steps:
                if count := (worlds & chunk.worlds).bit_count():
                    done += prepared.costs.flops(name(node), rows=regions.of(name(node))) * count
        prepared.work[key] = done, launches
        return done, launches

    def passing(self, prepared: Prepared, chunk: Chunk, regions: Regions) -> Pass:
        """The pass over a chunk."""
        graph, plan = self._graph, prepared.schedule.of(chunk.worlds)
        name, number, table = graph.name, graph.number, graph.table
        steps = {name(node): (worlds, regions.of(name(node))) for node, worlds in plan.steps}
        kept = {name(node) for node in (*plan.patched, *plan.targets)}
        fused = fitting(
            self.sweep.facts.fusions, steps, kept, lambda node: map(name, table.consumers[number(node)])
        )
        gone = {number(node) for fusion in fused.values() for node in fusion.inside}
        inputs = {node: table.inputs[node] for node, _ in plan.steps}
        inputs |= {number(node): tuple(graph.numbers(fusion.inputs)) for node, fusion in fused.items()}
        plan = replace(plan, steps=tuple(step for step in plan.steps if step[0] not in gone))
        drops: dict[int, list[int]] = {}
        for site, last_reader in last_reads(plan, inputs).items():
            drops.setdefault(last_reader, []).append(site)
        return Pass(plan, inputs, drops, fused)

    def _calibrated(self) -> float:
        """Operations a second, from one matrix product: an estimate until a sweep has been timed."""
        facts = self.sweep.facts
        if "product" not in facts.rates:
            facts.rates["product"] = matmul_rate(facts.device, facts.dtype, time.perf_counter)
        return facts.rates["product"]

    # -- worlds --------------------------------------------------------------------------------

    def _layout(self, base: Reading) -> Layout:
        program = self.sweep.model.program
        shapes = {leaf.name: leaf.shape for leaf in program.inputs}
        given = {name: tuple(value.shape) for name, value in base.inputs.items()}
        key = tuple(given.items())
        if key not in self._layouts:
            self._layouts[key] = Layout(program, program.sizes.symbols_of(shapes, given))
        return self._layouts[key]

    def _schedule(self, order: Sequence[int], standing: Sequence[Edit]) -> Schedule:
        worlds = [self._patches(self.sweep.cells[number], standing) for number in order]
        return schedule(self._graph, worlds, self._graph.numbers(self.sweep.targets()))

    def _arranged(self, batch: Batch) -> Arrangement:
        sweep, base = self.sweep, batch.base
        order, layout = depths(sweep), self._layout(base)
        finder = RegionFinder(layout)
        starts = Beginnings(sweep, layout, finder).of(batch)
        if len(set(starts)) == 1:
            return Arrangement(tuple(order), (len(order),))
        plan = self._schedule(order, base.edits)
        costs, name = Costs(sweep.model.program, layout), self._graph.name
        whole = sum(costs.flops(name(node)) * worlds.bit_count() for node, worlds in plan.steps)

        def work() -> list[int]:
            """Worlds that patch the same nodes compute the same."""
            known: dict[frozenset[str], int] = {}
            amounts = [0] * len(order)
            for world, cell in enumerate(order):
                nodes = frozenset(sweep.model.locate(place).node for place in sweep.cells[cell].places)
                if nodes not in known:
                    known[nodes] = sum(
                        costs.flops(name(node)) for node, worlds in plan.steps if worlds >> world & 1
                    )
                amounts[cell] = known[nodes]
            return amounts

        def share(start: int) -> float:
            regions = self._regions(finder, plan, start, base)
            left = sum(
                costs.flops(name(node), rows=regions.of(name(node))) * worlds.bit_count()
                for node, worlds in plan.steps
            )
            return left / whole if whole else 1.0

        overhead = LAUNCH_FLOPS.get(sweep.facts.device.type, LAUNCH_FLOPS["cuda"]) * plan.launches
        return arranged(order, starts, work, share, overhead)

    def _patches(self, cell: Cell, standing: Sequence[Edit]) -> dict[int, bool]:
        """The nodes that a world patches, and whether whole: the cell's, and what it must patch again."""
        patches: dict[int, bool] = {}
        for place in cell.places:
            found = self.sweep.model.locate(place)
            if found.result is not None:
                raise SweepError(
                    f"{place} is computed from z and is no node of the graph: it cannot be swept. Sweep z: "
                    "patching a head's z patches its result."
                )
            number = self._graph.number(found.node)
            patches[number] = patches.get(number, False) or not (found.part or self.sweep.is_function)
        for edit in self.reached(cell, standing):
            number = self._graph.number(edit.node)
            patches[number] = patches.get(number, False) or edit.covers
        return patches

    def _expect_effect(self, plan: Schedule) -> None:
        reached = 0
        for _, worlds in plan.steps:
            reached |= worlds
        for target in plan.targets:
            reached |= plan.patched.get(target, 0)
        order, cells = self.arrangement.order, self.sweep.cells
        idle = [cells[order[world]] for world in range(plan.worlds) if not reached >> world & 1]
        if idle:
            raise SweepError(
                f"the metric does not depend on {len(idle)} of {plan.worlds} cells, {idle[0].name} for one. "
                "Leave them out, or choose a metric that reads more of the outputs."
            )

    def _columns(self, plan: Schedule, layout: Layout) -> dict[str, tuple[int, ...]]:
        """The columns of the unembedding that the metrics read, where they read few and it is a product."""
        metrics, targets = self.sweep.metrics, self.sweep.targets()
        tokens = sorted({token for metric in metrics for token in metric.tokens})
        if len(targets) != 1 or any(metric.among is None for metric in metrics):
            return {}
        number, record = self._graph.number(targets[0]), self.sweep.facts.records.get(targets[0])
        is_product = (
            record is not None
            and record.op == "linear"
            and len(record.inputs) == len(record.args)
            and layout.varying.isdisjoint(record.inputs[1:])
        )
        if not is_product or number in plan.patched or number not in dict(plan.steps):
            return {}
        return {targets[0]: tuple(tokens)}

    def _obstacle(self, base: Reading, layout: Layout, plan: Schedule) -> str:
        """Why the worlds cannot be stacked, or nothing."""
        model, facts = self.sweep.model, self.sweep.facts
        if any(edit.found.result is not None for edit in base.edits):
            return "the base patches `result`, which is no node of the graph"
        if model.batch_is_fixed:
            return "the batch size is fixed in this capture"
        name = self._graph.name
        for node in plan.patched:
            if layout.batch_dim.get(name(node)) is None:
                return f"{name(node)!r} is patched and has no batch along which worlds could be stacked"
        trial, shape = Trial(layout, reader(base)), tuple(layout.symbols.values())
        with computing():
            for node, _ in plan.steps:
                key = name(node), shape
                apart = facts.keeps_apart.get(key)
                if apart is None:
                    apart = facts.keeps_apart[key] = trial.keeps_rows_apart(name(node))
                if not apart:
                    return f"{name(node)!r} mixes the rows of the batch"
        return ""

    # -- memory --------------------------------------------------------------------------------

    def _chunks(self, prepared: Prepared, batch: Batch, budget: int, starts: Sequence[int]) -> list[Chunk]:
        """Runs of worlds that each fit the budget, as few as possible; no run spans two groups."""
        chunks: list[Chunk] = []
        for worlds in runs_of(self.arrangement.groups):
            chunks += self._pieces(prepared, batch, budget, worlds, starts)
        return chunks

    def _pieces(
        self, prepared: Prepared, batch: Batch, budget: int, group: int, starts: Sequence[int]
    ) -> list[Chunk]:
        count, first = group.bit_count(), (group & -group).bit_length() - 1
        pieces = 1
        while True:
            size = math.ceil(count / pieces)
            chunks = [
                _chunk(((1 << min(size, count - begin)) - 1) << first + begin, starts)
                for begin in range(0, count, size)
            ]
            most = max(self._peak(prepared, batch, chunk, stacked=True) for chunk in chunks)
            if most <= budget:
                return chunks
            if size == 1:
                alone = [_chunk(1 << world, starts) for world in range(len(starts))]
                least = max(self._peak(prepared, batch, chunk, stacked=True) for chunk in alone)
                raise SweepError(
                    f"one world alone takes {shown_bytes(least)}, more than the budget of "
                    f"{shown_bytes(budget)}. The least that would do is max_memory={least}."
                )
            pieces = min(count, max(pieces + 1, math.ceil(pieces * most / budget)))

    def _peak(self, prepared: Prepared, batch: Batch, chunk: Chunk, *, stacked: bool) -> int:
        """The bytes held at most while the worlds of `chunk` are computed, together or one by one."""
        if not stacked:
            # A world holds all that it computed until it is dropped.
            plan, costs, name = prepared.schedule.of(chunk.worlds), prepared.whole_costs, self._graph.name
            return sum(costs.bytes(name(node)) for node, _ in plan.steps) + sum(
                costs.bytes_of_copy(name(node)) for node in plan.patched
            )
        key = chunk.worlds, chunk.start
        if key not in prepared.peaks:
            prepared.peaks[key] = self._peak_of_stack(prepared, batch, chunk)
        return prepared.peaks[key]

    def _peak_of_stack(self, prepared: Prepared, batch: Batch, chunk: Chunk) -> int:
        facts = self.sweep.facts
        if facts.lying is None:
            facts.lying = lying(prepared.layout, facts.device)
        regions = self.regions(prepared, chunk.start, batch.base)
        one = self.passing(prepared, chunk, regions)
        sizes = _NodeSizes(self._graph, prepared.costs, facts.lying, regions, one.plan.patched)
        return peak_bytes(one.plan, one.inputs, sizes, drops=one.drops, reading=self._reading(prepared))

    def _reading(self, prepared: Prepared) -> int:
        """The bytes that the metrics take for one world, one metric after another."""
        costs = prepared.costs
        taken = [0]
        for metric in self.sweep.metrics:
            if not metric.whole and not prepared.columns:
                target = self.sweep._target(metric)
                elements = costs.elements(target, rows=1 if metric.last else None)
                wide = 0 if costs.itemsize(target) == 4 else 1
                taken.append((metric.copies + wide) * elements * 4 if metric.copies else 0)
        return max(taken)


class _NodeSizes:
    """Bytes of one world's value of a node, and the rows of it that are computed, by the node's number."""

    def __init__(
        self, graph: Graph, costs: Costs, how: Lying, regions: Regions, patched: Iterable[int]
    ) -> None:
        self._graph, self._costs, self._lying, self._regions = graph, costs, how, regions
        self._patched = {graph.name(node) for node in patched}

    def value(self, node: int, rows: int | None) -> int:
        return self._costs.bytes_of_copy(self._graph.name(node), rows=rows)

    def repeated(self, node: int, rows: int | None) -> int:
        return self._costs.bytes_of_repeating(self._graph.name(node), rows=rows)

    def workspace(self, node: int) -> int:
        name = self._graph.name(node)
        copied = self._lying.copies(name, self._patched)
        return self._costs.workspace(name) + sum(
            self._costs.bytes_of_copy(read, rows=self._regions.wanted(name, read)) for read in copied
        )

    def rows(self, node: int) -> int | None:
        return self._regions.of(self._graph.name(node))

    def wanted(self, node: int, read: int) -> int | None:
        return self._regions.wanted(self._graph.name(node), self._graph.name(read))

    def wanted_of(self, target: int) -> int | None:
        return self._regions.wanted_of(self._graph.name(target))

    def shown(self, node: int) -> int | None:
        name = self._graph.name(node)
        return self._graph.number(self._lying.shown[name]) if name in self._lying.shown else None


def reader(base: Reading) -> Callable[[str], Any]:
    """Reads values of a run by the graph's own names, each once."""
    known: dict[str, Any] = {}

    def read(name: str) -> Any:
        if name not in known:
            (known[name],) = base.demand([name])
        return known[name]

    return read


def members(worlds: int) -> list[int]:
    """The worlds of a mask, first to last."""
    return [place for place in range(worlds.bit_length()) if worlds >> place & 1]


def runs_of(sizes: Sequence[int]) -> list[int]:
    """Runs of worlds of these sizes, as masks: each takes up where the one before it ends."""
    starts = accumulate(sizes, initial=0)
    return [((1 << size) - 1) << start for size, start in zip(sizes, starts, strict=False)]


def grouped(chunks: Sequence[Chunk], evaluator: str) -> Iterator[tuple[int, Chunk]]:
    """The chunks with their numbers; single worlds of a serial run in groups, so that storing is cheap."""
    if evaluator == "wavefront":
        yield from enumerate(chunks)
        return
    size = 16
    for piece, start in enumerate(range(0, len(chunks), size)):
        yield piece, Chunk(sum(chunk.worlds for chunk in chunks[start : start + size]))


def last_reads(plan: Schedule, inputs: Mapping[int, tuple[int, ...]]) -> dict[int, int]:
    """For each node that steps read, the last step that does; targets are kept to the end."""
    last: dict[int, int] = {}
    for node, _ in plan.steps:
        for site in inputs[node]:
            last[site] = node
    return {site: one for site, one in last.items() if site not in plan.targets}


def _chunk(worlds: int, starts: Sequence[int]) -> Chunk:
    return Chunk(worlds, min(starts[world] for world in members(worlds)))
