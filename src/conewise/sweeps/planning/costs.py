"""The cost of a record before it runs: floating-point operations, and bytes of its value."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from conewise.program.records import PRODUCTS, Program, Record, Ref
from conewise.program.split_products import (
    LEFT,
    SplitWeight,
    factor_bytes,
    split_factor,
    split_product,
    split_weight,
    sums_of,
    weight_bytes,
)
from conewise.program.walk import Rule
from conewise.sweeps.planning.layout import Layout


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
        """Return the count of numbers in one world's value; 1 where it is no tensor."""
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


def versions() -> dict[str, str]:
    """The versions that results depend on."""
    return {"torch": torch.__version__}


# ------------------------------------------------------------------------------------------
# Which products of a sweep are computed in bfloat16 parts: those with a weight, where it is faster.

FLOAT32_RATE, PARTS_RATE = 50e12, 100e12
"""Multiplications and additions a second of large float32 products on an H200, and of their parts."""
BANDWIDTH = 3.5e12
"""Bytes a second that splitting reads and writes there."""
LAUNCHING = 12e-6
"""Seconds that the launches of several kernels take in place of one."""
LEAST = 256
"""Narrower factors do not fill the tiles of a tensor core's product."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of a product: a value and a weight. With `is_turned` that is [columns, inner]."""

    value: str
    weight: str
    is_turned: bool


def factors_of(record: Record) -> Factors | None:
    """The factors of a product that might be one with a weight, in the order of its arguments."""
    refs = [arg.name for arg in record.args if isinstance(arg, Ref)]
    if record.kwargs or len(set(refs)) != len(refs) or tuple(refs) != record.inputs:
        return None
    if record.op == "linear" and len(refs) == len([arg for arg in record.args if arg is not None]) >= 2:
        return Factors(refs[0], refs[1], True)
    if record.op == "addmm" and len(refs) == len(record.args) == 3:
        return Factors(refs[1], refs[2], False)
    if record.op in {"mm", "matmul"} and len(refs) == len(record.args) == 2:
        return Factors(refs[0], refs[1], False)
    return None


def split_pays(rows: int, inner: int, columns: int) -> bool:
    """True if a product of these sizes is faster in parts, splitting included. Weights are split already."""
    if min(rows, inner, columns) < LEAST or inner % 8 or columns % 8:
        return False
    work = 2 * rows * inner * columns
    passes = 2 * len(sums_of(inner)) - 1  # each sum writes the result, all but the first read it
    moved = rows * inner * (4 + 2 * len(LEFT)) + rows * columns * 4 * passes
    return work / PARTS_RATE + moved / BANDWIDTH + LAUNCHING < work / FLOAT32_RATE


class Splitting:
    """Products of float32 with a weight that may be split, for runs of one shape.

    Products of which only a few columns are computed, the nodes `narrow`, are none of them.
    """

    def __init__(self, program: Program, costs: Costs, narrow: Collection[str] = ()) -> None:
        self._costs = costs
        self._weights: dict[str, str] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        sources = program.source_values
        for record in program.records:
            found = factors_of(record) if record.dtype == torch.float32 else None
            weight = sources.get(found.weight) if found is not None else None
            if found is None or weight is None or record.name in narrow or found.value not in program.varying:
                continue
            if weight.dim() == 2 and weight.dtype == torch.float32:
                inner, columns = weight.shape[::-1] if found.is_turned else weight.shape
                self._weights[record.name] = found.weight
                self._sizes[record.name] = inner, columns

    def pays(self, node: str, rows: int | None, worlds: int) -> bool:
        """True if a node is a product that is faster in parts, with so many positions and worlds."""
        return node in self._sizes and split_pays(self._rows(node, rows, worlds), *self._sizes[node])

    def scratch(self, node: str, rows: int | None, worlds: int) -> int:
        """Bytes of the parts of what is multiplied with a weight."""
        return factor_bytes(self._rows(node, rows, worlds), self._sizes[node][0])

    def kept(self, nodes: Collection[str]) -> int:
        """Bytes of the parts of the weights that these products read."""
        sizes: Mapping[str, tuple[int, int]] = {self._weights[node]: self._sizes[node] for node in nodes}
        return sum(weight_bytes(inner, columns) for inner, columns in sizes.values())

    def _rows(self, node: str, rows: int | None, worlds: int) -> int:
        shape = self._costs.shape(node, rows=rows) or ()
        return worlds * math.prod(shape[:-1])


# ------------------------------------------------------------------------------------------
# Rules of products in bfloat16 parts, and the parts of a model's weights: made once, and kept.

Tensor = torch.Tensor


class SplitWeights:
    """The parts of weights, by name. A weight with numbers that are not finite has none.

    The value that was multiplied last is kept in parts as well, for as long as it is there itself: queries,
    keys and values are made of one.
    """

    def __init__(self, program: Program) -> None:
        self._records, self._sources = program.record_of, program.source_values
        self._parts: dict[tuple[str, bool], SplitWeight | None] = {}
        self._last: MutableMapping[Tensor, tuple[int, Tensor]] = WeakTensorKeyDictionary()

    def clear(self) -> None:
        """Forget the parts: the weights are others."""
        self._parts.clear()
        self.forget_value()

    def forget_value(self) -> None:
        """Forget the parts of the value that was multiplied last."""
        self._last.clear()

    @torch.no_grad()
    def prepare(self, nodes: Iterable[str]) -> None:
        """Split the weights that some products read: it waits for the device, and cannot be captured."""
        for node in nodes:
            self._of(self._records[node])

    def taken_by(self, nodes: Iterable[str]) -> int:
        """Bytes of the parts of the weights that some products read, once these are split."""
        found = {id(parts): parts for node in nodes if (parts := self._of(self._records[node])) is not None}
        return sum(one.parts.nbytes for one in found.values())

    def rule(self, record: Record) -> Rule | None:
        """The rule of a product in parts; None where its weight has none."""
        parts = self._of(record)
        if parts is None:
            return None
        if record.op == "addmm":
            return lambda bias, value, _: self._product(value, parts, bias)
        return lambda value, _, bias=None: self._product(value, parts, bias)

    @torch.no_grad()
    def _of(self, record: Record) -> SplitWeight | None:
        factors = factors_of(record)
        assert factors is not None, f"{record.name} is no product with a weight"
        key = factors.weight, factors.is_turned
        if key not in self._parts:
            weight = self._sources[factors.weight].detach()
            self._parts[key] = split_weight(weight.t() if factors.is_turned else weight)
        return self._parts[key]

    def _product(self, value: Tensor, weight: SplitWeight, bias: Tensor | None) -> Tensor:
        flat = value.reshape(-1, weight.inner)
        out = split_product(flat, weight, self._parts_of(value, flat))
        if bias is not None:
            out += bias
        return out.view(*value.shape[:-1], weight.columns)

    def _parts_of(self, value: Tensor, flat: Tensor) -> Tensor | None:
        version, parts = self._last.get(value, (None, None))
        if version == value._version:
            return parts
        self.forget_value()  # before the next ones are made
        parts = split_factor(flat)
        if parts is not None:
            self._last[value] = value._version, parts
        return parts
