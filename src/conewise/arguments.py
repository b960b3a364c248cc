"""Arguments of public functions, checked by their annotations, and amounts of memory as text."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import functools
import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from types import FunctionType
from typing import Annotated, Any, TypeGuard, TypeVar, get_args, get_origin

from conewise.errors import ArgumentError, SweepError, describe

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def as_bytes(given: int | str | None) -> int | None:
    """A number of bytes, or text like "2GiB" or "500 MB"."""
    if given is None:
        return None
    amount = 0
    if isinstance(given, int) and not isinstance(given, bool):
        amount = given
    elif isinstance(given, str):
        text = given.strip().lower().replace(" ", "")
        number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
        with suppress(ValueError, KeyError, OverflowError):
            amount = int(float(number) * UNITS[text[len(number) :] or "b"])
    if amount < 1:
        raise SweepError(f"{given!r} is no amount of memory; write a number of bytes, or '2GiB', '500MB'.")
    return amount


def shown_bytes(count: int | None) -> str:
    """Bytes as people read them."""
    if count is None:
        return "no limit"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `minimum` to `maximum`; with `is_open` without the two."""

    minimum: float = -math.inf
    maximum: float = math.inf
    is_open: bool = False

    def holds(self, number: float) -> bool:
        """True if the number lies in the range."""
        if self.is_open:
            return self.minimum < number < self.maximum
        return self.minimum <= number <= self.maximum

    def __str__(self) -> str:
        if self.maximum == math.inf:
            return f"greater than {self.minimum:g}" if self.is_open else f"of at least {self.minimum:g}"
        return f"between {self.minimum:g} and {self.maximum:g}" + (
            ", without the two" if self.is_open else ""
        )


Positive = Annotated[int, Range(1)]
"""A whole number of at least 1."""
Count = Annotated[int, Range(0)]
"""A whole number of at least 0."""
Samples = Annotated[int, Range(1, 1_000_000)]
"""A number of repetitions: more would not end."""
Seed = Annotated[int, Range(-(2**63), 2**63 - 1)]
"""A seed, as torch takes it."""
NonNegative = Annotated[float, Range(0)]
"""A finite number of at least 0."""
Share = Annotated[float, Range(0, 1)]
"""A number from 0 to 1."""
PositiveNumber = Annotated[float, Range(0, is_open=True)]
"""A finite number greater than 0."""


def checked(target: F) -> F:
    """Check the arguments of a function by their annotations, or of every public method that a class defines.

    Raises ArgumentError, which says what was found and what was expected.
    """
    if isinstance(target, type):
        # What a dataclass is made of is not looked at: users do not make them.
        own = {"__getitem__"} if "__dataclass_fields__" in vars(target) else {"__getitem__", "__init__"}
        for name, member in list(vars(target).items()):
            if name.startswith("_") and name not in own:
                continue
            if isinstance(member, FunctionType):
                setattr(target, name, checked(member))
            elif isinstance(member, classmethod | staticmethod):
                setattr(target, name, type(member)(checked(member.__func__)))
        return target

    @functools.cache
    def checks() -> tuple[list[_Check | None], dict[str, _Check]]:
        # Not before the first call: the names that annotations speak of may be defined further down.
        scope = inspect.unwrap(target).__globals__
        parameters = inspect.signature(target).parameters.values()
        of = {one.name: _check(one, scope) for one in parameters}
        in_order = [of[one.name] for one in parameters if one.kind.name.startswith("POSITIONAL")]
        return in_order, {name: check for name, check in of.items() if check is not None}

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        in_order, by_name = checks()
        for at, (check, given) in enumerate(zip(in_order, args, strict=False)):
            if check is not None and (plain := check(given)) is not given:
                args = (*args[:at], plain, *args[at + 1 :])
        for name in kwargs.keys() & by_name.keys():
            kwargs[name] = by_name[name](kwargs[name])
        return target(*args, **kwargs)

    return call  # type: ignore[return-value]


def expect(name: str, given: object, annotation: str) -> Any:
    """Check one argument as `checked` does, where a function has to do so itself; returns it."""
    return _named_check(name, annotation)(given)


def has_items(given: object) -> TypeGuard[collections.abc.Iterable[Any]]:
    """True for what can be iterated over: a tensor or an array without dimensions cannot, and says it can."""
    return isinstance(given, collections.abc.Iterable) and getattr(given, "ndim", None) != 0


# -- what annotations say ------------------------------------------------------------------------

_REFUSED: Any = object()
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class _Alternative:
    """One kind of value: what it is called, and `take`, which makes a plain one of a value or refuses it."""

    name: str
    take: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Check:
    """The check of one parameter: a value has to be of one of the alternatives."""

    name: str
    alternatives: list[_Alternative]

    def __call__(self, given: Any) -> Any:
        for one in self.alternatives:
            if (taken := one.take(given)) is not _REFUSED:
                return taken
        expected = " or ".join(dict.fromkeys(one.name for one in self.alternatives))
        raise ArgumentError(f"`{self.name}` is {describe(given)}; expected {expected}.")


@functools.cache
def _named_check(name: str, annotation: str) -> _Check:
    return _Check(name, list(_alternatives(annotation, globals())))  # type: ignore[arg-type]


def _check(parameter: inspect.Parameter, scope: Mapping[str, Any]) -> _Check | None:
    """The check of a parameter; None where its annotation says nothing that can be checked."""
    if parameter.kind.name.startswith("VAR") or parameter.annotation is parameter.empty:
        return None
    if parameter.name == "max_memory":
        return None  # `as_bytes` says what an amount of memory is
    found = list(_alternatives(parameter.annotation, scope))
    return None if None in found else _Check(parameter.name, found)  # type: ignore[arg-type]


def _alternatives(annotation: object, scope: Mapping[str, Any]) -> Iterator[_Alternative | None]:
    """The alternatives of an annotation, those between its bars; None for one that cannot be checked."""
    parts, tree = [], ast.parse(str(annotation), mode="eval").body
    while isinstance(tree, ast.BinOp):
        parts.append(ast.unparse(tree.right))
        tree = tree.left
    parts = [ast.unparse(tree), *reversed(parts)]
    for part in parts:
        yield _PATH if "Path" in parts and part in {"str", "Path"} else _alternative(part, scope)


def _alternative(part: str, scope: Mapping[str, Any]) -> _Alternative | None:
    if part == "None":
        return _Alternative("None", lambda given: None if given is None else _REFUSED)
    name, _, values = part.partition("[")
    if name == "Literal":
        texts = ast.literal_eval(f"({values.removesuffix(']')},)")
        said = " or ".join(map(repr, texts))
        return _Alternative(
            said, lambda given: given if isinstance(given, str) and given in texts else _REFUSED
        )
    first, *inner = name.split(".")
    kind = scope.get(first, vars(builtins).get(first, getattr(collections.abc, first, None)))
    kind = functools.reduce(lambda found, inside: getattr(found, inside, None), inner, kind)
    if get_origin(kind) is collections.abc.Callable:
        kind = collections.abc.Callable
    if isinstance(kind, collections.abc.Hashable) and kind in _PLAIN:
        return _PLAIN[kind]
    if kind is None:  # imported for type checkers alone
        return _Alternative(
            _said(name),
            lambda given: given if any(one.__name__ == name for one in type(given).__mro__) else _REFUSED,
        )
    if get_origin(kind) is Annotated:
        return _ranged(*get_args(kind))
    if not isinstance(kind, type) or kind in (Any, object):
        return None
    if getattr(kind, "_is_protocol", False):
        names = [name for name in dir(kind) if not name.startswith("_")]
        return _Alternative(
            _said(kind.__name__),
            lambda given: given if all(hasattr(given, name) for name in names) else _REFUSED,
        )
    if kind.__module__ == "collections.abc":
        holds_texts = part.endswith("[str]")  # a range is none of them, and may be endless
        return _Alternative(
            f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__.lower()}",
            lambda given: (
                given
                if isinstance(given, kind)
                and not isinstance(given, str | bytes)
                and not (holds_texts and isinstance(given, range))
                and has_items(given)
                else _REFUSED
            ),
        )
    return _Alternative(_said(kind.__name__), lambda given: given if isinstance(given, kind) else _REFUSED)


def _said(kind: str) -> str:
    return _WORDS.get(kind, f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}")


def _ranged(kind: type, limits: Range) -> _Alternative:
    """Numbers of a kind within limits."""
    plain = _PLAIN[kind]

    def take(given: object) -> Any:
        number = plain.take(given)
        return number if number is not _REFUSED and limits.holds(number) else _REFUSED

    return _Alternative(f"{plain.name} {limits}", take)


def _whole(given: Any) -> Any:
    if type(given) is int:
        return given
    # A tensor or an array of booleans says that it is a whole number.
    is_flag = isinstance(given, bool) or str(getattr(given, "dtype", "")) in {"torch.bool", "bool"}
    if is_flag or isinstance(given, type) or not hasattr(given, "__index__"):
        return _REFUSED
    try:
        return operator.index(given)
    except TypeError:  # a tensor that is no single whole number
        return _REFUSED


def _number(given: Any) -> Any:
    if getattr(given, "ndim", None) == 0 and hasattr(given, "item"):
        given = given.item()
    is_plain = isinstance(given, int | float)
    if isinstance(given, bool) or not (is_plain or isinstance(given, Real)):
        return _REFUSED
    try:
        # Torch takes no whole number of more than 64 bits.
        plain = given if is_plain and abs(given) < 2**63 else float(given)
        return plain if math.isfinite(plain) else _REFUSED
    except OverflowError:
        return _REFUSED


def _flag(given: Any) -> Any:
    return bool(given) if type(given).__name__ in {"bool", "bool_"} else _REFUSED  # NumPy's too


def _text(given: Any) -> Any:
    """A text of characters: half of a surrogate pair is none, and no file can hold it."""
    is_text = isinstance(given, str) and (given.isascii() or _SURROGATE.search(given) is None)
    return given if is_text else _REFUSED


def _path(given: Any) -> Any:
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    is_path = isinstance(text, str) and text and "\0" not in text
    return given if is_path and _text(text) is text else _REFUSED


_PATH = _Alternative("a path: a text that is not empty, or a Path", _path)
_PLAIN: dict[Any, _Alternative] = {
    int: _Alternative("a whole number", _whole),
    float: _Alternative("a finite number", _number),
    bool: _Alternative("True or False", _flag),
    str: _Alternative("a text", _text),
    collections.abc.Callable: _Alternative(
        "a function", lambda given: given if callable(given) else _REFUSED
    ),
}
_WORDS = {
    "Captured": "a model, `cw.load(...)`",
    "Components": "a graph of edges, `model.components()`",
    "EdgeGraph": "`circuit.graph`",
    "Pool": "workers, such as `cw.Processes(4)`",
    "Model": "a model, `cw.load(...)`",
    "Module": "an `nn.Module`",
    "Plannable": "a captured model, `cw.capture(...)`",
    "Reading": "a run, `model.run(...)`",
    "SweepPlan": "a plan, `sweep.plan()`",
    "WorldsExecutor": "workers, such as `cw.Processes(4)`",
}
"""The words of a message for a class whose name users do not write."""
