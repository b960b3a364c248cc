"""Plain values that were read from a file, as values of the types that are expected there.

What was written by hand, by a newer version or by a broken disk is found out where it is read, and not where
it is used: every type and range is looked at, and what differs is told by its place in the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}
_LARGEST = 2**63


def decoded(value: Any, expected: Any, where: str) -> Any:
    """`value` as the type `expected`: a number, a text, None, tuples of them, dataclasses, unions of these.

    A list becomes a tuple, an object the dataclass, without the fields that are not known; a field's
    metadata may have its `name` there. Numbers are finite, and whole ones have 64 bits. Raises ValueError,
    which says `where`.
    """
    if expected is Any:
        return value
    if get_origin(expected) in (Union, UnionType):
        return _one_of(value, get_args(expected), where)
    if get_origin(expected) is tuple:
        return _items(value, get_args(expected), where)
    if get_origin(expected) in (dict, Mapping):
        kind = get_args(expected)[1]
        items = _object(value, where).items()
        return {str(name): decoded(item, kind, f"{where}.{name}") for name, item in items}
    if is_dataclass(expected):
        return _record(value, expected, where)
    return _plain(value, expected, where)


def _plain(value: Any, expected: Any, where: str) -> Any:
    if expected is float and type(value) is int and abs(value) < _LARGEST:
        return float(value)
    if type(value) is not expected:
        raise ValueError(f"{where} is {_shown(value)}, where {_WORDS[expected]} is expected")
    if expected is float and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, where a finite number is expected")
    if expected is int and not -_LARGEST <= value < _LARGEST:
        raise ValueError(f"{where} is a number of {len(str(abs(value)))} digits")
    return value


def _one_of(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    if value is None and NoneType in kinds:
        return None
    rest = [kind for kind in kinds if kind is not NoneType]
    for kind in rest[:-1]:
        try:
            return decoded(value, kind, where)
        except ValueError:
            continue
    return decoded(value, rest[-1], where)


def _items(value: Any, kinds: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} is {_shown(value)}, where a list is expected")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(decoded(item, kinds[0], f"{where}[{place}]") for place, item in enumerate(value))
    if len(value) != len(kinds):
        raise ValueError(f"{where} has {len(value)} items, where {len(kinds)} are expected")
    return tuple(
        decoded(item, kind, f"{where}[{place}]")
        for place, (item, kind) in enumerate(zip(value, kinds, strict=True))
    )


def _record(value: Any, kind: Any, where: str) -> Any:
    value = _object(value, where)
    hints, given = _hints(kind), {}
    for one in fields(kind):
        name = one.metadata.get("name", one.name)
        if name in value:
            given[one.name] = decoded(value[name], hints[one.name], f"{where}.{name}")
        elif one.default is MISSING and one.default_factory is MISSING:
            raise ValueError(f"{where} has no {name}")
    return kind(**given)


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {_shown(value)}, where an object is expected")
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _shown(value: Any) -> str:
    words = {**_WORDS, list: "a list", dict: "an object"}
    return words.get(type(value), type(value).__name__)
