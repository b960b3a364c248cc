"""Small models of the zoo, captured once for all tests of a process, and hooks to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import conewise as cw
from conewise.model import Model
from conewise.runs.captured import Captured
from tests.program.zoo import ZOO, Case

Change = Callable[[Tensor], Tensor]


def small(name: str = "gpt2", attention: str = "sdpa") -> Model:
    """The captured model of the zoo; its module is `small(name).module`."""
    return _captured(name, attention)


@cache
def _captured(name: str, attention: str) -> Model:
    case = ZOO[name]
    return cw.capture(case.make(attention), **case.example(1, 12))


def inputs(name: str = "gpt2", batch: int = 2, length: int = 12, seed: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    return ZOO[name].example(batch, length)


def module_outputs(model: Captured, given: dict[str, Any]) -> list[Tensor]:
    """What the module itself returns, called as it was captured."""
    constants = {"use_cache": False} if "use_cache" in model.signature.example.kwargs else {}
    with torch.no_grad():
        return tree_leaves(model.module(**given, **constants))


@contextmanager
def hooked(module: nn.Module, way: str, path: str, change: Change, call: int = 0) -> Iterator[list[Tensor]]:
    """Let `change` replace what goes into (`in`) or comes out of (`out`) the module at `path`.

    Only its call number `call` is changed. Yields the list of all values seen there.
    """
    seen: list[Tensor] = []

    def swap(value: Tensor) -> Tensor:
        seen.append(value)
        return change(value.clone()) if len(seen) == call + 1 else value

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (swap(args[0]), *args[1:])

    def leave(_: nn.Module, __: Any, out: Any) -> Any:
        return (swap(out[0]), *out[1:]) if isinstance(out, tuple) else swap(out)

    part = module.get_submodule(path)
    handle = part.register_forward_pre_hook(enter) if way == "in" else part.register_forward_hook(leave)
    try:
        yield seen
    finally:
        handle.remove()


def hook_of(case: Case, kind: str, layer: int) -> tuple[str, str, int]:
    """Where a hook finds a kind: (in or out, path, call). A shared block is called once a layer."""
    way, _, path = case.hooks[kind].partition(":")
    block = case.block.format(layer)
    return way, f"{block}.{path}" if path else block, 0 if "{}" in case.block else layer


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
