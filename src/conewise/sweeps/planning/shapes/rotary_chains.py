"""Rotary embeddings written out: x · cos + (−x₂, x₁) · sin, where x₁ and x₂ are the halves of x.

Five kernels that read and write whole values become three, two of which do half of one. In half precision
they round less: a product is not rounded before it is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from conewise.program.records import Record, Ref
from conewise.program.rules import Rule

Tensor = torch.Tensor


def rotation_ending_in(
    record: Record, records: Mapping[str, Record]
) -> tuple[frozenset[str], tuple[str, ...], Rule] | None:
    """The rotation whose last record this is: the records inside of it, what it reads, its rule."""
    if record.op != "add" or record.kwargs or len(record.args) != 2:
        return None
    for straight, turned in (record.args, record.args[::-1]):
        for value, cos in _products(straight, records):
            for crossed, sin in _products(turned, records):
                found = _halves(value, crossed, records)
                if found is not None and cos != sin and _fits(record, value, (cos, sin), records):
                    inside = frozenset({straight.name, turned.name, crossed, *found})
                    half = _width(value, records) // 2
                    return inside, (value, cos, sin), partial(_rotated, half)
    return None


def _products(ref: Any, records: Mapping[str, Record]) -> list[tuple[str, str]]:
    """The ways to read a value as a product of two."""
    found = records.get(ref.name) if isinstance(ref, Ref) else None
    if found is None or found.op != "mul" or found.kwargs or len(found.inputs) != 2:
        return []
    if not all(isinstance(arg, Ref) for arg in found.args):
        return []
    one, other = found.inputs
    return [(one, other), (other, one)]


def _halves(value: str, crossed: str, records: Mapping[str, Record]) -> tuple[str, ...] | None:
    """The records that make (−x₂, x₁) of x, if `crossed` is that."""
    joined = records.get(crossed)
    rank, width = len(_shape(value, records)), _width(value, records)
    if joined is None or joined.op != "cat" or joined.kwargs or not width or width % 2:
        return None
    if len(joined.args) != 2 or joined.args[1] not in {-1, rank - 1} or len(joined.args[0]) != 2:
        return None
    first, second = joined.args[0]
    negative = records.get(first.name) if isinstance(first, Ref) else None
    if negative is None or negative.op != "neg" or not isinstance(second, Ref):
        return None
    names = negative.inputs[0], second.name
    for name, (start, stop) in zip(names, ((width // 2, width), (0, width // 2)), strict=True):
        part = records.get(name)
        if (
            part is None
            or part.op != "slice"
            or part.kwargs
            or part.inputs != (value,)
            or len(part.args) != 4
        ):
            return None
        _, dim, begins, ends = part.args
        if (
            dim not in {-1, rank - 1}
            or begins != start
            or not isinstance(ends, int)
            or min(ends, width) != stop
        ):
            return None
    return negative.name, *names


def _fits(record: Record, value: str, factors: tuple[str, str], records: Mapping[str, Record]) -> bool:
    """Whether the value keeps its shape and precision, and the factors are as wide as it is."""
    whole = records.get(value)
    if whole is None or whole.shape is None or (whole.shape, whole.dtype) != (record.shape, record.dtype):
        return False
    return all(
        _width(name, records) == _width(value, records) and records[name].dtype == record.dtype
        for name in factors
    )


def _shape(name: str, records: Mapping[str, Record]) -> tuple[Any, ...]:
    return (records[name].shape or ()) if name in records else ()


def _width(name: str, records: Mapping[str, Record]) -> int:
    """The size of the last dimension; 0 where it is not known."""
    width = _shape(name, records)[-1:]
    return width[0] if width and isinstance(width[0], int) else 0


def _rotated(half: int, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = value * cos
    out[..., :half].addcmul_(value[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(value[..., :half], sin[..., half:])
    return out
