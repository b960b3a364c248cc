"""The stream that a reader sees when a writer's value is another run's, and what lies between is live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from conewise.edges.stacked_values import Read, StackedValues
from conewise.edges.stream_views import StreamViews
from conewise.errors import EdgeError
from conewise.locations.sites import SiteTable
from conewise.program.records import Record
from conewise.program.rules import Rule
from conewise.program.tensors import computing
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

_Steps = tuple[tuple[Record, Rule, tuple[str, ...]], ...]


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
        self._steps: dict[tuple[str, str, str], _Steps] = {}
        if not components.program.dimensions.batch:
            raise EdgeError(
                "paths through live components need a batch along which senders can be stacked, and the "
                "batch of this capture is fixed. Freeze all between them: freeze='all'."
            )

    def changes(self, entry: str, writers: Sequence[int], live: str, base: Read, source: Read) -> Tensor:
        """[writer, batch, pos, d_model]: what the stream at `entry` is more than in the base, by writer."""
        stream = self._views.shown(entry, base(entry)[None], self._sizes(base, 1))[0]
        found = stream.new_zeros((len(writers), *stream.shape))
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
                    found[[row for row, _ in some]] = made - stream
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
        known: dict[str, Any] = {node: value}
        reading = self._values.reading(base, count)
        for record, rule, done in self._between(entry, node, live):
            known[record.name] = rule(*[known[n] if n in known else reading(n) for n in record.inputs])
            for name in done:
                del known[name]
        layout = self._values.layout(base)
        dim = layout.batch_dim[entry]
        assert dim is not None
        each = known[entry].unflatten(dim, (count, -1)).movedim(dim, 0)
        return self._views.shown(entry, each, layout.sizes(1))

    def _sizes(self, read: Read, worlds: int) -> tuple[int, ...]:
        return self._values.layout(read).sizes(worlds)

    def _between(self, entry: str, node: str, live: str) -> _Steps:
        """The records that are computed anew, in order, each with the values that nothing reads any more."""
        key = entry, node, live
        if key not in self._steps:
            wiring = self.components.wiring
            everything = frozenset(wiring.records)
            frozen = {one.node for one in self.components.heads} - {node}
            if live == "":
                frozen |= set(self.components.terms) - {node, *self._terms_of(node)}
            moving = everything - frozen if live != "all" else everything
            names = wiring.cone(node, moving) & wiring.above(entry, everything, frozenset({node}))
            records = [wiring.records[name] for name in sorted(names, key=wiring.order.__getitem__)]
            last = {name: at for at, one in enumerate(records) for name in one.inputs if name in names}
            done: dict[int, list[str]] = {}
            for name, at in last.items():
                if name != entry:
                    done.setdefault(at, []).append(name)
            self._steps[key] = tuple(
                (record, compile_stacked_rule(record), tuple(done.get(at, ())))
                for at, record in enumerate(records)
            )
        return self._steps[key]

    def _terms_of(self, node: str) -> list[str]:
        """The term that carries a head's result into the stream."""
        return [self._heads[node].term] if node in self._heads else []
