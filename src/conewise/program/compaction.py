"""What is multiplied by zero, taken out of a program, and what only that needs.

Two passes over the records decide, and a third one writes. Forwards: along which dimensions is a value zero
but for some entries? It begins at `where(mask, 0, x)`, which a pruning leaves. Backwards: which entries does
each reader need? A product needs those that are not zero; a reader that computes entry by entry needs those
that are needed of it; all else needs all. Where it needs fewer than are there, it reads a selection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from conewise.anatomy.axes import Kept, entries_of, split_entries
from conewise.errors import SurgeryError
from conewise.program.lowering import live
from conewise.program.records import POINTWISE, Program, Record, Ref, Source, filled
from conewise.program.sizes import Size, is_equal

_aten = torch.ops.aten

Wants = Mapping[str, Kept]
"""What a record needs of the values that it reads; all of those that are not named."""

SAME = frozenset({"alias", "clone", "contiguous", "detach", "to", "_to_copy", "dropout", "type_as"})
"""Operations whose value has the entries of the first operand."""
KEEPS_ZERO = frozenset({"neg", "abs", "relu", "silu", "gelu", "tanh", "sign", "sqrt", "square"})
RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten"})
MOVES = frozenset({"transpose", "t", "permute", "unsqueeze"})
SPLITS = frozenset({"split", "split_with_sizes", "chunk"})
BY_CHANNEL = frozenset({"batch_norm", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"})


@dataclass
class Compaction:
    """A program without columns that were pruned to zero; what is left along the dimensions of its values.

    `kept` is of values and weights; `sources` are the weights that lost entries, by name.
    """

    program: Program
    kept: dict[str, Kept] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._given = self.program
        self._shapes: dict[str, tuple[Size, ...] | None] = {
            **self._given.shapes,
            **self._given.source_shapes,
        }
        self._support = self._supports()
        self._wants: dict[str, Wants] = {}
        self._parts: dict[str, dict[int, tuple[int, ...]]] = {}
        self._decide()
        self._expect_own_weights()
        self._new: list[Record] = []
        self._selections: dict[Any, str] = {}
        self._indices: dict[str, Source] = {}
        self.program = self._written()

    # -- forwards: where values are zero -----------------------------------------------------------

    def _supports(self) -> dict[str, Kept]:
        found: dict[str, Kept] = {}
        for record in self._given.records:
            own = self._support_of(record, found)
            if own:
                found[record.name] = own
        return found

    def _support_of(self, record: Record, found: Mapping[str, Kept]) -> Kept:
        names = [leaf.name for leaf in record.args if isinstance(leaf, Ref)]
        first: Kept = found.get(names[0], {}) if names else {}
        if (pruned := self._pruned(record)) is not None:
            return _both(found.get(names[2], {}), pruned)
        if record.op == "mul" and len(names) == 2:
            whole: Kept = {}
            for one in (found.get(one, {}) for one in names if self._shapes[one] == record.shape):
                whole = _both(whole, one)
            return whole
        if not first:
            return {}
        if record.op in RESHAPES:
            return through(self.shape(names[0]), record.shape or (), first) or {}
        if record.op in SAME | MOVES or (record.op in KEEPS_ZERO and len(names) == 1):
            layout = _LAYOUTS[record.op](self, record)
            labels = layout.operands[names[0]] if layout is not None else ()
            return {at: first[dim] for dim, at in enumerate(labels) if dim in first and isinstance(at, int)}
        return {}

    def _pruned(self, record: Record) -> Kept | None:
        """The entries that a mask leaves, along the one dimension that it varies along; None without one."""
        if record.target is not _aten.where.self or not all(isinstance(one, Ref) for one in record.args):
            return None
        values = self._given.source_values
        mask, value = (values.get(one.name) for one in record.args[:2])
        if mask is None or value is None or mask.dtype != torch.bool or mask.shape != value.shape:
            return None
        kept = None if bool(value[mask].any()) or bool(mask.all()) else entries_of(~mask)
        return kept if kept and len(kept) == 1 else None

    # -- backwards: what is needed -------------------------------------------------------------------

    def _decide(self) -> None:
        """What each record reads of its operands, and what is left of every value."""
        program = self._given
        asked: dict[str, list[Kept]] = {}
        whole = {out.name for out in program.outputs if isinstance(out, Ref)}
        for record in reversed(program.records):
            kept = {} if record.name in whole else self._union(record.name, asked.get(record.name, []))
            if record.op == "getitem" and self._is_split(record.inputs[0]):
                self._parts.setdefault(record.inputs[0], {})
                kept = self._of_part(record, kept)
                wants: Wants = {}
            else:
                kept, wants = self._narrowed(record, kept)
            if kept:
                self.kept[record.name] = kept
            self._wants[record.name] = wants
            for name in record.inputs:
                asked.setdefault(name, []).append(wants.get(name, {}))
        for source in program.sources:
            if kept := self._union(source.name, asked.get(source.name, [])):
                self.kept[source.name] = kept

    def _union(self, name: str, asked: Sequence[Kept]) -> Kept:
        """The entries that one reader or another needs."""
        dims = set.intersection(*(set(one) for one in asked)) if asked else set()
        found = {dim: tuple(sorted({entry for one in asked for entry in one[dim]})) for dim in dims}
        shape = self._shapes.get(name) or ()
        return {dim: entries for dim, entries in sorted(found.items()) if len(entries) != shape[dim]}

    def _narrowed(self, record: Record, kept: Kept) -> tuple[Kept, Wants]:
        """What of the record can be left out, and what it needs then."""
        if record.op in SPLITS:
            return {}, self._of_split(record)
        for some in (kept, *({dim: entries} for dim, entries in kept.items()), {}):
            wants = None if record.shape is None else self._needed(record, some)
            if wants is not None:
                return some, wants
        return {}, {}

    def _needed(self, record: Record, kept: Kept) -> Wants | None:
        """What a record reads where these entries of its value are needed; None where it makes no fewer."""
        if record.op in RESHAPES:
            name = record.args[0].name
            found = through(record.shape or (), self.shape(name), kept)
            return None if found is None else {name: found}
        layout = _LAYOUTS[record.op](self, record) if record.op in _LAYOUTS else None
        if layout is None or not layout.whole.isdisjoint(kept):
            return None
        places = [(name, dim, label) for name, of in layout.operands.items() for dim, label in enumerate(of)]
        zero_free = [self.support(name, dim) for name, dim, label in places if label == INNER]
        inner = [set(entries) for entries in zero_free if entries is not None]
        left = {**kept, INNER: tuple(sorted(set.intersection(*inner)))} if inner else dict(kept)
        wants: dict[str, dict[int, tuple[int, ...]]] = {name: {} for name in layout.operands}
        for name, dim, label in places:
            of, shared = label if isinstance(label, tuple) else (label, 1)
            if of is not None and left.get(of):
                wants[name][dim] = tuple(sorted({entry // shared for entry in left[of]}))
        return wants

    def _is_split(self, name: str) -> bool:
        record = self._given.record_of.get(name)
        return record is not None and record.op in SPLITS

    def _of_part(self, part: Record, kept: Kept) -> Kept:
        """What of a part of a split is left; what it asks for is noted."""
        split = self._given.record_of[part.inputs[0]]
        dim = _split_dim(split, len(part.shape or ()))
        mine = {dim: kept[dim]} if dim in kept else {}
        size = (part.shape or ())[dim]
        if not isinstance(size, int):
            return {}
        self._parts[split.name][part.args[1]] = mine.get(dim, tuple(range(size)))
        return mine

    def _of_split(self, record: Record) -> Wants:
        parts = self._parts.get(record.name, {})
        sizes = self._part_sizes(record)
        if sizes is None or sorted(parts) != list(range(len(sizes))):
            self._drop_parts(record.name)
            return {}
        begins = list(accumulate(sizes, initial=0))
        entries = tuple(begins[at] + one for at in range(len(sizes)) for one in parts[at])
        dim = _split_dim(record, len(self._shapes[record.inputs[0]] or ()))
        return {record.inputs[0]: {dim: entries}} if len(entries) < begins[-1] else {}

    def _drop_parts(self, name: str) -> None:
        """Leave the parts of a split whole: not all of them are read."""
        self._parts.pop(name, None)
        for part in self._given.parts.get(name, ()):
            self.kept.pop(part, None)

    def _part_sizes(self, record: Record) -> list[int] | None:
        shape = self._shapes[record.inputs[0]] or ()
        whole = shape[_split_dim(record, len(shape))]
        by = record.args[1]
        if not isinstance(whole, int):
            return None
        if isinstance(by, list | tuple):
            return list(by) if all(isinstance(one, int) for one in by) else None
        each = by if record.op == "split" else -(-whole // by)
        return [min(each, whole - begin) for begin in range(0, whole, each)]

    def support(self, name: str, dim: int) -> tuple[int, ...] | None:
        """The entries of a value along a dimension that may be other than zero; None for all, or for none."""
        return self._support.get(name, {}).get(dim % len(self._shapes[name] or (0,))) or None

    def shape(self, name: str) -> tuple[Size, ...]:
        """The shape of a value or of a weight before anything was left out."""
        return self._shapes[name] or ()

    def _expect_own_weights(self) -> None:
        """Raise SurgeryError where a weight that is to lose entries is needed whole elsewhere."""
        for source in self._given.sources:
            readers = self._given.readers[source.name]
            for one in readers if source.is_parameter else ():
                want = self._wants.get(one.name, {}).get(source.name, {})
                if any(self.kept.get(source.name, {}).get(dim) != kept for dim, kept in want.items()):
                    others = [other.name for other in readers if other is not one]
                    tied = f", tied with {', '.join(source.aliases)}," if source.aliases else ""
                    raise SurgeryError(
                        f"columns of {source.name!r}{tied} cannot be removed for {one.name!r}: it is shared, "
                        f"and {', '.join(others[:3])} needs what would go. Prune the same there, or leave "
                        "the columns in: what is pruned is zero with them too."
                    )

    # -- the records ----------------------------------------------------------------------------------

    def _written(self) -> Program:
        given = self._given
        self.sources = {one.name: self._cut(one) for one in given.sources if self.kept.get(one.name)}
        for record in given.records:
            self._new.append(self._record(record))
        records = live(self._new, given.outputs)
        read = {name for record in records for name in record.inputs}
        read |= {out.name for out in given.outputs if isinstance(out, Ref)}
        sources = (self.sources.get(one.name, one) for one in (*given.sources, *self._indices.values()))
        program = replace(given, records=records, sources=tuple(one for one in sources if one.name in read))
        program.check()
        return program

    def _cut(self, source: Source) -> Source:
        value = source.value.detach()
        for dim, entries in self.kept[source.name].items():
            value = value.index_select(dim, torch.tensor(entries, device=value.device))
        if isinstance(source.value, nn.Parameter):
            value = nn.Parameter(value, requires_grad=source.value.requires_grad)
        return replace(source, value=value)

    def _record(self, record: Record) -> Record:
        kept, wants = self.kept.get(record.name, {}), self._wants[record.name]
        if (pruned := self._pruned(record)) is not None:
            ((dim, entries),) = pruned.items()
            if dim in kept and set(kept[dim]) <= set(entries):
                record = replace(record, target=_aten.alias.default, args=(record.args[2],))
        names = {name: self._selected(name, wants.get(name, {}), record) for name in record.inputs}
        record = self._resized(record, kept, names)

        def named(leaf: Any) -> Any:
            return Ref(names.get(leaf.name, leaf.name)) if isinstance(leaf, Ref) else leaf

        shape = record.shape and tuple(
            len(kept[dim]) if dim in kept else size for dim, size in enumerate(record.shape)
        )
        return replace(
            record, args=filled(record.args, named), kwargs=filled(dict(record.kwargs), named), shape=shape
        )

    def _resized(self, record: Record, kept: Kept, names: dict[str, str]) -> Record:
        """The record, with the sizes among its arguments as they are now."""
        if record.op in (RESHAPES - {"flatten"}) | {"expand"} and kept:
            sizes = list(record.args[1])
            for dim, entries in kept.items():
                sizes[dim] = sizes[dim] if sizes[dim] == -1 else len(entries)
            return replace(record, args=(record.args[0], sizes, *record.args[2:]))
        if record.name in self._parts and self._wants[record.name]:
            parts = self._parts[record.name]
            dim = _split_dim(record, len(self.shape(record.inputs[0])))
            sizes = [len(parts[at]) for at in range(len(parts))]
            target = _aten.split_with_sizes.default
            return replace(record, target=target, args=(record.args[0], sizes, dim), kwargs={})
        if record.op == "scaled_dot_product_attention" and 1 in kept and record.kwargs.get("enable_gqa"):
            key, value = (leaf.name for leaf in record.args[1:3])
            shared = self.shared_heads(record) or 1
            groups = sorted({head // shared for head in kept[1]})
            each = [groups.index(head // shared) for head in kept[1]]
            if each != [at for at in range(len(groups)) for _ in range(len(each) // len(groups))]:
                for name in {key, value}:
                    names[name] = self._select(names[name], 1, each, record, self.shape(name))
                return replace(record, kwargs={**record.kwargs, "enable_gqa": False})
        return record

    def shared_heads(self, record: Record) -> int | None:
        """The number of heads of an attention that share keys and values; None where it varies."""
        heads, keys = (self.shape(leaf.name)[1] for leaf in record.args[:2])
        return heads // keys if isinstance(heads, int) and isinstance(keys, int) else None

    def _selected(self, name: str, wanted: Kept, reader: Record) -> str:
        """The name of what a reader needs of a value: the value, or a selection of it."""
        have = self.kept.get(name, {})
        for dim, entries in wanted.items():
            there = have.get(dim) or tuple(range(int(self.shape(name)[dim])))
            if there != entries:
                at = {entry: number for number, entry in enumerate(there)}
                name = self._select(name, dim, [at[entry] for entry in entries], reader, self.shape(name))
        return name

    def _select(
        self, name: str, dim: int, entries: Sequence[int], reader: Record, shape: tuple[Size, ...]
    ) -> str:
        key = (name, dim, tuple(entries))
        if key not in self._selections:
            made = self._selections[key] = f"{name}/kept{len(self._selections)}"
            known = {one.name: one for one in self._new}.get(name)
            of = known.shape if known is not None else shape
            device = reader.device
            index = f"{made}.index"
            self._indices[index] = Source(index, torch.tensor(entries, device=device), is_parameter=False)
            new = tuple(len(entries) if at == dim else size for at, size in enumerate(of or ()))
            dtype = known.dtype if known is not None else self._dtype(name)
            args = (Ref(name), dim, Ref(index))
            self._new.append(
                Record(made, _aten.index_select.default, args, {}, reader.modules, new, dtype, device)
            )
            self._shapes[made] = new
        return self._selections[key]

    def _dtype(self, name: str) -> torch.dtype | None:
        source = self._given.source_values.get(name)
        return source.dtype if source is not None else self._given.dtypes[name]


# -- the dimensions of operations ------------------------------------------------------------------------

INNER = -1
Label = int | tuple[int, int] | None
"""Of a dimension of an operand: the value's dimension with the same entries; that and how many of its entries
share one; `INNER` where it is summed over; None where all entries are needed."""


@dataclass(frozen=True)
class Layout:
    """The dimensions of what an operation reads, by those of its value; of other operands it needs all.

    Along the dimensions of `whole`, all entries of the value are needed wherever any is.
    """

    operands: Mapping[str, tuple[Label, ...]]
    whole: frozenset[int] = frozenset()


def _names(leaves: Iterable[Any]) -> list[str]:
    return [leaf.name for leaf in leaves if isinstance(leaf, Ref)]


def _aligned(all_of: Compaction, record: Record, names: Iterable[str]) -> Layout:
    """Operands that are broadcast to the value's shape."""
    whole: set[int] = set()
    found: dict[str, tuple[Label, ...]] = {}
    value = record.shape or ()
    for name in names:
        shape = all_of.shape(name)
        dims = range(len(value) - len(shape), len(value))
        found[name] = tuple(None if size == 1 else dim for dim, size in zip(dims, shape, strict=True))
        whole.update(dim for dim, size in zip(dims, shape, strict=True) if size not in (1, value[dim]))
    return Layout(found, frozenset(whole))


def _pointwise(all_of: Compaction, record: Record) -> Layout:
    return _aligned(all_of, record, _names(record.leaves()))


def _first(all_of: Compaction, record: Record) -> Layout:
    return _aligned(all_of, record, _names(record.args[:1]))


def _same(_: Compaction, record: Record) -> Layout:
    return Layout({record.args[0].name: tuple(range(len(record.shape or ())))})


def _product(all_of: Compaction, record: Record, x: Ref, weight: Ref, bias: Any, inner: int) -> Layout | None:
    """A product over the last dimension of x and dimension `inner` of a matrix, and a bias."""
    last = len(record.shape or ()) - 1
    if len(all_of.shape(weight.name)) != 2 or len(all_of.shape(x.name)) != last + 1:
        return None
    found: dict[str, tuple[Label, ...]] = {
        x.name: (*range(last), INNER),
        weight.name: (last, INNER) if inner else (INNER, last),
    }
    if isinstance(bias, Ref):
        if len(all_of.shape(bias.name)) != 1:
            return None
        found[bias.name] = (last,)
    return Layout(found) if len(found) == 2 + isinstance(bias, Ref) else None


def _linear(all_of: Compaction, record: Record) -> Layout | None:
    x, weight, *bias = record.args
    return _product(all_of, record, x, weight, bias[0] if bias else None, 1)


def _addmm(all_of: Compaction, record: Record) -> Layout | None:
    bias, x, weight = record.args
    return _product(all_of, record, x, weight, bias, 0)


def _matmul(all_of: Compaction, record: Record) -> Layout | None:
    x, y = record.args
    rank = len(record.shape or ())
    if x == y or rank < 2 or {len(all_of.shape(x.name)), len(all_of.shape(y.name))} != {rank}:
        return _product(all_of, record, x, y, None, 0)
    lead = _aligned(all_of, record, (x.name, y.name))
    before = {name: labels[: rank - 2] for name, labels in lead.operands.items()}
    operands = {x.name: (*before[x.name], rank - 2, INNER), y.name: (*before[y.name], INNER, rank - 1)}
    return Layout(operands, lead.whole - {rank - 2, rank - 1})


def _move(all_of: Compaction, record: Record) -> Layout:
    """The same dimensions in another order, and perhaps one more."""
    name = record.args[0].name
    rank = len(all_of.shape(name))
    dims = list(range(rank))
    match record.op:
        case "transpose":
            one, other = (dim % rank for dim in record.args[1:3])
            dims[one], dims[other] = other, one
        case "t":
            dims.reverse()
        case "permute":
            order = [dim % rank for dim in record.args[1]]
            dims = [order.index(dim) for dim in dims]
        case "unsqueeze":
            at = record.args[1] % (rank + 1)
            return Layout({name: tuple(dim + (dim >= at) for dim in dims)}, frozenset({at}))
    return Layout({name: tuple(dims)})


def _beside(_: Compaction, record: Record) -> Layout | None:
    """An operation along one dimension, which leaves the others apart."""
    rank = len(record.shape or ())
    at = 0 if record.op in {"cat", "stack"} else 1
    along = record.args[1] if len(record.args) > 1 else record.kwargs.get("dim", at and None)
    if not isinstance(along, int):
        return None
    labels = tuple(None if dim == along % rank else dim for dim in range(rank))
    return Layout(dict.fromkeys(_names(record.leaves()), labels), frozenset({along % rank}))


def _normed(all_of: Compaction, record: Record) -> Layout | None:
    """A norm, or a mean that keeps its dimensions, over dimensions of which all entries stay."""
    rank, (first, *rest) = len(record.shape or ()), record.args
    over = rest[0] if rest else None
    if not isinstance(over, list | tuple) or len(all_of.shape(first.name)) != rank:
        return None
    taken = {dim % rank for dim in over} if record.op == "mean" else range(rank - len(over), rank)
    return Layout({first.name: tuple(range(rank))}, frozenset(taken))


def _attend(all_of: Compaction, record: Record) -> Layout | None:
    rank = len(record.shape or ())
    names = _names(record.args[:3])
    mask = record.args[3] if len(record.args) > 3 else record.kwargs.get("attn_mask")
    if rank != 4 or len(set(names)) != 3:
        return Layout({}, frozenset(range(rank)))
    shared = all_of.shared_heads(record)
    if shared is None:
        return None
    query, key, value = names
    masked = _aligned(all_of, record, _names([mask])) if isinstance(mask, Ref) else Layout({})
    others = dict.fromkeys((key, value), (0, (1, shared), None, None))
    return Layout({query: (0, 1, None, None), **others, **masked.operands}, masked.whole | {2, 3})


def _embed(_: Compaction, record: Record) -> Layout | None:
    table, ids = record.args[:2]
    last = len(record.shape or ()) - 1
    if not isinstance(table, Ref) or not isinstance(ids, Ref):
        return None
    return Layout({table.name: (None, last), ids.name: tuple(range(last))})


def _convolve(all_of: Compaction, record: Record) -> Layout | None:
    x, weight, *rest = record.args
    groups = record.args[6] if len(record.args) > 6 else record.kwargs.get("groups", 1)
    rank = len(record.shape or ())
    if groups != 1 or {len(all_of.shape(x.name)), len(all_of.shape(weight.name))} != {rank}:
        return None
    beyond: tuple[Label, ...] = (None,) * (rank - 2)
    found = {x.name: (0, INNER, *beyond), weight.name: (1, INNER, *beyond)}
    if rest and isinstance(rest[0], Ref):
        found[rest[0].name] = (1,)
    return Layout(found, frozenset(range(2, rank)))


def _channels(_: Compaction, record: Record) -> Layout:
    first, *others = _names(record.leaves())
    rank = len(record.shape or ())
    found: dict[str, tuple[Label, ...]] = dict.fromkeys(others, (1,))
    return Layout({**found, first: (0, 1, *(None,) * (rank - 2))}, frozenset(range(2, rank)))


_LAYOUTS: Mapping[str, Callable[[Compaction, Record], Layout | None]] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    "linear": _linear,
    "addmm": _addmm,
    **dict.fromkeys(("mm", "bmm", "matmul"), _matmul),
    **dict.fromkeys(SAME, _same),
    **dict.fromkeys(MOVES, _move),
    "expand": _first,
    **dict.fromkeys(("slice", "cat", "softmax", "_softmax", "log_softmax", "narrow"), _beside),
    **dict.fromkeys(("mean", "layer_norm", "rms_norm"), _normed),
    "scaled_dot_product_attention": _attend,
    "embedding": _embed,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolve),
    **dict.fromkeys(BY_CHANNEL, _channels),
}


def _split_dim(record: Record, rank: int) -> int:
    dim = record.args[2] if len(record.args) > 2 else record.kwargs.get("dim", 0)
    return int(dim) % rank


def _both(one: Kept, other: Kept) -> Kept:
    """The entries that are in both."""
    dims = {*one, *other}
    return {
        dim: tuple(sorted(set(one.get(dim, other.get(dim, ()))) & set(other.get(dim, one.get(dim, ())))))
        for dim in dims
    }


def through(shape: Sequence[Size], other: Sequence[Size], kept: Kept) -> Kept | None:
    """The entries in another shape of the same numbers; None where they are none along its dimensions."""
    found: dict[int, tuple[int, ...]] = {}
    done: set[int] = set()
    for mine, theirs in _groups(shape, other):
        touched = [dim for dim in mine if dim in kept]
        done.update(touched)
        if not touched:
            continue
        sizes, others = [shape[dim] for dim in mine], [other[dim] for dim in theirs]
        if not all(isinstance(size, int) for size in (*sizes, *others)):
            return None
        split = split_entries(sizes, {mine.index(dim): kept[dim] for dim in touched}, others)
        if split is None:
            return None
        found |= {theirs[at]: entries for at, entries in split.items()}
    return found if done == kept.keys() else None


def _groups(shape: Sequence[Size], other: Sequence[Size]) -> Iterator[tuple[list[int], list[int]]]:
    """The dimensions of two shapes that hold the same numbers, from the last ones on."""
    mine, theirs = len(shape) - 1, len(other) - 1
    while mine >= 0 and theirs >= 0:
        one, two = [mine], [theirs]
        while not is_equal(a := _size(shape, one), b := _size(other, two)):
            is_less = isinstance(a, int) and isinstance(b, int) and a < b
            if is_less and one[0] > 0:
                one.insert(0, one[0] - 1)
            elif isinstance(a, int) and isinstance(b, int) and two[0] > 0:
                two.insert(0, two[0] - 1)
            else:
                yield list(range(mine + 1)), list(range(theirs + 1))
                return
        yield one, two
        mine, theirs = one[0] - 1, two[0] - 1


def _size(shape: Sequence[Size], dims: Sequence[int]) -> Size:
    return math.prod(shape[dim] for dim in dims)
