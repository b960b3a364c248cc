"""Views: how a node's value is shown in natural axes, and how a part of it is replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from conewise.frontends.torch.axes import Axes
from conewise.frontends.torch.errors import MissingSiteError

Selection = Mapping[str, int | slice | Sequence[int]]


@dataclass(frozen=True, slots=True)
class View:
    """The natural axes of a value, in order, and where they lie in the node's dimensions.

    `packing` names the axes in each dimension, outermost first; `lengths` are the fixed lengths.
    At most one axis of a dimension has no fixed length. Presenting is splitting dimensions and
    permuting them, so it is a view of memory for every layout of strides, and never a copy.
    """

    axes: tuple[str, ...]
    packing: tuple[tuple[str, ...], ...]
    lengths: Mapping[str, int]

    def present(self, value: torch.Tensor) -> torch.Tensor:
        """The value with `axes` as its dimensions; shares memory with it."""
        for dim in reversed(range(len(self.packing))):
            packed = self.packing[dim]
            if len(packed) != 1:
                lengths = [self.lengths.get(axis, -1) for axis in packed]
                value = value.unflatten(dim, lengths) if packed else value.squeeze(dim)
        flat = [axis for packed in self.packing for axis in packed]
        return value.permute([flat.index(axis) for axis in self.axes])

    def index(self, selection: Selection) -> tuple[Any, ...]:
        """An index into the presented value. Raises MissingSiteError for an axis it has not."""
        unknown = [axis for axis in selection if axis not in self.axes]
        if unknown:
            raise MissingSiteError(
                f"no axis {unknown[0]!r} here: this site's axes are {', '.join(self.axes)}."
            )
        return tuple(selection.get(axis, slice(None)) for axis in self.axes)

    def read(self, value: torch.Tensor, selection: Selection) -> torch.Tensor:
        """The selected part, in natural axes; an axis selected by a number is dropped."""
        return self.present(value)[self.index(selection)]

    def replace(self, value: torch.Tensor, selection: Selection, part: torch.Tensor) -> torch.Tensor:
        """A copy of `value`, its strides kept, whose selected part is `part`.

        Raises MissingSiteError when the part has another shape, dtype or device: nothing is cast
        or broadcast silently.
        """
        fresh = value.clone()
        target = self.present(fresh)
        index = self.index(selection)
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


def view_of(axes: Axes | None, natural: Sequence[str]) -> View | None:
    """The view that shows a value of these axes in the `natural` order.

    None when an axis is missing, one is left over, or a dimension packs two axes of varying
    length, which no run-independent view could split.
    """
    if axes is None:
        return None
    names = [axis.name for packed in axes for axis in packed]
    if sorted(names) != sorted(natural):
        return None
    for packed in axes:
        if len(packed) > 1 and sum(not isinstance(axis.length, int) for axis in packed) > 1:
            return None
    lengths = {
        axis.name: axis.length for packed in axes for axis in packed if isinstance(axis.length, int)
    }
    packing = tuple(tuple(axis.name for axis in packed) for packed in axes)
    return View(tuple(natural), packing, lengths)
