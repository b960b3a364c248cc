"""The memory of a sweep: of a pass step by step, its instructions followed with sizes in place of values.

The memory of a serial world, which keeps all that it computed, is read off the same sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from conewise.anatomy.places import EdgePlace
from conewise.program.tensors import SPLIT
from conewise.sweeps.planning.costs import Costs, Splitting
from conewise.sweeps.planning.passes import Alignment, PassProgram, Put, Read, Step
from conewise.sweeps.planning.patching import Edits, Patching, ReaderWork, part_size, reader_work
from conewise.sweeps.planning.regions import Regions
from conewise.sweeps.planning.schedule import Schedule, count_of
from conewise.sweeps.planning.shapes import ShapeFacts


@dataclass(slots=True)
class Memory:
    """Blocks of memory, each held by some nodes; a block goes when nothing holds it any more.

    `peak` is the most that was ever held, `top` the most since it was last set.
    """

    live: int = 0
    peak: int = 0
    top: int = 0
    _sizes: list[int] = field(default_factory=list)
    _holders: list[int] = field(default_factory=list)

    def take(self, size: int) -> int:
        """A new block, held once."""
        self._sizes.append(size)
        self._holders.append(1)
        self.live += size
        self.peak, self.top = max(self.peak, self.live), max(self.top, self.live)
        return len(self._sizes) - 1

    def hold(self, block: int) -> int:
        """Hold a block once more."""
        self._holders[block] += 1
        return block

    def release(self, block: int) -> None:
        """Hold it once less."""
        self._holders[block] -= 1
        if not self._holders[block]:
            self.live -= self._sizes[block]


def measured(program: PassProgram, sizes: NodeSizes, *, reading: int, put: int = 0) -> PassProgram:
    """The same pass with its memory: what each step takes, and the most that is held.

    `reading` is what the metrics take for one world, beside what they read, `put` what all worlds hold of
    tensors of their own.
    """
    walk, rises = _Walk(sizes), []
    memory = walk.memory
    memory.take(put)
    for step in program.steps:
        before = memory.top = memory.live
        walk.step(step)
        rises.append(memory.top - before)
    before = memory.top = memory.live
    walk.finish(program, reading)
    return replace(program, rises=tuple(rises), reading=memory.top - before, peak=memory.peak)


class _Walk:
    def __init__(self, sizes: NodeSizes) -> None:
        self.memory = Memory()
        self._sizes = sizes
        self._blocks: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._strided: set[str] = set()
        """The nodes whose stacks show the last positions of longer ones."""

    def step(self, step: Step) -> None:
        """Compute a node in some worlds, then let go of what nothing reads any more."""
        memory = self.memory
        if step.worlds:
            self._compute(step)
        if step.put is not None:
            self._put(step.put)
        for name in step.drop:
            memory.release(self._blocks.pop(name))

    def finish(self, program: PassProgram, reading: int) -> None:
        """Align the targets to all worlds, and read the metrics."""
        for read in program.targets:
            self._operand(read, program.worlds)
        for block in self._blocks.values():
            self.memory.release(block)  # what the metrics read is held by them
        self.memory.take(reading * program.worlds)

    def _compute(self, step: Step) -> None:
        memory, sizes, count = self.memory, self._sizes, step.count
        operands: Mapping[str, int | None] = {read.node: self._operand(read, count) for read in step.reads}
        scratch = sizes.scratch(step.node, step.rows, step.kernel, count)
        taken = sizes.workspace(step.node, step.rows) * count + scratch
        space = memory.take(taken)
        block = self._shown(step, operands)
        size = sizes.value(step.node, step.rows)
        own = memory.take(size * count) if block is None else memory.hold(block)
        for one in (space, *operands.values()):
            if one is not None:
                memory.release(one)
        if not step.align.is_nothing:
            own = self._aligned(step.node, step.align, own, size, count, step.rows)
        self._blocks[step.node], self._counts[step.node] = own, count

    def _shown(self, step: Step, operands: Mapping[str, int | None]) -> int | None:
        """The block that a view shows; None where its value takes one of its own."""
        node = step.node
        self._strided.discard(node)
        alias = self._sizes.alias(node)
        if alias is None or operands.get(alias) is None:
            return None
        if any(read.node == alias and self._is_strided(read) for read in step.reads):
            if self._sizes.is_scattered(node, step.rows, step.count):
                return None
            self._strided.add(node)
        return operands[alias]

    def _is_strided(self, read: Read) -> bool:
        """True if a reader is given the last positions of something longer, without a copy."""
        align = read.align
        if not read.stacked or align.add or (align.pick is not None and len(align.pick) > 1):
            return False
        is_cut = read.rows is not None and read.rows != read.have
        is_extended = read.rows is None and read.have is not None
        return is_cut or (read.node in self._strided and not is_extended)

    def _put(self, put: Put) -> None:
        """Rows of a computed node written anew, and rows of worlds that did not compute it."""
        memory, node = self.memory, put.node
        whole, size = self._sizes.value(node, None), self._sizes.value(node, put.rows)
        fresh = count_of(put.fresh)
        self._strided.discard(node)
        if put.rows is not None and not (put.fresh and node in self._blocks):
            self._strided.add(node)
        if node not in self._blocks:
            block = self._cut(node, self._filled(node, whole, fresh), put.rows, fresh)
            self._blocks[node], self._counts[node] = block, fresh
            return
        if put.again:
            self._blocks[node] = self._changed(put, whole)
        if fresh:
            rows = self._cut(node, self._filled(node, whole, fresh), put.rows, fresh)
            self._counts[node] += fresh
            both = memory.take(size * self._counts[node])
            if put.order is not None:
                memory.release(memory.take(size * self._counts[node]))
            memory.release(self._blocks[node])
            memory.release(rows)
            self._blocks[node] = both

    def _changed(self, put: Put, whole: int) -> int:
        """A copy of a stack with all its positions, of which some worlds are written, in place or apart."""
        memory, node, count, again = self.memory, put.node, self._counts[put.node], count_of(put.again)
        front = memory.take(self._before(node, put.rows) * count)
        copy = memory.take(whole * count)
        memory.release(front)
        apart = memory.take(whole * again if len(put.places) > 1 else 0)
        self._gather(node, again)
        memory.release(apart)
        copy = self._cut(node, copy, put.rows, count)
        memory.release(self._blocks[node])
        return copy

    def _cut(self, node: str, block: int, rows: int | None, count: int) -> int:
        """The block of the last `rows` positions of one that has more: the same, or a copy."""
        if not self._sizes.is_scattered(node, rows, count):
            return block
        copy = self.memory.take(self._sizes.value(node, rows) * count)
        self.memory.release(block)
        return copy

    def _before(self, node: str, rows: int | None) -> int:
        """Bytes of the baseline's positions before the last `rows`, where repeating them takes memory."""
        return 0 if rows is None else self._sizes.repeated(node, None) - self._sizes.repeated(node, rows)

    def _filled(self, node: str, size: int, count: int) -> int:
        """Rows of the baseline; what the worlds put in is gathered before it is written there."""
        rows = self.memory.take(size * count)
        self._gather(node, count)
        return rows

    def _gather(self, node: str, count: int) -> None:
        """Take what so many worlds put into a node, before it is written there."""
        made = self.memory.take(self._sizes.of_edges(node, count))
        self.memory.release(self.memory.take(self._sizes.part(node) * count))
        self.memory.release(made)

    def _operand(self, read: Read, count: int) -> int | None:
        """The block that a reader of `count` worlds gets; None where it takes no memory."""
        memory, sizes, node = self.memory, self._sizes, read.node
        if not read.stacked:
            return self._repeated(node, count, read.rows)
        kept = read.rows if read.rows is not None else read.have
        block = memory.hold(self._blocks[node])
        if read.rows != read.have:
            block = self._cut(node, block, read.rows, self._counts[node])
        block = self._aligned(node, read.align, block, sizes.value(node, kept), count, kept)
        if read.rows is None and kept is not None:
            front = memory.take(self._before(node, kept) * count)
            whole = memory.take(sizes.value(node, None) * count)
            memory.release(front)
            memory.release(block)
            block = whole
        return block

    def _aligned(
        self, node: str, align: Alignment, block: int, size: int, count: int, rows: int | None
    ) -> int:
        """The block of a stack that was aligned to `count` worlds; it holds the old one no more."""
        memory = self.memory
        if align.pick is not None and len(align.pick) > 1:
            picked = memory.take(size * count_of(align.pick))
            memory.release(block)
            block = picked
        if not align.add:
            return block
        base = self._repeated(node, align.add, rows)
        both = memory.take(size * count)
        if align.order is not None:
            ordered = memory.take(size * count)
            memory.release(both)
            both = ordered
        memory.release(block)
        if base is not None:
            memory.release(base)
        return both

    def _repeated(self, node: str, count: int, rows: int | None) -> int | None:
        size = self._sizes.repeated(node, rows)
        return self.memory.take(size * count) if size and count > 1 else None


# ------------------------------------------------------------------------------------------
# Bytes of one world's values: of what it puts in, and of what it computes.


class PutSizes:
    """Bytes of what worlds put into nodes, in runs of one shape.

    `lengths` has the lengths of the axes of each group's site, `writers` is how many components write into
    the stream that edges are patched in.
    """

    def __init__(
        self, patching: Patching, facts: ShapeFacts, lengths: Sequence[Mapping[str, int]], writers: int = 0
    ) -> None:
        self._patching, self._costs, self._writers = patching, facts.costs, writers
        self._groups = list(zip(patching.groups, lengths, strict=True))
        self._reader_work: dict[str, ReaderWork] = {}
        self._parts: dict[str, int] = {}
        self._wholes: dict[str, int] = {}
        for group, own in self._groups:
            node, item = group.node, self._costs.itemsize(group.node)
            # What is added to is gathered beside what is added.
            copies = 2 if group.how == "shift" else 1
            self._parts[node] = max(self._parts.get(node, 0), copies * part_size(group, own) * item)
            if group.sources is None:
                self._wholes[node] = max(self._wholes.get(node, 0), math.prod(own.values()) * item)

    def part(self, node: str) -> int:
        """Return the bytes of the part that a world puts into a node, the largest one."""
        return self._parts.get(node, 0)

    def held(self, nodes: Iterable[str], of_source: bool) -> int:
        """Return the bytes of what is put into nodes and is no run's: a row for each of cells' own sources.

        With `of_source`, the values of the sweep's source too: one for each site.
        """
        wanted, taken = set(nodes), 0
        stacks: set[tuple[Any, ...]] = set()  # sites that are given the same sources share one
        for group, lengths in self._groups:
            if group.node not in wanted or group.sources is None:
                continue
            item = self._costs.itemsize(group.node)
            if group.how in {"value", "shift"}:
                size, sources = min(group.largest, part_size(group, lengths)), frozenset(group.sources)
                stack = sources, len(group.located.part_axes), size, item
                taken += len(sources) * size * item if stack not in stacks else 0
                stacks.add(stack)
            elif group.how == "whole":
                taken += math.prod(lengths.values()) * item
        return taken + (sum(self._wholes.get(node, 0) for node in wanted) if of_source else 0)

    def reader_work(self, node: str) -> ReaderWork:
        """Return what is computed for one writer's edge into a node."""
        if node not in self._reader_work:
            place = self._patching.edge_groups[node][0].place
            assert isinstance(place, EdgePlace)
            found = reader_work(self._patching.graph, place.entry, node, self._costs.bytes_of_copy)
            self._reader_work[node] = found
        return self._reader_work[node]

    def of_edges(self, node: str, worlds: int) -> int:
        """Return the bytes of what edges make of a node, for all writers of so many worlds."""
        if node not in self._patching.edge_groups:
            return 0
        writers = min(worlds, self._writers_of[node])
        return writers * self._costs.bytes_of_copy(node) + self.reader_work(node).taken(writers)

    @cached_property
    def _writers_of(self) -> dict[str, int]:
        """The number of writers that have edges into each node."""
        return {
            node: max(len(set(group.writers or ())) for group in groups)
            for node, groups in self._patching.edge_groups.items()
        }

    @cached_property
    def of_writers(self) -> int:
        """Bytes of parts while edges are put in: those of all writers, what replaces them, and both apart.

        Where streams are summed up anew, parts of half precision have a copy in single.
        """
        places = [group.place for groups in self._patching.edge_groups.values() for group in groups]
        entries = {place.entry for place in places if isinstance(place, EdgePlace)}
        costs = self._costs
        copies = {entry: 3 if costs.itemsize(entry) >= 4 else 5 for entry in entries}
        return max((self._writers * copies[one] * costs.bytes_of_copy(one) for one in entries), default=0)


class NodeSizes:
    """Bytes of one world's values in one pass. `rows`: of its last positions, None for all.

    `put` has what worlds put into the nodes `patched`, None for nothing that counts. `splitting` is for
    products in parts, where these were asked for.
    """

    def __init__(
        self,
        facts: ShapeFacts,
        costs: Costs,
        regions: Regions,
        patched: frozenset[str],
        put: PutSizes | None,
        is_causal: Callable[[str], bool],
        splitting: Splitting | None = None,
    ) -> None:
        self._costs, self._regions, self._patched = costs, regions, patched
        self._put, self._is_causal, self._splitting = put, is_causal, splitting
        self._layout, self._space = facts.memory_layout, facts.workspace(costs)
        self._shape = facts.layout

    def value(self, node: str, rows: int | None) -> int:
        """Return the bytes of the value itself."""
        return self._costs.bytes_of_copy(node, rows=rows)

    def repeated(self, node: str, rows: int | None) -> int:
        """Return the bytes of a copy of the baseline's value; 0 where it is repeated without one."""
        return self._costs.bytes_of_repeating(node, rows=rows)

    def workspace(self, node: str, rows: int | None) -> int:
        """Return the bytes that computing it takes beside its value."""
        taken = self._space.each(node, rows, self._is_causal)
        for read in self._layout.copies(node, self._patched):
            taken += self._costs.bytes_of_copy(read, rows=self._regions.wanted(node, read))
        return taken

    def scratch(self, node: str, rows: int | None, kernel: str, worlds: int) -> int:
        """Return the bytes that this kernel takes beside its value, for all worlds together."""
        if kernel == SPLIT:
            assert self._splitting is not None
            return self._splitting.scratch(node, rows, worlds)
        return self._space.fixed(node, rows, self._is_causal)

    def part(self, node: str) -> int:
        """Return the bytes of the part of it that a world puts in."""
        return 0 if self._put is None else self._put.part(node)

    def of_edges(self, node: str, worlds: int) -> int:
        """Return the bytes that edges make of it in so many worlds, for all writers together."""
        return 0 if self._put is None else self._put.of_edges(node, worlds)

    def alias(self, node: str) -> str | None:
        """Return the node whose memory its value shares, where it takes none of its own."""
        return self._layout.aliases.get(node)

    def is_scattered(self, node: str, rows: int | None, count: int) -> bool:
        """True if the last `rows` positions of `count` worlds are copied, as others stand between them.

        They are where batch and positions are one dimension of the node.
        """
        positions = self._shape.pos_dim.get(node)
        is_flat = positions is not None and positions == self._shape.batch_dim.get(node)
        return is_flat and rows is not None and rows > 1 and count * self._shape.batch > 1


def serial_peak(
    schedule: Schedule,
    patching: Patching,
    edits: Edits,
    world_of: Sequence[int],
    facts: ShapeFacts,
    put: PutSizes,
    is_causal: Callable[[str], bool],
    reading: int,
) -> int:
    """Return the bytes that one serial world holds at most: all that it computed, until it is dropped."""
    costs, aliases, most = facts.costs, facts.memory_layout.aliases, 0
    space = facts.workspace(costs)
    for nodes, cells in patching.cells_by_nodes.items():
        world = world_of[cells[0]]
        held = sum(put.part(node) + costs.bytes_of_copy(node) for node in dict.fromkeys(nodes))
        held += sum(costs.bytes_of_copy(edit.node) for edit in patching.made_again(edits, nodes))
        peak = held
        for node, mask in schedule.steps:
            if mask >> world & 1 and node in facts.records:
                held += 0 if node in aliases else costs.bytes_of_copy(node)
                taken = space.each(node, None, is_causal) + space.fixed(node, None, is_causal)
                peak = max(peak, held + taken)
        most = max(most, peak, held + reading)
    return most
