"""Sizes that vary from run to run: symbols read off the inputs, and expressions over them.

`torch.export` writes such a size as an expression (`10*s23`). A table numbers the expressions
that a program uses; a run evaluates them all at once, before any record is computed, so sizes
are no nodes of the graph and are in no cone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy  # type: ignore[import-untyped]
import torch
from torch.utils._sympy.printers import PythonPrinter

from conewise.errors import InputMismatchError

Size: TypeAlias = int | sympy.Expr


def size_of(value: int | torch.SymInt) -> Size:
    """The size as a plain int, or as the expression that `torch.export` has for it."""
    if isinstance(value, int):
        return value
    expr = value.node.expr
    return int(expr) if expr.is_Integer else expr


def has_unbacked(size: object) -> bool:
    """True if the expression depends on the values of tensors, not on their shapes alone."""
    symbols = getattr(size, "free_symbols", ())
    return any(str(symbol).startswith(("u", "zuf")) for symbol in symbols)


def folded(value: object) -> bool | int | float | sympy.Basic:
    """A symbolic number or truth value as a plain one where it is constant, else its expression."""
    expr = value.node.expr  # type: ignore[attr-defined]
    if expr in {sympy.true, sympy.false}:
        return bool(expr)
    if expr.is_number:
        return int(expr) if expr.is_Integer else float(expr)
    return expr


def is_symbolic(value: object) -> bool:
    """True if `value` is a number or truth value that `torch.export` keeps symbolic."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def relations_of(tensors: Iterable[torch.Tensor]) -> list[sympy.Basic]:
    """The relations between sizes that tracing took for granted, as far as the tensors know them."""
    for tensor in tensors:
        for size in tensor.shape:
            if is_symbolic(size):
                environment = size.node.shape_env  # type: ignore[attr-defined]
                return [environment.replace(guard.expr) for guard in environment.guards]
    return []


def quotient(whole: Size, part: Size) -> Size | None:
    """`whole / part` when it is a whole number for all values of the symbols, else None."""
    ratio = sympy.cancel(sympy.sympify(whole) / part)
    if ratio.is_Integer:
        return int(ratio)
    return ratio if sympy.denom(ratio) == 1 and ratio.free_symbols else None


@functools.lru_cache(maxsize=4096)
def is_equal(one: Size, other: Size) -> bool:
    """True if two sizes are equal for all values of their symbols."""
    return bool(sympy.expand(sympy.sympify(one) - other) == 0)


def coefficient(size: Size) -> tuple[int, Size]:
    """A size as (whole number, rest): `4*s0` as (4, s0), a plain number n as (1, n)."""
    if isinstance(size, int):
        return 1, size
    number, rest = size.as_coeff_Mul()
    return (int(number), rest) if number.is_Integer else (1, size)


@dataclass(frozen=True, slots=True)
class Guard:
    """A relation between sizes that the captured program takes for granted."""

    relation: sympy.Basic
    holds: Callable[..., bool]


@functools.lru_cache(maxsize=4096)
def symbols_in(size: Size) -> frozenset[str]:
    """The names of the symbols that a size depends on."""
    return frozenset(str(symbol) for symbol in getattr(size, "free_symbols", ()))


def dim_along(shape: Sequence[Size] | None, symbols: Set[str]) -> int | None:
    """The first dimension of a shape whose size depends on one of `symbols`."""
    for dim, size in enumerate(shape or ()):
        if not symbols.isdisjoint(symbols_in(size)):
            return dim
    return None


class SizeTable:
    """The expressions that a program uses, each at its index; grows while a program is lowered.

    `symbols` says where each symbol is read: (input name, dimension), the first one first.
    """

    def __init__(self) -> None:
        self.symbols: dict[str, tuple[str, int]] = {}
        self.expressions: list[sympy.Expr] = []
        self._index: dict[sympy.Expr, int] = {}
        self._guards: list[Guard] = []
        self._evaluate: Callable[..., Any] | None = None
        self._one: dict[sympy.Expr, Callable[..., Any]] = {}

    def copy(self) -> SizeTable:
        """A table with the same expressions at the same indices, which grows by itself."""
        made = SizeTable()
        made.symbols, made.expressions = dict(self.symbols), list(self.expressions)
        made._index, made._guards = dict(self._index), list(self._guards)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """The expressions, symbols and relations, without what was compiled of them."""
        return {"symbols": self.symbols, "expressions": self.expressions, "relations": self.relations}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.symbols = dict(state["symbols"])
        for expression in state["expressions"]:
            self.index(expression)
        for relation in state["relations"]:
            self.guard(relation)

    @property
    def relations(self) -> tuple[sympy.Basic, ...]:
        """The relations that are required of every run."""
        return tuple(guard.relation for guard in self._guards)

    def index(self, expr: sympy.Expr) -> int:
        """The index of `expr`, which is added when it is new."""
        if expr not in self._index:
            self._index[expr] = len(self.expressions)
            self.expressions.append(expr)
            self._evaluate = None
        return self._index[expr]

    def bind(self, name: str, shape: Sequence[Size]) -> None:
        """Say that the symbols in `shape` are read off the input `name`."""
        for dim, size in enumerate(shape):
            if isinstance(size, sympy.Symbol):
                self.symbols.setdefault(str(size), (name, dim))
        self._evaluate = None
        self._one = {}

    def guard(self, relation: sympy.Basic) -> None:
        """Require `relation` of every run. Relations that are always true are dropped."""
        names = {str(symbol) for symbol in relation.free_symbols}
        if names and names.issubset(self.symbols):
            self._guards.append(Guard(relation, self._compile(f"bool({_python(relation)})")))

    def symbols_of(
        self, shapes: Mapping[str, Sequence[Size]], given: Mapping[str, Sequence[int]]
    ) -> dict[str, int]:
        """The value of each symbol when the inputs have the `given` shapes.

        Raises InputMismatchError when `given` does not fit the captured `shapes`, or breaks a
        relation that the capture relied on.
        """
        for name, shape in shapes.items():
            found = tuple(given[name])
            if len(found) != len(shape):
                raise InputMismatchError(f"the input {name!r} has shape {found}: {self._why(shape, found)}")
        values = {symbol: int(given[name][dim]) for symbol, (name, dim) in self.symbols.items()}
        for name, shape in shapes.items():
            found = tuple(given[name])
            expected = tuple(self.value(size, values) for size in shape)
            if found != expected:
                raise InputMismatchError(
                    f"the input {name!r} has shape {found}, but {expected} was expected: "
                    f"{self._why(shape, found)}"
                )
        for guard in self._guards:
            if not guard.holds(**values):
                raise InputMismatchError(self._broken(guard, values))
        return values

    def of(self, values: Mapping[str, int]) -> tuple[int, ...]:
        """Every expression of the table, evaluated; this is the value of the source `SIZES`."""
        if self._evaluate is None:
            body = "".join(f"{_python(expr)}, " for expr in self.expressions)
            self._evaluate = self._compile(f"({body})")
        sizes: tuple[int, ...] = self._evaluate(**values)
        return sizes

    def value(self, size: Size, values: Mapping[str, int]) -> int:
        """One size, evaluated."""
        if isinstance(size, int):
            return size
        evaluate = self._one.get(size)
        if evaluate is None:
            evaluate = self._one[size] = self._compile(_python(size))
        return int(evaluate(**values))

    def _compile(self, expression: str) -> Callable[..., Any]:
        code = f"lambda {', '.join((*self.symbols, '**_'))}: {expression}"
        namespace = {"math": math, "torch": torch, "min": min, "max": max}
        compiled: Callable[..., Any] = eval(code, namespace)
        return compiled

    def _why(self, shape: Sequence[Size], found: tuple[int, ...]) -> str:
        if len(shape) != len(found):
            return f"it was captured with {len(shape)} dimensions. Capture again with such an example."
        fixed = [dim for dim, size in enumerate(shape) if isinstance(size, int) and size != found[dim]]
        if fixed:
            return (
                f"dimension {fixed[0]} is fixed in this capture, because the module's computation "
                "depends on it. Capture again with an example of this shape."
            )
        return "sizes that were equal in the captured example must be equal in every run."

    def _broken(self, guard: Guard, values: Mapping[str, int]) -> str:
        names = sorted(str(symbol) for symbol in guard.relation.free_symbols)
        where = ", ".join(
            f"{symbol} = {values[symbol]} (dimension {self.symbols[symbol][1]} of "
            f"{self.symbols[symbol][0]!r})"
            for symbol in names
        )
        return (
            f"these inputs break a relation that the captured computation relies on: "
            f"{guard.relation}, with {where}. The module computes differently there; capture again "
            "with an example of this shape."
        )


def _python(expr: sympy.Basic) -> str:
    return str(PythonPrinter().doprint(expr))
