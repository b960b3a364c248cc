"""The parameters that a patch has: those that autograd would find gradients for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from conewise.jobs.identity import Keyed
from conewise.program.tensors import Tensor

MOST = 256
"""So many items of a container that a function reads are looked at."""


def parameters_of(patch: Any) -> tuple[Tensor, ...]:
    """Return the tensors that require a gradient in a patch, each once.

    They are the tensor itself, the parameters of a module, and what a function reads of these two: in its
    closure, its defaults, the globals that it names, the object that it is a method of, and in lists and
    dictionaries there.
    """
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    queue = [patch]
    while queue:
        one = queue.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            if one.requires_grad:
                found[id(one)] = one
        elif isinstance(one, nn.Module):
            found |= {id(own): own for own in one.parameters() if own.requires_grad}
        else:
            queue += _read_by(one)
    return tuple(found.values())


def trained_by(patch: Any, module: nn.Module) -> tuple[Tensor, ...]:
    """The parameters of a patch, without the weights of the module that it is a patch of: constants."""
    found = parameters_of(patch)
    if not found:
        return ()
    weights = set(map(id, module.parameters()))
    return tuple(one for one in found if id(one) not in weights)


def _read_by(one: Any) -> list[Any]:
    """Return what a function or a container holds, as far as tensors may be in it."""
    if isinstance(one, FunctionType):
        held: list[Any] = [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
        for cell in one.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # it is not bound yet
                continue
        known = one.__globals__
        named = (known[name] for name in _names(one.__code__) if name in known)
        # Functions of other files are not looked into: they lead through all of a library.
        held += [value for value in named if getattr(value, "__globals__", known) is known]
        return [value for value in held if isinstance(value, _LOOKED_INTO)]
    if isinstance(one, partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, MethodType):
        return [one.__func__, one.__self__]
    if isinstance(one, Keyed):
        return [one.function]
    if isinstance(one, Mapping):
        return list(one.values())[:MOST]
    if isinstance(one, list | tuple):
        return list(one[:MOST])
    if callable(one) and not isinstance(one, type):
        held = list(getattr(one, "__dict__", {}).values())
        return [value for value in held if isinstance(value, Tensor | nn.Module)]
    return []


def _names(code: CodeType) -> Iterator[str]:
    """The globals that code names, that of functions inside of it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


_LOOKED_INTO = (Tensor, nn.Module, FunctionType, partial, MethodType, Keyed, list, tuple, dict)
