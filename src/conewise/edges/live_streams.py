"""The stream that a reader sees when a writer's value is another run's, and what lies between is live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from conewise.edges.stacked_values import Read, StackedValues
from conewise.edges.stream_views import StreamViews
from conewise.errors import EdgeError
from conewise.locations.sites import SiteTable
from conewise.program.tensors import computing
from conewise.program.walk import Walk, between, plan_walk
from conewise.structure.components.components import Components, Writer
from conewise.sweeps.planning.shapes.layout import compile_stacked_rule, repeated

Tensor = torch.Tensor

LIVE: Mapping[str, str] = {
    "": "nothing",
    "mlps": "MLPs, while heads keep what they had in the base",
    "all": "heads and MLPs",
}
"""What may be computed anew between a writer and a reader, by name."""

AT_ONCE = 16
"""For how many writers it is computed at a time."""


class LiveStreams:
    """Streams at the entries of readers, as functions of what one writer's node holds.

    A head's own result is replaced (z), so that its output projection and any norm on the way are computed
    anew; of an MLP it is the term, of what enters the stream itself.
    """

    def __init__(self, sites: SiteTable, components: Components) -> None:
        self.components = components
        self._values = StackedValues(components.program)
        self._views = StreamViews(sites, components)
        self._heads = {one.node: one for one in components.heads}
        self._walks: dict[tuple[str, str, str], Walk] = {}
        if not components.program.dimensions.batch:
            raise EdgeError(
                "paths through live components need a batch along which senders can be stacked, and the "
                "batch of this capture is fixed. Freeze all between them: freeze='all'."
            )

    def streams(self, entry: str, writers: Sequence[int], live: str, base: Read, source: Read) -> Tensor:
        """[writer, batch, pos, d_model]: the stream at `entry`, by the writer whose value is the source's."""
        stream = self._views.shown(entry, base(entry)[None], self._sizes(base, 1))[0]
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

    def _sizes(self, read: Read, worlds: int) -> tuple[int, ...]:
        return self._values.layout(read).sizes(worlds)

    def _walk(self, entry: str, node: str, live: str) -> Walk:
        """The walk over the records that are computed anew between a node and an entry."""
        key = entry, node, live
        if key not in self._walks:
            program, moving = self.components.program, None
            if live != "all":
                frozen = {one.node for one in self.components.heads} - {node}
                if live == "":
                    frozen |= set(self.components.terms) - {node, *self._terms_of(node)}
                moving = program.record_of.keys() - frozen
            records = between(program, [node], [entry], moving)
            steps = ((one.name, one.inputs, compile_stacked_rule(one)) for one in records)
            self._walks[key] = plan_walk(steps, [node, entry])
        return self._walks[key]

    def _terms_of(self, node: str) -> list[str]:
        """The term that carries a head's result into the stream."""
        return [self._heads[node].term] if node in self._heads else []
