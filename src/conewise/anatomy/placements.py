"""The place of the batch, or of positions, in each value of a program: in which dimension, in which order.

A dimension of exactly the batch's size is the batch. One that holds more besides (`[batch·pos, d_model]`,
`[head·batch, pos, d_head]`) shows its size alone, which does not give the order: that is followed
from operation to operation, and where an operation is not known, the order is not either.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conewise.anatomy.axes import order_of
from conewise.errors import MetricError
from conewise.program.records import (
    ATTENTION,
    NORMS,
    PERMUTATIONS,
    PLAIN_PRODUCTS,
    POINTWISE,
    RESHAPES,
    SOFTMAX,
    SPLITS,
    Program,
    Record,
    Ref,
)
from conewise.program.sizes import Size, is_equal, quotient, symbols_in


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
        """Return its place in a value; None where it has none, has several, or none that is known."""
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


class Outputs:
    """Puts the outputs of a program into the order of metrics: [world, prompt, position, ...].

    Prompts and positions are known by their sizes. Where an output has no size that is known to be
    positions' (their number is fixed, or one alone is computed), positions are the dimension behind the
    prompts, as in [prompt, position, vocabulary], unless another one alone has the length of the inputs.
    One dimension behind the prompts is what a token is picked from, be it a vocabulary or positions.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known = program.dimensions
        self._batch = placements_of(program, self._known.batch)
        self._pos = placements_of(program, self._known.positions)
        self._shapes = program.shapes
        self._fixed_lengths = {
            leaf.shape[1] for leaf in program.inputs if leaf.has_positions and isinstance(leaf.shape[1], int)
        }

    def prompts(self, inputs: Mapping[str, Tensor]) -> int:
        """Return the number of prompts of a run with these inputs; 0 where that is not known."""
        if self._known.doubt:
            return 0
        if self._known.is_unbatched:
            return 1
        for leaf in self._program.inputs:
            for dim, size in enumerate(leaf.shape):
                if str(size) in self._known.batch:
                    return int(inputs[leaf.name].shape[dim])
        wide = [leaf for leaf in self._program.inputs if leaf.shape]
        wide = [leaf for leaf in wide if len(leaf.shape) > 1] or wide
        leading = {int(inputs[leaf.name].shape[0]) for leaf in wide}
        return leading.pop() if len(leading) == 1 else 0 if wide else 1

    def arranged(self, name: str, value: Any, worlds: int, prompts: int) -> Tensor:
        """A stack of an output's values as [world, prompt, ...], positions behind the prompts.

        Raises MetricError where it is not known how they lie.
        """
        if self._known.doubt:
            raise MetricError(f"{self._known.doubt}. A function of the module's outputs needs no batch.")
        shape = self._shapes.get(name)
        if not isinstance(value, torch.Tensor) or shape is None:
            raise MetricError(
                f"the output {name!r} is no tensor. Give a function of the module's outputs as the metric."
            )
        if self._known.is_unbatched:
            pos = self._pos.of(name)
            return value[None, None] if pos is None else value[None, None].movedim(pos.dim + 2, 2)
        placement = self._placement(name, value, prompts)
        dim, count = placement.dim, value.shape[placement.dim] // (worlds * prompts)
        outer, inner = (1, count) if is_equal(placement.outer, 1) else (count, 1)
        split = value.unflatten(dim, (worlds, outer, prompts, inner))  # type: ignore[no-untyped-call]
        # Behind worlds and prompts: the dimensions in front, what shared theirs outside, inside, the others.
        stack: Tensor = split.movedim((dim, dim + 2), (0, 1))
        at = self._position(name, placement)
        stack = stack if at is None else stack.movedim(at, 2)
        for spare in (dim + 3, dim + 2):
            # Positions, if found, stand in front of these now.
            index = spare + (at is not None and at > spare)
            if at != spare and stack.shape[index] == 1:
                stack = stack.squeeze(index)
        return stack

    def has_positions(self, name: str) -> bool:
        """True if an output has positions, and behind them what a token is picked from."""
        if self._known.is_unbatched:
            return len(self._shapes.get(name) or ()) > 1
        placement = self._placement_of(name)
        return placement is not None and self._position(name, placement) is not None

    def has_last(self, name: str) -> bool:
        """True if the last position can be read off an output without the others."""
        placement = self._pos.of(name)
        rest = len(self._shapes.get(name) or ()) - 1
        shares = placement is not None and not is_equal(placement.outer, 1)
        return placement is not None and (rest > 1 or (shares and rest == 1))

    def ends_in_tokens(self, name: str) -> bool:
        """True if the last dimension of an output is what a token is picked from, and not positions."""
        shape = self._shapes.get(name) or ()
        placement = self._placement_of(name)
        if placement is None:
            return False
        at = self._position(name, placement)
        return at is None or at != len(shape) + 2

    def _position(self, name: str, batch: Placement) -> int | None:
        """Return the dimension of positions, once what shares the prompts' dimension is split off."""
        shape = self._shapes.get(name) or ()
        others = [dim for dim in range(len(shape)) if dim != batch.dim]
        along = [dim for dim in others if not symbols_in(shape[dim]).isdisjoint(self._known.positions)]
        placement = self._pos.of(name)
        if placement is not None and placement.dim == batch.dim:
            return batch.dim + (3 if is_equal(batch.outer, 1) else 2)
        if len(others) < 2:
            return None
        fixed = [dim for dim in others if shape[dim] in self._fixed_lengths]
        if not along and not self._known.positions and len(fixed) == 1:
            along = fixed
        found = (along or others)[0]
        return found + 2 if found < batch.dim else found + 3

    def _placement(self, name: str, value: Tensor, prompts: int) -> Placement:
        placement = self._placement_of(name)
        is_fixed = not self._known.batch
        if placement is None or (is_fixed and value.shape[0] != prompts):
            raise MetricError(
                f"it is not known where the prompts lie in the output {name!r} of shape "
                f"{tuple(value.shape)}. Give a function of the module's outputs as the metric."
            )
        return placement

    def _placement_of(self, name: str) -> Placement | None:
        """Return the place of the prompts in an output; a batch of fixed size is its first dimension."""
        if not self._known.batch:
            shape = self._shapes.get(name)
            return Placement(0, shape[0]) if shape else None
        placement = self._batch.of(name)
        if placement is None:
            return None
        return placement if is_equal(placement.outer, 1) or is_equal(placement.inner, 1) else None
