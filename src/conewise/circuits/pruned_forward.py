"""Worlds with removed edges by what still reads what: a component is computed where its input is another one.

Where parts are carried unchanged (every model that does not norm its sums), reader r sees in world k

    what no writer wrote + Σ kept w (part in k) + Σ removed w (ablated part)

so no stream has to be carried along; `ReplacedParts` says where that is the base's stream, changed. A reader
that no changed writer reaches over kept edges has the value of the current world, and what nobody reads is
not computed: the more edges are removed, the less there is to do. Where the metric reads the last position,
so do those that only lead there.

Each component is a walk (`program/walk.py`), and their order is its own. `MaskedForward` computes the same as
one walk, which takes longer (tiny model, one core): 38 ms against 8 for one world, 152 against 91 for 64, 49
against 9 for 32 worlds that differ below the attention in the middle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conewise.anatomy.axes import View
from conewise.anatomy.components import HeadWriters, Reader
from conewise.anatomy.places import Place
from conewise.circuits.masked_forward import Ablated, Numbers, Stage, expect_room, few_of, moved_by, stages_of
from conewise.circuits.replaced_parts import EdgeFacts, Mask, ReplacedParts, mixed, mixed_by_world, wide
from conewise.circuits.stream_parts import HeadShares
from conewise.circuits.walks import (
    HeadSlices,
    KnownWalks,
    StackedValues,
    Walks,
    by_head,
    head_slices,
    is_run,
    some_of,
)
from conewise.errors import CircuitError, MetricError
from conewise.program.rehearsal import as_numpy, bytes_of, is_rehearsal, peak_of
from conewise.program.tensors import brought, computing
from conewise.program.walk import Walk
from conewise.runs.captured import Captured
from conewise.runs.metrics import Metric
from conewise.runs.reading import Reading
from conewise.sweeps.execution.reading import MetricReader
from conewise.sweeps.planning.compiler import DEFAULT_MEMORY
from conewise.sweeps.planning.layout import index_tensor, repeated
from conewise.sweeps.planning.planner import ModelFacts, facts_of, readout, tail_of
from conewise.sweeps.planning.shapes import ShapeFacts
from conewise.sweeps.planning.spec import SweepSpec

NOTHING, LAST, ALL = range(3)
"""The positions at which a value is read."""

WIDE = 4
"""So many times `few` worlds are enough: no more are asked for."""

TOGETHER = 1 << 23
"""The most numbers in the streams of a layer where those of q, k and v are one stack."""


@dataclass(slots=True)
class _Slot:
    """Queries, keys or values of a layer: the node, how heads lie in it, the number of the first reader."""

    node: str
    view: View
    axis: str
    first: int
    slices: HeadSlices | None


@dataclass(slots=True)
class _Attention:
    """The attention of a layer: from the nodes of its slots to z, or to the term where norms lie behind z.

    `output` is the output projection by head, [head, d_head, d_model], where the term is nothing more.
    `constant` is the number that stands for what no head wrote, where that is another value in other worlds.
    """

    slots: dict[str, _Slot]
    heads: HeadWriters
    walk: Walk
    shares: HeadShares
    output: Tensor | None
    constant: int | None


@dataclass(frozen=True, slots=True)
class _Heads:
    """Readers of a slot that are computed anew, by their places in the stage; `at_last`: there alone."""

    slot: _Slot
    at: list[int]
    at_last: bool


@dataclass(slots=True)
class Changes:
    """Parts of some writers, others than the base's: [writer, world, batch, pos, d_model].

    Of a constant it is how far it is off the base's.
    """

    writers: list[int] = field(default_factory=list)
    stacks: list[Tensor] = field(default_factory=list)

    def add(self, writers: Sequence[int], stack: Tensor) -> None:
        """Add the parts of more writers."""
        self.writers += writers
        self.stacks.append(stack)

    def blocks(self) -> Iterator[tuple[list[int], Tensor]]:
        """The writers of each stack, and the stack."""
        start = 0
        for stack in self.stacks:
            yield self.writers[start : start + len(stack)], stack
            start += len(stack)

    def whole(self) -> Tensor:
        """The parts of all of them in one."""
        if len(self.stacks) > 1:
            self.stacks = [torch.cat(self.stacks)]
        return self.stacks[0]


@dataclass(slots=True)
class _State:
    """A world: what is removed, its metric, parts and nodes of readers that are others than the base's.

    `full` are parts at all positions, `last` those that are known at the last one only: [batch, pos,
    d_model].
    """

    removed: Mask
    value: Numbers
    full: dict[int, Tensor] = field(default_factory=dict)
    last: dict[int, Tensor] = field(default_factory=dict)
    nodes: dict[str, Tensor] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The bytes that it holds."""
        return bytes_of([*self.full.values(), *self.last.values(), *self.nodes.values()])


@dataclass(slots=True)
class Stack:
    """Worlds under way: those of `own` differ from `state` in what the readers of some stages lost.

    `kept` are the edges that some world keeps, `need` says where readers and writers are read.
    """

    state: _State
    own: Mapping[int, Mask]
    worlds: int
    kept: Mask
    need_reader: NDArray[np.int8]
    need_writer: NDArray[np.int8]
    changed: NDArray[np.bool_]
    full: Changes = field(default_factory=Changes)
    last: Changes = field(default_factory=Changes)
    nodes: dict[str, Tensor] = field(default_factory=dict)
    values: Numbers | None = None

    @property
    def bytes(self) -> int:
        """The bytes that it holds."""
        return bytes_of([*self.full.stacks, *self.last.stacks, *self.nodes.values()])


_KNOWN: WeakKeyDictionary[ShapeFacts, KnownWalks] = WeakKeyDictionary()


def _known_walks(shape: ShapeFacts) -> KnownWalks:
    """What forwards of this shape found of the program before: finding it takes longer than one circuit."""
    return _KNOWN.setdefault(shape, KnownWalks())


class PrunedForward:
    """Metrics of worlds with removed edges, over the values of `base`, whose worlds can be stacked."""

    def __init__(
        self, facts: EdgeFacts, base: Reading, ablated: Ablated, metric: Metric, max_memory: int | None = None
    ) -> None:
        model = base.model
        if not facts.parts.is_carried_unchanged:
            raise CircuitError("this model norms its sums: what is written is not read as it was written.")
        self.components, self._facts = facts.components, facts
        self.graph = facts.graph
        self.stages = stages_of(self.components.readers)
        self.node_evaluations = 0
        self.moved = moved_by(facts)
        self._read = ablated.read
        self._views = facts.parts.views
        swept = facts_of(model)
        shape = swept.shape(base.inputs)
        self._layout = shape.layout
        self._walks = Walks(model.program, shape.fusions, self._read, _known_walks(shape))
        self._bytes = model.estimated_bytes(base.inputs)
        with computing():
            self._prepare_parts(ablated)
            self._prepare_metric(swept, shape, metric, base)
            self._attentions = {
                stage.number: self._attention(stage, model)
                for stage in self.stages
                if stage.kind == "attention"
            }
            none = np.zeros(self.shape, dtype=bool)
            self._base = _State(none, np.zeros(0))
            stack = self._stacked(self._base, {len(self.stages) - 1: none[None, -1:]})
            self._compute(self.stages[-1], stack, [0])
            assert stack.values is not None
            self._base.value = stack.values[0]
        self._state: _State = self._base
        self._stack: Stack | None = None
        self._budget, self._held = max_memory, self._bytes_held(ablated)
        own = {stage.number: self._there[None, stage.rows] for stage in self.stages}
        if max_memory is not None and self._upper_bytes(own, self._base) > max_memory:
            # Any world alone has to fit: the largest lose nothing but an edge of their first stage.
            ones = [{stage.number: self._in_line(stage.number, none, 2)[1:]} for stage in self.stages]
            expect_room(max(self.peak_bytes(one) for one in (own, *ones)), max_memory)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """The number of readers and of writers."""
        return len(self.components.readers), len(self.components.writers)

    # -- what is known before any world --------------------------------------------------------------

    def _prepare_parts(self, ablated: Ablated) -> None:
        parts, entries = self._facts.parts, self.components.entries
        own, constants = parts.parts(self._read), dict(parts.constants(self._read))
        self._dtype, self._stream = own.dtype, own[0]
        self.epsilon = torch.finfo(own.dtype).eps
        replaced = ReplacedParts.of(
            own,
            ablated.whole[:, :1, :1] if ablated.is_shared else ablated.whole,
            {entry: readers[0].writers for entry, readers in entries.items()},
            {entry: parts.stream(self._read, entry) for entry in entries},
            {entry: ablated.stream(entry, constants[entry]) for entry in entries},
            constants,
        )
        self._replaced = replaced, replaced.at_last()
        self._there = self.graph.there

    def _prepare_metric(self, swept: ModelFacts, shape: ShapeFacts, metric: Metric, base: Reading) -> None:
        spec = SweepSpec((), (), (metric,))
        read = readout(swept, spec, shape)
        self._targets = read.targets
        self._reads_last = read.last == read.targets and tail_of(swept, (metric,), base.inputs) == 1
        self._columns = {node: index_tensor(spec.tokens, shape.device_of(node)) for node, _ in read.columns}
        for node in self._columns:
            vocabulary = (shape.costs.shape(node) or (0,))[-1]
            if above := [token for token in spec.tokens if token >= vocabulary]:
                raise MetricError(
                    f"the metric {metric.name!r} reads the token {above[0]}, which is not in the vocabulary "
                    f"of {base.model.name}: it has {vocabulary}, from 0."
                )
        self._metrics = MetricReader(swept, (metric,), spec.tokens, base)
        last = self.components.readers[-1]
        if last.slot != "logits":
            raise CircuitError("this stack has no logits that a metric could be read off.")
        outside = [name for name in self._targets if name not in self.components.wiring.cone(last.entry)]
        if outside:
            raise CircuitError(
                f"the metric {metric.name!r} reads {outside[0]!r}, which is not computed from the logits' "
                "stream; in a world with removed edges, only what the unembedding leads to is known."
            )
        self._readout = self._walks.walk([last.entry], self._targets)

    def _attention(self, stage: Stage, model: Captured) -> _Attention:
        layer = stage.readers[0].layer
        (heads,) = [one for one in self.components.heads if one.layer.number == layer]
        (shares,) = [one for one in self._facts.parts.heads if one.heads is heads]
        shares = shares.with_values(StackedValues(model.program))
        slots: dict[str, _Slot] = {}
        for at, one in enumerate(stage.readers):
            if one.slot not in slots:
                view = model.locate(Place(*one.site)).view
                assert one.axis is not None
                slices = head_slices(
                    self.components.wiring,
                    self._walks,
                    self._layout,
                    self._read,
                    one.entry,
                    one.node,
                    view,
                    one.axis,
                )
                slots[one.slot] = _Slot(one.node, view, one.axis, stage.first + at, slices)
        starts = [slot.node for slot in slots.values()]
        if shares.is_plain:
            result = model.site_table.find("result", heads.layer.number, heads.layer.stack).result
            assert result is not None
            z = by_head(heads.view, self._read(heads.node), self._layout.sizes(1), "head")
            output = result.by_head(self._read(result.weight), z.shape[-2:])
            return _Attention(slots, heads, self._walks.walk(starts, [heads.node]), shares, output, None)
        wiring = self.components.wiring
        behind = wiring.above(heads.term, frozenset(wiring.records), frozenset({heads.node}))
        walk = self._walks.walk(starts, [heads.term], keep=[heads.node, *behind])
        is_there = bool(shares.constant(self._read).any())
        return _Attention(
            slots, heads, walk, shares, None, self.shape[1] + stage.number if is_there else None
        )

    # -- worlds ------------------------------------------------------------------------------------

    def most(self, stage: int, removed: Mask | None = None) -> int:
        """Return the number of worlds that differ from a stage on and fit into memory at once."""
        lost = self._state.removed if removed is None else removed
        if self._budget is None:
            # The less a world takes, the more there are, within what a search plans for: with `few` of them
            # always a search of 32,491 edges took 2.1 s on a GPU, and 1.7 s where their number could grow.
            bound = self._bound(stage, lost)
            worlds = max(self.few + 1, (self.few + 1) * self._largest // (2 * bound))
            return max(1, min(worlds, DEFAULT_MEMORY // bound))
        worlds = (self._budget - self._held - self._state.bytes) // self._bound(stage, lost)
        if worlds > WIDE * self.few:
            return worlds
        state = _State(lost, self._base.value)
        one, two = (self.peak_bytes({stage: self._in_line(stage, lost, n)}, state) for n in (1, 2))
        return max(1, 1 + (self._budget - one) // max(two - one, 1))

    @cached_property
    def _largest(self) -> int:
        """The bound on what a world takes with nothing removed, from the stage where it is largest."""
        return max(self._bound(stage.number, self._base.removed) for stage in self.stages)

    def _in_line(self, stage: int, removed: Mask, worlds: int) -> Mask:
        """[world, reader of the stage, writer]: worlds that lose one edge after the other."""
        masks = np.repeat(removed[None, self.stages[stage].rows], worlds, 0)
        left = np.argwhere(self._there[self.stages[stage].rows] & ~masks[0])[::-1]
        for world, edge in enumerate(left[: worlds - 1], 1):
            masks[(slice(world, None), *edge)] = True
        return masks

    def peak_bytes(self, own: Mapping[int, Mask], state: _State | None = None) -> int:
        """Return the most that worlds hold that are evaluated at once, with what is held for all of them.

        They differ from the state in edges [world, reader of the stage, writer] by stage. It is rehearsed.
        """
        state, count = self._state if state is None else state, self.node_evaluations
        found = peak_of(lambda: self._evaluated(state, own))
        self.node_evaluations = count
        return self._kept + found

    @property
    def _kept(self) -> int:
        """The bytes that are held while worlds are evaluated."""
        return self._held + self._state.bytes + (0 if self._stack is None else self._stack.bytes)

    def _fits(self, own: Mapping[int, Mask], state: _State) -> bool:
        """Return True if the memory suffices for these worlds at once; it is rehearsed where that is near."""
        if self._budget is None or self._upper_bytes(own, state) <= self._budget:
            return True
        return self.peak_bytes(own, state) <= self._budget

    def _upper_bytes(self, own: Mapping[int, Mask], state: _State) -> int:
        """Return more than these worlds hold at once, with what is held for all of them."""
        worlds = len(next(iter(own.values())))
        return self._kept + worlds * self._bound(min(own), state.removed & ~self._there)

    def search_bytes(self, *, speculative: bool = True) -> tuple[int, int]:
        """Return the bytes held for all worlds of a search, and the most that a step takes beside them."""
        none, steps = self._base.removed, []
        for stage in self.stages:
            edges = int(self._there[stage.rows].sum())
            worlds = min(self.few, edges) + 1
            worlds = min(worlds, self.most(stage.number, none)) if speculative else 1
            masks = self._in_line(stage.number, none, max(worlds, 2))[-max(worlds, 1) :]
            steps.append(self.peak_bytes({stage.number: masks}, self._base) - self._kept)
        slots = {slot.node for attention in self._attentions.values() for slot in attention.slots.values()}
        state = [self._replaced[0].parts, *(self._read(node) for node in slots)]  # of the current world
        return self._held + bytes_of(state), max(steps)

    @property
    def few(self) -> int:
        """The number of worlds that take hardly longer than one does."""
        return few_of(self._stream)

    def _bytes_held(self, ablated: Ablated) -> int:
        """The bytes that are held for all worlds: parts and streams, their own and what replaces them."""
        tensors = [ablated.whole]
        for one in self._replaced:
            tensors += (one.parts, one.given, one.apart)
            for by_entry in (one.streams, one.replaced, one.constants, one.residues):
                tensors += by_entry.values()
        return bytes_of(tensors)

    def _bound(self, stage: int, removed: Mask) -> int:
        """Return more than a world takes: parts that are others, streams of one slot, what a walk holds.

        A rehearsal says exactly what it takes, and lasts 0.2 s for the tiny model, where 100 worlds last
        0.03 s: so one is held only where this bound is beyond the budget.
        """
        kept = ~removed & self._there
        _, need = self._needs(kept)
        first = min(
            (w for one in self.graph.fed[self.stages[stage].first :] for w in one), default=self.shape[1]
        )
        positions = self._stream.shape[1]
        own = self._stream.numel() * wide(self._dtype).itemsize
        changed = sum(own if at == ALL else own // positions for at in need[first:] if at)
        below = self.stages[stage:]
        widest = max((len(one.readers) for one in below if one.kind == "attention"), default=3) // 3 + 1
        largest = max((size for name, size in self._bytes.items() if name not in self._targets), default=own)
        read = sum(self._bytes.get(name, own) for name in self._targets)
        if self._columns:
            read = own
        elif self._reads_last:
            read = read // positions + own
        return 2 * changed + 4 * widest * own + 6 * largest + 5 * read + 8 * own

    def values(self, removed: Mask) -> Numbers:
        """[world, prompt] of worlds with edges [world, reader, writer] removed, computed from the base."""
        many = len(removed)
        if many > 1:
            none = self._base.removed
            many = self.most(0, none) if self._budget else max(1, DEFAULT_MEMORY // self._bound(0, none))
        found = []
        for at in range(0, len(removed), many):
            some = removed[at : at + many]
            own = {stage.number: some[:, stage.rows] for stage in self.stages}
            found += [one.values for one in self._in_turn(self._base, own)]
        return np.concatenate(
            [one for one in found if one is not None] or [np.zeros((0, len(self._base.value)))]
        )

    def begin(self, removed: Mask) -> Numbers:
        """Let the world with edges [reader, writer] removed be the current one; its metric as [prompt]."""
        own = {stage.number: removed[None, stage.rows] for stage in self.stages}
        self._state, self._stack = self._base, None  # before the next is made
        self._state = self._taken(self._evaluated(self._base, own), 0)
        return self._state.value

    def below(self, stage: int, removed: Mask) -> Numbers:
        """[world, prompt] of worlds that are the current one but for edges into the readers of one stage."""
        self._stack = None  # before the next is made
        found = []
        for stack in self._in_turn(self._state, {stage: removed}):
            found.append(stack.values)
            self._stack = stack
            del stack  # before the next is made
        return np.concatenate([one for one in found if one is not None])

    def _in_turn(self, state: _State, own: Mapping[int, Mask]) -> Iterator[Stack]:
        """Worlds as stacks, halved as often as memory requires; one alone fits."""
        worlds = len(next(iter(own.values())))
        if worlds == 1 or self._fits(own, state):
            yield self._evaluated(state, own)
            return
        for part in (slice(worlds // 2), slice(worlds // 2, None)):
            self._stack = None
            yield from self._in_turn(state, {stage: masks[part] for stage, masks in own.items()})

    def adopt(self, stage: int, removed: Mask) -> None:
        """Let the world that has edges [reader of the stage, writer] removed be the current one."""
        rows = self.stages[stage].rows
        if np.array_equal(removed, self._state.removed[rows]):
            return
        stack, at = self._stack, []
        if stack is not None and stack.state is self._state and list(stack.own) == [stage]:
            at = np.flatnonzero((stack.own[stage] == removed).all((1, 2))).tolist()
        if stack is None or not at:
            stack, at = self._evaluated(self._state, {stage: removed[None]}), [0]
        self._state, self._stack = self._taken(stack, at[0]), None

    def _taken(self, stack: Stack, world: int) -> _State:
        """One world of a stack as a state: copies, so that the stack goes."""
        old = stack.state
        removed = old.removed.copy()
        for stage, masks in stack.own.items():
            removed[self.stages[stage].rows] = masks[world]
        assert stack.values is not None
        state = _State(removed, stack.values[world], dict(old.full), dict(old.last), dict(old.nodes))
        for changes, parts in ((stack.full, state.full), (stack.last, state.last)):
            if changes.writers:
                parts.update(zip(changes.writers, changes.whole()[:, world].clone(), strict=True))
        for node, value in stack.nodes.items():
            dim = self._layout.batch_dim[node]
            assert dim is not None
            each = value.shape[dim] // stack.worlds
            state.nodes[node] = value.narrow(dim, world * each, each).clone()
        return state

    def _stacked(self, state: _State, own: Mapping[int, Mask]) -> Stack:
        kept = ~state.removed & self._there
        for stage, masks in own.items():
            rows = self.stages[stage].rows
            kept[rows] = (~masks).any(0) & self._there[rows]
        changed = np.zeros(self.shape[1] + len(self.stages), dtype=bool)
        return Stack(state, own, len(next(iter(own.values()))), kept, *self._needs(kept), changed)

    def _needs(self, kept: Mask) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
        """Return the positions at which readers and writers are read, over kept edges."""
        readers, writers = (np.zeros(n, dtype=np.int8) for n in self.shape)
        for stage in reversed(self.stages):
            known: list[int] = writers.tolist()
            for number, one in enumerate(stage.readers, stage.first):
                if one.slot == "logits":
                    readers[number] = LAST if self._reads_last else ALL
                    continue
                need = max([known[writer] for writer in self.moved[number]], default=NOTHING)
                readers[number] = ALL if need and one.slot in ("k", "v") else need
            rows = stage.rows
            np.maximum(writers, (kept[rows] * readers[rows][:, None]).max(0), out=writers)
        return readers, writers

    def _evaluated(self, state: _State, own: Mapping[int, Mask]) -> Stack:
        """A stack of worlds, all computed that is another value than in `state`."""
        with computing():
            stack = self._stacked(state, own)
            for stage in self.stages[min(own) :]:
                todo = self._todo(stage, stack)
                if todo:
                    self._compute(stage, stack, todo)
        if stack.values is None:
            stack.values = np.repeat(state.value[None], stack.worlds, 0)
        if self._budget is not None and not is_rehearsal():
            self._walks.rebase(self._read)  # constants for other numbers of worlds would add up
        return stack

    def _compute(self, stage: Stage, stack: Stack, todo: Sequence[int]) -> None:
        """Compute the components that some readers of a stage belong to, and note what they write."""
        if stage.kind == "attention":
            self._attend(stage, stack, todo)
        elif stage.kind == "mlp":
            self._compute_mlp(stage, stack)
        else:
            outputs = self._outputs(stage, stack)
            columns = {node: len(index) for node, index in self._columns.items()}
            numbers = self._metrics.of_stack(outputs, stack.worlds, self._layout, columns)()
            stack.values = as_numpy(numbers[:, 0])

    def _todo(self, stage: Stage, stack: Stack) -> list[int]:
        """The readers of a stage that see another stream than in the state, and that something reads."""
        rows, count = stage.rows, self.shape[1]
        found = (stack.kept[rows] & stack.changed[:count]).any(1)
        for at in np.flatnonzero(stack.changed[count:]):
            heads = self._attentions[int(at)].heads
            found |= np.array([heads.rows.stop <= one.writers for one in stage.readers])
        masks = stack.own.get(stage.number)
        if masks is not None:
            found |= (masks != stack.state.removed[rows]).any((0, 2))
        found &= stack.need_reader[rows] != NOTHING
        todo: list[int] = np.flatnonzero(found).tolist()
        lost = stack.state.removed[rows].any(1) if masks is None else masks.any((0, 2))
        self.node_evaluations += stack.worlds * int((lost & found).sum())
        return todo

    # -- streams -----------------------------------------------------------------------------------

    def _streams(self, stack: Stack, one: Reader, lost: Mask, *, at_last: bool) -> tuple[Tensor, bool]:
        """[row, batch, pos, d_model]: what a reader sees that lost [row, writer], less what is changed.

        Writers that are not changed have the parts that they have in the state. And whether parts are others
        than the base's: then it is a sum that is to be settled.
        """
        lost, replaced = lost[:, : one.writers], self._replaced[at_last]
        parts = dict(stack.state.full)
        if at_last:
            parts = {w: part[:, -1:] for w, part in parts.items()} | stack.state.last
        written = [w for w in parts if self._is_seen(w, one) and not stack.changed[w]]
        changed = [w for w in np.flatnonzero(stack.changed).tolist() if self._is_seen(w, one)]
        if not written and not changed:
            return replaced.seen(one.entry, lost), False
        out = replaced.summed(one.entry, lost, [w for w in (*written, *changed) if w < self.shape[1]])
        if written:
            keeps = self._keeps(lost, written)
            if keeps.any():
                out += mixed(keeps, torch.stack([parts[w] for w in written]))
        return out, True

    def _settled(self, one: Reader, total: Tensor, lost: Mask, *, at_last: bool) -> Tensor:
        """Streams as sums, where [row, writer] are lost: those of which all is are what replaces them."""
        replaced, nothing_kept = self._replaced[at_last], lost[..., : one.writers].all(-1)
        total = replaced.settled(one.entry, total)
        if nothing_kept.any() and all(one.constant is None for one in self._attentions.values()):
            rows = np.broadcast_to(nothing_kept, total.shape[: nothing_kept.ndim])
            at = tuple(brought(torch.from_numpy(one), total.device) for one in np.nonzero(rows))
            total[at] = replaced.replaced[one.entry]
        return total

    def _moving(self, stack: Stack, one: Reader, lost: Mask, *, at_last: bool) -> Tensor | None:
        """[reader, world, batch, pos, d_model]: what changed writers add where [reader, writer] are lost.

        With worlds in front, [world, reader, writer], each world has lost edges of its own. None is nothing.
        """
        found: Tensor | None = None
        for changes in (stack.full, stack.last) if at_last else (stack.full,):
            seen = [at for at, writer in enumerate(changes.writers) if self._is_seen(writer, one)]
            if not seen:
                continue
            keeps = self._keeps(lost, [changes.writers[at] for at in seen])
            used: Mask = np.logical_or.reduce(keeps.reshape(-1, len(seen)))
            if not used.any():
                continue
            whole = changes.whole()
            at = [place for place, is_used in zip(seen, used, strict=True) if is_used]
            if len(at) < len(whole):
                whole = some_of(whole, at)
            if at_last and whole.shape[3] > 1:
                whole = whole[:, :, :, -1:]
            keeps = keeps[..., used]
            added = mixed(keeps, whole) if keeps.ndim == 2 else mixed_by_world(keeps, whole)
            found = added if found is None else found + added
        return found

    def _keeps(self, lost: Mask, writers: Sequence[int]) -> Mask:
        """True where edges from some writers are kept; a constant always is."""
        count = self.shape[1]
        found = np.ones((*lost.shape[:-1], len(writers)), dtype=bool)
        for at, writer in enumerate(writers):
            if writer < count:
                found[..., at] = ~lost[..., writer]
        return found

    def _is_seen(self, writer: int, one: Reader) -> bool:
        if writer < self.shape[1]:
            return writer < one.writers
        return self._attentions[writer - self.shape[1]].heads.rows.stop <= one.writers

    def _seen(self, stage: Stage, stack: Stack, at: Sequence[int], *, at_last: bool) -> Tensor:
        """[reader, world, batch, pos, d_model]: the streams that some readers of a stage see."""
        one, masks = stage.readers[at[0]], stack.own.get(stage.number)
        if masks is None:
            lost = stack.state.removed[stage.rows][at]
            still, is_sum = self._streams(stack, one, lost, at_last=at_last)
            still = still[:, None]
        else:
            lost = masks[:, at]
            rows = lost.transpose(1, 0, 2).reshape(-1, lost.shape[2])
            still, is_sum = self._streams(stack, one, rows, at_last=at_last)
            still = still.view(len(at), stack.worlds, *still.shape[1:])
        moving = self._moving(stack, one, lost, at_last=at_last)
        if moving is not None:
            still = moving.add_(still) if moving.is_contiguous() else moving + still
        if is_sum:
            by_row = lost[:, None] if masks is None else lost.transpose(1, 0, 2)
            still = self._settled(one, still, by_row, at_last=at_last)
        return still.to(self._dtype).expand(len(at), stack.worlds, *still.shape[2:])

    # -- components --------------------------------------------------------------------------------

    def _attend(self, stage: Stage, stack: Stack, todo: Sequence[int]) -> None:
        attention = self._attentions[stage.number]
        given: dict[str, Tensor] = {}
        waiting: list[_Heads] = []
        for slot in attention.slots.values():
            at = [one for one in todo if stage.readers[one].node == slot.node]
            value = stack.state.nodes.get(slot.node)
            value = self._read(slot.node) if value is None else value
            dim = self._layout.batch_dim[slot.node]
            given[slot.node] = repeated(value, 0 if dim is None else dim, stack.worlds)
            if at:
                given[slot.node] = given[slot.node].clone(memory_format=torch.contiguous_format)
                stack.nodes[slot.node] = given[slot.node]
                need = stack.need_reader[[stage.first + one for one in at]].max()
                waiting.append(_Heads(slot, at, bool(need == LAST)))
        for group in self._groups(waiting, stack.worlds):
            self._write_heads(stage, stack, group, given)
        found = self._walks.run(attention.walk, given, stack.worlds)
        self.node_evaluations += stack.worlds * attention.walk.records
        fed = {writer for at in todo for writer in self.graph.fed[stage.first + at]}
        if attention.output is None:
            self._write_shares(stack, attention, found)
            return
        z = by_head(
            attention.heads.view, found[attention.heads.node], self._layout.sizes(stack.worlds), "head"
        )
        for need, changes in ((ALL, stack.full), (LAST, stack.last)):
            writers = [writer for writer in sorted(fed) if stack.need_writer[writer] == need]
            if not writers:
                continue
            own = [writer - attention.heads.rows.start for writer in writers]
            rows = some_of(z if need == ALL else z[:, -1:], own, 2).permute(2, 0, 1, 3)
            wrote = torch.bmm(rows.reshape(len(own), -1, z.shape[-1]), some_of(attention.output, own))
            self._note(stack, changes, writers, wrote)

    def _note(self, stack: Stack, changes: Changes, writers: Sequence[int], wrote: Tensor) -> None:
        """Take note of what writers wrote in each world; `wrote` begins with [writer, world]."""
        batch, pos, width = self._stream.shape
        pos = 1 if changes is stack.last else pos
        changes.add(list(writers), wrote.reshape(len(writers), stack.worlds, batch, pos, width))
        stack.changed[list(writers)] = True

    def _groups(self, waiting: Sequence[_Heads], worlds: int) -> list[list[_Heads]]:
        """Slots whose streams are computed together: small ones that are normed alike. Others take turns."""
        count = sum(len(one.at) for one in waiting)
        is_small = count * worlds * self._stream.numel() <= TOGETHER
        found: dict[tuple[bool, str], list[_Heads]] = {}
        for one in waiting:
            alike = one.slot.slices.operand if one.slot.slices is not None and is_small else one.slot.node
            found.setdefault((one.at_last, alike), []).append(one)
        return list(found.values())

    def _write_heads(
        self, stage: Stage, stack: Stack, group: Sequence[_Heads], given: Mapping[str, Tensor]
    ) -> None:
        """Write some heads into the values at their slots' nodes, computed from the streams that they see."""
        at, at_last = [one for heads in group for one in heads.at], group[0].at_last
        one, masks = stage.readers[at[0]], stack.own.get(stage.number)
        index: Tensor | None = None
        if masks is not None and not stack.changed.any():
            lost, which = _distinct(masks[:, at])
            flat = lost.reshape(-1, lost.shape[2])
            rows, is_sum = self._streams(stack, one, flat, at_last=at_last)
            rows = (self._settled(one, rows, flat, at_last=at_last) if is_sum else rows).to(self._dtype)
            streams = rows.view(*lost.shape[:2], *rows.shape[1:])
            index = brought(torch.from_numpy(which), rows.device)
        else:
            streams = self._seen(stage, stack, at, at_last=at_last)
        slices = group[0].slot.slices
        operand = None if slices is None else self._normed(slices, one, streams, at_last=at_last)
        start = 0
        for some in group:
            slot, own = some.slot, slice(start, start + len(some.at))
            start = own.stop
            heads = [place - (slot.first - stage.first) for place in some.at]
            if slot.slices is not None and operand is not None:
                made = slot.slices.project(operand[own], heads).view(len(heads), *streams.shape[1:4], -1)
            else:
                made = self._projected(slot, one, streams[own], heads, at_last=at_last)
            if index is not None:
                made = made.flatten(0, 1).index_select(0, index[own].flatten() - own.start * made.shape[1])
                made = made.view(len(heads), stack.worlds, *made.shape[1:])
            target = by_head(slot.view, given[slot.node], self._layout.sizes(stack.worlds), slot.axis)
            target = target[:, -1:] if at_last else target
            found = made.flatten(1, 2).permute(1, 2, 0, 3)
            if is_run(heads):
                some_of(target, heads, 2).copy_(found)
            else:
                target.index_copy_(2, index_tensor(tuple(heads), target.device), found)

    def _normed(self, slices: HeadSlices, one: Reader, streams: Tensor, *, at_last: bool) -> Tensor:
        """[reader, row, d_model]: what the product reads of streams [reader, world, batch, pos, d_model]."""
        given = {one.entry: self._views.as_node(one.entry, streams.flatten(0, 2))}
        count, rows = len(streams) * streams.shape[1], 1 if at_last else None
        found: Tensor = self._walks.run(slices.norm, given, count, rows)[slices.operand]
        return found.reshape(len(streams), -1, found.shape[-1])

    def _projected(
        self, slot: _Slot, one: Reader, streams: Tensor, heads: Sequence[int], *, at_last: bool
    ) -> Tensor:
        """[head, world, batch, pos, d_head] of streams [head, world, batch, pos, d_model]: whole products."""
        lead = streams.shape[:4]
        count, rows = lead[0] * lead[1], 1 if at_last else None
        given = {one.entry: self._views.as_node(one.entry, streams.flatten(0, 2))}
        values = self._walks.run(self._walks.walk([one.entry], [slot.node]), given, count, rows)[slot.node]
        shown = by_head(slot.view, values, self._layout.sizes(count, rows), slot.axis)
        shown = shown.reshape(*lead[:3], *shown.shape[1:])
        return torch.stack([shown[place, :, :, :, head] for place, head in enumerate(heads)])

    def _write_shares(self, stack: Stack, attention: _Attention, found: Mapping[str, Any]) -> None:
        """The parts of all heads of a layer behind whose output projection lie norms: all move together."""
        heads, sizes = attention.heads, self._layout.sizes(stack.worlds)

        def read(name: str) -> Any:
            return found[name] if name in found else self._read(name)

        shape = (stack.worlds, *self._stream.shape)
        shares = self._views.shown(heads.term, attention.shares.at_term(read), sizes)
        shares = shares.reshape(len(heads.rows), *shape)
        for need, changes in ((ALL, stack.full), (LAST, stack.last)):
            writers = [writer for writer in heads.rows if stack.need_writer[writer] == need]
            if writers:
                own = some_of(shares, [writer - heads.rows.start for writer in writers])
                self._note(stack, changes, writers, own if need == ALL else own[:, :, :, -1:])
        if attention.constant is not None:
            rest, base = attention.shares.constant(read), attention.shares.constant(self._read)
            rest = self._views.shown(heads.term, rest[None], sizes)[0].reshape(shape)
            base = self._views.shown(heads.term, base[None], self._layout.sizes(1))[0]
            stack.full.add([attention.constant], (rest - base)[None])
            stack.changed[attention.constant] = True

    def _compute_mlp(self, stage: Stage, stack: Stack) -> None:
        (one,) = stage.readers
        (writer,) = self.graph.fed[stage.first]
        at_last = bool(stack.need_reader[stage.first] == LAST)
        rows = 1 if at_last else None
        stream = self._seen(stage, stack, [0], at_last=at_last)[0].flatten(0, 1)
        walk = self._walks.walk([one.entry], [one.node])
        found = self._walks.run(walk, {one.entry: self._views.as_node(one.entry, stream)}, stack.worlds, rows)
        self.node_evaluations += stack.worlds * walk.records
        wrote = self._views.shown(one.node, found[one.node][None], self._layout.sizes(stack.worlds, rows))
        self._note(stack, stack.last if at_last else stack.full, [writer], wrote)

    def _outputs(self, stage: Stage, stack: Stack) -> dict[str, Any]:
        """What the metric reads, computed from the logits' stream."""
        (one,), rows = stage.readers, 1 if self._reads_last else None
        stream = self._seen(stage, stack, [0], at_last=self._reads_last)[0].flatten(0, 1)
        given = {one.entry: self._views.as_node(one.entry, stream)}
        found = self._walks.run(self._readout, given, stack.worlds, rows, self._columns)
        self.node_evaluations += stack.worlds * self._readout.records
        return {name: found[name] for name in self._targets}


def _distinct(masks: Mask) -> tuple[Mask, NDArray[np.int64]]:
    """[reader, row, writer] of what readers lost, [world, reader, writer]; and which row of all a world has.

    Worlds that stand in line differ in few readers: those that follow each other and lost the same are one
    row. Readers with fewer rows than others have their last one repeated.
    """
    fresh = np.ones(masks.shape[:2], dtype=bool)
    fresh[1:] = (masks[1:] != masks[:-1]).any(2)
    which = np.cumsum(fresh, 0) - 1
    most = int(which[-1].max()) + 1
    first = np.stack(
        [np.flatnonzero(column)[np.minimum(np.arange(most), column.sum() - 1)] for column in fresh.T]
    )
    readers = np.arange(masks.shape[1])
    return masks[first, readers[:, None]], which.T + most * readers[:, None]
