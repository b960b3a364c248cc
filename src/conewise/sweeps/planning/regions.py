"""Regions: the positions that a sweep computes of each node, and what attention masks hide of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from conewise.anatomy.attention import PLACES, attention_argument
from conewise.anatomy.axes import View
from conewise.program.records import ATTENTION, Program, Record, Ref, SizeRef
from conewise.program.walk import Rule, compile_rule
from conewise.sweeps.planning.independence import Independence
from conewise.sweeps.planning.layout import Layout


@dataclass(frozen=True, slots=True)
class Mask:
    """One mask. `is_causal`: it says that every position sees itself and all before it, and nothing else.

    Bit s of `hides` says that no position before s sees one from s on.
    """

    is_causal: bool
    hides: int

    def hides_from(self, start: int) -> bool:
        """True if no position before `start` sees one from there on."""
        return bool(self.hides >> start & 1)


Masks = Mapping[str, Mask]
"""By the name of the value that is the mask."""


def masks_of(program: Program) -> tuple[str, ...]:
    """The values that attention takes for its masks."""
    given = (attention_argument(r, "attn_mask") for r in program.records if r.op == ATTENTION)
    return tuple(dict.fromkeys(mask.name for mask in given if isinstance(mask, Ref)))


def attention_kernel(record: Record, rows: int | None, layout: Layout, masks: Masks) -> str:
    """Return the name of an attention's kernel for so many positions; empty for what has one way only."""
    if record.op != ATTENTION:
        return ""
    mask = attention_argument(record, "attn_mask")
    if rows is None and isinstance(mask, Ref) and mask.name not in layout.varying:
        return "causal" if mask.name in masks and masks[mask.name].is_causal else ""
    return "last rows" if rows is not None and attention_argument(record, "is_causal") else ""


@torch.no_grad()
def read_masks(names: tuple[str, ...], read: Callable[[str], Any]) -> dict[str, Mask]:
    """Return what these masks hide in a run, whose values `read` gives."""
    return {name: mask_of(read(name)) for name in names}


def mask_of(value: Any) -> Mask:
    """Return what a mask hides: booleans where a position sees, or numbers that are added to scores."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return Mask(is_causal=False, hides=0)
    rows, columns = value.shape[-2:]
    if value.dtype == torch.bool:
        sees = value
    else:
        # A row that sees nothing sees everything alike: what is added to a score is low, not minus infinity.
        sees = value > torch.finfo(value.dtype).min / 2
        sees = sees | ~sees.any(-1, keepdim=True)
    flat = sees.reshape(-1, rows, columns).any(0)
    numbers = torch.arange(1, columns + 1, device=flat.device)
    furthest = (flat * numbers).amax(-1).cummax(0).values.tolist()
    hides = 0
    for start in range(1, min(rows, columns)):
        if furthest[start - 1] <= start:
            hides |= 1 << start
    return Mask(is_causal_mask(value), hides)


# ------------------------------------------------------------------------------------------
# Other ways to compute a fused attention: for its last positions, without a mask, with keys repeated.

MASK = "$mask"
"""The name under which a rule is given its mask."""


def causal_rule(record: Record, rows: int, length: int, device: torch.device) -> Rule:
    """The rule of a causal attention without a mask, for the last `rows` of its queries."""
    mask = _causal_mask(rows, length, device)
    given = [*record.args[:3], Ref(MASK), attention_argument(record, "dropout_p") or 0.0, False]
    named = {key: value for key, value in record.kwargs.items() if key not in PLACES}
    masked = replace(record, args=tuple(given), kwargs=named)
    rule, at = compile_rule(masked), masked.inputs.index(MASK)
    return lambda *values: rule(*values[:at], mask, *values[at:])


_CAUSAL_MASKS: weakref.WeakValueDictionary[tuple[int, int, torch.device], torch.Tensor]
_CAUSAL_MASKS = weakref.WeakValueDictionary()


def _causal_mask(rows: int, length: int, device: torch.device) -> torch.Tensor:
    """The mask of the last `rows` positions: one for all layers, for as long as a rule has it."""
    key = rows, length, device
    mask = _CAUSAL_MASKS.get(key)
    if mask is None:
        mask = _CAUSAL_MASKS[key] = torch.ones(rows, length, dtype=torch.bool, device=device).tril(
            length - rows
        )
    return mask


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
        return rule(*[_repeated_heads(v, times) if i in places else v for i, v in enumerate(values)])

    return repeating


def _repeated_heads(value: torch.Tensor, times: int) -> torch.Tensor:
    """Each head `times` times, one behind the other."""
    shape = value.shape
    apart = value.unsqueeze(-3).expand(*shape[:-2], times, *shape[-2:])
    return apart.reshape(*shape[:-3], shape[-3] * times, *shape[-2:])


def is_causal_mask(mask: Any) -> bool:
    """True if every position sees itself and all before it, and nothing else."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.dim() < 2:
        return False
    rows, columns = mask.shape[-2:]
    return rows == columns and torch.equal(mask, torch.ones_like(mask).tril())


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
        """Return how many positions of a node are computed; None for all."""
        return self.rows.get(node)

    def wanted(self, node: str, read: str) -> int | None:
        """Return how many positions of `read` a node reads; None for all."""
        return None if read in self.seen.get(node, ()) else self.rows.get(node)

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
        """True if a value has one row for each position of the run, in order."""
        return self._layout.pos_dim.get(name) is not None and self._independent.is_plain(name)

    def shows_positions(self, name: str, view: View) -> bool:
        """True if the axis `pos` of a view is what the run's positions are: an attention's may be others."""
        at = [dim for dim, packed in enumerate(view.packing) if "pos" in packed]
        is_inner = all(view.packing[dim][-1] == "pos" for dim in at)
        return self.has_rows(name) and is_inner and at == [self._layout.pos_dim.get(name)]

    def _takes_last(self, record: Record) -> bool:
        """True if the record is a slice that takes the last position, whatever reads it."""
        layout = self._layout
        if record.op != "slice" or len(record.args) < 3 or layout.pos_dim.get(record.name) is not None:
            return False
        source, (dim, start) = record.inputs[0], record.args[1:3]
        if source not in layout.varying or not self.has_rows(source):
            return False
        if dim != layout.pos_dim.get(source) or dim == layout.batch_dim.get(source):
            return False
        # Both of the whole value and of its last position: a fixed start is in the one, and not in the other.
        whole, alone = (
            layout.sizes(1, rows)[start.index] if isinstance(start, SizeRef) else start for rows in (None, 1)
        )
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
