"""Where a program mixes the rows of a batch: worlds can be stacked along the batch only where it does not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from conewise.frontends.torch.records import SIZES, Program, Record
from conewise.frontends.torch.stacking import Constants, Layout, compile_stacked_rule, tolerance_of


@torch.no_grad()
def try_stacking(program: Program, layout: Layout, inputs: Mapping[str, torch.Tensor]) -> Trial:
    """Which nodes mix rows of the batch, and which show the memory of others, each tried by itself.

    A node is given two batches, one behind the other, and has to return what it returns for each alone, one
    behind the other. Where it does not, or cannot be computed so, or has no batch although what it
    reads has one, rows mix. What only reads the mixture is not meant.
    """
    others = _others(inputs, [name for name in inputs if layout.batch_dim.get(name) is not None])
    trial = _Stacking(program, layout, dict(inputs), others)
    mixing = frozenset(record.name for record in program.records if not trial.keeps_rows_apart(record))
    return Trial(mixing, trial.shown)


@dataclass(frozen=True, slots=True)
class Trial:
    """What trying the nodes showed: those that mix rows, and for each view the node whose memory it shows."""

    mixing: frozenset[str]
    shown: Mapping[str, str]


class _Stacking:
    """Two batches alone, and each node on both together; records come in order."""

    def __init__(self, program: Program, layout: Layout, one: dict[str, Any], other: dict[str, Any]) -> None:
        sources = {source.name: source.value for source in program.sources}
        self._layout = layout
        self._one: dict[str, Any] = {**sources, **one, SIZES: layout.sizes(1)}
        self._other: dict[str, Any] = {**sources, **other, SIZES: layout.sizes(1)}
        self.shown: dict[str, str] = {}
        self._tuples: dict[str, Any] = {}
        self._constants = Constants(layout, self._one)
        self._has_batch = {
            leaf.name for leaf in program.inputs if layout.batch_dim.get(leaf.name) is not None
        }
        self._last_use = {name: record.name for record in program.records for name in record.inputs}

    def keeps_rows_apart(self, record: Record) -> bool:
        rule, name = compile_stacked_rule(record), record.name
        self._one[name] = rule(*[self._one[read] for read in record.inputs])
        self._other[name] = rule(*[self._other[read] for read in record.inputs])
        own = _storages(self._one[name])
        for read in record.inputs:
            if own & _storages(self._one[read]):
                self.shown[name] = read
        carries = any(read in self._has_batch for read in record.inputs)
        if carries:
            self._has_batch.add(name)
        try:
            return not carries or self._is_stacked(name, rule(*map(self._both, record.inputs)))
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False
        finally:
            self._forget(record)

    def _both(self, name: str) -> Any:
        """The two batches of a value, one behind the other."""
        if name == SIZES:
            return self._layout.sizes(2)
        if name in self._tuples:
            return self._tuples[name]
        if name not in self._layout.varying:
            return self._constants.stacked(name, 2)
        dim = self._layout.batch_dim.get(name)
        return self._one[name] if dim is None else torch.cat([self._one[name], self._other[name]], dim)

    def _is_stacked(self, name: str, both: Any) -> bool:
        if not isinstance(both, torch.Tensor):
            self._tuples[name] = both  # its parts are looked at where they are taken out
            return True
        one, other, dim = self._one[name], self._other[name], self._layout.batch_dim.get(name)
        if dim is None or both.shape[dim] != one.shape[dim] + other.shape[dim]:
            return False
        halves = both.split([one.shape[dim], other.shape[dim]], dim)  # type: ignore[no-untyped-call]
        return _close(halves[0], one) and _close(halves[1], other)

    def _forget(self, record: Record) -> None:
        # Constants are few, and are computed from one another again for a stack.
        for name in record.inputs:
            if self._last_use[name] == record.name and name in self._layout.varying:
                for values in (self._one, self._other, self._tuples):
                    values.pop(name, None)


def _storages(value: Any) -> set[int]:
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr()}
    return set().union(*map(_storages, value)) if isinstance(value, tuple | list) else set()


def _others(inputs: Mapping[str, torch.Tensor], batched: Iterable[str]) -> dict[str, torch.Tensor]:
    """Another batch of the same kind: the positions in reverse, the rows exchanged, or other values."""
    others = {name: _other(value) if name in set(batched) else value for name, value in inputs.items()}
    if all(torch.equal(others[name], inputs[name]) for name in inputs):
        # One token each, or all alike: other token ids, as small as these.
        others = {
            name: torch.where(value > 0, value - 1, value + 1)
            if name in set(batched) and not value.is_floating_point() and value.dtype != torch.bool
            else value
            for name, value in inputs.items()
        }
    return others


def _other(value: torch.Tensor) -> torch.Tensor:
    if value.is_floating_point():
        return -value.flip(0) + 0.5
    for dim in range(1, value.ndim):
        if not torch.equal(value, value.flip(dim)):
            return value.flip(dim)
    return value.flip(0)


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
