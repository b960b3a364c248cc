"""What readers make of the residual stream, for many streams at once: queries, keys, values, MLP terms."""

from __future__ import annotations

from collections.abc import Collection

import torch

from conewise.edges.stacked_values import Read, StackedValues
from conewise.edges.stream_views import StreamViews
from conewise.errors import EdgeError
from conewise.locations.sites import SiteTable
from conewise.program.tensors import computing
from conewise.program.walk import Walk, between, plan_walk
from conewise.structure.components.components import Components
from conewise.structure.relevance import Relevance
from conewise.sweeps.planning.shapes.layout import compile_stacked_rule

Tensor = torch.Tensor


class ReaderValues:
    """The nodes of readers as functions of the stream at their entry.

    Norm and projection of a layer are computed once for all heads, attention itself never. Streams are
    stacked along the batch. Where the batch of the program is fixed, they are computed one by one.
    """

    def __init__(self, sites: SiteTable, components: Components) -> None:
        self.components = components
        self._values = StackedValues(components.program)
        self._views = StreamViews(sites, components)
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
        """How many records are computed for one stream."""
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
            records = between(self.components.program, [entry], nodes)
            steps = ((one.name, one.inputs, compile_stacked_rule(one)) for one in records)
            also = {} if relevance is None else relevance.entries
            self._walks[key] = plan_walk(steps, [entry, *nodes], also_reads=also)
        return self._walks[key]
