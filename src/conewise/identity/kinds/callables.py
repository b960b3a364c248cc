"""Callables around functions: methods, built-in ones, descriptors, partial and compiled ones."""

from __future__ import annotations

import functools
import types
from typing import Any

import numpy as np

from conewise.identity.libraries import library_of_module, library_of_name
from conewise.identity.names import home_of, reached
from conewise.identity.short_text import short
from conewise.identity.walk import Walk


def method_text(walk: Walk, value: types.MethodType) -> str:
    """A method, by its function and what it is bound to."""
    return short("method", f"{walk.at('method', value.__func__)}, {walk.at('self', value.__self__)}")


def builtin_text(walk: Walk, value: Any) -> str:
    """A built-in function, by its name, and what it is bound to."""
    owner = getattr(value, "__self__", None)
    name = f"{getattr(value, '__module__', None)}.{value.__qualname__}"
    if owner is None or isinstance(owner, types.ModuleType):
        library = library_of_name(str(value.__module__))
        if not library or reached(value.__module__, value.__name__) is not value:
            raise walk.refused(f"the built-in function {name}, of which the code cannot be seen")
        return f"{name} of {library}"
    return short(name, walk.at("self", owner))


def descriptor_text(walk: Walk, value: Any) -> str:
    """A descriptor of a built-in class, by its name in that class."""
    return f"{value.__name__} of {walk.at('class', value.__objclass__)}"


def partial_text(walk: Walk, value: functools.partial[Any]) -> str:
    """A partial function, by what it was given."""
    parts = {"function": value.func, "keywords": value.keywords, **vars(value)}
    parts |= {f"argument {index}": item for index, item in enumerate(value.args)}
    return short("partial", walk.attributes(parts))


def wrapped_text(walk: Walk, value: Any) -> str:
    """A function with a cache, by what it caches."""
    return short(type(value).__name__, walk.at("function", value.__wrapped__))


def operation_text(walk: Walk, value: Any) -> str:
    """An operation of torch, by its name."""
    name = str(value)
    if name.partition(".")[0] not in {"aten", "prim", "prims"}:
        raise walk.refused(f"the operation {name}, of which the code cannot be seen")
    return f"operation {name}"


def ufunc_text(walk: Walk, value: np.ufunc) -> str:
    """A ufunc of numpy, by its name."""
    if getattr(np, value.__name__, None) is not value:
        raise walk.refused(f"the ufunc {value.__name__}, of which the code cannot be seen")
    return f"numpy.{value.__name__} of {library_of_module(np)}"


def property_text(walk: Walk, value: property) -> str:
    """A property, by its functions."""
    return short("property", walk.items((value.fget, value.fset, value.fdel)))


def held_function_text(walk: Walk, value: Any) -> str:
    """`staticmethod`, `classmethod` and `cached_property` around a function."""
    function = value.func if isinstance(value, functools.cached_property) else value.__func__
    return short(type(value).__name__, walk.at("function", function))


def compiled(value: object) -> object:
    """What was given to `torch.compile`, of what it returned; else None."""
    held = getattr(value, "__dict__", {})
    if home_of(type(value)).startswith("torch._dynamo"):
        return held.get("_modules", {}).get("_orig_mod")
    return held.get("_torchdynamo_orig_callable") if isinstance(value, types.FunctionType) else None
