"""Slices of projections: what one head's queries, keys or values need of a layer's weights.

With removed edges every head reads a stream of its own, so that a whole projection for each would compute
all heads to use one. Where a slot is a norm and one product, whose columns are then only rearranged, a
head's columns are found by sending the columns' numbers the same way; and the slices are compared with the
run itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from conewise.circuits.forwards.stacked_walk import Walks
from conewise.edges.stacked_values import Read
from conewise.program.records import Record, Ref
from conewise.program.rehearsal import is_rehearsal
from conewise.program.walk import Walk
from conewise.structure.axes.views import View
from conewise.structure.wiring.wiring import Wiring
from conewise.sweeps.planning.shapes.layout import Layout, index_tensor

Tensor = torch.Tensor

NATURAL = ("batch", "pos", "head", "d_head")
AGREES = 1e-3
"""How far slices may be off the run's own values, relative to the largest: rounding is far below, errors
above."""


@dataclass(frozen=True, slots=True)
class HeadSlices:
    """The columns of a product by head: `norm` leads from the stream to `operand`, which the product reads.

    `weight` is [head, d_model, d_head], `bias` [head, 1, d_head] or None.
    """

    norm: Walk
    operand: str
    weight: Tensor
    bias: Tensor | None

    def project(self, operand: Tensor, heads: Sequence[int]) -> Tensor:
        """[head, row, d_head] of rows [head, row, d_model], for some heads."""
        weight = some_of(self.weight, heads)
        if self.bias is None:
            return torch.bmm(operand, weight)
        return torch.baddbmm(some_of(self.bias, heads), operand, weight)


def some_of(value: Tensor, numbers: Sequence[int], dim: int = 0) -> Tensor:
    """Some rows of a value along a dimension: without a copy where they follow each other."""
    if is_run(numbers):
        return value.narrow(dim, numbers[0], len(numbers))
    return value.index_select(dim, index_tensor(tuple(numbers), value.device))


def is_run(numbers: Sequence[int]) -> bool:
    """Whether numbers follow each other."""
    return list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))


def by_head(view: View, value: Tensor, sizes: tuple[int, ...], axis: str) -> Tensor:
    """[batch, pos, head, d_head] of a node's value, of which it is a view of memory."""
    shown = view.present(value, sizes)
    return shown.permute([view.axes.index(axis if name == "head" else name) for name in NATURAL])


def head_slices(
    wiring: Wiring, walks: Walks, layout: Layout, read: Read, entry: str, node: str, view: View, axis: str
) -> HeadSlices | None:
    """The slices of a slot; None where it is no such product, or slices do not agree with the run."""
    if sorted(view.axes) != sorted(axis if name == "head" else name for name in NATURAL):
        return None
    found = _product(wiring, entry, node)
    if found is None:
        return None
    record, operand, weight, bias = found
    value, matrix = read(record.name), read(weight)
    if record.op == "linear":
        matrix = matrix.T
    count = matrix.shape[1]
    if value.shape[-1] != count or matrix.shape[0] != read(operand).shape[-1]:
        return None
    numbers = torch.arange(count, dtype=torch.float64, device=value.device).expand(value.shape)
    behind = walks.walk([record.name], [node])
    try:
        moved = walks.run(behind, {record.name: numbers}, 1)[node] if record.name != node else numbers
    except RuntimeError:
        return None  # something else than rearranging
    columns = by_head(view, moved, layout.sizes(1), axis)
    first = columns[:1, :1]
    if not torch.equal(columns, first.expand_as(columns)) or not _are_numbers(first[0, 0], count):
        return None
    index = first[0, 0].long()
    slices = HeadSlices(
        walks.walk([entry], [operand]),
        operand,
        _gathered(matrix, index),
        None if bias is None else read(bias)[index][:, None],
    )
    rows = read(operand).reshape(1, -1, matrix.shape[0]).expand(len(index), -1, -1)
    own = by_head(view, read(node), layout.sizes(1), axis)
    again = slices.project(rows, range(len(index))).view(len(index), *own.shape[:2], -1).permute(1, 2, 0, 3)
    apart, size = (again - own).abs().max(), own.abs().max()
    return slices if is_rehearsal() or bool(apart <= AGREES * size) else None


def _product(wiring: Wiring, entry: str, node: str) -> tuple[Record, str, str, str | None] | None:
    """The one product with a weight between a stream and a node: record, operand, weight, bias."""
    everything = frozenset(wiring.records)
    between = wiring.above(node, everything, frozenset({entry})) & wiring.cone(entry)
    products = [wiring.records[name] for name in between if wiring.is_linear(wiring.records[name])]
    if len(products) != 1:
        return None
    (record,) = products
    names = [arg.name if isinstance(arg, Ref) else None for arg in record.args]
    if record.kwargs or None in names:
        return None
    if record.op == "linear":
        operand, weight, *rest = names
    elif record.op == "addmm":
        bias, operand, weight = names
        rest = [bias]
    elif record.op in ("mm", "matmul") and len(names) == 2:
        operand, weight, rest = names[0], names[1], []
    else:
        return None
    assert operand is not None
    assert weight is not None
    if operand not in between and operand != entry:
        return None
    if not {weight, *filter(None, rest)}.isdisjoint(wiring.varying) or weight in wiring.records:
        return None
    return record, operand, weight, rest[0] if rest else None


def _are_numbers(found: Tensor, count: int) -> bool:
    """Whether these are numbers of columns, each at most once."""
    whole = found.round()
    is_one = torch.equal(whole, found) and float(found.min()) >= 0 and float(found.max()) < count
    return is_one and len(torch.unique(found)) == found.numel()


def _gathered(matrix: Tensor, index: Tensor) -> Tensor:
    """[head, d_model, d_head] of the columns of a matrix: a view where they lie at regular distances."""
    heads, width = index.shape
    step = int(index[1, 0] - index[0, 0]) if heads > 1 else width
    start = int(index[0, 0])
    regular = start + step * torch.arange(heads)[:, None] + torch.arange(width)
    if not torch.equal(index.cpu(), regular):
        return matrix[:, index].permute(1, 0, 2).contiguous()
    along, across = matrix.stride()
    size, stride = (heads, matrix.shape[0], width), (step * across, along, across)
    return torch.as_strided(matrix, size, stride, matrix.storage_offset() + start * across)
