"""A dictionary as part of a module: what it computes, and a copy of a module that has it in its place.

The copy shares the tensors of the module that it was made of. That module itself is only read.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conewise.checks.hooking import Spot

Function = Callable[[Tensor], Tensor]


class Held(nn.Module):
    """A function of one tensor as a module. It holds the modules that the function reads."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        if not isinstance(function, nn.Module):
            for number, module in enumerate(_modules_of(function)):
                self.add_module(f"of{number or ''}", module)

    def forward(self, value: Tensor) -> Tensor:
        """The function's value."""
        return self.function(value)


def _modules_of(function: object) -> Iterator[nn.Module]:
    """The modules that a method, a partial function or a closure holds, each once."""
    held: list[object] = [getattr(function, "__self__", None)]
    if isinstance(function, partial):
        held += [*_modules_of(function.func), *function.args, *function.keywords.values()]
    for cell in getattr(function, "__closure__", None) or ():
        held.append(cell.cell_contents)
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    held += [names.get(name) for name in (code.co_names if code is not None else ())]
    yield from {id(one): one for one in held if isinstance(one, nn.Module)}.values()


class Splice(nn.Module):
    """A dictionary at its place: the value there, changed by what is done to the latents and to the error.

    The error term is of the latents as encoded, whatever is put in their place afterwards. The output is
    `value − ((clean − reconstruction) + (missed − error))`, which is `reconstruction + error`, and the value
    itself, bit for bit, where neither is changed.
    """

    def __init__(self, encode: Function, decode: Function) -> None:
        super().__init__()
        self.encode, self.decode = Held(encode), Held(decode)
        self.latents, self.error = nn.Identity(), nn.Identity()
        self.read: dict[int, Tensor] = {}
        """What was read to be encoded, by the thread that runs the module."""

    def forward(self, value: Tensor, read: Tensor | None = None) -> Tensor:
        """`value` with the dictionary in it; the latents are of `read`, where they are those of another."""
        encoded = self.encode(value if read is None else read)
        clean = self.decode(encoded)
        missed = value - clean
        reconstruction = self.decode(self.latents(encoded))
        error = self.error(missed)
        made: Tensor = value - ((clean - reconstruction) + (missed - error))
        return made


class SpliceHook:
    """Lets a splice act at one call of a module: it reads a tensor there, or takes its place."""

    acts_last = True
    """Hooks that are registered later act before it; see `checks.hooking`."""

    def __init__(self, splice: Splice, spot: Spot, *, is_reading: bool, takes_two: bool) -> None:
        self.splice, self.spot = splice, spot
        self.is_reading, self.takes_two = is_reading, takes_two
        self.calls: dict[int, int] = {}  # of each thread, which may all run the module at once

    def __call__(self, _: nn.Module, first: Any, second: Any) -> Any:
        """What goes on from here: nothing else where it is not the call, or where the splice only reads."""
        thread = threading.get_ident()
        number = self.calls.get(thread, 0)
        self.calls[thread] = number + 1
        boundary = self.spot.boundary
        if number != boundary.call.call:
            return None
        whole = second if boundary.is_output else (first, second)
        value = self.spot.read(whole)
        if self.is_reading:
            self.splice.read[thread] = value
            return None
        made = self.splice(value, self.splice.read.pop(thread)) if self.takes_two else self.splice(value)
        return self.spot.replaced(whole, made)

    def begin(self, *_: Any) -> None:
        """Count calls from the start: a forward of the whole module begins."""
        self.calls.pop(threading.get_ident(), None)
        self.splice.read.pop(threading.get_ident(), None)


def with_splice(
    module: nn.Module, name: str, splice: Splice, write: Spot | None, read: Spot | None
) -> nn.Module:
    """A copy of the module, with the same tensors, that holds the splice as `name`, and has it at its place.

    Without a spot to `write` at, no module shows the place: the splice is held, and does nothing.
    """
    made = shallow_copy(module)
    made.add_module(name, splice)
    kind = type(made)
    if kind.forward is nn.Sequential.forward:
        made.__class__ = type(kind.__name__, (kind,), {"forward": _forward_of_sequence})
    for spot in (read, write) if write is not None else ():
        if spot is None:
            continue
        acting = SpliceHook(splice, spot, is_reading=spot is read, takes_two=read is not None)
        part = made.get_submodule(spot.boundary.call.path)
        if spot.boundary.is_output:
            part.register_forward_hook(acting)
        else:
            part.register_forward_pre_hook(acting, with_kwargs=True)
        made.register_forward_pre_hook(acting.begin)
    return made


def _forward_of_sequence(self: nn.Sequential, input: Any) -> Any:  # noqa: A002  # as torch calls it
    """What a sequence computes: each of its modules in turn, but for dictionaries, which act by hooks."""
    for part in self:
        if not isinstance(part, Splice):
            input = part(input)  # noqa: A001
    return input


def shallow_copy(module: nn.Module) -> nn.Module:
    """A copy of a module and of all in it that shares every tensor with the module."""
    held = [*module.parameters(), *module.buffers()]
    for part in module.modules():
        held += [value for value in vars(part).values() if isinstance(value, torch.Tensor)]
    # What is in `memo` is taken for a copy that was made already.
    memo: dict[int, Any] = {id(one): one for one in held}
    return copy.deepcopy(module, memo)
