"""The compiler of sweeps: what is asked, for runs of one shape, becomes passes of steps and their costs.

It is pure: it runs nothing, times nothing, and reads no tensor. What it has to know of the runs is given as
`Conditions`: plain values that are found before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from conewise.anatomy.places import EdgePlace, Writers
from conewise.arguments import shown_bytes
from conewise.errors import Argument, SweepError
from conewise.program.streaming import reads_of
from conewise.program.tensors import SPLIT, TF32
from conewise.sweeps.planning.costs import Costs, Splitting
from conewise.sweeps.planning.memory import NodeSizes, PutSizes, measured, serial_peak
from conewise.sweeps.planning.passes import (
    PassProgram,
    baseline_pass,
    fused_pass,
    merged_weights,
    read_of_base,
    weights_of,
)
from conewise.sweeps.planning.patching import (
    EdgeFill,
    FillTable,
    Patching,
    PlaceGroup,
    axis_lengths,
    counted_from_front,
    fill_tables,
    first_changes,
    read_in,
)
from conewise.sweeps.planning.plan import SERIAL_GROUP, Compiled, Pass, SweepPlan
from conewise.sweeps.planning.regions import WHOLE, Masks, Regions, attention_kernel
from conewise.sweeps.planning.schedule import (
    LAUNCH_FLOPS,
    Piece,
    Schedule,
    WorldOrder,
    cut_worlds,
    no_room,
    ordered,
    ranges_of,
    stored_pieces,
)
from conewise.sweeps.planning.shapes import ShapeFacts
from conewise.sweeps.planning.spec import Conditions, ReadOut, SweepSpec

DEFAULT_MEMORY = 2 << 30
"""The bytes that a sweep may hold beside the model and its baseline, where nothing else is said."""

HOLES = {"cuda": 1.4}
"""Bytes of a device that torch's allocator has for each byte of tensors: it leaves holes between blocks."""


NAMED = 60
"""The longest name of a part of a site that a plan tells; of what is longer, the site's alone."""


class Compilation:
    """Compiles what `spec` asks for runs of one shape. `patching` has the nodes that its cells patch.

    `readout` says how metrics read, and `writers` how many components write into the stream that edges are
    patched in.
    """

    def __init__(
        self,
        patching: Patching,
        facts: ShapeFacts,
        spec: SweepSpec,
        readout: ReadOut,
        conditions: Conditions,
        writers: int = 0,
    ) -> None:
        self.patching, self.graph, self.facts, self.spec = patching, patching.graph, facts, spec
        self.readout, self.conditions, self._writers = readout, conditions, writers
        self._regions: dict[int, Regions] = {}
        self._programs: dict[Any, PassProgram] = {}
        self._passes: dict[tuple[int, int, int], PassProgram] = {}
        self._flops: dict[tuple[str, int | None], int] = {}

    def schedule_of(self, world_of: Sequence[int]) -> Schedule:
        """Return the schedule of all worlds, given the world of each cell."""
        return self.patching.schedule(self.conditions.edits, world_of)

    # -- what is put in --------------------------------------------------------------------------

    @cached_property
    def _lengths(self) -> list[dict[str, int]]:
        """The lengths of the natural axes of each group's site."""
        return [axis_lengths(group.located, self.facts) for group in self.patching.groups]

    @cached_property
    def _numbers(self) -> list[list[tuple[int, ...]]]:
        """The numbers that each place of each group selects, counted from the front."""
        groups = zip(self.patching.groups, self._lengths, strict=True)
        return [counted_from_front(group, lengths) for group, lengths in groups]

    @cached_property
    def put(self) -> PutSizes:
        """The bytes of what worlds put in."""
        return PutSizes(self.patching, self.facts, self._lengths, self._writers)

    @cached_property
    def world_of(self) -> list[int]:
        """The world of each cell."""
        return turned(self.order.cells)

    def _tables(self) -> tuple[FillTable, ...]:
        """Return what worlds put where: their own, then the edits of the base that they make again."""
        edited = self.patching.edited(self.conditions.edits, self.world_of)
        again = [
            FillTable(edit.node, edit.site, -1, tuple(sorted(own)), (), (), (), edit=edit.number)
            for edit, own in sorted(edited.items(), key=lambda item: item[0].number)
        ]
        return (*fill_tables(self.patching.groups, self._numbers, self.world_of, self._edge_fill), *again)

    def _edge_fill(self, group: PlaceGroup, writers: tuple[Writers, ...]) -> EdgeFill:
        work = self.put.reader_work(group.node)
        assert isinstance(group.place, EdgePlace)
        return EdgeFill(writers, group.place.entry, len(work.nodes), work.at_once, group.place.live)

    # -- the order of worlds ---------------------------------------------------------------------

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """For each cell, the first position that it changes."""
        # A function in the base may carry a change to any part of what it is given.
        if self.conditions.obstacle or any(edit.is_function for edit in self.conditions.edits):
            return (0,) * self.patching.cells
        finder, layout, cells = self.facts.finder, self.facts.layout, self.patching.cells
        return first_changes(self.patching.groups, self._numbers, cells, finder, layout, self._from_source)

    @cached_property
    def _from_source(self) -> Mapping[str, int]:
        """The nodes that differ between base and source from a position on only."""
        start = self.conditions.first_change
        if not self.spec.from_run or not start:
            return {}
        layout = self.facts.layout
        computed = {name for name in self.facts.records if name in layout.varying}
        found = self.facts.finder.changed(start, self.conditions.differing, computed, self._hides)
        inside = layout.varying
        if self.conditions.differing:
            inside = frozenset(found.rows.keys() | (layout.varying - computed))
        return dict.fromkeys(inside, start)

    @cached_property
    def _masks(self) -> Masks:
        return dict(self.conditions.masks)

    def _hides(self, mask: str, start: int) -> bool:
        return mask in self._masks and self._masks[mask].hides_from(start)

    @cached_property
    def order(self) -> WorldOrder:
        """The cells by world: patches that stand first in the graph come first. Stacks grow at their ends."""
        labels, graph = self.graph.table.labels, self.graph
        depth = {
            nodes: min(labels[graph.number(node)] for node in nodes) for nodes in self.patching.cells_by_nodes
        }
        by_cell = [depth[nodes] for nodes in self.patching.nodes_of_cells]
        cells = sorted(range(len(by_cell)), key=by_cell.__getitem__)
        if len(set(self.starts)) == 1:
            return WorldOrder(tuple(cells), (len(cells),))
        world_of = turned(cells)
        plan = self.schedule_of(world_of)
        whole = sum(self.flops(node, None) * mask.bit_count() for node, mask in plan.steps)

        def work() -> list[int]:
            """Worlds that patch the same nodes compute the same."""
            amounts = [0] * len(cells)
            for own in self.patching.cells_by_nodes.values():
                world = world_of[own[0]]
                amount = sum(self.flops(node, None) for node, mask in plan.steps if mask >> world & 1)
                for cell in own:
                    amounts[cell] = amount
            return amounts

        def share(start: int) -> float:
            regions = self._changed(plan, start)
            left = sum(self.flops(node, regions.of(node)) * mask.bit_count() for node, mask in plan.steps)
            return left / whole if whole else 1.0

        overhead = LAUNCH_FLOPS.get(self.facts.device.type, LAUNCH_FLOPS["cuda"]) * plan.launches
        return ordered(cells, self.starts, work, share, overhead)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of all worlds; raises SweepError where some change nothing that a metric reads."""
        found = self.schedule_of(self.world_of)
        reached = found.reached
        # A site may lie in front of some cells: there the metric is the base's, and nothing is computed.
        is_inside = any(metric.reads for metric in self.spec.metrics)
        if reached != (1 << found.worlds) - 1 and not (is_inside and reached):
            idle = [world for world in range(found.worlds) if not reached >> world & 1]
            raise SweepError(
                f"the metric does not depend on {len(idle)} of {found.worlds} cells, "
                f"{self.spec.names[self.order.cells[idle[0]]]} for one. Leave them out, or choose a metric "
                "that reads more of the outputs."
            )
        return found

    def flops(self, node: str, rows: int | None) -> int:
        """Operations of one world, all columns."""
        key = node, rows
        if node not in self.facts.records:
            return 0  # a graft brought it in: what it costs is not known
        if key not in self._flops:
            self._flops[key] = self.facts.costs.flops(node, rows=rows)
        return self._flops[key]

    # -- positions and columns -------------------------------------------------------------------

    def _changed(self, plan: Schedule, start: int) -> Regions:
        if not start:
            return WHOLE
        computed = {node for node, _ in plan.steps}
        return self.facts.finder.changed(start, plan.patched.keys(), computed, self._hides)

    def regions(self, start: int) -> Regions:
        """Return which positions of nodes are computed in worlds that change nothing before `start`."""
        if start not in self._regions:
            found, tail = self._changed(self.schedule, start), self.conditions.tail
            # What is read may begin in front of the first change: then all positions are put together.
            is_inside = all(rows >= tail for rows in found.rows.values())
            self._regions[start] = found.ending(self._last, tail) if is_inside else found
        return self._regions[start]

    @cached_property
    def _last(self) -> frozenset[str]:
        """The nodes of which the metrics read the last positions alone."""
        if not self.readout.last:
            return frozenset()
        steps, patched = dict(self.schedule.steps), self.schedule.patched
        again = {node for node, mask in patched.items() if steps.get(node, 0) & mask}
        targets = self.readout.targets
        return self.facts.finder.last(targets, again.union(set(targets) - set(self.readout.last)))

    @cached_property
    def columns(self) -> dict[str, int]:
        """The products of which only the columns of a few tokens are computed, and how many."""
        steps = dict(self.schedule.steps)
        return {
            node: count
            for node, count in self.readout.columns
            if node in steps and node not in self.schedule.patched
        }

    @cached_property
    def costs(self) -> Costs:
        """Costs with the columns that are computed."""
        return self.facts.narrow_costs(self.columns)

    # -- passes ----------------------------------------------------------------------------------

    def program(self, first: int, count: int, start: int) -> PassProgram:
        """The pass over some worlds, from the position `start` on; passes of equal shape are one."""
        key = first, count, start
        if key not in self._passes:
            own = self.schedule.of(first, count)
            put = self._held(own)
            shape = count, start, put, tuple(own.patched.items()), tuple(own.whole.items())
            if shape not in self._programs:
                self._programs[shape] = self._built(own, self.regions(start), put)
            self._passes[key] = self._programs[shape]
        return self._passes[key]

    def _built(self, own: Schedule, regions: Regions, put: int) -> PassProgram:
        program = fused_pass(self.graph, self.facts, own, regions, self._kernel)
        sizes = NodeSizes(
            self.facts,
            self.costs,
            regions,
            frozenset(own.patched),
            self.put,
            self._is_causal,
            self.splitting,
        )
        costs = self.costs
        flops = sum(
            costs.flops(node, rows=regions.of(node)) * worlds.bit_count() for node, worlds in own.steps
        )
        return replace(measured(program, sizes, reading=self.reading, put=put + self.kept), flops=flops)

    def _kernel(self, node: str, rows: int | None, worlds: int) -> str:
        """Return the name of the kernel for a product or an attention of so many positions and worlds."""
        if self.splitting is not None and self.splitting.pays(node, rows, worlds):
            return SPLIT
        return attention_kernel(self.facts.records[node], rows, self.facts.layout, self._masks)

    def _is_causal(self, mask: str) -> bool:
        return mask in self._masks and self._masks[mask].is_causal

    @cached_property
    def splitting(self) -> Splitting | None:
        """The products that may be computed in parts, where that was asked for."""
        return (
            Splitting(self.facts.program, self.costs, self.columns) if self.spec.precision == SPLIT else None
        )

    @cached_property
    def kept(self) -> int:
        """Bytes of the parts of weights: of all that are split where the worlds are one pass."""
        if self.splitting is None:
            return 0
        regions, pays = self.regions(min(self.starts)), self.splitting.pays
        steps = self.schedule.steps
        return self.splitting.kept([n for n, mask in steps if pays(n, regions.of(n), mask.bit_count())])

    @cached_property
    def reading(self) -> int:
        """The bytes that the metrics take for one world, one metric after another."""
        taken = [0]
        if not self.columns:
            for target, last, copies in self.readout.taken:
                elements = self.costs.elements(target, rows=self.conditions.tail if last else None)
                wide = 0 if self.costs.itemsize(target) == 4 else 1
                taken.append((copies + wide) * elements * 4)
        return max(taken)

    def _held(self, own: Schedule) -> int:
        """Bytes of what worlds put in, and that no run holds: one value for each site."""
        edges = self.patching.edge_groups
        parts = self.put.of_writers if not edges.keys().isdisjoint(own.patched) else 0
        of_source = not (self.spec.from_run or self.spec.is_function)
        return parts + self.put.held([node for node in own.patched if node not in edges], of_source)

    # -- the cut -----------------------------------------------------------------------------------

    @cached_property
    def evaluator(self) -> str:
        """Serial or wavefront."""
        asked, cut, obstacle = self.conditions.evaluator, self.conditions.cut, self.conditions.obstacle
        if asked not in {"auto", "serial", "wavefront"}:
            raise SweepError(f"no evaluator {asked!r}: there are 'serial', 'wavefront' and 'auto'.")
        if asked == "wavefront" and obstacle:
            raise SweepError(f"this sweep cannot run as a wavefront: {obstacle}. Run it serially.")
        if cut is not None:
            return cut.evaluator
        return asked if asked != "auto" else "serial" if obstacle else "wavefront"

    @cached_property
    def passes(self) -> list[Piece]:
        """The wavefront's passes: the first world, how many, and the first position that they change."""
        starts = [self.starts[cell] for cell in self.order.cells]
        if self.conditions.cut is not None:
            return stored_pieces(self.conditions.cut.chunks, starts)
        room = HOLES.get(self.facts.device.type, 1.0)
        return cut_worlds(
            self.order.groups, starts, self.budget, lambda *one: int(room * self.program(*one).peak)
        )

    @property
    def budget(self) -> int:
        """The bytes that a pass may take."""
        return self.conditions.max_memory or DEFAULT_MEMORY + self.kept + self.put.of_writers

    # -- the whole ---------------------------------------------------------------------------------

    def plan(self) -> SweepPlan:
        """Return the plan of one batch: its steps, and what they cost."""
        stored, budget, worlds = self.conditions.cut, self.conditions.max_memory, self.patching.cells
        steps = self.schedule.steps
        stacked = self.evaluator == "wavefront"
        programs: list[PassProgram] = []
        passes: list[Pass] = []
        if stacked:
            numbers: dict[int, int] = {}
            for first, count, start in self.passes:
                one = self.program(first, count, start)
                if id(one) not in numbers:
                    numbers[id(one)] = len(programs)
                    programs.append(one)
                passes.append(Pass(first, count, start, numbers[id(one)]))
            peak = max(program.peak for program in programs)
            flops = sum(programs[one.program].flops for one in passes)
            launches = sum(programs[one.program].launches for one in passes)
            if stored is not None and budget is not None and peak > budget:
                raise SweepError(
                    f"the stored run was cut into chunks that take {shown_bytes(peak)}, more than the budget "
                    f"of {shown_bytes(budget)}, and other chunks would round differently. Resume it with ",
                    Argument("max_memory", peak),
                    " or more, or start again in another folder.",
                )
        else:
            peak = serial_peak(
                self.schedule, self.patching, self.conditions.edits, self.world_of, self.facts, self.put,
                self._is_causal, self.reading,
            )  # fmt: skip
            flops = sum(self.flops(node, None) * mask.bit_count() for node, mask in steps)
            launches = self.schedule.node_evaluations
            if budget is not None and peak > budget:
                raise no_room(peak, budget)
        compiled = Compiled(
            tuple(self.facts.layout.symbols.items()),
            self.readout.targets,
            self.order.cells,
            tuple((node, ranges_of(mask)) for node, mask in steps),
            tuple(passes),
            tuple(programs),
            self._tables(),
            tuple(self.columns.items()) if stacked else (),
        )
        evaluations, chunks = self.schedule.node_evaluations, compiled.together
        for chunk in chunks if self.patching.edge_groups else ():
            for read in read_in(compiled.fills, chunk):
                nodes = self.put.reader_work(read.node).nodes
                evaluations += read.writers * read.work
                flops += read.writers * sum(self.flops(node, None) for node in nodes)
                launches += read.calls * read.work
        computed = self.patching.computed
        return SweepPlan(
            worlds=worlds,
            batches=1,
            node_evaluations=evaluations,
            full_evaluations=len(computed) * worlds,
            launches=launches,
            flops=flops,
            full_flops=sum([self.flops(node, None) for node in computed]) * worlds,
            peak_bytes=peak,
            max_memory=budget,
            chunks=tuple(map(len, chunks)),
            evaluator=self.evaluator,
            why=self._why(programs),
            seconds=None,
            moved_bytes=self._moved(programs, passes, chunks),
            compiled=compiled,
        )

    def _moved(self, programs: Sequence[PassProgram], passes: Sequence[Pass], chunks: Sequence[range]) -> int:
        """Return the bytes of streamed weights that are moved: for each pass once; or world after world."""
        streamed = reads_of(self.facts.program)
        if streamed.stream is None:
            return 0
        if passes:
            read = [weights_of(one, streamed, self.columns) for one in programs]
            each = [streamed.moved([one]) for one in read]
            number = passes[0].program
            first = self._with_baselines(programs[number], read[number])
            return streamed.moved([first]) + sum(each[one.program] for one in passes[1:])
        steps = [(numbers, mask) for node, mask in self.schedule.steps if (numbers := streamed.at(node))]
        worlds = range(len(chunks))
        groups = [worlds[first : first + SERIAL_GROUP] for first in worlds[::SERIAL_GROUP]]
        return streamed.moved(
            [
                [numbers for world in group for numbers, mask in steps if mask >> world & 1]
                for group in groups
            ],
            as_program=True,
        )

    def _with_baselines(
        self, program: PassProgram, weights: Sequence[tuple[int, ...]]
    ) -> Sequence[tuple[int, ...]]:
        """The weights that the steps of the first pass read, with those of base and source beside them."""
        if not self.conditions.along:
            return weights
        wanted = [*read_of_base(program), *(group.node for group in self.patching.groups)]
        along = baseline_pass(
            self.graph, self.facts, [*wanted, *self.readout.targets], self._masks, self.conditions.along
        )
        return merged_weights(self.facts.program, program, weights, along)

    def _why(self, programs: Sequence[PassProgram]) -> str:
        """Return why the worlds are computed in this way, what that does to the numbers, where it ends."""
        read = (place for metric in self.spec.metrics for place in metric.reads)
        sites = dict.fromkeys(str(one) if len(str(one)) < NAMED else one.name for one in read)
        is_inside = all(metric.reads and not metric.whole for metric in self.spec.metrics)
        ends = f"; nothing behind {', '.join(sites)} is computed" if is_inside else ""
        return f"{self._why_so(programs)}{ends}"

    def _how_cut(self) -> str:
        """Say how the worlds are cut into passes, and for what reason."""
        worlds = [piece[1] for piece in self.passes]
        if len(worlds) == 1:
            return "all worlds in one pass"
        cut = f"worlds in {len(worlds)} passes of {max(worlds):,} at most"
        if self.conditions.cut is not None:
            return f"{cut}, as the stored run was cut"
        groups = len(self.order.groups)
        reasons = []
        if groups > 1:
            reasons.append("apart by the first position that they change")
        if len(worlds) > groups:
            reasons.append(f"no more than fit the budget of {shown_bytes(self.budget)}")
        return ", ".join([cut, *reasons])

    def _why_so(self, programs: Sequence[PassProgram]) -> str:
        if self.conditions.obstacle:
            return self.conditions.obstacle
        if not programs:
            return "one world after another, bit for bit a full re-run"
        rounding = "TF32" if self.spec.precision == TF32 else "batched kernels"
        why = f"{self._how_cut()}, equal up to the rounding of {rounding}"
        if self.spec.precision != SPLIT:
            return why
        split = {step.node for one in programs for step in one.steps if step.kernel == SPLIT}
        if not split:
            return f"{why}; no product is large enough to be split"
        products = f"{len(split)} product{'s' if len(split) > 1 else ''}"
        return f"{why}; {products} in bfloat16 parts, for which weights take {shown_bytes(self.kept)} more"


def turned(order: Sequence[int]) -> list[int]:
    """Return the place of each number in an order: the world of each cell, given the cell of each world."""
    places = [0] * len(order)
    for place, number in enumerate(order):
        places[number] = place
    return places
