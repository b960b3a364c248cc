"""What a record costs before it runs: floating-point operations, and bytes of its value."""

from __future__ import annotations

import math
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
        self._constant: dict[str, tuple[int, ...]] = {s.name: tuple(s.value.shape) for s in program.sources}
        self._symbolic = {r.name: r.shape for r in program.records} | {
            i.name: i.shape for i in program.inputs
        }
        self._dtypes = {r.name: r.dtype for r in program.records} | {i.name: i.dtype for i in program.inputs}
        self._shapes: dict[tuple[str, int | None], tuple[int, ...] | None] = {}
        self._parts: dict[str, list[str]] = {}
        for record in program.records:
            if record.op == "getitem":
                self._parts.setdefault(record.inputs[0], []).append(record.name)

    def shape(self, name: str, *, rows: int | None = None) -> tuple[int, ...] | None:
        """The shape of one world's value; of its last positions alone with `rows`."""
        if name in self._constant:
            return self._constant[name]
        key = name, rows
        if key not in self._shapes:
            symbolic = self._symbolic.get(name)
            values = dict(self._layout.symbols)
            if rows is not None:
                values |= dict.fromkeys(self._layout.position_symbols & set(values), rows)
            sizes = self._layout.program.sizes
            shape = None if symbolic is None else tuple(sizes.value(size, values) for size in symbolic)
            if shape is not None and name in self._columns:
                shape = (*shape[:-1], len(self._columns[name]))
            self._shapes[key] = shape
        return self._shapes[key]

    def flops(self, name: str, *, rows: int | None = None) -> int:
        """Multiplications and additions of one world; other operations count one for each element."""
        record = self._records[name]
        out = self.shape(name, rows=rows) or ()
        if record.op in PRODUCTS:
            inner = self._inner(record, rows)
            return 2 * math.prod(out) * inner
        if "attention" in record.op:
            # Of the arguments, and not of what is read: keys may be the queries themselves.
            read = [arg.name for arg in record.args if isinstance(arg, Ref)]
            query, key = self.shape(read[0], rows=rows) or (1,), self.shape(read[min(1, len(read) - 1)])
            return 4 * math.prod(query) * (key or (1, 1))[-2]
        if "conv" in record.op:
            weight = next((self._constant[n] for n in record.inputs if n in self._constant), (1,))
            return 2 * math.prod(out) * math.prod(weight[1:])
        return 0 if self.is_view(name) else math.prod(out)

    def bytes_of_copy(self, name: str, *, rows: int | None = None) -> int:
        """Bytes of one world's value when it is copied; of several tensors, those that anything reads."""
        if name in self._parts:
            return sum(self.bytes_of_copy(part, rows=rows) for part in self._parts[name])
        shape, dtype = self.shape(name, rows=rows), self._dtypes.get(name)
        return 0 if shape is None or dtype is None else math.prod(shape) * dtype.itemsize

    def elements(self, name: str, *, rows: int | None = None) -> int:
        """How many numbers one world's value has."""
        return math.prod(self.shape(name, rows=rows) or ())

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
        record = self._records[name]
        schema = getattr(record.target, "_schema", None)
        if record.op == "getitem":
            return True
        if schema is None:
            return False
        return any(result.alias_info is not None for result in schema.returns)

    def _inner(self, record: Record, rows: int | None) -> int:
        """The length that a product sums over: the last dimension of its first factor."""
        factors = [arg.name for arg in record.args if isinstance(arg, Ref)]
        factors = factors[1:] if record.op in {"addmm", "baddbmm"} else factors
        shape = self.shape(factors[0], rows=rows) if factors else None
        return shape[-1] if shape else 1


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
