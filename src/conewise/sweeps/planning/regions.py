"""Regions: nodes of which a sweep computes some positions only, the last few or the very last.

A change at a position of a causal model reaches no earlier one, so the rows before the first change are
the baseline's. A metric that reads the last position wants no other. Which operations treat each position
by itself is known from their kind (`apart.py`); attention is the one exception, where the mask says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from conewise.program.operations import ATTENTION
from conewise.program.records import Record, Ref, SizeRef
from conewise.program.rules import Rule, compile_rule
from conewise.structure.views import View
from conewise.sweeps.planning.apart import Apart
from conewise.sweeps.planning.stacking import Layout


@dataclass(frozen=True, slots=True)
class Regions:
    """`rows`: nodes of which so many last positions are computed; `seen`: what some of them read whole.

    `last` are those of which nothing but the last position is ever read.
    """

    rows: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    seen: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    last: frozenset[str] = frozenset()

    def of(self, node: str) -> int | None:
        """How many positions of a node are computed; None for all."""
        return self.rows.get(node)

    def wanted(self, node: str, read: str) -> int | None:
        """How many positions of `read` a node reads; None for all."""
        return None if read in self.seen.get(node, ()) else self.rows.get(node)

    def wanted_of(self, target: str) -> int | None:
        """How many positions of a target the metrics read; None for all."""
        return 1 if target in self.last else None

    def ending(self, last: frozenset[str]) -> Regions:
        """The same, with just the last position of some nodes."""
        return Regions({**self.rows, **dict.fromkeys(last, 1)}, self.seen, last)


WHOLE = Regions()


class RegionFinder:
    """Finds regions of one program, for runs of one shape."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._program = layout.program
        self._apart = Apart(layout, layout.pos_dim, layout.position_symbols)
        self._records = {record.name: record for record in self._program.records}
        self._readers: dict[str, list[str]] = {}
        for record in self._program.records:
            for name in record.inputs:
                self._readers.setdefault(name, []).append(record.name)

    @cached_property
    def masks_vary(self) -> bool:
        """Whether what an attention sees depends on a run's inputs, beyond their shapes."""
        masks = (attention_argument(r, "attn_mask") for r in self._program.records if r.op == ATTENTION)
        return any(isinstance(mask, Ref) and mask.name in self._layout.varying for mask in masks)

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
            used_by = [reader for reader in self._readers.get(name, ()) if reader in wanted]
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
        read: Callable[[str], Any],
    ) -> Regions:
        """The nodes that patches from position `start` on change from there on only, as far as is known."""
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
            elif whole := self._seen_by_attention(record, reached, start, read):
                inside.add(name)
                seen[name] = whole
        region = dict.fromkeys((name for name in inside if name in computed or name in patched), rows)
        return Regions(region, seen)

    def _is_row_wise(self, name: str) -> bool:
        return name in self._layout.varying and self._apart.known(name)

    def has_rows(self, name: str) -> bool:
        """Whether a value has one row for each position of the run, in order."""
        return self._layout.pos_dim.get(name) is not None and self._apart.is_plain(name)

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
        self, record: Record, reached: Collection[str], start: int, read: Callable[[str], Any]
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
        return frozenset({key, value}) if _is_hidden(read(mask.name), start) else frozenset()

    def _shape(self, name: str) -> tuple[Any, ...]:
        record = self._records.get(name)
        if record is not None:
            return record.shape or ()
        return next((leaf.shape for leaf in self._program.inputs if leaf.name == name), ())


def _first_of(start: Any, sizes: Sequence[int]) -> Any:
    """Where a slice begins."""
    return sizes[start.index] if isinstance(start, SizeRef) else start


PLACES = {"attn_mask": 3, "dropout_p": 4, "is_causal": 5}


def attention_argument(record: Record, name: str) -> Any:
    """An argument of a fused attention, given by place or by name."""
    place = PLACES[name]
    return record.args[place] if len(record.args) > place else record.kwargs.get(name)


def _is_hidden(mask: torch.Tensor, start: int) -> bool:
    """Whether no position before `start` sees one from there on."""
    before, later = mask[..., :start, :start], mask[..., :start, start:]
    if mask.dtype == torch.bool:
        return not bool(later.any())
    # A row that sees nothing sees everything alike: what is added to a score is very low, not minus infinity.
    low = torch.finfo(mask.dtype).min / 2
    return bool((later <= low).all()) and bool((before > low).any(-1).all())


def causal_rule(record: Record, rows: int, length: int, device: torch.device) -> Rule:
    """The rule of a causal attention without a mask, for the last `rows` of its queries."""
    mask = torch.ones(rows, length, dtype=torch.bool, device=device).tril(length - rows)
    given = [*record.args[:3], mask, attention_argument(record, "dropout_p") or 0.0, False]
    named = {key: value for key, value in record.kwargs.items() if key not in PLACES}
    return compile_rule(replace(record, args=tuple(given), kwargs=named))


def unmasked_rule(record: Record) -> Rule:
    """The rule of an attention whose mask says no more than "causal": kernels know that by themselves."""
    given = [*record.args[:3], None, attention_argument(record, "dropout_p") or 0.0, True]
    named = {key: value for key, value in record.kwargs.items() if key not in PLACES}
    plain = replace(record, args=tuple(given), kwargs=named)
    rule, places = compile_rule(plain), [record.inputs.index(name) for name in plain.inputs]
    return lambda *values: rule(*[values[place] for place in places])


def repeated_rule(record: Record, rule_of: Callable[[Record], Rule]) -> Rule:
    """The rule of an attention whose heads share keys and values, which it repeats, one for each head.

    The kernels that share them hold all scores in float32, or wherever there is a mask.
    """
    query, *shared = (one.name for one in record.args[:3])
    if query in shared:
        return rule_of(record)
    named = {key: value for key, value in record.kwargs.items() if key != "enable_gqa"}
    rule, heads = rule_of(replace(record, kwargs=named)), record.inputs.index(query)
    places = {record.inputs.index(name) for name in shared}

    def repeating(*values: Any) -> Any:
        times = values[heads].shape[-3] // values[min(places)].shape[-3]
        return rule(*[_repeated(v, times) if i in places else v for i, v in enumerate(values)])

    return repeating


def _repeated(value: torch.Tensor, times: int) -> torch.Tensor:
    """Each head `times` times, one behind the other."""
    shape = value.shape
    apart = value.unsqueeze(-3).expand(*shape[:-2], times, *shape[-2:])
    return apart.reshape(*shape[:-3], shape[-3] * times, *shape[-2:])


def is_causal_mask(mask: Any) -> bool:
    """Whether every position sees itself and all before it, and nothing else."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.dim() < 2:
        return False
    rows, columns = mask.shape[-2:]
    return rows == columns and torch.equal(mask, torch.ones_like(mask).tril())


@torch.no_grad()
def first_differences(
    layout: Layout, names: Sequence[str], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> list[int]:
    """For pairs of values of the same node, the first position at which they differ, or else the last."""
    found = []
    for name, (one, other) in zip(names, pairs, strict=True):
        dim, length = layout.pos_dim[name], layout.length(name)
        assert dim is not None
        differs = one != other
        if dim == layout.batch_dim.get(name):
            differs, dim = differs.unflatten(dim, (-1, length)), dim + 1  # type: ignore[no-untyped-call]
        found.append(differs.movedim(dim, 0).flatten(1).any(1))
    if not found:
        return []
    rows = torch.stack(found).cpu()
    last = rows.shape[1] - 1
    return [int(row.to(torch.uint8).argmax()) if bool(row.any()) else last for row in rows]
