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

from conewise.program.operations import (
    ATTENTION,
    DIMENSION_MOVES,
    NORMS,
    POINTWISE,
    REDUCTIONS,
    RESHAPES,
    SLICES,
    SOFTMAX,
    SPLITS,
)
from conewise.program.records import SIZES, Program, Record, Ref, SizeRef
from conewise.program.sizes import Size, symbols_in
from conewise.structure.axes.placements import Placement, placements_of
from conewise.sweeps.planning.shapes.layout import Layout

Dim = int | None


@dataclass(slots=True)
class _Finding:
    """What was found of a record, and the questions about sizes that it rests on, with their answers.

    `holds_elsewhere`: it rests on nothing else, so that it holds for every shape that answers them alike.
    """

    answer: bool = False
    holds_elsewhere: bool = True
    questions: dict[int, bool] = field(default_factory=dict)

    def rest_on(self, other: _Finding) -> None:
        """Say that this one was found by another."""
        self.questions |= other.questions
        self.holds_elsewhere = self.holds_elsewhere and other.holds_elsewhere


class _Findings:
    """What was found of a program along one dimension, and all questions that were asked, by number.

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


def _findings_of(program: Program, symbols: set[str], *, is_batch: bool) -> _Findings:
    kept = _FINDINGS.setdefault(program, {})
    return kept.setdefault((frozenset(symbols), is_batch), _Findings())


class Independence:
    """What is known of the records of a program along one dimension: the batch, or the positions.

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
        self._findings = _findings_of(program, symbols, is_batch=self._is_batch())
        self._answers: dict[int, bool] = {}
        self._holds: dict[int, bool] = {}
        self._found: dict[str, _Finding] = {}
        self._asked: list[_Finding] = []

    def known(self, name: str) -> bool:
        """Whether the node of that name is known to keep slices apart."""
        found = self._found.get(name)
        if found is None:
            found = self._found[name] = self._kept(name) or self._new(name)
        if self._asked:
            self._asked[-1].rest_on(found)
        return found.answer

    def _kept(self, name: str) -> _Finding | None:
        """What was found with another shape, and holds for this one."""
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
        """Whether sizes are as a question says, in runs of this shape."""
        number = self._findings.number(question)
        answer = self._answer(number)
        if self._asked:
            self._asked[-1].questions[number] = answer
        return answer

    def _answer(self, number: int) -> bool:
        if number not in self._answers:
            kind, *sizes = self._findings.questions[number]
            self._answers[number] = self._is_outer(*sizes) if kind == "outer" else self._is_around(*sizes)
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

    def _is_around(self, read: tuple[int, Placement], own: tuple[int, Placement]) -> bool:
        return self._around(*read) == self._around(*own)

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
        """Whether its slices can be taken as they lie.

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

    def _is_outer(self, outer: Size, is_batch: bool) -> bool:
        """Whether there is one in front of ours, or as many as the batch has rows."""
        return self._number(outer) == (self._layout.batch if is_batch else 1)

    def _dim(self, ref: Any) -> Dim:
        return self._dims.get(ref.name) if isinstance(ref, Ref) else None

    def _shape(self, ref: Any) -> tuple[Size, ...]:
        return (self._shapes.get(ref.name) or ()) if isinstance(ref, Ref) else ()

    def _number(self, size: Size) -> int:
        return self._layout.program.sizes.value(size, self._layout.symbols)

    def _is_sole(self, name: str) -> bool:
        """Whether exactly one dimension of a value extends along ours, and holds its slices in order."""
        found = [size for size in self._shapes.get(name) or () if self._mentions(size)]
        return len(found) == 1 and self.is_plain(name)

    def _mentions(self, size: Size) -> bool:
        return not self._symbols.isdisjoint(symbols_in(size))

    def _is_one(self, ref: Any) -> bool:
        """Whether it is a value with slices of its own, which a run's inputs determine."""
        return (
            isinstance(ref, Ref)
            and ref.name in self._layout.varying
            and self._dims.get(ref.name) is not None
            and self._is_sole(ref.name)
        )

    def _is_same(self, record: Record, ref: Any) -> bool:
        """Whether it is such a value, of as many slices as the record's own."""
        if not self._is_one(ref):
            return False
        dim, here = self._dims[ref.name], self._dims[record.name]
        own = self._shapes[record.name]
        assert dim is not None
        return here is not None and own is not None and self._shape(ref)[dim] == own[here]

    def _is_weight(self, arg: Any) -> bool:
        """Whether it is the same for every slice: no tensor, a parameter, a constant without slices."""
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
        """Whether an operand of a pointwise operation meets each slice with its own, or with all."""
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
        """Whether what it takes lies at the same place however many slices there are."""
        expressions = self._layout.program.sizes.expressions
        used = [expressions[leaf.index] for leaf in record.leaves() if isinstance(leaf, SizeRef)]
        return not any(map(self._mentions, used))

    def _along(self, record: Record, ref: Any, place: int, default: int | None = None) -> int | None:
        """The dimension that an operation works along, counted from the front."""
        given = record.args[place] if len(record.args) > place else record.kwargs.get("dim", default)
        dims = len(self._shape(ref))
        return given % dims if isinstance(given, int) and dims else None
