"""Where the batch, or the positions, lie in each value of a program: in which dimension, in which order.

A dimension of exactly the batch's size is the batch. One that holds more besides (`[batch·pos, d_model]`,
`[head·batch, pos, d_head]`) shows its size alone, which does not give the order: that is followed
from operation to operation, and where an operation is not known, the order is not either.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from conewise.program.operations import (
    ATTENTION,
    NORMS,
    PERMUTATIONS,
    PLAIN_PRODUCTS,
    POINTWISE,
    RESHAPES,
    SOFTMAX,
    SPLITS,
)
from conewise.program.records import Program, Record, Ref
from conewise.program.sizes import Size, is_equal, quotient, symbols_in
from conewise.structure.axes.axes import order_of


@dataclass(frozen=True, slots=True)
class Placement:
    """Dimension `dim` holds, from the outermost in: `outer` entries, `size` of ours, and `inner`."""

    dim: int
    size: Size
    outer: Size = 1
    inner: Size = 1


class Placements:
    """The placements of one role: `symbols` are the sizes that are the batch's, or the positions'."""

    def __init__(self, program: Program, symbols: Set[str]) -> None:
        self._symbols = symbols
        self._shapes, self._records = program.shapes, program.record_of
        self._found: dict[str, Placement | None] = {}
        for leaf in program.inputs:
            self._found[leaf.name] = self._exact(leaf.name)
        for record in program.records:
            self._found[record.name] = self._exact(record.name) or self._followed(record)

    def of(self, name: str) -> Placement | None:
        """Where it lies in a value; None where it does not, lies several times, or is not known to lie."""
        return self._found.get(name)

    def _along(self, name: str) -> list[int]:
        shape = self._shapes.get(name) or ()
        return [dim for dim, size in enumerate(shape) if not self._symbols.isdisjoint(symbols_in(size))]

    def _exact(self, name: str) -> Placement | None:
        dims = self._along(name)
        shape = self._shapes.get(name) or ()
        if len(dims) != 1 or str(shape[dims[0]]) not in self._symbols:
            return None
        return Placement(dims[0], shape[dims[0]])

    def _followed(self, record: Record) -> Placement | None:
        dims = self._along(record.name)
        if len(dims) != 1:
            return None
        dim = dims[0]
        if record.op in RESHAPES:
            return self._viewed(record, dim)
        if record.op in PERMUTATIONS | {"unsqueeze", "expand"}:
            return self._moved(record)
        if record.op == "getitem":
            split = self._records.get(record.inputs[0])
            known = split is not None and split.op in SPLITS and len(split.inputs) > 0
            return self._kept(record, dim, split.inputs[:1]) if known and split is not None else None
        sources = self._read_in_place(record)
        return self._kept(record, dim, sources) if sources else None

    def _read_in_place(self, record: Record) -> list[str]:
        """The operands whose entries stand in the result where they stood, or are repeated there."""
        refs = [arg.name for arg in record.args if isinstance(arg, Ref)]
        match record.op:
            case op if op in POINTWISE:
                return [name for name in record.inputs if name in self._found]
            case op if op in NORMS | SOFTMAX | PLAIN_PRODUCTS | {"slice", "narrow", ATTENTION}:
                return refs[:1]
            case "addmm" | "baddbmm" | "embedding":
                return refs[1:2]
            case "cat":
                return [part.name for part in record.args[0] if isinstance(part, Ref)]
            case _:
                return []

    def _kept(self, record: Record, dim: int, sources: Iterable[str]) -> Placement | None:
        """The placement that all sources which have one agree on, in a dimension of the same size."""
        own = record.shape or ()
        found: set[Placement] = set()
        for name in sources:
            if not self._along(name):
                continue
            placement, shape = self._found.get(name), self._shapes.get(name) or ()
            if placement is None or not is_equal(shape[placement.dim], own[dim]):
                return None
            same_place = (
                placement.dim == dim
                if record.op not in POINTWISE
                else (len(shape) - placement.dim == len(own) - dim)
            )
            if not same_place:
                return None
            found.add(replace(placement, dim=dim))
        return found.pop() if len(found) == 1 else None

    def _moved(self, record: Record) -> Placement | None:
        source = record.inputs[0]
        placement, shape = self._found.get(source), self._shapes.get(source)
        if placement is None or shape is None:
            return None
        own = record.shape or ()
        match record.op:
            case "unsqueeze":
                at = int(record.args[1]) % len(own)
                return replace(placement, dim=placement.dim + (at <= placement.dim))
            case "expand":
                moved = replace(placement, dim=placement.dim + len(own) - len(shape))
                return moved if is_equal(shape[placement.dim], own[moved.dim]) else None
            case _:
                return replace(placement, dim=order_of(record, len(shape)).index(placement.dim))

    def _viewed(self, record: Record, dim: int) -> Placement | None:
        """The same elements in the same order: as many lie in front of each of ours as before."""
        source = record.inputs[0]
        placement, shape = self._found.get(source), self._shapes.get(source)
        if placement is None or shape is None or record.shape is None:
            return None
        front = _product([*shape[: placement.dim], placement.outer])
        outer = quotient(front, _product(record.shape[:dim]))
        inner = None if outer is None else quotient(record.shape[dim], outer * placement.size)
        return None if outer is None or inner is None else Placement(dim, placement.size, outer, inner)


_FOUND: weakref.WeakKeyDictionary[Program, dict[frozenset[str], Placements]] = weakref.WeakKeyDictionary()


def placements_of(program: Program, symbols: Set[str]) -> Placements:
    """The placements of one role in a program, found at the first call."""
    known = _FOUND.setdefault(program, {})
    role = frozenset(symbols)
    if role not in known:
        known[role] = Placements(program, role)
    return known[role]


def _product(sizes: Sequence[Any]) -> Size:
    total: Size = 1
    for size in sizes:
        total = total * size
    return total
