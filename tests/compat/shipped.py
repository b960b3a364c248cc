"""The model that comes with the package, as a notebook has it, and plain hooks on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor

import conewise as cw
from conewise.compat.transformer_lens import HookedModel


@cache
def hooked() -> HookedModel:
    return HookedModel(cw.load("tiny", attn_implementation="eager"))


@contextmanager
def hook(path: str, change: Callable[[Tensor], Tensor], *, is_input: bool = False) -> Iterator[Any]:
    """The module with what goes into, or comes out of, one part of it changed."""
    part = hooked().module.get_submodule(path)

    def enter(_: Any, args: Any) -> Any:
        return (change(args[0].clone()), *args[1:])

    def leave(_: Any, __: Any, out: Any) -> Any:
        return (change(out[0].clone()), *out[1:]) if isinstance(out, tuple) else change(out.clone())

    handle = part.register_forward_pre_hook(enter) if is_input else part.register_forward_hook(leave)
    try:
        yield hooked().module
    finally:
        handle.remove()


def block(layer: int) -> str:
    """The path of a block."""
    names: list[str] = [name for name, _ in hooked().module.named_modules() if name.endswith(".0")]
    return f"{names[0].removesuffix('.0')}.{layer}"


def projection(layer: int) -> str:
    """The path of what multiplies a layer's heads with W_O."""
    inside = dict(hooked().module.get_submodule(block(layer)).named_modules())
    return f"{block(layer)}.{next(name for name in inside if name.endswith(('o_proj', 'attn.c_proj')))}"
