"""Plain values, as JSON and SQLite have them: of dataclasses, and back, with every type looked at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np
import torch

_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}
_LARGEST = 2**80


def plain(value: Any, *, whole: bool = False) -> Any:
    """Return nested dataclasses, mappings, tuples and slices as JSON has them.

    Fields that have their default are left out, unless it is to be `whole`. A dataclass with `as_row = True`
    is a list of all of its fields.
    """
    if is_dataclass(value):
        found = {one: getattr(value, one.name) for one in fields(value)}
        if getattr(value, "as_row", False):
            return [plain(item) for item in found.values()]
        given = {one.name: item for one, item in found.items() if whole or item != one.default}
        return {name: plain(item, whole=whole) for name, item in given.items()}
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop, value.step]}
    if isinstance(value, Mapping):
        return {name: plain(item, whole=whole) for name, item in value.items()}
    return [plain(item, whole=whole) for item in value] if isinstance(value, tuple | list) else value


def decoded(value: Any, expected: Any, where: str) -> Any:
    """Return `value` as the type `expected`: a number, a text, None, sequences, records, unions of these.

    A list becomes a tuple, an object a slice, a dataclass or a TypedDict, without fields that are not known.
    Numbers are finite, and whole ones have 80 bits. Raises ValueError, which says `where`.
    """
    origin, kinds = get_origin(expected), get_args(expected)
    if expected is Any:
        return value
    if origin is Literal:
        if value not in kinds:
            raise ValueError(f"{where} is {value!r}, where {' or '.join(map(repr, kinds))} is expected")
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in kinds:
            return None
        *others, last = (kind for kind in kinds if kind is not NoneType)
        for kind in others:
            with suppress(ValueError):
                return decoded(value, kind, where)
        return decoded(value, last, where)
    if origin in (tuple, Sequence):
        return _items(value, kinds if origin is tuple else (*kinds, Ellipsis), where)
    if origin in (dict, Mapping):
        items = _object(value, where).items()
        return {str(name): decoded(item, kinds[1], f"{where}.{name}") for name, item in items}
    if is_dataclass(expected) or is_typeddict(expected):
        return _record(value, expected, where)
    if expected is slice:
        bounds = _record(value, _Slice, where)["slice"]
        return slice(*bounds)
    return _single(value, expected, where)


class _Slice(TypedDict):
    slice: tuple[int | None, int | None, int | None]


def _single(value: Any, expected: Any, where: str) -> Any:
    if expected is float and type(value) is int and abs(value) < _LARGEST:
        return float(value)
    if type(value) is not expected:
        raise ValueError(f"{where} is {_shown(value)}, where {_WORDS[expected]} is expected")
    if expected is float and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, where a finite number is expected")
    if expected is int and not -_LARGEST <= value < _LARGEST:
        raise ValueError(f"{where} is a number of {len(str(abs(value)))} digits")
    return value


def _items(value: Any, kinds: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} is {_shown(value)}, where a list is expected")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        if kinds[0] is str and all(type(item) is str for item in value):
            return tuple(value)
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        raise ValueError(f"{where} has {len(value)} items, where {len(kinds)} are expected")
    pairs = enumerate(zip(value, kinds, strict=True))
    return tuple(decoded(item, kind, f"{where}[{place}]") for place, (item, kind) in pairs)


def _record(value: Any, kind: Any, where: str) -> Any:
    hints, optional = _fields_of(kind)
    if isinstance(value, list) and getattr(kind, "as_row", False):
        value = dict(zip(hints, value, strict=True))
    value, given = _object(value, where), {}
    for name, hint in hints.items():
        if name in value:
            given[name] = decoded(value[name], hint, f"{where}.{name}")
        elif name not in optional:
            raise ValueError(f"{where} has no {name}")
    return kind(**given)


@cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], set[str]]:
    """Return the types of the fields of a dataclass or a TypedDict, and which may be left out."""
    hints = get_type_hints(kind)
    if not is_dataclass(kind):
        return hints, set()
    own = fields(kind)
    optional = {o.name for o in own if o.default is not MISSING or o.default_factory is not MISSING}
    return {one.name: hints[one.name] for one in own}, optional


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {_shown(value)}, where an object is expected")
    return value


def _shown(value: Any) -> str:
    words = {**_WORDS, list: "a list", dict: "an object"}
    return words.get(type(value), type(value).__name__)


def packed(value: torch.Tensor) -> bytes:
    """The numbers of a float64 tensor. Raises TypeError for another dtype: nothing is rounded."""
    if value.dtype != torch.float64:
        raise TypeError(f"only float64 is packed, and this is {value.dtype}.")
    return value.detach().cpu().contiguous().numpy().astype("<f8", copy=False).tobytes()


def unpacked(data: bytes, shape: Sequence[int]) -> torch.Tensor:
    """A float64 tensor of `shape`. Raises ValueError when the bytes are more or fewer than it takes."""
    return torch.from_numpy(np.frombuffer(data, "<f8").reshape(tuple(shape)).astype(np.float64))


def from_rows(rows: Sequence[Sequence[float]] | Sequence[float]) -> torch.Tensor:
    """A float64 tensor of nested lists."""
    return torch.tensor(rows, dtype=torch.float64, device="cpu")
