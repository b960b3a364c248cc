"""Where a program mixes the rows of a batch: worlds can be stacked along the batch only where it does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from conewise.frontends.torch.apart import Apart
from conewise.frontends.torch.records import SIZES, Record
from conewise.frontends.torch.stacking import Constants, Layout, compile_stacked_rule, tolerance_of

Other = Callable[[torch.Tensor, int, int], torch.Tensor]
"""Makes another batch of a value's, given where its batch lies and how many rows that has."""


class Trial:
    """Which nodes mix rows of the batch: most are known from their kind, the others are tried.

    A node that is tried is given two batches, one behind the other, and has to return what it returns for
    each alone, one behind the other. Where it does not, or cannot be computed so, or has no batch although
    what it reads has one, rows mix. `read` gives the values of a run; what only reads a mixture is not meant.

    It is tried with two other batches. The same rows in another order show what goes by place; they do not
    show what a batch has as a whole (its mean, what attention over it sees), which another number of the same
    rows does.
    """

    def __init__(self, layout: Layout, read: Callable[[str], Any]) -> None:
        self._layout = layout
        self._read = read
        self._records = {record.name: record for record in layout.program.records}
        self._constants = Constants(layout, read)
        self._apart = Apart(layout, layout.batch_dim, layout.batch_symbols, self._constants.alike)
        self._several: dict[tuple[str, Other], tuple[Any, Any, Any]] = {}

    @torch.no_grad()
    def keeps_rows_apart(self, name: str) -> bool:
        """Whether rows of the batch stay apart in the node of that name."""
        if self._apart.known(name):
            return True
        record = self._records[name]
        if self._layout.batch_dim.get(name) is None and record.shape is not None:
            return False
        try:
            return all(self._is_stacked(name, *self._tried(record, other)) for other in (_turned, _one_row))
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False

    def _tried(self, record: Record, other: Other) -> tuple[Any, Any, Any]:
        """The node's value for a batch, for another one, and for both."""
        key = record.name, other
        if key not in self._several:
            rule = compile_stacked_rule(record)
            reads = [self._operands(read, other) for read in record.inputs]
            one, two, both = (rule(*values) for values in zip(*reads, strict=True))
            if isinstance(one, torch.Tensor):
                return one, two, both
            self._several[key] = one, two, both
        return self._several[key]

    def _operands(self, name: str, other: Other) -> tuple[Any, Any, Any]:
        if name == SIZES:
            return self._layout.sizes(1), self._layout.sizes(1), self._layout.sizes(2)
        if name not in self._layout.varying:
            value = self._constants.stacked(name, 1)
            return value, value, self._constants.stacked(name, 2)
        record = self._records.get(name)
        if record is not None and record.shape is None:
            return self._tried(record, other)
        value = self._read(name)
        dim = self._layout.batch_dim.get(name)
        if dim is None:
            return value, value, value
        two = other(value, dim, self._layout.batch)
        return value, two, torch.cat([value, two], dim)

    def _is_stacked(self, name: str, one: Any, other: Any, both: Any) -> bool:
        if not isinstance(both, torch.Tensor):
            return True  # its parts are looked at where they are taken out
        dim = self._layout.batch_dim.get(name)
        if dim is None or both.shape[dim] != one.shape[dim] + other.shape[dim]:
            return False
        halves = both.split([one.shape[dim], other.shape[dim]], dim)  # type: ignore[no-untyped-call]
        return _close(halves[0], one) and _close(halves[1], other)


def _one_row(value: torch.Tensor, batch_dim: int, batch: int) -> torch.Tensor:
    """Another batch of the same kind: its last row again and again, or its last slice elsewhere."""
    rows = value.unflatten(batch_dim, (batch, -1))  # type: ignore[no-untyped-call]
    for dim in [batch_dim, *reversed(range(rows.ndim))]:
        again: torch.Tensor = rows.narrow(dim, rows.shape[dim] - 1, 1).expand(rows.shape)
        if not torch.equal(again, rows):
            return again.reshape(value.shape)
    return _turned(value, batch_dim, batch)


def _turned(value: torch.Tensor, batch_dim: int, _: int) -> torch.Tensor:
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


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance, scale = tolerance_of(one.dtype), float(other.abs().max()) if other.numel() else 0.0
    if math.isfinite(scale):
        return not one.numel() or float((one - other).abs().max()) <= tolerance * max(scale, 1e-30)
    finite = torch.isfinite(other)
    if not torch.equal(finite, torch.isfinite(one)):
        return False
    left, right = torch.where(finite, one, 0), torch.where(finite, other, 0)
    return float((left - right).abs().max()) <= tolerance * max(float(right.abs().max()), 1e-30)
