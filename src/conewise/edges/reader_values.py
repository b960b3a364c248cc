"""What readers make of the residual stream, for many streams at once: queries, keys, values, MLP terms."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from conewise.edges.stacked_values import Read, StackedValues
from conewise.edges.stream_views import StreamViews
from conewise.errors import EdgeError
from conewise.locations.sites import SiteTable
from conewise.program.records import Record
from conewise.program.rules import Rule
from conewise.program.tensors import computing
from conewise.structure.components.components import Components
from conewise.structure.relevance import Relevance
from conewise.sweeps.planning.shapes.layout import compile_stacked_rule

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class _Steps:
    """The records between an entry and some readers' nodes: rules, and what none behind them reads."""

    nodes: dict[str, str]
    records: tuple[tuple[Record, Rule, tuple[str, ...]], ...]


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
        self._steps: dict[tuple[str, tuple[str, ...]], _Steps] = {}
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
        steps = self._between(entry, tuple(dict.fromkeys(slots)))
        if not self._is_fixed:
            value = self._views.as_node(entry, stream)
            worlds = self._values.worlds_in(read, entry, value)
            return self._computed(steps, entry, value, self._values.reading(read, worlds), relevance)
        rows = self._views.shown(entry, read(entry)[None]).shape[1]
        reading = self._values.reading(read, 1)
        each = [
            self._computed(steps, entry, self._views.as_node(entry, one), reading, relevance)
            for one in torch.split(stream, rows)
        ]
        return {slot: torch.cat([one[slot] for one in each], 0) for slot in steps.nodes}

    def records(self, entry: str, slots: Collection[str]) -> tuple[str, ...]:
        """The records that are computed for one stream, by name, in order."""
        return tuple(one.name for one, *_ in self._between(entry, tuple(dict.fromkeys(slots))).records)

    def count(self, entry: str, slots: Collection[str]) -> int:
        """How many records are computed for one stream."""
        return len(self._between(entry, tuple(dict.fromkeys(slots))).records)

    def _computed(
        self, steps: _Steps, entry: str, value: Tensor, reading: Read, relevance: Relevance | None
    ) -> dict[str, Tensor]:
        known: dict[str, Any] = {entry: value}
        for record, rule, done in steps.records:
            inputs = [known[n] if n in known else reading(n) for n in record.inputs]
            if relevance is None or record.name not in relevance.rules:
                known[record.name] = rule(*inputs)
            else:
                begin = known.get(relevance.entries.get(record.name, ""))
                known[record.name] = relevance.rules[record.name](rule, inputs, begin)
            for name in done:
                del known[name]
        return {slot: known[node] for slot, node in steps.nodes.items()}

    def _slots(self, entry: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for reader in self.components.entries[entry]:
            if found.setdefault(reader.slot, reader.node) != reader.node:
                raise EdgeError(
                    f"two layers read the stream at {entry!r}: {found[reader.slot]!r} and {reader.node!r} "
                    "are made of it. Edges are known where layers follow each other."
                )
        return found

    def _between(self, entry: str, slots: tuple[str, ...]) -> _Steps:
        key = entry, slots
        if key not in self._steps:
            own = self.slots.get(entry, {})
            unknown = [slot for slot in slots if slot not in own]
            if unknown:
                raise EdgeError(
                    f"no reader {unknown[0]!r} of the stream at {entry!r}: it has {', '.join(own) or 'none'}."
                )
            self._steps[key] = self._found(entry, {slot: own[slot] for slot in slots})
        return self._steps[key]

    def _found(self, entry: str, nodes: dict[str, str]) -> _Steps:
        wiring = self.components.wiring
        everything, cone = frozenset(wiring.records), wiring.cone(entry)
        names = {
            n for node in nodes.values() for n in wiring.above(node, everything, frozenset({entry}))
        } & cone
        records = [wiring.records[name] for name in sorted(names, key=wiring.order.__getitem__)]
        last = {name: at for at, record in enumerate(records) for name in record.inputs if name in names}
        done: dict[int, list[str]] = {}
        for name, at in last.items():
            if name not in nodes.values():
                done.setdefault(at, []).append(name)
        steps = tuple(
            (record, compile_stacked_rule(record), tuple(done.get(at, ())))
            for at, record in enumerate(records)
        )
        return _Steps(nodes, steps)
