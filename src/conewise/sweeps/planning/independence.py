"""Operations that treat every slice along a dimension by itself, known from their kind and their shapes.

Along the batch this says where worlds can be stacked; along the positions, where a part of the rows can be
computed without the others. What is not known here is not thereby mixed: it may be tried.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from conewise.anatomy.placements import Placement, placements_of
from conewise.program.records import (
    ATTENTION,
    DIMENSION_MOVES,
    NORMS,
    POINTWISE,
    REDUCTIONS,
    RESHAPES,
    SIZES,
    SLICES,
    SOFTMAX,
    SPLITS,
    Program,
    Record,
    Ref,
    SizeRef,
)
from conewise.program.sizes import Size, symbols_in
from conewise.sweeps.planning.layout import Constants, Layout, compile_stacked_rule

Dim = int | None


@dataclass(slots=True)
class _Finding:
    """A finding about a record, and the questions about sizes that it rests on, with their answers.

    `holds_elsewhere`: it rests on nothing else, so that it holds for every shape that answers them alike.
    """

    answer: bool = False
    holds_elsewhere: bool = True
    questions: dict[int, bool] = field(default_factory=dict)


class _Findings:
    """The findings about a program along one dimension, and all questions that were asked, by number.

    Each finding has the number of its premise: those that rest on the same questions and answers share it.
    """

    def __init__(self) -> None:
        self.known: dict[str, list[tuple[_Finding, int]]] = {}
        self._premises: dict[frozenset[tuple[int, bool]], int] = {}
        self.questions: list[tuple[Any, ...]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def keep(self, name: str, found: _Finding) -> None:
        """Keep what was found of a record."""
        premise = self._premises.setdefault(frozenset(found.questions.items()), len(self._premises))
        self.known.setdefault(name, []).append((found, premise))

    def number(self, question: tuple[Any, ...]) -> int:
        """The number of a question, which is added when it is new."""
        if question not in self._numbers:
            self._numbers[question] = len(self.questions)
            self.questions.append(question)
        return self._numbers[question]


_FINDINGS: weakref.WeakKeyDictionary[Program, dict[Any, _Findings]] = weakref.WeakKeyDictionary()


class Independence:
    """Known independence of a program's records along one dimension: the batch, or the positions.

    `dims` has the dimension of each value. `alike(name)` says whether a constant that extends along it is the
    same in every slice, where that can be asked.

    What is found is kept with the program, with the questions about sizes that it rests on: it holds for
    every shape that answers these alike.
    """

    def __init__(
        self,
        layout: Layout,
        dims: Mapping[str, Dim],
        symbols: set[str],
        alike: Callable[[str], bool] = lambda _: False,
    ) -> None:
        program = layout.program
        self._layout, self._dims, self._alike = layout, dims, alike
        self._records = program.record_of
        self._shapes, self._shape_number = program.shapes, program.distinct_shapes[1]
        self._symbols = symbols
        self._placements = placements_of(program, symbols)
        kept = _FINDINGS.setdefault(program, {})
        self._findings = kept.setdefault((frozenset(symbols), self._is_batch()), _Findings())
        self._answers: dict[int, bool] = {}
        self._holds: dict[int, bool] = {}
        self._found: dict[str, _Finding] = {}
        self._asked: list[_Finding] = []

    def known(self, name: str) -> bool:
        """True if the node of that name is known to keep slices apart."""
        found = self._found.get(name)
        if found is None:
            found = self._found[name] = self._kept(name) or self._new(name)
        if self._asked:  # that one rests on this one
            asked = self._asked[-1]
            asked.questions |= found.questions
            asked.holds_elsewhere = asked.holds_elsewhere and found.holds_elsewhere
        return found.answer

    def _kept(self, name: str) -> _Finding | None:
        """Return what was found with another shape, and holds for this one."""
        for found, premise in self._findings.known.get(name, ()):
            if premise not in self._holds:
                questions = found.questions.items()
                self._holds[premise] = all(self._answer(number) is answer for number, answer in questions)
            if self._holds[premise]:
                return found
        return None

    def _new(self, name: str) -> _Finding:
        found = _Finding()
        self._asked.append(found)
        try:
            found.answer = self._is_known(self._records[name])
        finally:
            self._asked.pop()
        if found.holds_elsewhere:
            self._findings.keep(name, found)
        return found

    def _ask(self, *question: Any) -> bool:
        """True if sizes are as a question says, in runs of this shape."""
        number = self._findings.number(question)
        answer = self._answer(number)
        if self._asked:
            self._asked[-1].questions[number] = answer
        return answer

    def _answer(self, number: int) -> bool:
        if number not in self._answers:
            kind, one, other = self._findings.questions[number]
            if kind == "outer":  # one in front of ours, or as many as the batch has rows
                self._answers[number] = self._number(one) == (self._layout.batch if other else 1)
            else:
                self._answers[number] = self._around(*one) == self._around(*other)
        return self._answers[number]

    def _is_known(self, record: Record) -> bool:
        op = record.op
        first = record.args[0] if record.args else None
        if op == "getitem":
            return self._is_taken_from_split(record)
        if op in SPLITS:
            along = self._along(record, first, 2, default=0)
            return self._is_one(first) and along != self._dim(first) and self._is_placed_alike(record)
        here = self._dims.get(record.name)
        if here is None or not self._is_sole(record.name):
            return False
        if op in POINTWISE:
            return SIZES not in record.inputs and all(self._is_aligned(n, record.name) for n in record.inputs)
        if op in {"linear", "mm", "matmul", "bmm"}:
            return self._is_product(record, record.args)
        if op == "addmm":
            return self._is_weight(first) and self._is_product(record, record.args[1:])
        if op in NORMS:
            last = len(self._shape(first)) - len(record.args[1])
            return self._is_same(record, first) and here < last and self._are_weights(record.args[2:])
        if op in RESHAPES:
            return self._is_view(record, first)
        if op in SLICES:
            is_whole = self._along(record, first, 1, default=0) == self._dim(first)
            return self._is_same(record, first) and (is_whole or self._is_placed_alike(record))
        if op in DIMENSION_MOVES or op in REDUCTIONS:
            return self._is_same(record, first) and self._reads_only(record, first)
        if op in SOFTMAX:
            return self._is_same(record, first) and self._along(record, first, 1) != here
        if op == "cat":
            return self._is_joined(record)
        if op == "embedding":
            return self._is_weight(first) and self._is_same(record, record.args[1])
        if op == ATTENTION:
            return self._is_attention(record)
        return False

    # -- kinds ---------------------------------------------------------------------------------

    def _is_product(self, record: Record, factors: tuple[Any, ...]) -> bool:
        """A product with weights keeps rows apart; one of two stacks, if both are stacked in front."""
        left, right = factors[:2]
        if not self._is_same(record, left) or self._dim(left) == len(self._shape(left)) - 1:
            return False
        if self._is_weight(right):
            return self._are_weights(factors[2:])
        if record.op not in {"matmul", "bmm"} or not self._is_one(right):
            return False
        dim, here = self._dim(right), self._dims[record.name]
        assert dim is not None
        assert here is not None
        from_right = len(self._shape(right)) - dim
        return from_right > 2 and from_right == len(self._shape(Ref(record.name))) - here

    def _is_view(self, record: Record, read: Any) -> bool:
        """The same slices, one behind the other, in a value of another shape."""
        if not self._is_one(read) or not self._reads_only(record, read):
            return False
        own = [(self._shape_number[name], self._placements.of(name)) for name in (read.name, record.name)]
        return self._ask("around", *own)

    def _around(self, number: int, placement: Placement) -> tuple[int, int]:
        """Elements in front of the dimension's slices; elements of one slice."""
        shape = self._layout.shape_of(number)
        assert shape is not None
        front = self._number(placement.outer) * math.prod(shape[: placement.dim])
        return front, math.prod(shape) // (front * self._number(placement.size))

    def _is_joined(self, record: Record) -> bool:
        parts = record.args[0]
        along = record.args[1] if len(record.args) > 1 else record.kwargs.get("dim", 0)
        here = self._dims[record.name]
        return (
            isinstance(parts, list | tuple)
            and all(self._is_same(record, part) for part in parts)
            and along % len(self._shape(Ref(record.name))) != here
        )

    def _is_taken_from_split(self, record: Record) -> bool:
        split = self._records.get(record.inputs[0])
        if split is None or split.op not in SPLITS or not self.known(split.name):
            return False
        return self._is_same(record, split.args[0])

    def _is_attention(self, record: Record) -> bool:
        """Attention of a batch; its positions see each other."""
        if not self._is_batch():
            return False
        mask = record.args[3] if len(record.args) > 3 else record.kwargs.get("attn_mask")
        return all(self._is_same(record, one) and self._dim(one) == 0 for one in record.args[:3]) and (
            mask is None or self._is_weight(mask)
        )

    # -- values --------------------------------------------------------------------------------

    def _is_batch(self) -> bool:
        return self._dims is self._layout.batch_dim

    def is_plain(self, name: str) -> bool:
        """True if its slices can be taken as they lie.

        Those of the batch are the outermost of their dimension; positions are the innermost, alone or behind
        the batch.
        """
        placement = self._placements.of(name)
        if placement is None or placement.dim != self._dims.get(name):
            return False
        if self._is_batch():
            return self._ask("outer", placement.outer, False)
        shared = placement.dim == self._layout.batch_dim.get(name)
        return placement.inner == 1 and self._ask("outer", placement.outer, shared)

    def _dim(self, ref: Any) -> Dim:
        return self._dims.get(ref.name) if isinstance(ref, Ref) else None

    def _shape(self, ref: Any) -> tuple[Size, ...]:
        return (self._shapes.get(ref.name) or ()) if isinstance(ref, Ref) else ()

    def _number(self, size: Size) -> int:
        return self._layout.program.sizes.value(size, self._layout.symbols)

    def _is_sole(self, name: str) -> bool:
        """True if exactly one dimension of a value extends along ours, and holds its slices in order."""
        found = [size for size in self._shapes.get(name) or () if self._mentions(size)]
        return len(found) == 1 and self.is_plain(name)

    def _mentions(self, size: Size) -> bool:
        return not self._symbols.isdisjoint(symbols_in(size))

    def _is_one(self, ref: Any) -> bool:
        """True if it is a value with slices of its own, which a run's inputs determine."""
        return (
            isinstance(ref, Ref)
            and ref.name in self._layout.varying
            and self._dims.get(ref.name) is not None
            and self._is_sole(ref.name)
        )

    def _is_same(self, record: Record, ref: Any) -> bool:
        """True if it is such a value, of as many slices as the record's own."""
        if not self._is_one(ref):
            return False
        dim, here = self._dims[ref.name], self._dims[record.name]
        own = self._shapes[record.name]
        assert dim is not None
        return here is not None and own is not None and self._shape(ref)[dim] == own[here]

    def _is_weight(self, arg: Any) -> bool:
        """True if it is the same for every slice: no tensor, a parameter, a constant without slices."""
        if not isinstance(arg, Ref):
            return not isinstance(arg, list | tuple)
        if arg.name in self._layout.varying or arg.name == SIZES:
            return False
        if self._dims.get(arg.name) is None:
            return True
        if not self._is_batch():
            return False
        if self._asked:
            self._asked[-1].holds_elsewhere = False  # it is a value that says so
        return self._alike(arg.name)

    def _are_weights(self, args: tuple[Any, ...]) -> bool:
        return all(self._is_weight(arg) for arg in args)

    def _is_aligned(self, name: str, out: str) -> bool:
        """True if an operand of a pointwise operation meets each slice with its own, or with all."""
        here, shape = self._dims[out], self._shapes[out]
        assert here is not None
        assert shape is not None
        ref = Ref(name)
        if name not in self._layout.varying and self._is_weight(ref):
            return True
        dim, own = self._dims.get(name), self._shape(ref)
        if dim is None or not self._is_sole(name):
            return False
        if name not in self._layout.varying and self._is_batch():
            return False
        return len(own) - dim == len(shape) - here and own[dim] == shape[here]

    def _reads_only(self, record: Record, ref: Any) -> bool:
        return set(record.inputs) <= {ref.name, SIZES}

    def _is_placed_alike(self, record: Record) -> bool:
        """True if what it takes lies at the same place however many slices there are."""
        expressions = self._layout.program.sizes.expressions
        used = [expressions[leaf.index] for leaf in record.leaves() if isinstance(leaf, SizeRef)]
        return not any(map(self._mentions, used))

    def _along(self, record: Record, ref: Any, place: int, default: int | None = None) -> int | None:
        """The dimension that an operation works along, counted from the front."""
        given = record.args[place] if len(record.args) > place else record.kwargs.get("dim", default)
        dims = len(self._shape(ref))
        return given % dims if isinstance(given, int) and dims else None


# ------------------------------------------------------------------------------------------
# Where a program mixes the rows of a batch: worlds can be stacked along the batch only where it does not.

Tensor = torch.Tensor
Variant = Callable[[Tensor, int, int], Tensor]
"""Another batch like a value's own, given where its batch lies and how many rows that has."""

Stacked = tuple[Variant, ...]
"""The batches that an operation is given, one behind the other."""

DOUBLE_TOLERANCE = 1e-10
"""The distance that a stack in float64 may lie from each batch alone, relative to the largest value.

Rounding in float64 is a million times smaller; what depends on a row's place, or on its neighbours, shows.
"""


class Trial:
    """Finds the nodes that mix rows of the batch: most are known from their kind, the others are tried.

    A node that is tried is given two batches, one behind the other. Changing either must not move one bit
    of the other's result: the kernels are the same. And each result must be that of its batch alone, computed
    in float64, where rounding cannot be taken for a difference. Where a node fails, or cannot be computed
    so, or has no batch although what it reads has one, rows mix. `read` gives the values of a run; what only
    reads a mixture is not meant.

    The other batches are the same rows in another order, which show what goes by place; one row again and
    again, zeros, and numbers larger than any, which show what a batch has as a whole: its mean, its largest,
    what attention over it sees.
    """

    def __init__(self, layout: Layout, read: Callable[[str], Any]) -> None:
        self._layout = layout
        self._read = read
        self._records = layout.program.record_of
        self._constants = Constants(layout, read)
        self._independent = Independence(
            layout, layout.batch_dim, layout.batch_symbols, self._constants.alike
        )
        self._several: dict[tuple[str, Stacked, bool], Any] = {}

    def is_batch_independent(self, name: str) -> bool:
        """True if rows of the batch stay apart in the node of that name."""
        return self._independent.known(name) or self._is_tried(name)

    @torch.no_grad()
    def _is_tried(self, name: str) -> bool:
        record = self._records[name]
        if self._layout.batch_dim.get(name) is None and record.shape is not None:
            return False
        try:
            return self._is_unmoved(record) and all(
                self._is_stacked(record, one) for one in (_turned, _one_row)
            )
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False

    def _is_unmoved(self, record: Record) -> bool:
        """True if neither half of a stack moves when the other is changed."""
        if record.shape is None:
            return True  # its parts are looked at where they are taken out
        for half in (0, 1):
            kept: Tensor | None = None
            for other in VARIANTS:
                both = self._value(record, (_same, other) if half == 0 else (other, _same))
                part = self._halves(record.name, both)[half]
                if kept is not None and not _equal(part, kept):
                    return False
                kept = part
        return True

    def _is_stacked(self, record: Record, other: Variant) -> bool:
        """True if a stack is what its batches are alone, one behind the other."""
        if record.shape is None:
            return True
        dim = self._layout.batch_dim[record.name]
        is_double = all(source.value.device.type != "mps" for source in self._layout.program.sources)
        both = self._value(record, (_same, other), is_double)
        alone = [self._value(record, (one,), is_double) for one in (_same, other)]
        if not isinstance(both, Tensor) or dim is None or both.shape[dim] != sum(o.shape[dim] for o in alone):
            return False
        return all(map(_close, self._halves(record.name, both), alone))

    def _halves(self, name: str, both: Any) -> tuple[Tensor, Tensor]:
        dim = self._layout.batch_dim[name]
        if not isinstance(both, Tensor) or dim is None or both.shape[dim] % 2:
            raise ValueError("no stack of two batches")
        one, other = both.chunk(2, dim)
        return one, other

    def _value(self, record: Record, batches: Stacked, is_double: bool = False) -> Any:
        """The node's value for batches that lie one behind the other."""
        key = record.name, batches, is_double
        if key in self._several:
            return self._several[key]
        rule = compile_stacked_rule(record)
        value = rule(*[self._operand(read, batches, is_double) for read in record.inputs])
        if not isinstance(value, Tensor):
            self._several[key] = value
        return value

    def _operand(self, name: str, batches: Stacked, is_double: bool) -> Any:
        if name == SIZES:
            return self._layout.sizes(len(batches))
        if name not in self._layout.varying:
            return _doubled(self._constants.stacked(name, len(batches)), is_double)
        record = self._records.get(name)
        if record is not None and record.shape is None:
            return self._value(record, batches, is_double)
        value, dim = _doubled(self._read(name), is_double), self._layout.batch_dim.get(name)
        if dim is None:
            return value
        return torch.cat([variant(value, dim, self._layout.batch) for variant in batches], dim)


def _doubled(value: Any, is_double: bool) -> Any:
    return value.double() if is_double and isinstance(value, Tensor) and value.is_floating_point() else value


def _same(value: Tensor, _: int, __: int) -> Tensor:
    return value


def _one_row(value: Tensor, batch_dim: int, batch: int) -> Tensor:
    """Another batch of the same kind: its last row again and again, or its last slice elsewhere."""
    rows = value.unflatten(batch_dim, (batch, -1))  # type: ignore[no-untyped-call]
    for dim in [batch_dim, *reversed(range(rows.ndim))]:
        again: Tensor = rows.narrow(dim, rows.shape[dim] - 1, 1).expand(rows.shape)
        if not torch.equal(again, rows):
            return again.reshape(value.shape)
    return _turned(value, batch_dim, batch)


def _turned(value: Tensor, batch_dim: int, _: int) -> Tensor:
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


def _quiet(value: Tensor, _: int, __: int) -> Tensor:
    """The least of the same kind: zeros, or the smallest number that is there."""
    if value.is_floating_point() or value.dtype == torch.bool or not value.numel():
        return torch.zeros_like(value)
    return value.min().expand(value.shape)


def _loud(value: Tensor, _: int, __: int) -> Tensor:
    """More than is there: larger numbers of both signs, or the largest."""
    if value.dtype == torch.bool or not value.numel():
        return torch.ones_like(value)
    if not value.is_floating_point():
        return value.max().expand(value.shape)
    finite = torch.where(torch.isfinite(value), value, 0)
    scale = 4 * finite.abs().max() + 1
    signs = torch.arange(value.numel(), device=value.device).remainder(2).mul(2).sub(1).view(value.shape)
    return finite + scale.to(value.dtype) * signs.to(value.dtype)


VARIANTS: Stacked = (_turned, _one_row, _quiet, _loud)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Equal element by element, NaN equal to NaN."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _close(one: Tensor, other: Tensor) -> bool:
    """Equal but for rounding, element by element; infinities and NaN are where they are."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    finite = torch.isfinite(other)
    if not _equal(torch.where(finite, 0, one), torch.where(finite, 0, other)):
        return False
    left, right = torch.where(finite, one, 0).double(), torch.where(finite, other, 0).double()
    if not right.numel():
        return True
    # What was cast to fewer bits may round to either neighbour.
    own = 4 * torch.finfo(one.dtype).eps * right.abs()
    return bool(((left - right).abs() <= own + DOUBLE_TOLERANCE * right.abs().max()).all())
