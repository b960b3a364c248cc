"""Instances: what an object holds, as far as Python shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

BUILT_IN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)
"""Types whose contents are known without asking the object."""

BESIDE = frozenset(
    {
        "__annotate__",
        "__annotate_func__",
        "__annotations__",
        "__annotations_cache__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__orig_bases__",
        "__parameters__",
        "__qualname__",
        "__slots__",
        "__static_attributes__",
        "__type_params__",
        "__weakref__",
        "_abc_impl",
    }
)
"""What a class has beside what it computes."""

_PYTHON_CLASS = 1 << 4
"""The flag of classes that were made by a `class` statement, and whose instances have a `__dict__`."""


def contents_of(value: Any) -> object:
    """The contents of an instance of a subclass of a built-in type, as that type."""
    base: Any = next(kind for kind in BUILT_IN if isinstance(value, kind))
    if base is dict:
        return dict(dict.items(value))
    if base in (list, tuple, set, frozenset):
        return base(base.__iter__(value))
    if base is bytearray:
        return bytes(value)
    if base in (str, bytes):
        return base.__getitem__(value, slice(None))
    return base.__pos__(value)


def attributes_of(value: Any) -> dict[str, object]:
    """The attributes of an instance, slots included, less its own hash: it is another in each process."""
    held = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    held |= getattr(value, "__dict__", {})
    remembered = [name for name, item in held.items() if name.endswith("hash") and type(item) is int]
    return {name: item for name, item in held.items() if name not in remembered or not _is_hash(item, value)}


def _is_hash(number: object, value: object) -> bool:
    try:
        return number == hash(value)
    except TypeError:
        return False


def _slots(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        names = vars(one).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name in {"__dict__", "__weakref__"}:
                continue
            is_private = name.startswith("__") and not name.endswith("__")
            yield f"_{one.__name__.lstrip('_')}{name}" if is_private else name


def is_python(kind: type) -> bool:
    """Whether a class was made in Python, so that slots and `__dict__` are all that its instances hold."""
    return "__slots__" in vars(kind) or bool(kind.__flags__ & _PYTHON_CLASS)
