"""Chains of operations that one kernel computes: found in the program, used where nothing looks inside.

GELU is often written out as eight pointwise operations, each of which reads and writes the widest values of
the model. On a stack of worlds they are one, equal up to rounding. On CUDA so are norms and rotations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from conewise.program.records import Program, Record, Ref
from conewise.program.walk import Rule

CUBE, SCALE = 0.044715, 0.7978845608028654  # of the tanh approximation: √(2/π)


@dataclass(frozen=True, slots=True)
class Fusion:
    """`node` from `inputs` by one `rule`, without the nodes `inside`."""

    node: str
    inside: frozenset[str]
    inputs: tuple[str, ...]
    rule: Rule


def find_fusions(program: Program, device: torch.device) -> tuple[Fusion, ...]:
    """The chains of a program that one kernel of a device can compute, whatever reads them."""
    records = program.record_of
    found = [_tanh_gelu(record, records) for record in program.records]
    if device.type == "cuda":
        norms = NormChains(program)
        for record in program.records:
            chain = norms.ending_in(record) or rotation_ending_in(record, records)
            found.append(None if chain is None else Fusion(record.name, *chain))
    fusions = tuple(fusion for fusion in found if fusion is not None)
    return (
        fusions if len(program.devices) < 2 else tuple(one for one in fusions if _fits(one, program, device))
    )


def _fits(fusion: Fusion, program: Program, device: torch.device) -> bool:
    """True if a chain is computed on one device, of the kind that it was looked for on."""
    where = {record.name: record.device for record in program.records}
    where |= {leaf.name: leaf.device for leaf in program.inputs}
    where |= {name: value.device for name, value in program.source_values.items()}
    (own, *others) = {where[name] for name in (fusion.node, *fusion.inside, *fusion.inputs)}
    return not others and own is not None and own.type == device.type


def fitting(
    fusions: Iterable[Fusion],
    steps: Mapping[str, Any],
    kept: Collection[str],
    readers: Callable[[str], Iterable[str]],
) -> dict[str, Fusion]:
    """Those that some steps (node: all that says how it is computed) can use, by the node that they compute.

    Nodes of `kept` are looked at. What is inside of a fusion is computed just as its last node is, and
    nothing else reads it.
    """
    fit = {}
    for fusion in fusions:
        how = steps.get(fusion.node)
        if how is None:
            continue
        alone = all(
            steps.get(node) == how
            and node not in kept
            and all(one == fusion.node or one in fusion.inside or one not in steps for one in readers(node))
            for node in fusion.inside
        )
        if alone:
            fit[fusion.node] = fusion
    return fit


def _tanh_gelu(record: Record, records: Mapping[str, Record]) -> Fusion | None:
    """½ x (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    inside: list[str] = []

    def operands(ref: Any, op: str, number: float | None) -> list[Ref] | None:
        """Return the operands of the record at `ref`, if it is this operation, with this number."""
        found = records.get(ref.name) if isinstance(ref, Ref) else None
        if found is None or found.op != op or found.kwargs:
            return None
        numbers = [arg for arg in found.args if isinstance(arg, int | float)]
        if numbers != ([] if number is None else [number]):
            return None
        inside.append(found.name)
        return [arg for arg in found.args if isinstance(arg, Ref)]

    if record.op != "mul" or record.kwargs or len(record.args) != 2:
        return None
    if not all(isinstance(arg, Ref) for arg in record.args):
        return None
    for half, rest in (record.args, record.args[::-1]):
        inside.clear()
        read = operands(half, "mul", 0.5)
        one = operands(rest, "add", 1.0)
        bent = operands(one[0], "tanh", None) if one else None
        scaled = operands(bent[0], "mul", SCALE) if bent else None
        total = operands(scaled[0], "add", None) if scaled else None
        for first, second in (total, total[::-1]) if read and total and len(total) == 2 else ():
            before = len(inside)
            cube = operands(second, "mul", CUBE)
            power = operands(cube[0], "pow", 3.0) if cube else None
            if read and power and first == read[0] == power[0]:
                return Fusion(record.name, frozenset(inside), (first.name,), _gelu)
            del inside[before:]  # x itself may be such a product
    return None


def product_then_bias(record: Record) -> Rule | None:
    """The rule of a product with a bias; on CUDA the bias of a narrow one is added afterwards."""
    if record.kwargs or len(record.args) != 3 or len(record.inputs) != 3:
        return None
    if record.device is not None and record.device.type != "cuda":
        return _PRODUCTS.get(record.op)
    return {"addmm": _addmm, "linear": _linear}.get(record.op)


_PRODUCTS: dict[str, Rule] = {"addmm": torch.addmm, "linear": torch.nn.functional.linear}


def _addmm(bias: torch.Tensor, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if not value.is_cuda or bias.dim() != 1 or not _is_narrow(value, *weight.shape):
        return torch.addmm(bias, value, weight)
    return torch.mm(value, weight).add_(bias)


def _linear(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if not value.is_cuda or not _is_narrow(value, weight.shape[1], weight.shape[0]):
        return torch.nn.functional.linear(value, weight, bias)
    return torch.nn.functional.linear(value, weight).add_(bias)


def _is_narrow(value: torch.Tensor, inner: int, columns: int) -> bool:
    """True if a device multiplies faster without a bias: on an H200 up to twice as fast."""
    rows = value.numel() // max(inner, 1)
    return columns <= 1024 and (inner > columns or rows <= 1024)


def _gelu(value: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(value, approximate="tanh")


# ------------------------------------------------------------------------------------------
# Root-mean-square norms written out: x / √(mean(x²) + ε), with weights or without, in any precision.
#
# In half precision they are written with casts, and the norm itself is in float32. The kernel casts inside.
# It rounds once where the chain may round twice, before it is scaled by the weights and behind that.

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
                return norm.inside, (norm.of, weight), partial(_weighted_norm, norm.epsilon)
        norm = self._norm(record)
        if norm is None or Ref(norm.of) not in record.args:
            return None
        return norm.inside - {record.name}, (norm.of,), partial(_plain_norm, norm.epsilon)

    def _of_half(self, record: Record) -> tuple[frozenset[str], tuple[str, ...], Rule] | None:
        """Cast up, normed, and cast down: before it is scaled, behind that, or without being scaled."""
        assert record.dtype is not None
        down = self._cast(record, record.dtype)
        if down is not None:
            for weight, scaled in self._weighted(down, record.dtype):
                found = self._half(self._norm(scaled), record.dtype)
                if found is not None and self._is_as_wide(found.of, weight):
                    inside = found.inside | {down.name}
                    return inside, (found.of, weight), partial(_weighted_norm, found.epsilon)
            found = self._half(self._norm(down), record.dtype)
            return None if found is None else (found.inside, (found.of,), partial(_plain_norm, found.epsilon))
        for weight, scaled in self._weighted(record, record.dtype):
            cast = self._cast(scaled, record.dtype)
            found = None if cast is None else self._half(self._norm(cast), record.dtype)
            if found is not None and self._is_as_wide(found.of, weight):
                inside = found.inside | {scaled.name}
                return inside, (found.of, weight), partial(_weighted_norm, found.epsilon)
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
        """Return the value that a record casts to float32."""
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
    """True if a record gives the numbers that it reads first, in another precision."""
    is_read = bool(record.args) and isinstance(record.args[0], Ref)
    return record.op in {"to", "_to_copy", "type_as", "float"} and is_read


def _weighted_norm(epsilon: float, value: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(value, weight.shape, weight, epsilon)


def _plain_norm(epsilon: float, value: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(value, value.shape[-1:], None, epsilon)


# ------------------------------------------------------------------------------------------
# Rotary embeddings written out: x · cos + (−x₂, x₁) · sin, where x₁ and x₂ are the halves of x.
#
# Five kernels that read and write whole values become three, two of which do half of one. In half precision
# they round less: a product is not rounded before it is added.


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
                if found is not None and cos != sin and _is_rotation(record, value, (cos, sin), records):
                    inside = frozenset({straight.name, turned.name, crossed, *found})
                    half = _width_of(value, records) // 2
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
    rank, width = len(_shape_of(value, records)), _width_of(value, records)
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


def _is_rotation(record: Record, value: str, factors: tuple[str, str], records: Mapping[str, Record]) -> bool:
    """True if the value keeps its shape and precision, and the factors are as wide as it is."""
    whole = records.get(value)
    if whole is None or whole.shape is None or (whole.shape, whole.dtype) != (record.shape, record.dtype):
        return False
    return all(
        _width_of(name, records) == _width_of(value, records) and records[name].dtype == record.dtype
        for name in factors
    )


def _shape_of(name: str, records: Mapping[str, Record]) -> tuple[Any, ...]:
    return (records[name].shape or ()) if name in records else ()


def _width_of(name: str, records: Mapping[str, Record]) -> int:
    """The size of the last dimension; 0 where it is not known."""
    width = _shape_of(name, records)[-1:]
    return width[0] if width and isinstance(width[0], int) else 0


def _rotated(half: int, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = value * cos
    out[..., :half].addcmul_(value[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(value[..., :half], sin[..., half:])
    return out
