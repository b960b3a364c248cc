"""What a surgery puts into a module: blocks that act by hooks, and submodules that stand for others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from conewise.errors import ConewiseError, SurgeryError, describe
from conewise.program.export import Exported, export
from conewise.program.foreign import brief
from conewise.program.records import Program
from conewise.program.sizes import Size
from conewise.runs.splicing import Held

_SIZES = (3, 5, 7, 11, 13, 17, 19, 23)
"""Sizes of the examples that stand for those which vary: no two are equal, and none is 1."""


class Operated(Held):
    """A function, or a module, that a surgery put in: in place of another one, or at a hook."""

    acts_by_hook = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the function makes of what it is given."""
        return self.function(*args, **kwargs)


class Grafted(Operated):
    """A block that acts by a hook, on the value that it finds there."""

    acts_by_hook = True


class Pruned(nn.Module):
    """A value with a part of it pruned: what `mask` chooses is `value`; without a mask, all of it."""

    acts_by_hook = True
    mask: Tensor | None
    value: Tensor

    def __init__(self, mask: Tensor | None, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.register_buffer("value", value)

    def forward(self, given: Tensor) -> Tensor:
        """What is given, pruned."""
        if self.mask is None:
            return self.value.repeat(
                [
                    1 if here == there else there
                    for here, there in zip(self.value.shape, given.shape, strict=True)
                ]
            )
        return torch.where(self.mask, self.value, given)


class Flat(nn.Module):
    """A module that is given tensors alone, and returns those of its results: what is captured of it."""

    def __init__(self, held: Operated, call: Sequence[Any], spec: TreeSpec, tensors: Sequence[int]) -> None:
        super().__init__()
        self.held = held
        self._call, self._spec, self._at = list(call), spec, list(tensors)

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors that the module returns."""
        leaves = list(self._call)
        for at, tensor in zip(self._at, tensors, strict=True):
            leaves[at] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        return [leaf for leaf in tree_flatten(self.held(*args, **kwargs))[0] if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Example:
    """Values like those of a program, of sizes that tell dimensions apart."""

    program: Program

    @cached_property
    def symbols(self) -> Mapping[str, int]:
        """A size for each symbol."""
        return {name: _SIZES[min(at, len(_SIZES) - 1)] for at, name in enumerate(self.program.sizes.symbols)}

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The program's sizes."""
        return self.program.sizes.of(self.symbols)

    def size(self, size: Size) -> int:
        """One size."""
        return self.program.sizes.value(size, self.symbols)

    def like(self, node: str) -> Tensor:
        """A value like a node's."""
        shape, dtype = self.program.shapes[node], self.program.dtypes[node]
        if shape is None or dtype is None:
            raise SurgeryError(
                f"the value of {node!r} is several tensors, not one. Name the site that takes the part you "
                "mean from it."
            )
        return torch.zeros(
            [self.size(size) for size in shape], dtype=dtype, device=device_of(self.program, node)
        )


def device_of(program: Program, node: str) -> torch.device:
    """The device of a node's value."""
    record = program.record_of.get(node)
    if record is not None:
        assert record.device is not None
        return record.device
    return next(leaf.device for leaf in program.inputs if leaf.name == node)


def captured(
    what: str,
    function: Operated,
    program: Program,
    nodes: Sequence[str],
    call: tuple[Sequence[Any], TreeSpec, Sequence[int]] | None = None,
) -> Exported:
    """A block as records, as it is applied to values of the program.

    `call` holds the leaves of the whole call, how they are nested, and where the tensors are among them.
    Raises SurgeryError where the block fails there, returns no tensor, or writes to what it is given.
    """
    example = [Example(program).like(node) for node in nodes]
    if call is None:
        leaves, spec = tree_flatten((tuple(example), {}))
        call = leaves, spec, range(len(example))
    module = Flat(function, *call)
    module.train(function.training)
    shown = f"{what}, given {', '.join(f'shape {tuple(one.shape)}, {one.dtype}' for one in example)},"
    try:
        with torch.no_grad():
            given = [one.clone() for one in example]
            buffers = {name: one.clone() for name, one in module.named_buffers()}  # it may write to them
            found = functional_call(module, buffers, tuple(given))
    except Exception as error:  # it raises whatever it likes
        raise SurgeryError(f"{shown} raises {brief(error)}.") from error
    if not found:
        raise SurgeryError(f"{shown} returns no tensor; it has to return what is read in its place.")
    if any(one._version for one in given):  # counted by torch, whatever is written
        raise SurgeryError(
            f"{what} writes to what it is given, which others read too. Let it make a new tensor: `x + 1`, "
            "not `x.add_(1)`."
        )
    shapes = tuple(
        {dim: Dim.AUTO for dim, size in enumerate(program.shapes[node] or ()) if not isinstance(size, int)}
        for node in nodes
    )
    try:
        return export(module, tuple(example), varying={"tensors": shapes})
    except ConewiseError as error:
        raise SurgeryError(f"{what} cannot be captured: {error}") from error


def as_block(what: str, given: Any, kind: type[Operated]) -> Operated:
    """A block that was given, as a module. Raises SurgeryError where it is no function."""
    if not callable(given) or isinstance(given, type):
        raise SurgeryError(f"{what} is a function of tensors, or an nn.Module, not {describe(given)}.")
    made = kind(given)
    return made.train(given.training) if isinstance(given, nn.Module) else made.eval()
