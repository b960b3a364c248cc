"""Identity: a short text for any value or function, so that a change of it between two runs is seen.

Equal texts mean the same: a value is identified by its contents, a function by its code and by all that its
code reads, wherever that lies. What cannot be identified for certain (what is read from a file, an iterator
that is used up, the inside of a foreign object) is refused, and has to be given a name.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import fx

from conewise.errors import IdentityError
from conewise.identity.keyed import Keyed
from conewise.identity.kinds.arrays import array_text, number_text, tensor_text
from conewise.identity.kinds.callables import (
    builtin_text,
    compiled,
    descriptor_text,
    held_function_text,
    method_text,
    operation_text,
    partial_text,
    property_text,
    ufunc_text,
    wrapped_text,
)
from conewise.identity.kinds.classes import class_text, module_text
from conewise.identity.kinds.functions import code_text, function_parts, function_text
from conewise.identity.kinds.named import (
    keyed_text,
    lock_text,
    logger_text,
    named_text,
    pattern_text,
    reference_text,
)
from conewise.identity.kinds.objects import graph_text, object_text, used_up_text
from conewise.identity.libraries import library_of_file
from conewise.identity.short_text import short
from conewise.identity.walk import Walk


def identity(value: object) -> str:
    """Equal values and functions have equal text, in every process, and different ones have different texts.

    Raises IdentityError where that cannot be promised.
    """
    with _looking_at(value):
        return Walk(_described).text(value)


def identified(value: object) -> str | dict[str, str]:
    """The identity of a value; of a function of the user's, those of its code and of all that it reads."""
    if isinstance(value, types.FunctionType) and not library_of_file(value.__code__.co_filename):
        with _looking_at(value):
            return function_parts(Walk(_described), value)
    return identity(value)


@contextmanager
def _looking_at(value: object) -> Iterator[None]:
    """Whatever objects raise when they are looked at: that is no reason to fail, but to refuse."""
    try:
        yield
    except IdentityError:
        raise
    except RecursionError:
        raise IdentityError("", f"a {type(value).__name__} that holds values in values, too deep") from None
    except Exception as error:
        what = f"a {type(value).__name__} that cannot be looked at ({type(error).__name__}: {error})"
        raise IdentityError("", what) from error


_LOADED = tuple(
    kind
    for kind in (getattr(torch._ops, name, None) for name in ("OpOverload", "OpOverloadPacket"))
    if kind is not None
)

_LOCKS = (type(threading.Lock()), type(threading.RLock()))

_DESCRIBED: list[tuple[Any, Callable[..., str]]] = [
    (Keyed, keyed_text),
    (torch.Tensor, tensor_text),
    (np.ndarray, array_text),
    (np.generic, number_text),
    (types.ModuleType, module_text),
    (types.FunctionType, function_text),
    (types.MethodType, method_text),
    (types.CodeType, code_text),
    (functools.partial, partial_text),
    (type(functools.lru_cache(len)), wrapped_text),
    (_LOADED, operation_text),
    (fx.GraphModule, graph_text),
    (np.ufunc, ufunc_text),
    ((torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype, PurePath), named_text),
    (_LOCKS, lock_text),
    (type, class_text),
    ((types.BuiltinFunctionType, types.MethodWrapperType), builtin_text),
    (
        (
            types.MemberDescriptorType,
            types.GetSetDescriptorType,
            types.MethodDescriptorType,
            types.WrapperDescriptorType,
            types.ClassMethodDescriptorType,
        ),
        descriptor_text,
    ),
    (property, property_text),
    ((staticmethod, classmethod, functools.cached_property), held_function_text),
    (weakref.ref, reference_text),
    (re.Pattern, pattern_text),
    (logging.Logger, logger_text),
    ((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), used_up_text),
]


def _described(walk: Walk, value: Any) -> str:
    original = compiled(value)
    if original is not None:
        return short("compiled", walk.at("function", original))
    for kinds, describe in _DESCRIBED:
        if isinstance(value, kinds):
            found: str = describe(walk, value)
            return found
    if type(value) in (list, tuple):
        return short("", f"[{walk.items(value)}]" if type(value) is list else f"({walk.items(value)})")
    if type(value) in (set, frozenset):
        return short("set", walk.unordered(value))
    if type(value) in (dict, types.MappingProxyType):
        return short("", f"{{{walk.pairs(value)}}}")
    return object_text(walk, value)
