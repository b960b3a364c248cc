"""How much a wavefront holds, step by step: the pass walked through with sizes in place of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from conewise.sweeps.planning.schedule import Schedule


class Sizes(Protocol):
    """Bytes of one world's value of a node, by the node's number."""

    def value(self, node: int, rows: int | None) -> int:
        """Of the value itself; of its last positions with `rows`."""

    def repeated(self, node: int, rows: int | None) -> int:
        """Of a copy of the baseline's value; none where it is repeated without one."""

    def workspace(self, node: int) -> int:
        """Of what computing it takes beside its value."""

    def scratch(self, node: int) -> int:
        """Of what computing it takes beside its value, for however many worlds."""

    def part(self, node: int) -> int:
        """Of the part of it that a world puts in."""

    def rows(self, node: int) -> int | None:
        """How many of its positions are computed; None for all."""

    def wanted(self, node: int, read: int) -> int | None:
        """How many positions of `read` it reads; None for all."""

    def wanted_of(self, target: int) -> int | None:
        """How many positions of a target the metrics read; None for all."""

    def shown(self, node: int) -> int | None:
        """The node whose memory it shows, where it is a view and takes no memory of its own."""


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


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a pass takes, in bytes, beside the model and the baseline.

    `peak` is the most that it holds. `rises` says for each step how much is taken while it is computed,
    beyond what was held before it; `reading` the same of the end, when targets are lined up and metrics read.
    """

    peak: int
    rises: tuple[int, ...]
    reading: int


def footprint(
    plan: Schedule,
    inputs: Mapping[int, tuple[int, ...]],
    sizes: Sizes,
    *,
    drops: Mapping[int, Sequence[int]],
    reading: int,
    put: int = 0,
) -> Footprint:
    """What the worlds of `plan` take together.

    `inputs` has what each node reads, `drops` what goes after each step. `reading` is what the metrics take
    for one world, beside what they read, `put` what all worlds hold of tensors of their own.
    """
    walk, rises = _Walk(plan, sizes), []
    memory = walk.memory
    memory.take(put)
    for node, worlds in plan.steps:
        before = memory.top = memory.live
        walk.step(node, worlds, inputs[node], drops.get(node, ()))
        rises.append(memory.top - before)
    before = memory.top = memory.live
    walk.finish(reading)
    return Footprint(memory.peak, tuple(rises), memory.top - before)


class _Walk:
    def __init__(self, plan: Schedule, sizes: Sizes) -> None:
        self.memory = Memory()
        self._plan, self._sizes = plan, sizes
        self._stacks: dict[int, tuple[int, int]] = {}
        self._waiting = dict(plan.patched)

    def step(self, node: int, worlds: int, reads: Sequence[int], drops: Sequence[int]) -> None:
        """Compute a node in some worlds, then let go of what nothing reads any more."""
        memory, count = self.memory, worlds.bit_count()
        for site in reads:
            if site in self._waiting and site not in self._stacks:
                self._stacks[site] = self._filled(site, self._waiting.pop(site))
        operands = {
            site: self._operand(site, worlds, self._sizes.wanted(node, site)) for site in dict.fromkeys(reads)
        }
        space = memory.take(self._sizes.workspace(node) * count + self._sizes.scratch(node))
        shown = self._sizes.shown(node)
        block = operands.get(shown) if shown is not None else None
        size = self._sizes.value(node, self._sizes.rows(node)) * count
        own = memory.take(size) if block is None else memory.hold(block)
        for one in (space, *operands.values()):
            if one is not None:
                memory.release(one)
        self._stacks[node] = worlds, own
        if node in self._waiting:
            self._patch(node, self._waiting.pop(node))
        for site in drops:
            if site in self._stacks:
                memory.release(self._stacks.pop(site)[1])

    def finish(self, reading: int) -> None:
        """Line the targets up for all worlds, and read the metrics."""
        everything = 0
        for target in self._plan.targets:
            if target in self._waiting:
                if target in self._stacks:
                    self._patch(target, self._waiting.pop(target))
                else:
                    self._stacks[target] = self._filled(target, self._waiting.pop(target))
            everything |= self._stacks[target][0] if target in self._stacks else 0
        for target in self._plan.targets:
            self._operand(target, everything, self._sizes.wanted_of(target))
        for _, block in self._stacks.values():
            self.memory.release(block)  # what the metrics read is held by them
        self.memory.take(reading * self._plan.worlds)

    def _filled(self, node: int, worlds: int) -> tuple[int, int]:
        """Rows of the baseline; what the worlds put in is stacked before it is written there."""
        memory, count = self.memory, worlds.bit_count()
        rows = memory.take(self._sizes.value(node, None) * count)
        memory.release(memory.take(self._sizes.part(node) * count))
        return worlds, rows

    def _patch(self, node: int, worlds: int) -> None:
        """Rows of a computed node written anew, and rows of worlds that did not compute it."""
        memory = self.memory
        have, block = self._stacks[node]
        size = self._sizes.value(node, self._sizes.rows(node))
        if worlds & have:
            copy = memory.take(self._sizes.value(node, None) * have.bit_count())
            memory.release(block)
            block = copy
        if fresh := worlds & ~have:
            _, rows = self._filled(node, fresh)
            both = memory.take(size * (have | fresh).bit_count())
            in_order = have.bit_length() <= (fresh & -fresh).bit_length() - 1
            if not in_order:
                memory.release(memory.take(size * (have | fresh).bit_count()))
            memory.release(block)
            memory.release(rows)
            block = both
        self._stacks[node] = have | worlds, block

    def _operand(self, site: int, want: int, rows: int | None) -> int | None:
        """The block that a reader in the worlds `want` gets; None where it takes no memory."""
        memory = self.memory
        if site not in self._stacks:
            return self._repeated(site, want.bit_count(), rows)
        have, block = self._stacks[site]
        memory.hold(block)
        kept = rows if rows is not None else self._sizes.rows(site)
        size = self._sizes.value(site, kept)
        block = self._aligned(site, have, want, block, size, kept)
        if rows is None and kept is not None:
            before = self._sizes.repeated(site, None) - self._sizes.repeated(site, kept)
            front = memory.take(before * want.bit_count())
            whole = memory.take(self._sizes.value(site, None) * want.bit_count())
            memory.release(front)
            memory.release(block)
            block = whole
        return block

    def _aligned(self, site: int, have: int, want: int, block: int, size: int, rows: int | None) -> int:
        memory, shared = self.memory, have & want
        if shared != have and not _is_run(shared, have):
            picked = memory.take(size * shared.bit_count())
            memory.release(block)
            block = picked
        if shared == want:
            return block
        base = self._repeated(site, (want & ~have).bit_count(), rows)
        both = memory.take(size * want.bit_count())
        if want & ((1 << shared.bit_length()) - 1) != shared:
            ordered = memory.take(size * want.bit_count())
            memory.release(both)
            both = ordered
        memory.release(block)
        if base is not None:
            memory.release(base)
        return both

    def _repeated(self, site: int, count: int, rows: int | None) -> int | None:
        size = self._sizes.repeated(site, rows)
        return self.memory.take(size * count) if size and count > 1 else None


def _is_run(part: int, whole: int) -> bool:
    """Whether the worlds of `part` stand one behind the other among those of `whole`."""
    span = ((1 << part.bit_length()) - 1) & ~((part & -part) - 1)
    return whole & span == part
