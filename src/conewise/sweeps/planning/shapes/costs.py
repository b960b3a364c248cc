"""What a record costs before it runs: floating-point operations, and bytes of its value."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from conewise.program.operations import PRODUCTS
from conewise.program.records import Program, Record, Ref
from conewise.sweeps.planning.shapes.layout import Layout


class Costs:
    """Costs of the records of a program, for runs of one shape, at any number of stacked worlds."""

    def __init__(
        self, program: Program, layout: Layout, columns: Mapping[str, Sequence[int]] = MappingProxyType({})
    ) -> None:
        """`columns`: nodes of which only some columns are computed."""
        self._layout = layout
        self._columns = columns
        self._records = program.record_of
        self._kinds = _kinds_of(program)
        self._constant, self._dtypes, self._parts = program.source_shapes, program.dtypes, program.parts

    def shape(self, name: str, *, rows: int | None = None) -> tuple[int, ...] | None:
        """The shape of one world's value; of its last positions alone with `rows`."""
        if name in self._constant:
            return self._constant[name]
        shape = self._layout.shape(name, rows)
        if shape is not None and name in self._columns:
            return (*shape[:-1], len(self._columns[name]))
        return shape

    def flops(self, name: str, *, rows: int | None = None) -> int:
        """Multiplications and additions of one world; other operations count one for each element."""
        kind, factor = self._kinds[name]
        if kind == VIEW:
            return 0
        if kind == ATTENDS:
            return self._attention_flops(self._records[name], rows)
        elements = self.elements(name, rows=rows)
        if kind == MULTIPLIES:
            shape = self.shape(factor, rows=rows) if factor else None
            return 2 * elements * (shape[-1] if shape else 1)
        if kind == CONVOLVES:
            return 2 * elements * math.prod(self._constant.get(factor, (1,))[1:])
        return elements

    def _attention_flops(self, record: Record, rows: int | None) -> int:
        # Of the arguments, and not of what is read: keys may be the queries themselves.
        read = [arg.name for arg in record.args if isinstance(arg, Ref)]
        query, key = self.shape(read[0], rows=rows) or (1,), self.shape(read[min(1, len(read) - 1)])
        return 4 * math.prod(query) * (key or (1, 1))[-2]

    def bytes_of_copy(self, name: str, *, rows: int | None = None) -> int:
        """Bytes of one world's value when it is copied; of several tensors, those that anything reads."""
        if name in self._parts:
            return sum(self.bytes_of_copy(part, rows=rows) for part in self._parts[name])
        dtype = self._dtypes.get(name)
        if dtype is None:
            return 0
        return self.elements(name, rows=rows) * dtype.itemsize

    def elements(self, name: str, *, rows: int | None = None) -> int:
        """How many numbers one world's value has; 1 where it is no tensor."""
        if name in self._constant or name in self._columns:
            return math.prod(self.shape(name, rows=rows) or ())
        found = self._layout.elements(name, rows)
        return 1 if found is None else found

    def itemsize(self, name: str) -> int:
        """Bytes of one number of the value."""
        dtype = self._dtypes.get(name)
        return 4 if dtype is None else dtype.itemsize

    def bytes_of_repeating(self, name: str, *, rows: int | None = None) -> int:
        """Bytes of one world's share when the baseline's value is repeated; none where it has one row."""
        dim, shape = self._layout.batch_dim.get(name), self.shape(name, rows=rows)
        return 0 if dim is None or shape is None or shape[dim] == 1 else self.bytes_of_copy(name, rows=rows)

    def is_view(self, name: str) -> bool:
        """Whether the record's value shares memory with what it reads."""
        return _is_view(self._records[name])


VIEW, ATTENDS, MULTIPLIES, CONVOLVES, POINT = "view", "attention", "product", "convolution", "pointwise"

_KINDS: weakref.WeakKeyDictionary[Program, dict[str, tuple[str, str]]] = weakref.WeakKeyDictionary()


def _kinds_of(program: Program) -> dict[str, tuple[str, str]]:
    """By what the operations of each record are counted, and the factor whose shape says how many; kept."""
    if program not in _KINDS:
        constant = program.source_shapes
        _KINDS[program] = {record.name: _kind(record, constant) for record in program.records}
    return _KINDS[program]


def _kind(record: Record, constant: Mapping[str, tuple[int, ...]]) -> tuple[str, str]:
    if record.op in PRODUCTS:
        # It sums over the last dimension of its first factor.
        factors = [arg.name for arg in record.args if isinstance(arg, Ref)]
        factors = factors[1:] if record.op in {"addmm", "baddbmm"} else factors
        return MULTIPLIES, factors[0] if factors else ""
    if "attention" in record.op:
        return ATTENDS, ""
    if "conv" in record.op:
        return CONVOLVES, next((name for name in record.inputs if name in constant), "")
    return (VIEW if _is_view(record) else POINT), ""


def _is_view(record: Record) -> bool:
    return record.op == "getitem" or _shares_memory(record.target)


@functools.cache
def _shares_memory(target: Callable[..., Any]) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def matmul_rate(device: torch.device, dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """Floating-point operations a second of one large matrix product on this device."""
    rows, inner = (512, 768) if device.type == "cpu" else (2048, 1024)
    left = torch.ones(rows, inner, device=device, dtype=dtype)
    right = torch.ones(inner, inner, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(3):
        synchronize(device)
        start = clock()
        torch.mm(left, right)
        synchronize(device)
        best = min(best, clock() - start)
    return 2 * rows * inner * inner / best


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def versions(values: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The versions that results depend on."""
    return {"torch": torch.__version__, **{name: str(value) for name, value in (values or {}).items()}}
