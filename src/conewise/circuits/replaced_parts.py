"""Streams in which some parts are replaced, and what edges of a model need, found once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conewise.anatomy.components import Components, Edges, Writer, as_positions, edges_of
from conewise.anatomy.edge_graph import EdgeGraph
from conewise.attributing.relevance import Relevance
from conewise.circuits.stream_parts import StreamParts, StreamViews
from conewise.circuits.walks import StackedValues, stacked_walk
from conewise.errors import EdgeError
from conewise.program.rehearsal import as_numpy
from conewise.program.tensors import brought, computing
from conewise.program.walk import Read, Walk, between
from conewise.runs.captured import Captured
from conewise.sweeps.planning.layout import repeated
from conewise.threads import gc_paused

Mask = NDArray[np.bool_]
"""Removed edges: [reader, writer], or with worlds in front; of some rows, [row, writer]."""
Norms = NDArray[np.float32]
"""The norm of each writer's part by prompt and position: [writer, n]."""


@cache
def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that parts of a stream are added up in."""
    return torch.promote_types(dtype, torch.float32)


def mixed(weights: NDArray[np.generic], parts: Tensor) -> Tensor:
    """[row, ...]: for each row the sum over [row, writer] of parts [writer, ...], in the wide dtype."""
    return _product(torch.mm, weights, parts.reshape(len(parts), -1)).view(len(weights), *parts.shape[1:])


def mixed_by_world(weights: NDArray[np.generic], parts: Tensor) -> Tensor:
    """[row, world, ...]: sums of parts [writer, world, ...] over [world, row, writer], in the wide dtype."""
    found = _product(torch.bmm, weights, parts.transpose(0, 1).flatten(2)).transpose(0, 1)
    return found.reshape(*found.shape[:2], *parts.shape[2:])


def _product(multiply: Callable[..., Tensor], weights: NDArray[np.generic], flat: Tensor) -> Tensor:
    dtype = wide(flat.dtype)
    if not flat.is_cuda:  # numpy converts small arrays faster
        matrix = torch.from_numpy(weights.astype(np.float64 if dtype == torch.float64 else np.float32))
        return multiply(matrix, flat if flat.dtype == dtype else flat.to(dtype))
    matrix = brought(torch.from_numpy(np.ascontiguousarray(weights)), flat.device)
    if dtype != flat.dtype:
        return multiply(matrix.to(flat.dtype), flat, out_dtype=dtype)
    return multiply(matrix.to(dtype), flat)


def part_norms(parts: Tensor) -> Norms:
    """The norm of each part, [writer, batch * pos]."""
    norms = torch.linalg.vector_norm(parts, dim=-1, dtype=wide(parts.dtype)).flatten(1)
    found: Norms = as_numpy(norms.float().cpu())
    return found


def mostly_kept(gone: Norms, put: Norms, whole: Norms) -> Mask:
    """[row]: True where no more goes than stays and is put in, [row, n] each; `whole` is [n] of all parts."""
    found: Mask = np.logical_and.reduce(gone <= whole - gone + put, axis=1)
    return found


def with_residue(total: Tensor, residue: Tensor, stream: Tensor) -> Tensor:
    """A sum of parts with what rounding left between the sum of a run's own parts and its stream.

    Where at least half of the stream is still there, the residue is part of it, so that a sum of all parts is
    the stream itself; where less is, it would be an error of that size.
    """
    dtype = total.dtype
    half = torch.linalg.vector_norm(stream, dim=-1, keepdim=True, dtype=dtype) / 2
    is_there = torch.linalg.vector_norm(total, dim=-1, keepdim=True) >= half
    return torch.addcmul(total, residue.to(dtype), is_there.to(dtype))


@dataclass(frozen=True, slots=True)
class ReplacedParts:
    """The parts of all writers and what replaces them, where parts are the same wherever the stream is read.

    `parts` and `given` are [writer, batch, pos, d_model], `apart` is their difference; `given` may have one
    position for all. By entry: `streams` of the run, those where all is `replaced`, `constants`, which no
    writer wrote, `residues`, what rounding left between a stream and the sum of its parts.
    """

    parts: Tensor
    given: Tensor
    apart: Tensor
    streams: Mapping[str, Tensor]
    replaced: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    residues: Mapping[str, Tensor]
    norms: tuple[Norms, Norms]

    @classmethod
    def of(
        cls,
        parts: Tensor,
        given: Tensor,
        counts: Mapping[str, int],
        streams: Mapping[str, Tensor],
        replaced: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
    ) -> ReplacedParts:
        """Of a run's parts and streams; `counts` says how many writers write before each entry."""
        dtype = wide(parts.dtype)
        is_rounded = dtype != parts.dtype
        if not parts.is_cuda:  # a product of low precision would be rounded
            parts, given = parts.to(dtype), given.to(dtype)
        streams, replaced, constants = (
            {entry: value.to(dtype) for entry, value in one.items()} for one in (streams, replaced, constants)
        )
        residues = {
            entry: streams[entry] - constants[entry] - parts[:count].sum(0, dtype=dtype)
            for entry, count in (counts.items() if is_rounded else ())
        }
        norms = part_norms(parts), part_norms(given.expand_as(parts))
        return cls(parts, given, given - parts, streams, replaced, constants, residues, norms)

    def at_last(self) -> ReplacedParts:
        """The same at the last position."""
        batch, positions = self.parts.shape[1:3]
        parts, given, apart = (one[:, :, -1:].contiguous() for one in (self.parts, self.given, self.apart))
        streams, replaced, constants, residues = (
            {entry: value[:, -1:] for entry, value in one.items()}
            for one in (self.streams, self.replaced, self.constants, self.residues)
        )
        own, other = (one.reshape(-1, batch, positions)[:, :, -1] for one in self.norms)
        return ReplacedParts(parts, given, apart, streams, replaced, constants, residues, (own, other))

    def seen(self, entry: str, lost: Mask) -> Tensor:
        """[row, batch, pos, d_model]: the streams at an entry of which [row, writer] are replaced."""
        count = lost.shape[1]
        own, other = (one[:count] for one in self.norms)
        gone, put = lost @ own, lost @ other
        is_all = lost.all(1)
        near = mostly_kept(gone, put, own.sum(0)) & ~is_all
        if near.all():
            return mixed(lost, self.apart[:count]).add_(self.streams[entry])
        far = ~near & (is_all | mostly_kept(other.sum(0) - put, own.sum(0) - gone, other.sum(0)))
        out = mixed(lost.astype(np.int8) - (~near)[:, None], self.apart[:count])
        if far.all():
            return out.add_(self.replaced[entry])
        for rows, begin in ((near, self.streams), (far, self.replaced)):
            if rows.any():
                out[numbers_of(rows, out.device)] += begin[entry]
        neither = ~near & ~far
        if neither.any():
            out[numbers_of(neither, out.device)] = self.summed(entry, lost[neither])
        return out

    def summed(self, entry: str, lost: Mask, others: Sequence[int] = ()) -> Tensor:
        """[row, batch, pos, d_model]: the same as sums of all but what `others` wrote where it is kept."""
        count = lost.shape[1]
        kept = ~lost
        kept[:, others] = False
        if not lost.any():
            return mixed(kept, self.parts[:count]).add_(self.constants[entry])
        found = mixed(kept, self.parts[:count]).add_(mixed(lost, self.given[:count]))
        return found.add_(self.constants[entry])

    def settled(self, entry: str, total: Tensor) -> Tensor:
        """Sums [..., batch, pos, d_model], with the residue where most of the stream is there."""
        if entry not in self.residues:
            return total
        return with_residue(total, self.residues[entry], self.streams[entry])


def numbers_of(rows: Any, device: torch.device) -> Tensor:
    """Return the numbers of the rows that a mask chooses."""
    return brought(torch.from_numpy(np.flatnonzero(rows)), device)


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


class EdgeFacts:
    """The components of one stack of a model; `parts` and `readers` are made when they are first used."""

    def __init__(self, model: Captured, stack: str = "", *, reads_heads: bool = True) -> None:
        self._table, self._program = model.site_table, model.program
        layers = model.site_table.model_layers
        self.components = Components(model.program, layers, stack, reads_heads=reads_heads)

    @cached_property
    def graph(self) -> EdgeGraph:
        """The components and their edges by name."""
        shape = self._program.shapes[self.components.readers[-1].entry]
        return EdgeGraph.of(self.components, width=None if shape is None else int(shape[-1]))

    @cached_property
    def parts(self) -> StreamParts:
        """The parts of the stream: what each component wrote into it."""
        try:
            return StreamParts(self._table, self.components)
        except EdgeError as error:
            names = self._table.dictionaries
            if not names:
                raise
            raise EdgeError(
                f"{error} The model has dictionaries in it ({', '.join(names)}), and a nonlinear one in the "
                "stream or behind heads keeps parts from being told apart: take the edges of the model "
                "before it was spliced in, whose outputs are the same, or splice it in at mlp_out."
            ) from error

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The values of a run that parts and readers are made of."""
        components, program = self.components, self._program
        found = dict.fromkeys(components.entries)
        found |= dict.fromkeys(writer.node for writer in components.writers) | dict.fromkeys(components.terms)
        scaled = {name for entry in components.entries for name in components.carrying(entry)}
        for heads in components.heads:
            scaled |= {record.name for record in between(program, [heads.node], [heads.term])}
        for name in scaled:  # scales of norms are read in the middle of a walk
            found |= dict.fromkeys(program.record_of[name].inputs)
        ends = dict.fromkeys((reader.entry, reader.node) for reader in components.readers)
        for entry, node in ends:
            own = between(program, [entry], [node])
            inside = {record.name for record in own}
            found |= dict.fromkeys(one for record in own for one in record.inputs if one not in inside)
        return tuple(found)

    @cached_property
    def live(self) -> LiveStreams:
        """Streams as readers see them when components between are computed anew."""
        return LiveStreams(self.components, self.parts.values, self.parts.views)

    @cached_property
    def readers(self) -> ReaderValues:
        """Values that readers compute from a stream."""
        return ReaderValues(self.components, self.parts.values, self.parts.views)


_known: WeakKeyDictionary[Captured, dict[tuple[str, bool], EdgeFacts]] = WeakKeyDictionary()


def model_edges(model: Captured, pos: int | Sequence[int] | None = None, stack: str = "") -> Edges:
    """Return every edge between components of a model; see `Model.edges`."""
    facts = edge_facts(model, stack)
    key = stack, None if pos is None else as_positions(pos)
    kept: dict[object, Edges] = vars(model).setdefault("_edges", {})
    if key not in kept:
        with gc_paused():
            _ = facts.parts  # raises where what components wrote cannot be told apart
            kept[key] = edges_of(facts.components, key[1])
    return kept[key]


def edge_facts(model: Captured, stack: str = "", *, reads_heads: bool = True) -> EdgeFacts:
    """Return the facts about the edges of a stack. Raise EdgeError with the reason where it has none.

    Without `reads_heads`, what its parts need, which heads have whatever their queries are made of.
    """
    model.expect_program("tell apart what components write into the stream")
    known, key = _known.setdefault(model, {}), (stack, reads_heads)
    if key not in known:
        known[key] = EdgeFacts(model, stack, reads_heads=reads_heads)
    return known[key]
