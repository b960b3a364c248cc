"""Readers of the residual stream, computed for many streams at once: queries, keys, values, MLPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conewise.anatomy.axes import View
from conewise.anatomy.components import Components, Writer
from conewise.anatomy.sites import SiteTable
from conewise.anatomy.wiring import Step
from conewise.attributing.relevance import Relevance
from conewise.errors import EdgeError
from conewise.program.records import SIZES, Program, Record
from conewise.program.tensors import computing
from conewise.program.walk import Read, Rule, Walk, WalkStep, between, plan_walk
from conewise.sweeps.planning.layout import Constants, Layout, compile_stacked_rule, repeated

_KINDS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")


class StreamViews:
    """The views of the stream's values: those of sites, and of values that have the shape of a site's."""

    def __init__(self, sites: SiteTable, components: Components) -> None:
        shapes, by_shape = components.program.shapes, {}
        self._views: dict[str, View] = {}
        for layer in components.layers:
            for kind in _KINDS:
                if kind in layer.nodes:
                    site = sites.find(kind, layer.number, layer.stack)
                    if site.view is None or set(site.view.axes) - {"batch"} != {"pos", "d_model"}:
                        raise _unknown(site.node, f"layer {layer.number}")
                    self._views[site.node] = by_shape[shapes.get(site.node)] = site.view
        for entry in components.entries:
            if entry not in self._views:
                if shapes.get(entry) not in by_shape:
                    raise _unknown(entry, components.layer_of(entry))
                self._views[entry] = by_shape[shapes.get(entry)]

    def needs_sizes(self, node: str) -> bool:
        """True if the sizes of a run are needed to show a value."""
        return has_sizes(self._views[node])

    def shown(self, node: str, stack: Tensor, sizes: Sequence[int] = ()) -> Tensor:
        """[n, batch, pos, d_model] of n values of a node; the batch is 1 where the model has none."""
        view = self._views[node]
        shown = view.present(stack, sizes, leading=1)
        return shown if "batch" in view.axes else shown.unsqueeze(1)

    def as_node(self, node: str, stream: Tensor) -> Tensor:
        """A stream [batch, pos, d_model] in the form of the node's own value."""
        view = self._views[node]
        lengths = dict(zip(("batch", "pos", "d_model"), stream.shape, strict=True))
        if "batch" not in view.axes:
            stream = stream.squeeze(0)
        order = [view.axes.index(axis) for packed in view.packing for axis in packed]
        shape = [math.prod(lengths[axis] for axis in packed) for packed in view.packing]
        return stream.permute(order).reshape(shape)


def has_sizes(view: View) -> bool:
    """True if some length of the view depends on the sizes of a run."""
    return any(not isinstance(length, int) for length in view.lengths.values())


def _unknown(node: str, where: str) -> EdgeError:
    return EdgeError(
        f"{where}: where batch and positions lie in the residual stream at {node!r} is not known, so its "
        "parts cannot be shown by position."
    )


class StackedValues:
    """Reads values of runs of a program for stacks of worlds; keeps what depends on their shapes alone."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._inputs = tuple(leaf.name for leaf in program.inputs)
        self._known: dict[tuple[tuple[int, ...], ...], tuple[Layout, Constants]] = {}

    def layout(self, read: Read) -> Layout:
        """The layout of runs of this shape."""
        return self._of(read)[0]

    def worlds_in(self, read: Read, name: str, value: Tensor) -> int:
        """Return the number of worlds that a value is a stack of."""
        layout = self.layout(read)
        dim, shape = layout.batch_dim.get(name), layout.shape(name)
        return 1 if dim is None or shape is None else value.shape[dim] // shape[dim]

    def like(self, read: Read, name: str) -> tuple[tuple[int, ...], Read]:
        """The sizes of as many worlds as the value at `name` is a stack of, and `reading` for these."""
        worlds = self.worlds_in(read, name, read(name))
        return self.layout(read).sizes(worlds), self.reading(read, worlds)

    def reading(self, read: Read, worlds: int, rows: int | None = None) -> Read:
        """Return what reads every value as a stack of so many worlds: one that has fewer is repeated.

        With `rows`, of so many of its last positions.
        """
        layout, constants = self._of(read)
        constants.rebase(read)

        def stacked(name: str) -> Any:
            if name == SIZES:
                return layout.sizes(worlds, rows)
            if name in layout.varying:
                value, dim, shape = read(name), layout.batch_dim.get(name), layout.shape(name)
                if dim is not None and isinstance(value, torch.Tensor):
                    assert shape is not None
                    value = repeated(value, dim, worlds * shape[dim] // value.shape[dim])
            else:
                value = constants.stacked(name, worlds)
            is_cut = rows is not None and isinstance(value, torch.Tensor)
            return layout.tail(name, value, rows) if is_cut else value  # type: ignore[arg-type]

        return stacked

    def _of(self, read: Read) -> tuple[Layout, Constants]:
        shapes = tuple(tuple(read(name).shape) for name in self._inputs)
        if shapes not in self._known:
            given = dict(zip(self._inputs, shapes, strict=True))
            layout = Layout(self._program, self._program.symbols_of(given))
            self._known[shapes] = layout, Constants(layout, read)
        return self._known[shapes]


def stacked_walk(
    program: Program,
    starts: Collection[str],
    targets: Collection[str],
    *,
    members: Collection[str] | None = None,
    also_reads: Mapping[str, str] | None = None,
) -> Walk:
    """Plan the walk from `starts` to `targets` over stacks of worlds; it ends with the values of both."""
    records = between(program, starts, targets, members)
    steps = ((one.name, one.inputs, compile_stacked_rule(one)) for one in records)
    return plan_walk(steps, [*starts, *targets], also_reads=also_reads)


@dataclass(frozen=True, slots=True)
class Rows:
    """Parts of some writers in a row: `stack` is [writer, *the value's shape]."""

    stack: Tensor
    numbers: range

    def widened(self, numbers: range) -> Tensor:
        """Return a stack of more writers, of which the others have no part."""
        if self.numbers == numbers:
            return self.stack
        wide = self.stack.new_zeros((len(numbers), *self.stack.shape[1:]))
        wide[self.numbers.start - numbers.start : self.numbers.stop - numbers.start] = self.stack
        return wide


class AffineWalk:
    """The walk along an affine path: parts go through its linear part, what belongs to no part through all.

    It ends with the values of `keep`. `starts` are values that it is given and may drop.
    """

    def __init__(self, steps: Iterable[Step], keep: Collection[str], starts: Collection[str] = ()) -> None:
        self._steps = {step.record.name: step for step in steps}
        self._linear = {name: compile_stacked_rule(step.linear) for name, step in self._steps.items()}
        self._affine = {name: compile_stacked_rule(step.record) for name, step in self._steps.items()}
        walked = ((name, step.carried, self._affine[name]) for name, step in self._steps.items())
        self._walk = plan_walk(walked, keep, starts)

    def parts(
        self, values: dict[str, Rows], reading: Read, begin: Callable[[str], Rows] | None = None
    ) -> dict[str, Rows]:
        """Add the parts of each value to those that are given; `begin` has those of other names."""

        def compute(at: WalkStep, carried: list[Rows], _: dict[str, Rows]) -> Rows:
            ends = [(one.numbers.start, one.numbers.stop) for one in carried]
            numbers = range(min(start for start, _ in ends), max(stop for _, stop in ends))
            stacks = {name: one.widened(numbers) for name, one in zip(at.inputs, carried, strict=True)}
            return Rows(stepped(self._steps[at.node], self._linear[at.node], stacks, reading), numbers)

        return self._walk.run(values, begin or values.__getitem__, compute)

    def constants(
        self, values: dict[str, Tensor], reading: Read, begin: Callable[[str], Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Add what of each value belongs to no part; `begin` has it of other names."""

        def compute(at: WalkStep, carried: list[Tensor], _: dict[str, Tensor]) -> Tensor:
            record = self._steps[at.node].record
            if self._steps[at.node].is_norm:
                return normed(record, carried[0], reading, with_bias=True)
            known = dict(zip(at.inputs, carried, strict=True))
            found: Tensor = self._affine[at.node](
                *[known[name] if name in known else reading(name) for name in record.inputs]
            )
            return found

        return self._walk.run(values, begin or values.__getitem__, compute)


def stepped(step: Step, rule: Rule, stacks: Mapping[str, Tensor], reading: Read) -> Tensor:
    """Return the linear part of a step for a stack of values, whose first dimension numbers them."""
    if step.is_norm:
        return normed(step.linear, stacks[step.carried[0]], reading, with_bias=False)
    inputs = [stacks[name] if name in stacks else reading(name) for name in step.linear.inputs]
    dims = tuple(0 if name in stacks else None for name in step.linear.inputs)
    for at, name in enumerate(step.linear.inputs):
        if name in step.added and name not in stacks:
            inputs[at] = torch.zeros_like(inputs[at])
    found: Tensor = torch.vmap(rule, in_dims=dims)(*inputs)
    return found


def normed(record: Record, value: Tensor, reading: Read, *, with_bias: bool) -> Tensor:
    """A fused norm of `value`, with the scale that the norm has in the run; leading dimensions are kept."""
    bias = () if record.op == "rms_norm" else ("bias",)
    names = ("input", "normalized_shape", "weight", *bias, "eps")
    given = dict(zip(names, record.args, strict=False)) | dict(record.kwargs)
    own = reading(given["input"].name)
    dims = tuple(range(-len(given["normalized_shape"]), 0))
    wide = torch.promote_types(own.dtype, torch.float32)
    eps, numbers = given.get("eps"), own.to(wide)
    if record.op == "layer_norm":
        eps = 1e-5 if eps is None else eps
        spread = numbers.var(dims, correction=0, keepdim=True)
        value = value.to(wide) - value.to(wide).mean(dims, keepdim=True)
    else:
        eps = torch.finfo(own.dtype).eps if eps is None else eps
        spread = numbers.square().mean(dims, keepdim=True)
        value = value.to(wide)
    value = value * torch.rsqrt(spread + eps)
    if given.get("weight") is not None:
        value = value * reading(given["weight"].name)
    if with_bias and given.get("bias") is not None:
        value = value + reading(given["bias"].name)
    return value.to(own.dtype)


def bent(components: Components, record: Record, what: str) -> EdgeError:
    """The error that says which record is not affine, and what passes through it."""
    layers = [layer for layer in components.layers if record.name in layer.members]
    reasons = [layer.missing["mlp_out"] for layer in layers if "mlp_out" in layer.missing]
    why = f" No MLP was found there: {reasons[0]}." if reasons else ""
    return EdgeError(
        f"{what} passes through {record.name!r} ({record.op}, {components.layer_of(record.name)}), which is "
        "neither a sum, a projection nor a norm: what one component wrote cannot be separated from what "
        f"others did behind it.{why} Edges are not defined for this model; its sites can be patched."
    )


class ReaderValues:
    """The nodes of readers as functions of the stream at their entry.

    Norm and projection of a layer are computed once for all heads, attention itself never. Streams are
    stacked along the batch. Where the batch of the program is fixed, they are computed one by one.
    """

    def __init__(self, components: Components, values: StackedValues, views: StreamViews) -> None:
        self.components, self._values, self._views = components, values, views
        self._is_fixed = not components.program.dimensions.batch
        self._walks: dict[tuple[str, tuple[str, ...], bool], Walk] = {}
        self.slots = {entry: self._slots(entry) for entry in components.entries}
        """The slots of the readers at each entry, each with the node that is computed for it."""

    def values(self, entry: str, slots: Collection[str], stream: Tensor, read: Read) -> dict[str, Tensor]:
        """The value of each slot's node, for each of the streams [n * batch, pos, d_model].

        The values are laid out as the nodes are, stacked along the batch in the order of the streams. `read`
        gives the values of a run, or of stacks of worlds, for all that does not depend on the stream.
        """
        with computing():
            return self.recorded(entry, slots, stream, read)

    def recorded(
        self,
        entry: str,
        slots: Collection[str],
        stream: Tensor,
        read: Read,
        relevance: Relevance | None = None,
    ) -> dict[str, Tensor]:
        """The same, recorded by torch's autograd where it is on: for gradients by streams, or relevance."""
        walk = self._walk(entry, slots, relevance)
        nodes = {slot: self.slots[entry][slot] for slot in dict.fromkeys(slots)}

        def computed(value: Tensor, reading: Read) -> dict[str, Tensor]:
            known = walk.run({entry: value}, reading, None if relevance is None else relevance.compute)
            return {slot: known[node] for slot, node in nodes.items()}

        if not self._is_fixed:
            value = self._views.as_node(entry, stream)
            return computed(value, self._values.reading(read, self._values.worlds_in(read, entry, value)))
        rows = self._views.shown(entry, read(entry)[None]).shape[1]
        reading = self._values.reading(read, 1)
        each = [computed(self._views.as_node(entry, one), reading) for one in torch.split(stream, rows)]
        return {slot: torch.cat([one[slot] for one in each], 0) for slot in nodes}

    def records(self, entry: str, slots: Collection[str]) -> tuple[str, ...]:
        """The records that are computed for one stream, by name, in order."""
        return tuple(step.node for step in self._walk(entry, slots).steps)

    def count(self, entry: str, slots: Collection[str]) -> int:
        """Return the number of records that are computed for one stream."""
        return len(self._walk(entry, slots).steps)

    def _slots(self, entry: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for reader in self.components.entries[entry]:
            if found.setdefault(reader.slot, reader.node) != reader.node:
                raise EdgeError(
                    f"two layers read the stream at {entry!r}: {found[reader.slot]!r} and {reader.node!r} "
                    "are made of it. Edges are known where layers follow each other."
                )
        return found

    def _walk(self, entry: str, slots: Collection[str], relevance: Relevance | None = None) -> Walk:
        """The walk from the stream at an entry to the nodes of some slots."""
        key = entry, tuple(dict.fromkeys(slots)), relevance is not None
        if key not in self._walks:
            own = self.slots.get(entry, {})
            unknown = [slot for slot in slots if slot not in own]
            if unknown:
                raise EdgeError(
                    f"no reader {unknown[0]!r} of the stream at {entry!r}: it has {', '.join(own) or 'none'}."
                )
            nodes = [own[slot] for slot in key[1]]
            also = None if relevance is None else relevance.entries
            self._walks[key] = stacked_walk(self.components.program, [entry], nodes, also_reads=also)
        return self._walks[key]


LIVE: Mapping[str, str] = {
    "": "nothing",
    "mlps": "MLPs, while heads keep what they had in the base",
    "all": "heads and MLPs",
}
"""The components that may be computed anew between a writer and a reader, by name."""

AT_ONCE = 16
"""The number of writers for which they are computed at a time."""


class LiveStreams:
    """Streams at the entries of readers, as functions of what one writer's node holds.

    A head's own result is replaced (z), so that its output projection and any norm on the way are computed
    anew; of an MLP it is the term, of what enters the stream itself.
    """

    def __init__(self, components: Components, values: StackedValues, views: StreamViews) -> None:
        self.components, self._values, self._views = components, values, views
        self._heads = {one.node: one for one in components.heads}
        self._walks: dict[tuple[str, str, str], Walk] = {}
        if not components.program.dimensions.batch:
            raise EdgeError(
                "paths through live components need a batch along which senders can be stacked, and the "
                "batch of this capture is fixed. Freeze all between them: freeze='all'."
            )

    def streams(self, entry: str, writers: Sequence[int], live: str, base: Read, source: Read) -> Tensor:
        """[writer, batch, pos, d_model]: the stream at `entry`, by the writer whose value is the source's."""
        stream = self._views.shown(entry, base(entry)[None], self._values.layout(base).sizes(1))[0]
        found = stream.new_empty((len(writers), *stream.shape))
        by_node: dict[str, list[tuple[int, Writer]]] = {}
        for row, number in enumerate(writers):
            writer = self.components.writers[number]
            by_node.setdefault(writer.node, []).append((row, writer))
        with computing():
            for node, rows in by_node.items():
                for first in range(0, len(rows), AT_ONCE):
                    some = rows[first : first + AT_ONCE]
                    value = self._replaced(node, [writer for _, writer in some], base, source)
                    made = self._stream(entry, node, live, value, len(some), base)
                    found[[row for row, _ in some]] = made
        return found

    def _replaced(self, node: str, writers: Sequence[Writer], base: Read, source: Read) -> Tensor:
        """The values of a node in which each of these writers is replaced by the source's, stacked."""
        layout, count = self._values.layout(base), len(writers)
        dim = layout.batch_dim[node]
        assert dim is not None
        if node not in self._heads:
            value: Tensor = source(node)
            return value
        own, other = base(node), source(node)
        stack = repeated(own, dim, count).clone(memory_format=torch.contiguous_format)
        view, sizes = self._heads[node].view, layout.sizes(1)
        each = stack.unflatten(dim, (count, -1)).movedim(dim, 0)  # type: ignore[no-untyped-call]
        shown, given = view.present(each, sizes, leading=1), view.present(other, sizes)
        axis = view.axes.index("head")
        for row, writer in enumerate(writers):
            assert writer.head is not None
            shown[row].select(axis, writer.head).copy_(given.select(axis, writer.head))
        return stack

    def _stream(self, entry: str, node: str, live: str, value: Tensor, count: int, base: Read) -> Tensor:
        """[writer, batch, pos, d_model]: the stream at `entry`, given the values of a node."""
        known = self._walk(entry, node, live).run({node: value}, self._values.reading(base, count))
        layout = self._values.layout(base)
        dim = layout.batch_dim[entry]
        assert dim is not None
        each = known[entry].unflatten(dim, (count, -1)).movedim(dim, 0)
        return self._views.shown(entry, each, layout.sizes(1))

    def _walk(self, entry: str, node: str, live: str) -> Walk:
        """The walk over the records that are computed anew between a node and an entry."""
        key = entry, node, live
        if key not in self._walks:
            program, moving = self.components.program, None
            if live != "all":
                frozen = {one.node for one in self.components.heads} - {node}
                if live == "":
                    own = {self._heads[node].term} if node in self._heads else set()
                    frozen |= self.components.terms.keys() - {node} - own
                moving = program.record_of.keys() - frozen
            self._walks[key] = stacked_walk(program, [node], [entry], members=moving)
        return self._walks[key]
