"""A network operated by hand: hooks and replaced submodules on a copy. Nothing of the library is here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Act:
    """One thing that is done: to what goes `in` or comes `out` of a module, to it, or to its weight.

    `last` is the part of a module whose output is the module's own: what is done there is done to both.
    """

    where: str
    path: str
    change: Any
    last: str = ""


def operated(module: nn.Module, acts: Sequence[Act]) -> nn.Module:
    """A copy of the module, with all of it done. What was done inside of a module goes with it."""
    made = copy.deepcopy(module)
    hooks: list[Act] = []
    for act in acts:
        if act.where == "module":
            given = copy.deepcopy(act.change) if isinstance(act.change, nn.Module) else Called(act.change)
            made.set_submodule(act.path, given)
            hooks = [
                replace(one, path=act.path) if (one.where, one.path) == ("out", act.last) else one
                for one in hooks
            ]
            hooks = [one for one in hooks if not one.path.startswith(f"{act.path}.")]
        elif act.where == "weight":
            with torch.no_grad():
                made.get_submodule(act.path).weight = nn.Parameter(act.change.clone())
        else:
            hooks.append(act)
    for act in hooks:
        part = made.get_submodule(act.path)
        if act.where == "in":
            part.register_forward_pre_hook(entering(act.change), with_kwargs=True)
        else:
            part.register_forward_hook(leaving(act.change))
    return made


class Called(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def entering(change: Change) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    return hook


def leaving(change: Change) -> Any:
    def hook(_: nn.Module, __: Any, out: Any) -> Any:
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    return hook


def outputs(module: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The first tensor that the module returns."""
    with torch.no_grad():
        return next(
            one for one in tree_leaves(tuple(returned(module, inputs).values())) if isinstance(one, Tensor)
        )


def returned(module: nn.Module, inputs: dict[str, Any]) -> Any:
    config: Any = getattr(module, "config", None)
    off = {"use_cache": False} if hasattr(config, "vocab_size") else {}
    return module(**inputs, **off)


def with_columns(columns: Sequence[int], value: float = 0.0, dim: int = -1) -> Change:
    """What is there, with some of its features put to a number."""

    def change(x: Tensor) -> Tensor:
        x = x.clone().movedim(dim, -1)
        x[..., list(columns)] = value
        return x.movedim(-1, dim)

    return change
