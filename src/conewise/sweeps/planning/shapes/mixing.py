"""Where a program mixes the rows of a batch: worlds can be stacked along the batch only where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conewise.program.records import SIZES, Record
from conewise.sweeps.planning.shapes.independence import Independence
from conewise.sweeps.planning.shapes.layout import Constants, Layout, compile_stacked_rule

Tensor = torch.Tensor
Variant = Callable[[Tensor, int, int], Tensor]
"""Another batch like a value's own, given where its batch lies and how many rows that has."""

Stacked = tuple[Variant, ...]
"""The batches that an operation is given, one behind the other."""

DOUBLE_TOLERANCE = 1e-10
"""How far a stack in float64 may lie from each batch alone, relative to the largest value.

Rounding in float64 is a million times smaller; what depends on a row's place, or on its neighbours, shows.
"""


class Trial:
    """Which nodes mix rows of the batch: most are known from their kind, the others are tried.

    A node that is tried is given two batches, one behind the other. Changing either must not move one bit
    of the other's result: the kernels are the same. And each result must be that of its batch alone, computed
    in float64, where rounding cannot be taken for a difference. Where a node fails, or cannot be computed
    so, or has no batch although what it reads has one, rows mix. `read` gives the values of a run; what only
    reads a mixture is not meant.

    The other batches are the same rows in another order, which show what goes by place; one row again and
    again, zeros, and numbers larger than any, which show what a batch has as a whole: its mean, its largest,
    what attention over it sees.
    """

    def __init__(self, layout: Layout, read: Callable[[str], Any]) -> None:
        self._layout = layout
        self._read = read
        self._records = layout.program.record_of
        self._constants = Constants(layout, read)
        self._independent = Independence(
            layout, layout.batch_dim, layout.batch_symbols, self._constants.alike
        )
        self._several: dict[tuple[str, Stacked, bool], Any] = {}

    def is_batch_independent(self, name: str) -> bool:
        """Whether rows of the batch stay apart in the node of that name."""
        return self._independent.known(name) or self._is_tried(name)

    @torch.no_grad()
    def _is_tried(self, name: str) -> bool:
        record = self._records[name]
        if self._layout.batch_dim.get(name) is None and record.shape is not None:
            return False
        try:
            return self._is_unmoved(record) and all(
                self._is_stacked(record, one) for one in (_turned, _one_row)
            )
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False

    def _is_unmoved(self, record: Record) -> bool:
        """Whether neither half of a stack moves when the other is changed."""
        if record.shape is None:
            return True  # its parts are looked at where they are taken out
        for half in (0, 1):
            kept: Tensor | None = None
            for other in VARIANTS:
                both = self._value(record, (_same, other) if half == 0 else (other, _same))
                part = self._halves(record.name, both)[half]
                if kept is not None and not _equal(part, kept):
                    return False
                kept = part
        return True

    def _is_stacked(self, record: Record, other: Variant) -> bool:
        """Whether a stack is what its batches are alone, one behind the other."""
        if record.shape is None:
            return True
        dim, is_double = self._layout.batch_dim[record.name], self._can_double()
        both = self._value(record, (_same, other), is_double)
        alone = [self._value(record, (one,), is_double) for one in (_same, other)]
        if not isinstance(both, Tensor) or dim is None or both.shape[dim] != sum(o.shape[dim] for o in alone):
            return False
        return all(map(_close, self._halves(record.name, both), alone))

    def _halves(self, name: str, both: Any) -> tuple[Tensor, Tensor]:
        dim = self._layout.batch_dim[name]
        if not isinstance(both, Tensor) or dim is None or both.shape[dim] % 2:
            raise ValueError("no stack of two batches")
        one, other = both.chunk(2, dim)
        return one, other

    def _can_double(self) -> bool:
        return all(source.value.device.type != "mps" for source in self._layout.program.sources)

    def _value(self, record: Record, batches: Stacked, is_double: bool = False) -> Any:
        """The node's value for batches that lie one behind the other."""
        key = record.name, batches, is_double
        if key in self._several:
            return self._several[key]
        rule = compile_stacked_rule(record)
        value = rule(*[self._operand(read, batches, is_double) for read in record.inputs])
        if not isinstance(value, Tensor):
            self._several[key] = value
        return value

    def _operand(self, name: str, batches: Stacked, is_double: bool) -> Any:
        if name == SIZES:
            return self._layout.sizes(len(batches))
        if name not in self._layout.varying:
            return _doubled(self._constants.stacked(name, len(batches)), is_double)
        record = self._records.get(name)
        if record is not None and record.shape is None:
            return self._value(record, batches, is_double)
        value, dim = _doubled(self._read(name), is_double), self._layout.batch_dim.get(name)
        if dim is None:
            return value
        return torch.cat([variant(value, dim, self._layout.batch) for variant in batches], dim)


def _doubled(value: Any, is_double: bool) -> Any:
    return value.double() if is_double and isinstance(value, Tensor) and value.is_floating_point() else value


def _same(value: Tensor, _: int, __: int) -> Tensor:
    return value


def _one_row(value: Tensor, batch_dim: int, batch: int) -> Tensor:
    """Another batch of the same kind: its last row again and again, or its last slice elsewhere."""
    rows = value.unflatten(batch_dim, (batch, -1))  # type: ignore[no-untyped-call]
    for dim in [batch_dim, *reversed(range(rows.ndim))]:
        again: Tensor = rows.narrow(dim, rows.shape[dim] - 1, 1).expand(rows.shape)
        if not torch.equal(again, rows):
            return again.reshape(value.shape)
    return _turned(value, batch_dim, batch)


def _turned(value: Tensor, batch_dim: int, _: int) -> Tensor:
    """Another batch of the same kind: its rows exchanged or turned round, or other values of like size."""
    for dim in [batch_dim, *reversed(range(value.ndim))]:
        turned = value.flip(dim)
        if not torch.equal(turned, value):
            return turned
    if value.dtype == torch.bool:
        return value.logical_not()
    if value.is_floating_point():
        return value * 0.5 + 0.25
    return torch.where(value > 0, value - 1, value + 1)


def _quiet(value: Tensor, _: int, __: int) -> Tensor:
    """The least of the same kind: zeros, or the smallest number that is there."""
    if value.is_floating_point() or value.dtype == torch.bool or not value.numel():
        return torch.zeros_like(value)
    return value.min().expand(value.shape)


def _loud(value: Tensor, _: int, __: int) -> Tensor:
    """More than is there: larger numbers of both signs, or the largest."""
    if value.dtype == torch.bool or not value.numel():
        return torch.ones_like(value)
    if not value.is_floating_point():
        return value.max().expand(value.shape)
    finite = torch.where(torch.isfinite(value), value, 0)
    scale = 4 * finite.abs().max() + 1
    signs = torch.arange(value.numel(), device=value.device).remainder(2).mul(2).sub(1).view(value.shape)
    return finite + scale.to(value.dtype) * signs.to(value.dtype)


VARIANTS: Stacked = (_turned, _one_row, _quiet, _loud)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Equal element by element, NaN equal to NaN."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _close(one: Tensor, other: Tensor) -> bool:
    """Equal but for rounding, element by element; infinities and NaN are where they are."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    finite = torch.isfinite(other)
    if not _equal(torch.where(finite, 0, one), torch.where(finite, 0, other)):
        return False
    left, right = torch.where(finite, one, 0).double(), torch.where(finite, other, 0).double()
    if not right.numel():
        return True
    # What was cast to fewer bits may round to either neighbour.
    own = 4 * torch.finfo(one.dtype).eps * right.abs()
    return bool(((left - right).abs() <= own + DOUBLE_TOLERANCE * right.abs().max()).all())
