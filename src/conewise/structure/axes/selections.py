"""Selections: which part of each natural axis is meant, resolved against the sizes of a run."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from conewise.errors import MissingSiteError

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
    """How many entries of an axis of this size a selection means."""
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
