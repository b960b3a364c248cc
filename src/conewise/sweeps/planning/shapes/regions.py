"""Regions: nodes of which a sweep computes some positions only, the last few or the very last.

A change at a position of a causal model reaches no earlier one, so the rows before the first change are
the baseline's. A metric that reads the last position wants no other. Which operations treat each position
by itself is known from their kind (`independence.py`); attention is the exception, where the mask says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from conewise.program.operations import ATTENTION
from conewise.program.records import Record, Ref, SizeRef
from conewise.structure.attention.sizes import attention_argument
from conewise.structure.axes.views import View
from conewise.sweeps.planning.shapes.independence import Independence
from conewise.sweeps.planning.shapes.layout import Layout


@dataclass(frozen=True, slots=True)
class Regions:
    """`rows`: nodes of which so many last positions are computed; `seen`: what some of them read whole.

    `last` are those of which nothing but the last `tail` positions is ever read.
    """

    rows: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    seen: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    last: frozenset[str] = frozenset()
    tail: int = 1

    def of(self, node: str) -> int | None:
        """How many positions of a node are computed; None for all."""
        return self.rows.get(node)

    def wanted(self, node: str, read: str) -> int | None:
        """How many positions of `read` a node reads; None for all."""
        return None if read in self.seen.get(node, ()) else self.rows.get(node)

    def wanted_of(self, target: str) -> int | None:
        """How many positions of a target the metrics read; None for all."""
        return self.tail if target in self.last else None

    def ending(self, last: frozenset[str], tail: int = 1) -> Regions:
        """The same, with just the last `tail` positions of some nodes, which have so many or more."""
        return Regions({**self.rows, **dict.fromkeys(last, tail)}, self.seen, last, tail)


WHOLE = Regions()


class RegionFinder:
    """Finds regions of one program, for runs of one shape."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._program = layout.program
        self._independent = Independence(layout, layout.pos_dim, layout.position_symbols)
        self._records = self._program.record_of
        self._readers = self._program.readers

    def last(self, targets: Sequence[str], whole: Collection[str]) -> frozenset[str]:
        """The nodes that lead to `targets` at the last position only; those of `whole` are left out."""
        region: set[str] = set()
        wanted: set[str] = set(targets)
        for record in reversed(self._program.records):
            name = record.name
            if name not in wanted:
                continue
            wanted.update(record.inputs)
            if name in whole:
                continue
            used_by = [reader.name for reader in self._readers[name] if reader.name in wanted]
            if name in targets:
                is_last = self._layout.pos_dim.get(name) is not None and region.issuperset(used_by)
            else:
                is_last = bool(used_by) and region.issuperset(used_by)
            if (is_last and self._is_row_wise(name)) or self._takes_last(record):
                region.add(name)
        # A part of several values has as many rows as they have.
        for record in self._program.records:
            if record.op == "getitem" and record.inputs[0] not in region:
                region.discard(record.name)
        return frozenset(region)

    def changed(
        self,
        start: int,
        patched: Collection[str],
        computed: Collection[str],
        hides: Callable[[str, int], bool],
    ) -> Regions:
        """The nodes that patches from position `start` on change from there on only, as far as is known.

        `hides(mask, start)` says of a mask that no position before `start` sees one from there on.
        """
        length = next(iter(self._layout.lengths), 0)
        if len(self._layout.lengths) != 1 or not 0 < start < length:
            return WHOLE
        rows = length - start
        reached = set(computed) | set(patched)
        inside: set[str] = set()
        seen: dict[str, frozenset[str]] = {}
        inside.update(name for name in patched if name not in computed and self.has_rows(name))
        for record in self._program.records:
            name = record.name
            if name not in computed:
                continue
            if not inside.issuperset(one for one in record.inputs if one in reached):
                continue
            if self._is_row_wise(name):
                inside.add(name)
            elif whole := self._seen_by_attention(record, reached, start, hides):
                inside.add(name)
                seen[name] = whole
        region = dict.fromkeys((name for name in inside if name in computed or name in patched), rows)
        return Regions(region, seen)

    def _is_row_wise(self, name: str) -> bool:
        return name in self._layout.varying and self._independent.known(name)

    def has_rows(self, name: str) -> bool:
        """Whether a value has one row for each position of the run, in order."""
        return self._layout.pos_dim.get(name) is not None and self._independent.is_plain(name)

    def shows_positions(self, name: str, view: View) -> bool:
        """Whether the axis `pos` of a view is what the run's positions are: an attention's may be others."""
        at = [dim for dim, packed in enumerate(view.packing) if "pos" in packed]
        is_inner = all(view.packing[dim][-1] == "pos" for dim in at)
        return self.has_rows(name) and is_inner and at == [self._layout.pos_dim.get(name)]

    def _takes_last(self, record: Record) -> bool:
        """Whether the record is a slice that takes the last position, whatever reads it."""
        layout = self._layout
        if record.op != "slice" or len(record.args) < 3 or layout.pos_dim.get(record.name) is not None:
            return False
        source, (dim, start) = record.inputs[0], record.args[1:3]
        if source not in layout.varying or not self.has_rows(source):
            return False
        if dim != layout.pos_dim.get(source) or dim == layout.batch_dim.get(source):
            return False
        # Both of the whole value and of its last position: a fixed start is in the one, and not in the other.
        whole, alone = (_first_of(start, layout.sizes(1, rows)) for rows in (None, 1))
        length = layout.length(source)
        return (record.shape or ())[dim] == 1 and whole in {length - 1, -1} and alone in {0, -1}

    def _seen_by_attention(
        self, record: Record, reached: Collection[str], start: int, hides: Callable[[str, int], bool]
    ) -> frozenset[str]:
        """The keys and values of a fused attention in which no earlier position sees a later one."""
        if record.op != ATTENTION or not all(isinstance(one, Ref) for one in record.args[:3]):
            return frozenset()
        query, key, value = (one.name for one in record.args[:3])
        if query in {key, value} or not all(self.has_rows(one) for one in (query, key, value, record.name)):
            return frozenset()
        dims = self._layout.pos_dim, {name: len(self._shape(name)) for name in (query, key, value)}
        if any(dims[0][name] != dims[1][name] - 2 for name in (query, key, value)):
            return frozenset()
        mask = attention_argument(record, "attn_mask")
        if mask is None:
            return frozenset({key, value}) if attention_argument(record, "is_causal") else frozenset()
        if not isinstance(mask, Ref) or mask.name in reached:
            return frozenset()
        shape = self._shape(mask.name)
        if len(shape) < 2 or self._layout.pos_dim.get(mask.name) != len(shape) - 2:
            return frozenset()
        return frozenset({key, value}) if hides(mask.name, start) else frozenset()

    def _shape(self, name: str) -> tuple[Any, ...]:
        record = self._records.get(name)
        if record is not None:
            return record.shape or ()
        return next((leaf.shape for leaf in self._program.inputs if leaf.name == name), ())


def _first_of(start: Any, sizes: Sequence[int]) -> Any:
    """Where a slice begins."""
    return sizes[start.index] if isinstance(start, SizeRef) else start
