"""Which products of a sweep are computed in bfloat16 parts: those with a weight, where it is faster."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from conewise.program.records import Program, Record, Ref
from conewise.program.split_products import CHOSEN, factor_bytes, weight_bytes
from conewise.sweeps.planning.shapes.costs import Costs

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
    """What a product multiplies: a value with a weight. With `is_turned` that is [columns, inner]."""

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
    """Whether a product of these sizes is faster in parts, splitting included. Weights are split already."""
    if min(rows, inner, columns) < LEAST or inner % 8 or columns % 8:
        return False
    work = 2 * rows * inner * columns
    passes = 2 * len(CHOSEN.sums(inner)) - 1  # each sum writes the result, all but the first read it
    moved = rows * inner * (4 + 2 * len(CHOSEN.left)) + rows * columns * 4 * passes
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
        """Whether a node is a product that is faster in parts, with so many positions and worlds."""
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
