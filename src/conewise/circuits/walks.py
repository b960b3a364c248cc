"""Walks over stacks of worlds, and what one head's queries, keys or values need of a layer's weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from conewise.anatomy.axes import View
from conewise.anatomy.wiring import Wiring
from conewise.attributing.relevance import Relevance
from conewise.program.records import ATTENTION, SIZES, Program, Record, Ref
from conewise.program.rehearsal import is_rehearsal
from conewise.program.walk import Read, Rule, Walk, WalkStep, between, compile_rule, plan_walk
from conewise.sweeps.planning.fusing import Fusion, fitting, product_then_bias
from conewise.sweeps.planning.layout import Constants, Layout, compile_stacked_rule, index_tensor, repeated
from conewise.sweeps.planning.regions import repeated_rule


class StackedValues:
    """Reads values of runs of a program for stacks of worlds; keeps what depends on their shapes alone."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._inputs = tuple(leaf.name for leaf in program.inputs)
        self._known: dict[tuple[tuple[int, ...], ...], tuple[Layout, Constants]] = {}

    def layout(self, read: Read) -> Layout:
        """The layout of runs of this shape."""
        return self._of(read)[0]

    def worlds_in(self, read: Read, name: str, value: Tensor) -> int:
        """Return the number of worlds that a value is a stack of."""
        layout = self.layout(read)
        dim, shape = layout.batch_dim.get(name), layout.shape(name)
        return 1 if dim is None or shape is None else value.shape[dim] // shape[dim]

    def like(self, read: Read, name: str) -> tuple[tuple[int, ...], Read]:
        """The sizes of as many worlds as the value at `name` is a stack of, and `reading` for these."""
        worlds = self.worlds_in(read, name, read(name))
        return self.layout(read).sizes(worlds), self.reading(read, worlds)

    def reading(self, read: Read, worlds: int, rows: int | None = None) -> Read:
        """Return what reads every value as a stack of so many worlds: one that has fewer is repeated.

        With `rows`, of so many of its last positions.
        """
        layout, constants = self._of(read)
        constants.rebase(read)

        def stacked(name: str) -> Any:
            if name == SIZES:
                return layout.sizes(worlds, rows)
            if name in layout.varying:
                value, dim, shape = read(name), layout.batch_dim.get(name), layout.shape(name)
                if dim is not None and isinstance(value, torch.Tensor):
                    assert shape is not None
                    value = repeated(value, dim, worlds * shape[dim] // value.shape[dim])
            else:
                value = constants.stacked(name, worlds)
            is_cut = rows is not None and isinstance(value, torch.Tensor)
            return layout.tail(name, value, rows) if is_cut else value  # type: ignore[arg-type]

        return stacked

    def _of(self, read: Read) -> tuple[Layout, Constants]:
        shapes = tuple(tuple(read(name).shape) for name in self._inputs)
        if shapes not in self._known:
            given = dict(zip(self._inputs, shapes, strict=True))
            layout = Layout(self._program, self._program.symbols_of(given))
            self._known[shapes] = layout, Constants(layout, read)
        return self._known[shapes]


def stacked_walk(
    program: Program,
    starts: Collection[str],
    targets: Collection[str],
    *,
    members: Collection[str] | None = None,
    also_reads: Mapping[str, str] | None = None,
) -> Walk:
    """Plan the walk from `starts` to `targets` over stacks of worlds; it ends with the values of both."""
    records = between(program, starts, targets, members)
    steps = ((one.name, one.inputs, compile_stacked_rule(one)) for one in records)
    return plan_walk(steps, [*starts, *targets], also_reads=also_reads)


@dataclass(slots=True)
class KnownWalks:
    """Walks of a program, and the columns of products by head, for runs of one shape: neither has numbers."""

    walks: dict[tuple[tuple[str, ...], tuple[str, ...], frozenset[str]], Walk] = field(default_factory=dict)
    columns: dict[tuple[str, str], Tensor | None] = field(default_factory=dict)


class Walks:
    """Finds walks in a program, and computes them for runs of one shape.

    What a walk reads beside the values that it begins with is `read`: a run's own value, repeated. `known` is
    what others of this shape found of the program, with the same fusions.
    """

    def __init__(
        self, program: Program, fusions: tuple[Fusion, ...], read: Read, known: KnownWalks | None = None
    ) -> None:
        self._program, self._fusions, self._read = program, fusions, read
        self._values = StackedValues(program)
        self.known = KnownWalks() if known is None else known
        self._fixed: dict[tuple[str, int, int | None], Any] = {}

    def rebase(self, read: Read) -> None:
        """Read another run of the same shape from now on."""
        self._read = read
        self._fixed.clear()

    def walk(self, starts: Collection[str], targets: Collection[str], keep: Collection[str] = ()) -> Walk:
        """The walk from `starts` to `targets`; values of `keep` are kept to the end too."""
        key = tuple(starts), tuple(targets), frozenset(keep)
        if key not in self.known.walks:
            self.known.walks[key] = self._made(*key)
        return self.known.walks[key]

    def _made(self, starts: tuple[str, ...], targets: tuple[str, ...], keep: frozenset[str]) -> Walk:
        records = between(self._program, starts, targets)
        order = dict.fromkeys(one.name for one in records)
        kept, readers = {*targets, *keep, *starts}, self._program.readers
        fused = fitting(self._fusions, order, kept, lambda node: [one.name for one in readers[node]])
        inside = {name for fusion in fused.values() for name in fusion.inside}
        steps = [
            (one.name, fused[one.name].inputs, fused[one.name].rule)
            if one.name in fused
            else (one.name, one.inputs, _rule(one))
            for one in records
            if one.name not in inside
        ]
        return plan_walk(steps, {*targets, *keep}, starts, records=len(records))

    def run(
        self,
        walk: Walk,
        given: Mapping[str, Tensor],
        worlds: int,
        rows: int | None = None,
        columns: Mapping[str, Tensor] = MappingProxyType({}),
        relevance: Relevance | None = None,
    ) -> dict[str, Any]:
        """The values of the walk's targets, and of what it keeps, for `given` stacks of so many worlds.

        `rows`: of so many last positions, which is what is given then. `columns`: of a product with a
        weight, the columns that are computed. With `relevance` what is recorded is that, by its rules.
        """

        def narrowed(step: WalkStep, operands: list[Any], stacks: dict[str, Any]) -> Any:
            if step.node in columns:
                operands = [
                    value if name in stacks else value.index_select(0, columns[step.node])
                    for name, value in zip(step.inputs, operands, strict=True)
                ]
            return step.rule(*operands)

        compute = narrowed if columns else None if relevance is None else relevance.compute
        return walk.run(dict(given), lambda name: self._operand(name, worlds, rows), compute)

    def _operand(self, name: str, worlds: int, rows: int | None) -> Any:
        """Return a value that is read of a run: a weight, a constant, or one that no start leads to."""
        if name not in self._program.varying and name not in self._program.record_of and name != SIZES:
            return self._read(name)
        key = name, worlds, rows
        if key in self._fixed:
            return self._fixed[key]
        value = self._values.reading(self._read, worlds, rows)(name)
        if not is_rehearsal():
            if len(self._fixed) >= 512:
                self._fixed.clear()
            self._fixed[key] = value
        return value


def _rule(record: Record) -> Rule:
    if record.op == ATTENTION:
        return (
            repeated_rule(record, compile_rule) if record.kwargs.get("enable_gqa") else compile_rule(record)
        )
    return product_then_bias(record) or compile_stacked_rule(record)


NATURAL = ("batch", "pos", "head", "d_head")
AGREES = 1e-3
"""The error allowed in slices, relative to the run's largest value: rounding is far below, mistakes above."""


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
    """True if numbers follow each other."""
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
    matrix = read(weight).T if record.op == "linear" else read(weight)
    if is_new := (entry, node) not in walks.known.columns:
        walks.known.columns[entry, node] = _columns(
            walks, layout, record, read(record.name), node, by_head_of=(view, axis)
        )
    index = walks.known.columns[entry, node]
    if index is None or matrix.shape != (read(operand).shape[-1], read(record.name).shape[-1]):
        return None
    slices = HeadSlices(
        walks.walk([entry], [operand]),
        operand,
        _gathered(matrix, index),
        None if bias is None else read(bias)[index][:, None],
    )
    if not is_new or is_rehearsal():
        return slices
    rows = read(operand).reshape(1, -1, matrix.shape[0]).expand(len(index), -1, -1)
    own = by_head(view, read(node), layout.sizes(1), axis)
    again = slices.project(rows, range(len(index))).view(len(index), *own.shape[:2], -1).permute(1, 2, 0, 3)
    if not bool((again - own).abs().max() <= AGREES * own.abs().max()):
        walks.known.columns[entry, node] = None
        return None
    return slices


def _columns(
    walks: Walks, layout: Layout, record: Record, value: Tensor, node: str, *, by_head_of: tuple[View, str]
) -> Tensor | None:
    """[head, d_head]: the columns of a product that a node shows as each head's; None where it does more."""
    count = value.shape[-1]
    numbers = torch.arange(count, dtype=torch.float64, device=value.device).expand(value.shape)
    behind = walks.walk([record.name], [node])
    try:
        moved = walks.run(behind, {record.name: numbers}, 1)[node] if record.name != node else numbers
    except RuntimeError:
        return None  # something else than rearranging
    view, axis = by_head_of
    columns = by_head(view, moved, layout.sizes(1), axis)
    first = columns[:1, :1]
    if not torch.equal(columns, first.expand_as(columns)) or not _are_numbers(first[0, 0], count):
        return None
    return first[0, 0].long()


def _product(wiring: Wiring, entry: str, node: str) -> tuple[Record, str, str, str | None] | None:
    """The one product with a weight between a stream and a node: record, operand, weight, bias."""
    inside = between(wiring.program, [entry], [node])
    products = [record for record in inside if wiring.is_linear(record)]
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
    if operand != entry and operand not in {one.name for one in inside}:
        return None
    if not {weight, *filter(None, rest)}.isdisjoint(wiring.varying) or weight in wiring.records:
        return None
    return record, operand, weight, rest[0] if rest else None


def _are_numbers(found: Tensor, count: int) -> bool:
    """True if these are numbers of columns, each at most once."""
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
