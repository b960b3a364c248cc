"""Position-wise: whether a branch computes each position by itself, known from its operations.

A branch that does is an MLP for certain where it has a projection, a nonlinearity and another projection.
Axes are followed from the stream to the term, and every operation has to act on features alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from conewise.anatomy.axes import Axes, Axis, after
from conewise.anatomy.wiring import Wiring
from conewise.program.records import (
    ALONG_ONE_DIMENSION,
    BIASED_PRODUCTS,
    CASTS,
    CHOICES,
    CONCATENATIONS,
    CONTRACTIONS,
    COPIES,
    COUNTS,
    DISPATCHES,
    ELEMENTWISE,
    LINEAR,
    NORMS,
    PADS,
    REARRANGEMENTS,
    SCALINGS,
    SELECTIONS,
    SPLITS,
    STATISTICS,
    Record,
    Ref,
)
from conewise.program.sizes import Size


def is_elementwise(record: Record) -> bool:
    """True if each element of the value is made of the elements in its place alone."""
    return record.op in ELEMENTWISE or torch.Tag.pointwise in getattr(record.target, "tags", ())


def is_light(record: Record) -> bool:
    """True if the record is part of a norm, a scaling, a cast or a rearrangement: it mixes no weight in."""
    return is_elementwise(record) or record.op in REARRANGEMENTS | NORMS | STATISTICS


def is_rearranging(record: Record) -> bool:
    """True if the record is light, or takes parts of values and puts them together again."""
    return is_light(record) or record.op in SELECTIONS | CONCATENATIONS | PADS | {"stack", "repeat"}


@dataclass(frozen=True, slots=True)
class Branch:
    """The records between some values of the stream and a `term`, inputs first.

    `entries` are the values of the stream that it reads, `foreign` the other values from outside.
    """

    term: str
    records: tuple[Record, ...]
    entries: tuple[str, ...]
    foreign: tuple[str, ...]


def branch_of(wiring: Wiring, term: str, members: frozenset[str], stream: Collection[str]) -> Branch:
    """The branch that ends in `term`; `stream` are the values of the stream."""
    inside = wiring.above(term, members, frozenset(stream))
    records = tuple(record for record in wiring.program.records if record.name in inside)
    read = dict.fromkeys(name for record in records for name in wiring.operands(record))
    outside = [name for name in read if name not in inside]
    if term not in inside:
        outside.append(term)
    return Branch(
        term,
        records,
        tuple(name for name in outside if name in stream),
        tuple(name for name in outside if name not in stream),
    )


def projections(wiring: Wiring, branch: Branch, start: Collection[str]) -> int:
    """Count the projections that lie one behind the other between `start` and the term.

    Those without a nonlinearity between count as one.
    """
    states: dict[str, tuple[int, bool]] = dict.fromkeys(start, (0, False))
    for record in branch.records:
        reads = [name for name in wiring.operands(record) if name in states]
        if not reads or record.name in states:
            continue
        count, is_bent = max(states[name] for name in reads)
        if wiring.is_weighted(record):
            count, is_bent = (count + 1, False) if is_bent or not count else (count, False)
        elif len(wiring.operands(record)) > 1 if record.op in SCALINGS else record.op not in LINEAR:
            is_bent = True
        states[record.name] = count, is_bent
    return states.get(branch.term, (0, False))[0]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The finding about a branch: `doubt` says why it may not compute each position by itself; '' if it does.

    `is_routed`: it is handed to experts, each position by itself, by what a router chose for it.
    """

    doubt: str = ""
    is_routed: bool = False


def by_position(wiring: Wiring, branch: Branch) -> Verdict:
    """True if the branch computes each position by itself, as far as its operations show."""
    if len(branch.entries) != 1 or branch.term in branch.entries:
        return Verdict("is no function of one value of the stream")
    entry = branch.entries[0]
    shape = wiring.shape(entry)
    for name in branch.foreign:
        if shape is None or _has_rows(wiring.shape(name), shape):
            return Verdict(f"reads {name!r}, which is no value of the stream")
    known = {entry: _entered(wiring, entry)}
    lost: dict[str, Record] = {}
    for record in branch.records:
        reads = [name for name in wiring.operands(record) if name in known or name in lost]
        if not reads:
            continue
        found = None if any(name in lost for name in reads) else _followed(wiring, record, known)
        if found is None:
            lost[record.name] = record
        else:
            known[record.name] = found
    if not lost and _in_order(known[branch.term]) == _in_order(known[entry]):
        return Verdict()
    is_routed = any(record.op in CHOICES and record.name in known for record in branch.records)
    culprits = [record for record in lost.values() if not (is_routed and _is_dispatched(wiring, record))]
    if not culprits and lost:
        return Verdict(is_routed=True)
    culprit = next((record for record in culprits), wiring.records[branch.term])
    return Verdict(f"passes through {culprit.name!r}, which may mix positions")


def has_features_last(wiring: Wiring, branch: Branch) -> bool | None:
    """True if the last dimension of the stream holds its features, by the first norm or projection.

    None where there is none before the axes are lost.
    """
    known = {entry: _entered(wiring, entry) for entry in branch.entries}
    for record in branch.records:
        reads = wiring.operands(record)
        if not reads or any(name not in known for name in reads):
            continue
        found = _followed(wiring, record, known)
        if record.op in NORMS | STATISTICS or wiring.is_weighted(record):
            return found is not None
        if found is not None:
            known[record.name] = found
    return None


def _entered(wiring: Wiring, entry: str) -> Axes:
    """The axes of a value of the stream: rows, and features last."""
    shape = wiring.shape(entry) or ()
    names = [f"row{dim}" for dim in range(len(shape) - 1)]
    return tuple((Axis(name, size),) for name, size in zip([*names, "feature"], shape, strict=False))


def _is_dispatched(wiring: Wiring, record: Record) -> bool:
    """True if the record may hand rows to experts, compute there, or put them back."""
    if record.op in COUNTS | {"sort", "argsort", "cumsum", "item"}:
        given = wiring.records.get(wiring.operands(record)[0])
        is_count = given is not None and given.op in COUNTS | CASTS | {"sum"}
        is_number = given is not None and given.dtype is not None and not given.dtype.is_floating_point
        return is_count or is_number
    if wiring.is_weighted(record):
        return record.op in CONTRACTIONS or "grouped_mm" in record.op
    if wiring.is_product(record):
        return False
    if record.op in NORMS:
        return len(record.args[1]) == 1  # over the last dimension alone
    if record.op in STATISTICS | ALONG_ONE_DIMENSION:
        shape = wiring.shape(wiring.operands(record)[0]) or ()
        return record.op == "sum" or _dims_of(record) in ([-1], [len(shape) - 1])
    return is_elementwise(record) or record.op in REARRANGEMENTS | SELECTIONS | CONCATENATIONS | DISPATCHES


def _has_rows(shape: Sequence[Size] | None, stream: Sequence[Size]) -> bool:
    """True if a value may hold something else for each row of the stream."""
    return shape is None or (
        len(shape) >= len(stream) - 1 and all(size != 1 for size in shape[: len(stream) - 1])
    )


def _rows(axes: Axes | None) -> tuple[tuple[str, ...], ...] | None:
    """The axes of each dimension, by name, features taken together."""
    if axes is None:
        return None
    return tuple(_in_order((packed,)) for packed in axes)


def _in_order(axes: Axes) -> tuple[str, ...]:
    """The axes one behind the other, whether or not rows are flattened into one dimension."""
    names = (axis.name.partition(".")[0] for packed in axes for axis in packed)
    return tuple(name for name, _ in groupby(names))


def _is_feature(axes: Axes, dim: int) -> bool:
    return all(axis.name.startswith("feature") for axis in axes[dim])


def _followed(wiring: Wiring, record: Record, known: dict[str, Axes]) -> Axes | None:
    """The axes of the record's value, where it acts on features alone; None where it may not."""
    reads = [name for name in wiring.operands(record) if name in known]
    axes = known[reads[0]]
    if wiring.is_linear(record):
        return _projected_axes(record, reads, axes)
    if record.op in REARRANGEMENTS and record.op not in COPIES:
        return after(record, axes)
    if is_elementwise(record):
        return _broadcast(record, [known[name] for name in reads])
    if len(reads) > 1 and record.op not in CONCATENATIONS | {"stack"}:
        return None
    dims, dim = len(axes), _dim_of(record, 2 if record.op in SPLITS else 1)
    is_feature = dim is not None and -dims <= dim < dims and _is_feature(axes, dim % dims)
    match record.op:
        case op if op in NORMS:
            return axes if len(record.args[1]) == 1 and _is_feature(axes, dims - 1) else None
        case op if op in STATISTICS:
            return _reduced(record, axes)
        case op if op in ALONG_ONE_DIMENSION:
            along = _dims_of(record)
            return axes if along and _is_feature(axes, along[0] % dims) else None
        case op if op in SPLITS:
            return axes if is_feature else None
        case "unbind" | "select":
            return axes[: dim % dims] + axes[dim % dims + 1 :] if is_feature and dim is not None else None
        case "getitem":
            found = after(record, axes)
            return found if found is not None and _rows(found) == _rows(axes) else None
        case "slice" | "narrow":
            is_whole = dim is not None and record.shape == wiring.shape(reads[0])
            return after(record, axes) if is_feature or is_whole else None
        case op if op in CONCATENATIONS | {"stack"}:
            return _joined(wiring, record, [known[name] for name in reads], dim)
        case op if op in PADS:
            return after(record, axes) if len(record.args[1]) == 2 and _is_feature(axes, dims - 1) else None
        case _:
            return None


def _dim_of(record: Record, index: int) -> int | None:
    """The dimension that an operation is along, the argument at `index`, where it is one."""
    dim = record.args[index] if len(record.args) > index else record.kwargs.get("dim", 0)
    return dim if isinstance(dim, int) else None


def _projected_axes(record: Record, reads: Sequence[str], axes: Axes) -> Axes | None:
    """The axes behind a product with a weight, where it contracts features alone."""
    shape = record.shape
    if shape is None or len(reads) != 1:
        return None
    if record.op == "einsum":
        return _einsum_axes(record, reads[0], axes)
    factors = [arg.name for arg in record.args if isinstance(arg, Ref)]
    first = factors[1 if record.op in BIASED_PRODUCTS else 0]
    if first != reads[0] or len(shape) != len(axes) or not _is_feature(axes, len(axes) - 1):
        return None
    return (*axes[:-1], (Axis("feature", shape[-1]),))


def _einsum_axes(record: Record, read: str, axes: Axes) -> Axes | None:
    equation = str(record.args[0]).replace(" ", "")
    factors, _, result = equation.partition("->")
    operands = [arg.name for arg in record.args[1] if isinstance(arg, Ref)]
    letters = factors.split(",")[operands.index(read)]
    if not equation.replace("->", "").replace(",", "").isalpha() or record.shape is None:
        return None
    if not all(_is_feature(axes, dim) for dim, letter in enumerate(letters) if letter not in result):
        return None
    return tuple(
        axes[letters.index(letter)] if letter in letters else (Axis("feature", size),)
        for letter, size in zip(result, record.shape, strict=True)
    )


def _broadcast(record: Record, found: Sequence[Axes]) -> Axes | None:
    """The axes of an elementwise value: in each dimension those of the operand that extends there.

    Where just a constant does, these are features: a position has its own row already.
    """
    if record.shape is None:
        return None
    merged: list[tuple[Axis, ...]] = []
    for back in range(len(record.shape), 0, -1):
        packs = [axes[-back] for axes in found if len(axes) >= back and axes[-back]]
        names = {tuple(axis.name.partition(".")[0] for axis in pack) for pack in packs}
        if len(names) > 1:
            return None
        size = record.shape[-back]
        merged.append(packs[0] if packs else () if size == 1 else (Axis("feature", size),))
    return tuple(merged)


def _dims_of(record: Record) -> list[int]:
    """The dimensions that a reduction is over; empty where it is over all."""
    index = 2 if record.op in {"linalg_vector_norm", "norm", "topk"} else 1
    default = -1 if record.op in ALONG_ONE_DIMENSION else None
    given = record.args[index] if len(record.args) > index else record.kwargs.get("dim", default)
    if isinstance(given, int) and not isinstance(given, bool):
        return [given]
    return [dim for dim in given if isinstance(dim, int)] if isinstance(given, list | tuple) else []


def _reduced(record: Record, axes: Axes) -> Axes | None:
    dims = _dims_of(record)
    if not dims or record.shape is None:
        return None
    dropped = {dim % len(axes) for dim in dims}
    if not all(_is_feature(axes, dim) for dim in dropped):
        return None
    if len(record.shape) == len(axes):
        return tuple(() if dim in dropped else packed for dim, packed in enumerate(axes))
    return tuple(packed for dim, packed in enumerate(axes) if dim not in dropped)


def _joined(wiring: Wiring, record: Record, found: Sequence[Axes], dim: int | None) -> Axes | None:
    """The axes of values that are joined along features, or stacked along a new dimension of features."""
    if dim is None or record.shape is None or len(found) != len(wiring.operands(record)):
        return None
    index, is_new, first = dim % len(record.shape), record.op == "stack", found[0]
    if any(_rows(axes) != _rows(first) or not (is_new or _is_feature(axes, index)) for axes in found):
        return None
    behind = first[index if is_new else index + 1 :]
    return (*first[:index], (Axis("feature", record.shape[index]),), *behind)
