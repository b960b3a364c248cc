"""Stacks: the values of one node in several worlds, laid one behind the other along the batch.

`torch.export` keeps the batch size symbolic, so the same rules compute a stack of k worlds when every
size that depends on the batch is evaluated for k batches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from conewise.program.records import SIZES, Program, Record
from conewise.program.rehearsal import with_numbers
from conewise.program.sizes import Size, has_unbacked, symbols_in
from conewise.program.tensors import brought
from conewise.program.walk import Rule, compile_rule

Tensor = torch.Tensor


class Layout:
    """The dimensions of batch and positions in each value of a program, for runs of one shape."""

    def __init__(self, program: Program, symbols: dict[str, int]) -> None:
        self.program = program
        self.symbols = symbols
        bound, known = program.sizes.symbols, program.dimensions
        self._batch = self.batch_symbols = set(known.batch)
        self._positions = self.position_symbols = set(known.positions)
        self.batch = next((symbols[symbol] for symbol in bound if symbol in self._batch), 1)
        self.batch_dim, self.pos_dim, self.varying = program.batch_dims, program.pos_dims, program.varying
        self._distinct, self._number = program.distinct_shapes
        self._length_of = [self._length(shape) for shape in self._distinct]
        self._shapes: dict[tuple[int, int | None], tuple[int, ...] | None] = {}
        self._elements: dict[tuple[int, int | None], int | None] = {}
        self._sizes: dict[tuple[int, int | None], tuple[int, ...]] = {}

    def _length(self, shape: tuple[Size, ...] | None) -> int:
        """Return how many positions a value of this shape has: an encoder's may differ from a decoder's."""
        for size in shape or ():
            for symbol in symbols_in(size) & self._positions:
                return self.symbols[symbol]
        return 1

    def shape(self, name: str, rows: int | None = None) -> tuple[int, ...] | None:
        """The shape of one run's value; with `rows`, of so many of its last positions; None for no tensor."""
        number = self._number.get(name)
        return None if number is None else self.shape_of(number, rows)

    def shape_of(self, number: int, rows: int | None = None) -> tuple[int, ...] | None:
        """The shape of the values whose shapes have that number in the program.

        Evaluated when it is asked for: one that is never cut may not be defined for so few positions. None
        for one that depends on values.
        """
        key = number, rows
        if key not in self._shapes:
            values, value, shape = self.symbols, self.program.sizes.value, self._distinct[number]
            if rows is not None:
                values = values | dict.fromkeys(self._positions & set(values), rows)
            known = shape is not None and not any(map(has_unbacked, shape))
            self._shapes[key] = tuple(value(size, values) for size in shape or ()) if known else None
        return self._shapes[key]

    def elements(self, name: str, rows: int | None = None) -> int | None:
        """Return the count of numbers in one run's value; None for no tensor."""
        number = self._number.get(name)
        if number is None:
            return None
        key = number, rows
        if key not in self._elements:
            shape = self.shape_of(number, rows)
            self._elements[key] = None if shape is None else math.prod(shape)
        return self._elements[key]

    def sizes(self, worlds: int, rows: int | None = None) -> tuple[int, ...]:
        """The sizes of a stack of `worlds`; with `rows`, of so many of its last positions."""
        key = worlds, rows
        if key not in self._sizes:
            values = dict(self.symbols)
            values |= {symbol: worlds * values[symbol] for symbol in self._batch & set(values)}
            if rows is not None:
                values |= dict.fromkeys(self._positions & set(values), rows)
            self._sizes[key] = self.program.sizes.of(values)
        return self._sizes[key]

    def length(self, name: str) -> int:
        """Return the number of positions of a value."""
        return self._length_of[self._number[name]]

    @property
    def lengths(self) -> set[int]:
        """The lengths of a run's inputs: an encoder's may differ from a decoder's."""
        return {self.symbols[symbol] for symbol in self._positions if symbol in self.symbols}

    def tail(self, name: str, value: Tensor, rows: int, of: int | None = None) -> Tensor:
        """The last `rows` positions of a value, or of a stack; it has `of` of them, all unless said."""
        tail = self.tail_of(name, rows, of)
        return value if tail is None else tail(value)

    def tail_of(self, name: str, rows: int, of: int | None = None) -> Callable[[Tensor], Tensor] | None:
        """Return a function that takes the last `rows` positions of a value or a stack; None for all."""
        dim = self.pos_dim.get(name)
        if dim is None:
            return None
        have = self.length(name) if of is None else of
        if have == rows:
            return None
        if dim != self.batch_dim.get(name):
            return lambda value: value.narrow(dim, have - rows, rows)

        def apart(value: Tensor) -> Tensor:
            split = value.unflatten(dim, (-1, have))  # type: ignore[no-untyped-call]
            part: Tensor = split.narrow(dim + 1, have - rows, rows).flatten(dim, dim + 1)
            return part

        return apart

    def as_view(
        self, name: str, worlds: int, start: int, stop: int
    ) -> tuple[tuple[int, int, int], list[int]] | None:
        """Return where to narrow one run's value, and how to expand it, to show positions for `worlds` alike.

        None where that takes more than a view.
        """
        dim, batch, shape = self.pos_dim.get(name), self.batch_dim.get(name), self.shape(name)
        if batch is None or shape is None or shape[batch] != 1 or dim == batch:
            return None
        sizes = [-1] * len(shape)
        sizes[batch] = worlds
        return ((batch, 0, 1) if dim is None else (dim, start, stop - start)), sizes

    def extended(self, name: str, base: Tensor, value: Tensor, rows: int) -> Tensor:
        """A stack of the last `rows` positions, with those before them, which are the baseline's."""
        dim, batch = self.pos_dim.get(name), self.batch_dim.get(name)
        if dim is None or rows == self.length(name):
            return value
        assert batch is not None
        before = self.length(name) - rows
        if dim == batch:
            front = base.unflatten(dim, (-1, self.length(name))).narrow(dim + 1, 0, before)  # type: ignore[no-untyped-call]
            back = value.unflatten(dim, (-1, rows))  # type: ignore[no-untyped-call]
            front = repeated(front, dim, back.shape[dim] // front.shape[dim])
            whole: Tensor = torch.cat([front, back], dim + 1).flatten(dim, dim + 1)
            return whole
        front = base.narrow(dim, 0, before)
        front = repeated(front, batch, value.shape[batch] // front.shape[batch])
        return torch.cat([front, value], dim)


def repeated(value: Tensor, dim: int, times: int) -> Tensor:
    """`value` `times` times along `dim`; without a copy where it has one row there."""
    if times == 1:
        return value
    if value.shape[dim] == 1:
        shape = list(value.shape)
        shape[dim] = times
        return value.expand(shape)
    return torch.cat([value] * times, dim)


class Constants:
    """Values that depend on no input, but on the batch size: masks, index ranges.

    Where all rows are alike, a row is repeated; else the value is computed for the stacked size.
    """

    def __init__(self, layout: Layout, read: Callable[[str], Any]) -> None:
        self._layout = layout
        self._read = read
        self._records = layout.program.record_of
        self._alike: dict[str, bool] = {}
        self._at: dict[tuple[str, int], Any] = {}

    def rebase(self, read: Callable[[str], Any]) -> None:
        """Read another baseline of the same shape: its constants are the same."""
        self._read = read

    def value(self, name: str) -> Any:
        """The constant `name` as one run has it, computed of weights and sizes."""
        return self._computed(name, 1)

    def stacked(self, name: str, worlds: int) -> Any:
        """The constant `name` for a stack of `worlds`."""
        dim = self._layout.batch_dim.get(name)
        if dim is None and name in self._records and self._records[name].shape is not None:
            return self._read(name)
        if name not in self._records:
            return self._read(name)
        if self.alike(name):
            assert dim is not None
            return repeated(self._read(name), dim, worlds)
        return self._computed(name, worlds)

    @with_numbers()
    @torch.no_grad()
    def alike(self, name: str) -> bool:
        """True if every world has the same value of a constant that extends along the batch."""
        if name not in self._alike:
            two, dim = self._computed(name, 2), self._layout.batch_dim.get(name)
            self._alike[name] = (
                isinstance(two, torch.Tensor)
                and dim is not None
                and torch.equal(*two.chunk(2, dim))
                and two.shape[dim] == 2 * self._read(name).shape[dim]
            )
        return self._alike[name]

    @with_numbers()
    def _computed(self, name: str, worlds: int) -> Any:
        if name == SIZES:
            return self._layout.sizes(worlds)
        record = self._records.get(name)
        if record is None:
            return self._read(name)
        key = name, worlds
        if key not in self._at:
            rule = compile_rule(record)
            self._at[key] = rule(*[self._computed(read, worlds) for read in record.inputs])
        return self._at[key]


@functools.lru_cache(maxsize=4096)
def index_tensor(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Indices as a tensor; kept, since making one waits for the device and cannot be captured."""
    return brought(torch.tensor(places, dtype=torch.long), device)


def compile_stacked_rule(record: Record) -> Rule:
    """The rule of a record for stacks: a view becomes a reshape, and a product is one product.

    A stack is put together anew, so its strides need not be those of the module's own value, and what was a
    view of that may need a copy here. The numbers are the same.
    """
    if record.target is torch.ops.aten.view.default:
        return compile_rule(replace(record, target=torch.ops.aten.reshape.default))
    rule = compile_rule(record)
    if record.target is torch.ops.aten.linear.default:
        # Of rows that do not lie together, as last positions do not, torch makes a product for each world,
        # which takes twelve times as long on a CPU.
        return lambda value, *others: rule(value.contiguous() if value.ndim > 2 else value, *others)
    return rule
