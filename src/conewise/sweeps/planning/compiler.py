"""The compiler of sweeps: what is asked, for runs of one shape, becomes passes of steps and their costs.

It is pure: it runs nothing, times nothing, and reads no tensor. What it has to know of the runs is given as
`Conditions`: plain values that are found before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from conewise.amounts import shown_bytes
from conewise.errors import Argument, SweepError
from conewise.graph.graph import Graph
from conewise.locations.located import Located
from conewise.program.operations import ATTENTION
from conewise.program.records import Ref
from conewise.sweeps.planning.attention_rules import attention_argument
from conewise.sweeps.planning.build_pass import Chain, build_pass
from conewise.sweeps.planning.compiled import Compiled, Costing, Pass
from conewise.sweeps.planning.conditions import Conditions, StandingEdit
from conewise.sweeps.planning.costs import Costs
from conewise.sweeps.planning.fill_tables import (
    FillTable,
    PlaceGroup,
    counted_from_front,
    fill_tables,
    part_size,
)
from conewise.sweeps.planning.first_change import first_changes
from conewise.sweeps.planning.fusing import fitting
from conewise.sweeps.planning.instructions import PassProgram
from conewise.sweeps.planning.masks import Masks
from conewise.sweeps.planning.memory import measured
from conewise.sweeps.planning.ordering import LAUNCH_FLOPS, WorldOrder, ordered
from conewise.sweeps.planning.readout import ReadOut
from conewise.sweeps.planning.regions import WHOLE, Regions
from conewise.sweeps.planning.schedule import Schedule, schedule
from conewise.sweeps.planning.shape_facts import ShapeFacts
from conewise.sweeps.planning.worlds import mask_of_members, ranges_of

DEFAULT_MEMORY = 2 << 30
"""What a sweep may hold beside the model and its baseline, where nothing else is said."""


class Compilation:
    """Compiles one sweep for runs of one shape. `groups` are its places, `names` those of its cells."""

    def __init__(
        self,
        graph: Graph,
        facts: ShapeFacts,
        groups: Sequence[PlaceGroup],
        names: Sequence[str],
        readout: ReadOut,
        conditions: Conditions,
        *,
        is_function: bool,
        from_run: bool,
    ) -> None:
        self.graph, self.facts, self.groups, self.names = graph, facts, groups, names
        self.readout, self.conditions = readout, conditions
        self.is_function, self.from_run = is_function, from_run
        self._regions: dict[int, Regions] = {}
        self._programs: dict[Any, PassProgram] = {}
        self._passes: dict[tuple[int, int, int], PassProgram] = {}
        self._flops: dict[tuple[str, int | None], int] = {}

    # -- what is patched -------------------------------------------------------------------------

    @cached_property
    def lengths(self) -> list[dict[str, int]]:
        """The lengths of the natural axes of each group's site."""
        return [axis_lengths(group.located, self.facts) for group in self.groups]

    @cached_property
    def numbers(self) -> list[list[tuple[int, ...]]]:
        """What each place of each group selects, counted from the front."""
        return [counted_from_front(g, lengths) for g, lengths in zip(self.groups, self.lengths, strict=True)]

    @cached_property
    def nodes_of_cells(self) -> list[tuple[str, ...]]:
        """The nodes that each cell patches."""
        found: list[tuple[str, ...]] = [()] * len(self.names)
        for group in self.groups:
            for cell in group.cells:
                found[cell] = (*found[cell], group.node)
        return found

    def made_again(self, nodes: tuple[str, ...]) -> tuple[StandingEdit, ...]:
        """Those of the base's own edits that lie downstream of these nodes: a world makes them again."""
        edits = self.conditions.edits
        if not edits:
            return ()
        if nodes not in self._again:
            cone = self.graph.table.cone(set(self.graph.numbers(nodes)))
            self._again[nodes] = tuple(e for e in edits if self.graph.number(e.node) in cone)
        return self._again[nodes]

    @cached_property
    def _again(self) -> dict[tuple[str, ...], tuple[StandingEdit, ...]]:
        return {}

    def schedule_of(self, world_of: Sequence[int]) -> Schedule:
        """The schedule of all worlds, given the world of each cell."""
        patched: dict[str, list[int]] = {}
        whole: dict[str, list[int]] = {}
        for group in self.groups:
            worlds = [world_of[cell] for cell in group.cells]
            patched.setdefault(group.node, []).extend(worlds)
            if group.is_whole and not self.is_function:
                whole.setdefault(group.node, []).extend(worlds)
        for nodes, cells in self._cells_by_nodes.items():
            for edit in self.made_again(nodes):
                worlds = [world_of[cell] for cell in cells]
                patched.setdefault(edit.node, []).extend(worlds)
                if edit.covers:
                    whole.setdefault(edit.node, []).extend(worlds)
        put, replaced = (
            {node: mask_of_members(worlds) for node, worlds in one.items()} for one in (patched, whole)
        )
        return schedule(self.graph, put, replaced, len(self.names), self.readout.targets)

    @cached_property
    def _cells_by_nodes(self) -> dict[tuple[str, ...], list[int]]:
        found: dict[tuple[str, ...], list[int]] = {}
        for cell, nodes in enumerate(self.nodes_of_cells):
            found.setdefault(nodes, []).append(cell)
        return found

    # -- the order of worlds ---------------------------------------------------------------------

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """For each cell, the first position that it changes."""
        # A function in the base may carry a change to any part of what it is given.
        if self.conditions.obstacle or any(edit.is_function for edit in self.conditions.edits):
            return (0,) * len(self.names)
        finder, layout = self.facts.finder, self.facts.layout
        return first_changes(self.groups, self.numbers, len(self.names), finder, layout, self._from_source)

    @cached_property
    def _from_source(self) -> Mapping[str, int]:
        """The nodes that differ between base and source from a position on only."""
        start = self.conditions.first_change
        if not self.from_run or not start:
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
        depth = {nodes: min(labels[graph.number(node)] for node in nodes) for nodes in self._cells_by_nodes}
        by_cell = [depth[nodes] for nodes in self.nodes_of_cells]
        cells = sorted(range(len(by_cell)), key=by_cell.__getitem__)
        if len(set(self.starts)) == 1:
            return WorldOrder(tuple(cells), (len(cells),))
        plan = self.schedule_of(turned(cells))
        whole = sum(self.flops(node, None) * mask.bit_count() for node, mask in plan.steps)
        world_of = turned(cells)

        def work() -> list[int]:
            """Worlds that patch the same nodes compute the same."""
            amounts = [0] * len(cells)
            for own in self._cells_by_nodes.values():
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
        """Which nodes are computed in which worlds."""
        found = self.schedule_of(turned(self.order.cells))
        reached = found.reached
        if reached != (1 << found.worlds) - 1:
            idle = [world for world in range(found.worlds) if not reached >> world & 1]
            raise SweepError(
                f"the metric does not depend on {len(idle)} of {found.worlds} cells, "
                f"{self.names[self.order.cells[idle[0]]]} for one. Leave them out, or choose a metric that "
                "reads more of the outputs."
            )
        return found

    def flops(self, node: str, rows: int | None) -> int:
        """Operations of one world, all columns."""
        key = node, rows
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
        """Which positions of which nodes are computed in worlds that change nothing before `start`."""
        if start not in self._regions:
            self._regions[start] = self._changed(self.schedule, start).ending(self._last)
        return self._regions[start]

    @cached_property
    def _last(self) -> frozenset[str]:
        """The nodes of which the metrics read the last position alone."""
        if not self.readout.last:
            return frozenset()
        steps, patched = dict(self.schedule.steps), self.schedule.patched
        again = {node for node, mask in patched.items() if steps.get(node, 0) & mask}
        return self.facts.finder.last(self.readout.targets, again)

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
        records = self.facts.records
        steps = {node: (worlds, regions.of(node)) for node, worlds in own.steps}
        kept = {*own.patched, *own.targets}
        graph = self.graph
        consumers = graph.table.consumers
        fused = fitting(
            self.facts.fusions,
            steps,
            kept,
            lambda node: map(graph.name, consumers[graph.number(node)]),
        )
        chains = {node: Chain(fusion.inputs, tuple(sorted(fusion.inside))) for node, fusion in fused.items()}
        program = build_pass(
            own,
            lambda node: records[node].inputs,
            regions,
            chains=chains,
            several=lambda node: node in records and records[node].shape is None,
            kernel=self._kernel,
        )
        sizes = NodeSizes(self, regions, frozenset(own.patched))
        costs = self.costs
        flops = sum(
            costs.flops(node, rows=rows) * worlds.bit_count() for node, (worlds, rows) in steps.items()
        )
        return replace(measured(program, sizes, reading=self.reading, put=put), flops=flops)

    def _kernel(self, node: str, rows: int | None) -> str:
        """Which way to compute an attention is meant."""
        record = self.facts.records[node]
        if record.op != ATTENTION:
            return ""
        mask = attention_argument(record, "attn_mask")
        if rows is None and isinstance(mask, Ref) and mask.name not in self.facts.layout.varying:
            return "causal" if self._is_causal(mask.name) else ""
        return "last rows" if rows is not None and attention_argument(record, "is_causal") else ""

    def _is_causal(self, mask: str) -> bool:
        return mask in self._masks and self._masks[mask].is_causal

    @cached_property
    def reading(self) -> int:
        """The bytes that the metrics take for one world, one metric after another."""
        taken = [0]
        if not self.columns:
            for target, last, copies in self.readout.taken:
                elements = self.costs.elements(target, rows=1 if last else None)
                wide = 0 if self.costs.itemsize(target) == 4 else 1
                taken.append((copies + wide) * elements * 4)
        return max(taken)

    @cached_property
    def _parts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of the largest part of each node that a world puts in; of all whole values put into it."""
        parts: dict[str, int] = {}
        wholes: dict[str, int] = {}
        for group, lengths in zip(self.groups, self.lengths, strict=True):
            item = self.costs.itemsize(group.node)
            parts[group.node] = max(parts.get(group.node, 0), part_size(group, lengths) * item)
            wholes[group.node] = max(wholes.get(group.node, 0), math.prod(lengths.values()) * item)
        return parts, wholes

    def part(self, node: str) -> int:
        """Bytes of the part that a world puts into a node."""
        return self._parts[0].get(node, 0)

    def _held(self, own: Schedule) -> int:
        """Bytes of what worlds put in, and that no run holds: one value for each site."""
        if self.from_run or self.is_function:
            return 0
        return sum(self._parts[1].get(node, 0) for node in own.patched)

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
    def passes(self) -> list[tuple[int, int, int]]:
        """The wavefront's passes: the first world, how many, and the first position that they change."""
        by_world = [self.starts[cell] for cell in self.order.cells]

        def piece(first: int, count: int) -> tuple[int, int, int]:
            return first, count, min(by_world[first : first + count])

        if self.conditions.cut is not None:
            chunks = self.conditions.cut.chunks
            firsts = accumulate(chunks, initial=0)
            return [piece(first, count) for first, count in zip(firsts, chunks, strict=False)]
        budget = self.conditions.max_memory or DEFAULT_MEMORY
        found: list[tuple[int, int, int]] = []
        for first, count in zip(accumulate(self.order.groups, initial=0), self.order.groups, strict=False):
            found += self._pieces(first, count, budget, piece)
        return found

    def _pieces(self, first: int, count: int, budget: int, piece: Any) -> list[tuple[int, int, int]]:
        """Runs of worlds that each fit the budget, as few as possible."""
        pieces = 1
        while True:
            size = math.ceil(count / pieces)
            chunks = [piece(first + begin, min(size, count - begin)) for begin in range(0, count, size)]
            most = 0
            for chunk in chunks:
                most = max(most, self.program(*chunk).peak)
                if most > budget and size > 1:
                    break
            if most <= budget:
                return chunks
            if size == 1:
                total = len(self.names)
                least = max(self.program(*piece(world, 1)).peak for world in range(total))
                raise no_room(least, budget)
            pieces = min(count, max(pieces + 1, math.ceil(pieces * most / budget)))

    @cached_property
    def serial_peak(self) -> int:
        """The bytes that one world holds at most: all that it computed, until it is dropped."""
        costs, aliases = self.facts.costs, self.facts.memory_layout.aliases
        space = self.facts.workspace(costs)
        most = 0
        world_of = turned(self.order.cells)
        for nodes, cells in self._cells_by_nodes.items():
            world = world_of[cells[0]]
            held = sum(
                self._parts[0].get(node, 0) + costs.bytes_of_copy(node) for node in dict.fromkeys(nodes)
            )
            held += sum(costs.bytes_of_copy(edit.node) for edit in self.made_again(nodes))
            peak = held
            for node, mask in self.schedule.steps:
                if mask >> world & 1:
                    held += 0 if node in aliases else costs.bytes_of_copy(node)
                    taken = space.each(node, None, self._is_causal) + space.fixed(node, None, self._is_causal)
                    peak = max(peak, held + taken)
            most = max(most, peak, held + self.reading)
        return most

    # -- the whole ---------------------------------------------------------------------------------

    def compiled(self) -> tuple[Compiled, Costing]:
        """The passes, and what they cost."""
        cut, budget = self.conditions.cut, self.conditions.max_memory
        cells, facts = self.order.cells, self.facts
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
            if cut is not None and budget is not None and peak > budget:
                raise SweepError(
                    f"the stored run was cut into chunks that take {shown_bytes(peak)}, more than the budget "
                    f"of {shown_bytes(budget)}, and other chunks would round differently. Resume it with ",
                    Argument("max_memory", peak),
                    " or more, or start again in another folder.",
                )
        else:
            peak = self.serial_peak
            flops = sum(self.flops(node, None) * mask.bit_count() for node, mask in steps)
            launches = self.schedule.node_evaluations
            if budget is not None and peak > budget:
                raise no_room(peak, budget)
        tables = fill_tables(self.groups, self.numbers, turned(cells)) + self._edit_tables()
        compiled = Compiled(
            tuple(facts.layout.symbols.items()),
            self.readout.targets,
            cells,
            tuple((node, ranges_of(mask)) for node, mask in steps),
            tuple(passes),
            tuple(programs),
            tuple(tables),
            tuple(self.columns.items()) if stacked else (),
        )
        rules, graph = self.graph.table.rules, self.graph
        support = graph.table.support(graph.numbers(self.readout.targets), ())
        computed = [graph.name(number) for number in support if rules[number] is not None]
        full = sum(self.flops(node, None) for node in computed)
        worlds = len(self.names)
        return compiled, Costing(
            self.schedule.node_evaluations, len(computed) * worlds, launches, flops, full * worlds, peak
        )

    def _edit_tables(self) -> list[FillTable]:
        """The edits of the base that worlds make again, before what they put in themselves."""
        world_of = turned(self.order.cells)
        worlds: dict[StandingEdit, list[int]] = {}
        for nodes, cells in self._cells_by_nodes.items():
            for edit in self.made_again(nodes):
                worlds.setdefault(edit, []).extend(world_of[cell] for cell in cells)
        return [
            FillTable(edit.node, edit.site, -1, tuple(sorted(own)), edit=edit.number)
            for edit, own in sorted(worlds.items(), key=lambda item: item[0].number)
        ]


class NodeSizes:
    """Bytes of one world's values in one pass; see `memory.Sizes`."""

    def __init__(self, compilation: Compilation, regions: Regions, patched: frozenset[str]) -> None:
        self._compilation, self._regions, self._patched = compilation, regions, patched
        self._costs, self._layout = compilation.costs, compilation.facts.memory_layout
        self._space = compilation.facts.workspace(compilation.costs)

    def value(self, node: str, rows: int | None) -> int:
        """Of the value itself."""
        return self._costs.bytes_of_copy(node, rows=rows)

    def repeated(self, node: str, rows: int | None) -> int:
        """Of a copy of the baseline's value; none where it is repeated without one."""
        return self._costs.bytes_of_repeating(node, rows=rows)

    def workspace(self, node: str, rows: int | None) -> int:
        """Of what computing it takes beside its value."""
        copied = self._layout.copies(node, self._patched)
        return self._space.each(node, rows, self._compilation._is_causal) + sum(
            self._costs.bytes_of_copy(read, rows=self._regions.wanted(node, read)) for read in copied
        )

    def scratch(self, node: str, rows: int | None) -> int:
        """Of what computing it takes beside its value, for however many worlds."""
        return self._space.fixed(node, rows, self._compilation._is_causal)

    def part(self, node: str) -> int:
        """Of the part of it that a world puts in."""
        return self._compilation.part(node)

    def alias(self, node: str) -> str | None:
        """The node whose memory its value shares."""
        return self._layout.aliases.get(node)


def axis_lengths(located: Located, facts: ShapeFacts) -> dict[str, int]:
    """The lengths of the natural axes of a site, in runs of this shape."""
    shape = facts.costs.shape(located.node) or ()
    lengths = located.view.lengths_in(shape, facts.layout.sizes(1))
    return dict(zip(located.view.axes, lengths, strict=True))


def turned(order: Sequence[int]) -> list[int]:
    """The place of each number in an order."""
    places = [0] * len(order)
    for place, number in enumerate(order):
        places[number] = place
    return places


def no_room(least: int, budget: int) -> SweepError:
    """The error where one world alone takes more than the budget."""
    return SweepError(
        f"one world alone takes {shown_bytes(least)}, more than the budget of {shown_bytes(budget)}. The "
        "least that would do is ",
        Argument("max_memory", least),
        ".",
    )
