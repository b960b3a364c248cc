"""Named axes of a tensor, followed through the operations that rearrange it.

A dimension may pack several axes: `[batch, pos, head·d_head]`. Following the axes of an
attention operand back to the projection, or of its result on to the next one, shows how the
heads lie in a value, whatever the architecture calls its modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conewise.program.operations import AXIS_KEEPING, PERMUTATIONS
from conewise.program.records import Record
from conewise.program.sizes import Size, is_equal, quotient


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its name and its length, symbolic where it varies from run to run."""

    name: str
    length: Size


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
