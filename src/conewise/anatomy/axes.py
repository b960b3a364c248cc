"""Named axes of values: followed through operations, shown as views, resolved into selections."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from conewise.errors import MissingSiteError
from conewise.program.records import AXIS_KEEPING, PERMUTATIONS, Record, SizeRef
from conewise.program.sizes import Size, SizeTable, is_equal, quotient


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its name and its length, symbolic where it varies from run to run."""

    name: str
    length: Size


Kept = Mapping[int, tuple[int, ...]]
"""The entries of a value that are kept along some of the dimensions; all of them along the others."""

Axes = tuple[tuple[Axis, ...], ...]
"""For each dimension of a tensor the axes packed in it, outermost first."""


def one_per_dimension(names: Sequence[str], shape: Sequence[Size]) -> Axes:
    """The axes of a tensor whose dimensions are one axis each."""
    return tuple((Axis(name, length),) for name, length in zip(names, shape, strict=True))


def before(record: Record, after: Axes, shape: Sequence[Size] | None) -> Axes | None:
    """The axes of the record's tensor input (of `shape`), given those of its value; None if unclear."""
    if shape is None:
        return after
    match record.op:
        case op if op in PERMUTATIONS:
            order = order_of(record, len(after))
            return tuple(after[order.index(dim)] for dim in range(len(after)))
        case "unsqueeze":
            dim = int(record.args[1]) % len(after)
            return after[:dim] + after[dim + 1 :]
        case "select":
            dim = int(record.args[1]) % len(shape)
            return (*after[:dim], (Axis("part", shape[dim]),), *after[dim:])
        case "expand" | "expand_as":
            return _narrowed(after[len(after) - len(shape) :], shape)
        case "repeat_interleave":
            return _narrowed(after, shape)
        case "view" | "reshape" | "_unsafe_view" | "flatten" | "unflatten" | "squeeze":
            return regroup(after, shape)
        case _ if len(shape) == len(after):
            return _with_lengths(record, after, shape)
        case _:
            return None


def after(record: Record, before: Axes) -> Axes | None:
    """The axes of the record's value, given those of its tensor input; None if unclear."""
    if record.shape is None:
        return before
    match record.op:
        case op if op in PERMUTATIONS:
            return tuple(before[dim] for dim in order_of(record, len(before)))
        case "unsqueeze" | "view" | "reshape" | "_unsafe_view" | "flatten" | "unflatten" | "squeeze":
            return regroup(before, record.shape)
        case _ if len(record.shape) == len(before):
            return _with_lengths(record, before, record.shape)
        case _:
            return None


def regroup(axes: Axes, shape: Sequence[Size]) -> Axes | None:
    """The same axes in the same order, packed into dimensions of `shape`.

    An axis that spans two dimensions is cut in two (`head` into `head` and `head.rest`); None
    when the lengths do not fit.
    """
    waiting = [axis for dim in axes for axis in dim if axis.length != 1]
    grouped: list[tuple[Axis, ...]] = []
    for size in shape:
        packed: list[Axis] = []
        left: Size = size
        while left != 1:
            if not waiting:
                return None
            axis = waiting.pop(0)
            rest = quotient(left, axis.length)
            if rest is None:
                part = quotient(axis.length, left)
                if part is None:
                    return None
                waiting.insert(0, Axis(f"{axis.name}.rest", part))
                axis, rest = Axis(axis.name, left), 1
            packed.append(axis)
            left = rest
        grouped.append(tuple(packed))
    return None if waiting else tuple(grouped)


def order_of(record: Record, dims: int) -> list[int]:
    """The input dimension that each dimension of the value comes from."""
    order = list(range(dims))
    match record.op:
        case "permute":
            return [int(dim) % dims for dim in record.args[1]]
        case "transpose" | "swapaxes":
            first, second = int(record.args[1]) % dims, int(record.args[2]) % dims
        case "numpy_T":
            return order[::-1]
        case _:
            first, second = dims - 2, dims - 1
    order[first], order[second] = order[second], order[first]
    return order


def _narrowed(axes: Axes, shape: Sequence[Size]) -> Axes:
    """The axes of a value before it was repeated: a dimension of size 1 holds none."""
    narrowed: list[tuple[Axis, ...]] = []
    for packed, size in zip(axes, shape, strict=True):
        if size == 1:
            narrowed.append(())
        elif len(packed) == 1:
            narrowed.append((Axis(packed[0].name, size),))
        else:
            narrowed.append(packed)
    return tuple(narrowed)


def _with_lengths(record: Record, axes: Axes, shape: Sequence[Size]) -> Axes | None:
    """The same axes, with the lengths that `shape` gives; None where a packed dimension changed."""
    relengthened: list[tuple[Axis, ...]] = []
    for packed, size in zip(axes, shape, strict=True):
        total: Size = 1
        for axis in packed:
            total = total * axis.length
        if is_equal(total, size):
            relengthened.append(packed)
        elif len(packed) == 1 and (record.op in AXIS_KEEPING or size == 1):
            relengthened.append((Axis(packed[0].name, size),))
        else:
            return None
    return tuple(relengthened)


Selection = Mapping[str, int | slice | Sequence[int]]


def resolved(axes: Sequence[str], selection: Selection, shape: Sequence[int]) -> tuple[Any, ...]:
    """An index into a tensor of these axes and this shape.

    Lists on several axes select every combination of theirs, in the order of the axes. Raises
    MissingSiteError for an axis that is not there, and for what lies outside of an axis: nothing
    is cut off silently, and an empty part is no part.
    """
    unknown = [axis for axis in selection if axis not in axes]
    if unknown:
        raise MissingSiteError(f"no axis {unknown[0]!r} here: this site's axes are {', '.join(axes)}.")
    index = [
        _checked(axis, selection[axis], size) if axis in selection else slice(None)
        for axis, size in zip(axes, shape, strict=True)
    ]
    if sum(isinstance(part, list) for part in index) < 2:
        return tuple(index)
    return _combined(index, shape)


def selected(part: int | slice | Sequence[int], size: int) -> int:
    """Count the entries of an axis of this size that a selection means."""
    if isinstance(part, slice):
        return len(range(*part.indices(size)))
    return len(part) if isinstance(part, Sequence) else 1


def _checked(axis: str, part: Any, size: int) -> int | slice | list[int]:
    """`part` of an axis of this size, numbers counted from the front."""
    if isinstance(part, slice):
        if part.step is not None and part.step < 1:
            raise MissingSiteError(f"{axis}={part}: a slice goes forward, by a step of at least 1.")
        if not range(*part.indices(size)):
            raise MissingSiteError(f"{axis}={part} selects nothing: {_span(axis, size)}.")
        return part
    if isinstance(part, Sequence) and not isinstance(part, str):
        numbers = [_number(axis, item, size) for item in part]
        if not numbers:
            raise MissingSiteError(f"{axis}=[] selects nothing: {_span(axis, size)}.")
        if len(set(numbers)) < len(numbers):
            raise MissingSiteError(f"{axis}={list(part)} names an entry twice.")
        return numbers
    return _number(axis, part, size)


def _number(axis: str, part: Any, size: int) -> int:
    try:
        number = operator.index(part)
    except TypeError:
        number = None
    if number is None or isinstance(part, bool):
        raise MissingSiteError(f"{axis} is a number, a slice or a list of numbers, and {part!r} is none.")
    if not -size <= number < size:
        raise MissingSiteError(f"no {axis} {number}: {_span(axis, size)}.")
    return number % size


def _span(axis: str, size: int) -> str:
    return f"the axis {axis!r} has {size} entr{'ies' if size != 1 else 'y'} here, 0 to {size - 1}"


def _combined(index: Sequence[int | slice | list[int]], shape: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Every combination: torch alone would pair the lists up."""
    kept = [dim for dim, part in enumerate(index) if not isinstance(part, int)]
    tensors: list[torch.Tensor] = []
    for dim, part in enumerate(index):
        if isinstance(part, int):
            tensors.append(torch.tensor(part))
            continue
        numbers = list(range(*part.indices(shape[dim]))) if isinstance(part, slice) else part
        behind = len(kept) - 1 - kept.index(dim)
        tensors.append(torch.tensor(numbers).reshape(-1, *[1] * behind))
    return tuple(tensors)


@dataclass(frozen=True, slots=True)
class View:
    """The natural axes of a value, in order, and where they lie in the node's dimensions.

    `packing` names the axes in each dimension, outermost first; `lengths` are the lengths of the
    axes that share a dimension: fixed, or an entry of the run's sizes, or (for one of them) left
    open. Presenting is splitting dimensions and permuting them, so it is a view of memory for
    every layout of strides, and never a copy.
    """

    axes: tuple[str, ...]
    packing: tuple[tuple[str, ...], ...]
    lengths: Mapping[str, int | SizeRef]

    def present(self, value: torch.Tensor, sizes: Sequence[int] = (), leading: int = 0) -> torch.Tensor:
        """The value with `axes` as its dimensions; shares memory with it.

        `sizes` are those of the run that the value comes from. So many `leading` dimensions stay in front.
        """
        for at in reversed(range(len(self.packing))):
            packed, dim = self.packing[at], at + leading
            if not packed:
                value = value.squeeze(dim)
            elif len(packed) > 1:
                known = [self.lengths.get(axis, -1) for axis in packed]
                shape = [sizes[n.index] if isinstance(n, SizeRef) else n for n in known]
                value = value.view(*value.shape[:dim], *shape, *value.shape[dim + 1 :])
        flat = [axis for packed in self.packing for axis in packed]
        return value.permute([*range(leading), *(leading + flat.index(axis) for axis in self.axes)])

    def narrowed(self, shape: Sequence[Size], kept: Kept) -> View | None:
        """The view of what is left of a value of this shape; None where no whole entries of an axis are."""
        lengths = dict(self.lengths)
        for dim, entries in kept.items():
            packed, size = self.packing[dim], shape[dim]
            known = [lengths.get(axis, -1 if len(packed) > 1 else size) for axis in packed]
            if not isinstance(size, int) or not all(isinstance(one, int) for one in known):
                return None
            numbers = [one for one in known if isinstance(one, int)]
            there = math.prod(one for one in numbers if one != -1)
            numbers = [size // there if one == -1 else one for one in numbers]
            left = split_entries([size], {0: entries}, numbers)
            if left is None:
                return None
            lengths |= {axis: len(left.get(at, range(numbers[at]))) for at, axis in enumerate(packed)}
        return View(self.axes, self.packing, lengths)

    def lengths_in(self, shape: Sequence[int], sizes: Sequence[int] = ()) -> tuple[int, ...]:
        """The length of each natural axis of a value of this shape."""
        return tuple(self.present(torch.empty(tuple(shape), device="meta"), sizes).shape)

    def index(self, selection: Selection) -> tuple[Any, ...]:
        """An index into the presented value. Raises MissingSiteError for an axis it has not."""
        unknown = [axis for axis in selection if axis not in self.axes]
        if unknown:
            features = [axis for axis in self.axes if axis in {"d_model", "d_head"}]
            also = f" (`d` of `cw.sites` is {features[0]!r} here)" if unknown[0] == "d" and features else ""
            raise MissingSiteError(
                f"no axis {unknown[0]!r} here: this site's axes are {', '.join(self.axes)}{also}."
            )
        return tuple(selection.get(axis, slice(None)) for axis in self.axes)

    def read(self, value: torch.Tensor, selection: Selection, sizes: Sequence[int] = ()) -> torch.Tensor:
        """The selected part, in natural axes; an axis selected by a number is dropped."""
        shown = self.present(value, sizes)
        return shown[resolved(self.axes, selection, shown.shape)]

    def replace(
        self,
        value: torch.Tensor,
        selection: Selection,
        part: torch.Tensor,
        sizes: Sequence[int] = (),
    ) -> torch.Tensor:
        """A copy of `value`, its strides kept, whose selected part is `part`.

        Raises MissingSiteError when the part has another shape, dtype or device: nothing is cast
        or broadcast silently.
        """
        fresh = value.clone()
        target = self.present(fresh, sizes)
        index = resolved(self.axes, selection, target.shape)
        found = (tuple(part.shape), part.dtype, part.device)
        hole = target[index]
        expected = (tuple(hole.shape), hole.dtype, hole.device)
        if found != expected:
            raise MissingSiteError(
                f"the new value has shape {found[0]}, {found[1]}, on {found[2]}; this part has "
                f"shape {expected[0]}, {expected[1]}, on {expected[2]}."
            )
        target[index] = part
        return fresh


def split_entries(sizes: Sequence[int], kept: Kept, others: Sequence[int]) -> Kept | None:
    """The entries along other dimensions of the same numbers; None where they are not whole ones of these."""
    mask = torch.ones(list(sizes), dtype=torch.bool)
    for dim, entries in kept.items():
        own = torch.zeros(sizes[dim], dtype=torch.bool)
        own[list(entries)] = True
        mask &= own.view([-1 if at == dim else 1 for at in range(len(sizes))])
    return entries_of(mask.reshape(list(others)))


def entries_of(mask: torch.Tensor) -> Kept | None:
    """The entries along each dimension that a mask keeps; None where it keeps others than their product."""
    product = torch.ones_like(mask)
    found: dict[int, tuple[int, ...]] = {}
    for dim, size in enumerate(mask.shape):
        rest = [at for at in range(mask.ndim) if at != dim]
        own = mask.any(dim=rest) if rest else mask
        product &= own.view([-1 if at == dim else 1 for at in range(mask.ndim)])
        if size > 1 and not bool(own.all()):
            found[dim] = tuple(own.nonzero().flatten().tolist())
    return found if torch.equal(product, mask) else None


def view_of(axes: Axes | None, natural: Sequence[str], sizes: SizeTable) -> View | None:
    """The view that shows a value of these axes in the `natural` order.

    None when an axis is missing or one is left over. Lengths that vary from run to run are
    entered in `sizes` where a dimension packs more than one of them.
    """
    if axes is None:
        return None
    names = [axis.name for packed in axes for axis in packed]
    if sorted(names) != sorted(natural):
        return None
    lengths: dict[str, int | SizeRef] = {}
    for packed in axes:
        varying = [axis for axis in packed if not isinstance(axis.length, int)]
        for axis in packed:
            if isinstance(axis.length, int):
                lengths[axis.name] = axis.length
            elif axis is not varying[0]:
                lengths[axis.name] = SizeRef(sizes.index(axis.length))
    packing = tuple(tuple(axis.name for axis in packed) for packed in axes)
    return View(tuple(natural), packing, lengths)
