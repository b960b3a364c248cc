"""Identity: a short text for any value or function, so that a change of it between two runs is seen."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import torch

from conewise.frontends.torch.digests import inputs_digest

DEEPEST = 8
"""Where values in values in values stop being looked at."""


def identity(value: object) -> str:
    """Equal values and functions have equal text, in every process; different ones differ if it can be seen.

    Tensors are told apart by all their numbers, functions by their code, their defaults, what they close
    over, and the plain values and functions of their module that they name. Runs are their inputs. Any
    other object is its type and its attributes.
    """
    return _identity(value, ())


def _identity(value: object, above: tuple[int, ...]) -> str:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"tensor {inputs_digest({'': value})[:16]}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, type):
        return f"class {value.__qualname__}"
    if id(value) in above or len(above) > DEEPEST:
        return f"another {type(value).__qualname__}"
    above = (*above, id(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(_identity(item, above) for item in value)}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_identity(item, above) for item in value))}}}"
    if isinstance(value, Mapping):
        pairs = (f"{_identity(key, above)}: {_identity(item, above)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    return _described(value, above)


def _described(value: Any, above: tuple[int, ...]) -> str:
    if isinstance(value, functools.partial):
        return f"partial {_identity([value.func, value.args, value.keywords], above)}"
    if isinstance(value, types.MethodType):
        return f"method {_identity([value.__func__, value.__self__], above)}"
    if isinstance(value, types.FunctionType):
        return f"{value.__name__} {_sha(_function(value, above))}"
    if isinstance(value, types.CodeType):
        return _sha(_code(value, above))
    if isinstance(value, types.BuiltinFunctionType | types.BuiltinMethodType):
        return f"{value.__module__}.{value.__qualname__}"
    inputs = getattr(value, "inputs", None)
    if isinstance(inputs, Mapping) and all(isinstance(one, torch.Tensor) for one in inputs.values()):
        return f"run {inputs_digest(inputs)[:16]}"
    kind = type(value)
    call = kind.__dict__.get("__call__")
    attributes = _identity([call, getattr(value, "__dict__", None)], above)
    return f"{kind.__qualname__} {_sha(attributes)}"


def _function(function: types.FunctionType, above: tuple[int, ...]) -> str:
    cells = [_cell(cell) for cell in function.__closure__ or ()]
    named = {name: function.__globals__.get(name) for name in _names(function.__code__)}
    plain = (bool, int, float, complex, str, bytes, tuple, torch.Tensor, types.FunctionType)
    own = {
        name: value
        for name, value in sorted(named.items())
        # What a library defines is its version's matter.
        if isinstance(value, plain) and getattr(value, "__module__", None) in {None, function.__module__}
    }
    parts = [function.__code__, function.__defaults__, function.__kwdefaults__, cells, own]
    return _identity(parts, above)


def _cell(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*inner)


def _code(code: types.CodeType, above: tuple[int, ...]) -> str:
    return _identity([code.co_code, code.co_consts, code.co_names, code.co_varnames], above)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
