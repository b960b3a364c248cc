"""Views: how a node's value is shown in natural axes, and how a part of it is replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from conewise.errors import MissingSiteError
from conewise.program.records import SizeRef
from conewise.program.sizes import SizeTable
from conewise.structure.axes.axes import Axes
from conewise.structure.axes.selections import Selection, resolved


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
