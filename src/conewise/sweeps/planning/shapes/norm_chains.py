"""Root-mean-square norms written out: x / √(mean(x²) + ε), with weights or without, in any precision.

In half precision they are written with casts, and the norm itself is in float32. The kernel casts inside. It
rounds once where the chain may round twice, before it is scaled by the weights and behind that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from conewise.program.records import Program, Record, Ref
from conewise.program.rules import Rule

Tensor = torch.Tensor
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm without weights: of the value `of`, which is in float32; `inside` are all records of it."""

    of: str
    epsilon: float
    inside: frozenset[str]


class NormChains:
    """Finds norms in a program, by the record that ends one."""

    def __init__(self, program: Program) -> None:
        self._records = program.record_of
        self._dtypes = {leaf.name: leaf.dtype for leaf in program.inputs}
        self._dtypes |= {r.name: r.dtype for r in program.records if r.dtype is not None}
        # Vectors that a norm may be scaled by: weights, and what is made of them alone.
        self._vectors: dict[str, tuple[Any, torch.dtype | None]] = {
            source.name: (len(source.value), source.value.dtype)
            for source in program.sources
            if source.value.dim() == 1
        }
        for record in program.records:
            if record.shape is not None and len(record.shape) == 1 and record.name not in program.varying:
                self._vectors[record.name] = record.shape[0], record.dtype

    def ending_in(self, record: Record) -> tuple[frozenset[str], tuple[str, ...], Rule] | None:
        """The norm whose last record this is: the records inside of it, what it reads, its rule."""
        if record.dtype == torch.float32:
            return self._of_float32(record)
        if record.dtype in HALVES:
            return self._of_half(record)
        return None

    def _of_float32(self, record: Record) -> tuple[frozenset[str], tuple[str, ...], Rule] | None:
        for weight, scaled in self._weighted(record, record.dtype):
            norm = self._norm(scaled)
            if norm is not None and self._is_as_wide(norm.of, weight):
                return norm.inside, (norm.of, weight), partial(_weighted, norm.epsilon)
        norm = self._norm(record)
        if norm is None or Ref(norm.of) not in record.args:
            return None
        return norm.inside - {record.name}, (norm.of,), partial(_plain, norm.epsilon)

    def _of_half(self, record: Record) -> tuple[frozenset[str], tuple[str, ...], Rule] | None:
        """Cast up, normed, and cast down: before it is scaled, behind that, or without being scaled."""
        assert record.dtype is not None
        down = self._cast(record, record.dtype)
        if down is not None:
            for weight, scaled in self._weighted(down, record.dtype):
                found = self._half(self._norm(scaled), record.dtype)
                if found is not None and self._is_as_wide(found.of, weight):
                    inside = found.inside | {down.name}
                    return inside, (found.of, weight), partial(_weighted, found.epsilon)
            found = self._half(self._norm(down), record.dtype)
            return None if found is None else (found.inside, (found.of,), partial(_plain, found.epsilon))
        for weight, scaled in self._weighted(record, record.dtype):
            cast = self._cast(scaled, record.dtype)
            found = None if cast is None else self._half(self._norm(cast), record.dtype)
            if found is not None and self._is_as_wide(found.of, weight):
                inside = found.inside | {scaled.name}
                return inside, (found.of, weight), partial(_weighted, found.epsilon)
        return None

    def _norm(self, record: Record) -> _Norm | None:
        """The norm x · rsqrt(mean(x²) + ε) over the last dimension, in float32."""
        if record.op != "mul" or record.kwargs or record.dtype != torch.float32 or len(record.args) != 2:
            return None
        for value, factor in (record.args, record.args[::-1]):
            (shifted,) = self._at(factor, "rsqrt", 1)
            mean, epsilon = self._at(shifted, "add", 2)
            square, dims, keeps = self._at(mean, "mean", 3)
            squared, power = self._at(square, "pow", 2)
            if (power, dims, keeps) != (2, [-1], True) or not isinstance(epsilon, float):
                continue
            if not isinstance(value, Ref) or not isinstance(squared, Ref):
                continue
            inside = {record.name, factor.name, shifted.name, mean.name, square.name}
            if squared == value and self._dtypes.get(value.name) == torch.float32:
                return _Norm(value.name, epsilon, frozenset(inside))
            if self._raised(squared.name) == value.name:  # cast for the mean alone; the product casts it too
                return _Norm(squared.name, epsilon, frozenset(inside))
        return None

    def _half(self, norm: _Norm | None, dtype: torch.dtype) -> _Norm | None:
        """The same norm of the value before it was cast to float32."""
        below = None if norm is None else self._raised(norm.of)
        if norm is None or below is None or self._dtypes.get(below) != dtype:
            return None
        return _Norm(below, norm.epsilon, norm.inside | {norm.of})

    def _raised(self, name: str) -> str | None:
        """What a record casts to float32."""
        record = self._records.get(name)
        is_cast = record is not None and record.dtype == torch.float32 and _is_cast(record)
        return record.inputs[0] if record is not None and is_cast else None

    def _cast(self, record: Record | None, dtype: torch.dtype) -> Record | None:
        """The record of float32 that a record casts down."""
        if record is None or record.dtype != dtype or not _is_cast(record):
            return None
        read = self._records.get(record.inputs[0])
        return read if read is not None and read.dtype == torch.float32 else None

    def _weighted(self, record: Record, dtype: torch.dtype | None) -> list[tuple[str, Record]]:
        """The ways to read a product as one of a weight of this dtype, and a record."""
        if record.op != "mul" or record.kwargs or len(record.args) != 2:
            return []
        found = []
        for weight, scaled in (record.args, record.args[::-1]):
            if not isinstance(weight, Ref) or not isinstance(scaled, Ref) or scaled.name not in self._records:
                continue
            if weight.name in self._vectors and self._vectors[weight.name][1] == dtype:
                found.append((weight.name, self._records[scaled.name]))
        return found

    def _is_as_wide(self, value: str, weight: str) -> bool:
        record = self._records.get(value)
        return record is not None and (record.shape or ())[-1:] == (self._vectors[weight][0],)

    def _at(self, ref: Any, op: str, arguments: int) -> tuple[Any, ...]:
        found = self._records.get(ref.name) if isinstance(ref, Ref) else None
        fits = found is not None and found.op == op and len(found.args) == arguments and not found.kwargs
        return found.args if found is not None and fits else (None,) * arguments


def _is_cast(record: Record) -> bool:
    """Whether a record gives the numbers that it reads first, in another precision."""
    is_read = bool(record.args) and isinstance(record.args[0], Ref)
    return record.op in {"to", "_to_copy", "type_as", "float"} and is_read


def _weighted(epsilon: float, value: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(value, weight.shape, weight, epsilon)


def _plain(epsilon: float, value: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(value, value.shape[-1:], None, epsilon)
