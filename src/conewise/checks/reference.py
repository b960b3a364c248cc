"""The module once more, in a higher precision: what rounding errors are measured against.

A computation that is not equal to the module's own bit for bit is right when it is no further from this
reference than the module itself does, a few times over. So half precision is checked as sharply as it can be.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from conewise.identity.machine import memory_free
from conewise.program.calls import Call

Tensor = torch.Tensor

MULTIPLE = 2
"""How many times the module's own error a right computation may have: both round, each in its own way."""

_HIGHER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


class NoReferenceError(Exception):
    """There is no reference; the message says why."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A copy of a module that computes in `dtype` on `device`; the module itself computes in `own`.

    Without a device, it computes where the module does: on several.
    """

    module: nn.Module
    own: torch.dtype
    dtype: torch.dtype
    device: torch.device | None

    @property
    def name(self) -> str:
        """The precision, in a word."""
        return str(self.dtype).removeprefix("torch.")

    def lifted(self, value: Any) -> Any:
        """A tensor as the copy takes it: on its device, if it has one, numbers in its precision."""
        return _lifted(value, self.dtype, self.device)

    def inputs(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a run as the copy takes them."""
        return {name: self.lifted(value) for name, value in given.items()}

    def call(self, call: Call) -> Call:
        """The arguments of a call as the copy takes them."""
        args, kwargs = tree_map(self.lifted, (call.args, dict(call.kwargs)))
        return Call(args, kwargs)

    def shaken(self, outputs: Any, own: Any, draws: int = 8) -> Iterator[Any]:
        """What the copy returned, with random errors as large as those of what the module itself returned."""
        precise, spec = tree_flatten(outputs)
        theirs = tree_flatten(own)[0]
        where = {one.device for one in precise if _is_number(one)}
        generators = {device: torch.Generator(device).manual_seed(0) for device in where}
        for _ in range(draws):
            made = [
                one + _deviation(one, self.lifted(other)) * _noise(one, generators)
                if _is_number(one)
                else one
                for one, other in zip(precise, theirs, strict=True)
            ]
            yield tree_unflatten(made, spec)


def reference_of(module: nn.Module, own: torch.dtype) -> Reference:
    """A copy of a module that computes in `own`, in the next higher precision.

    It lies on the module's device, or in main memory where it does not fit there. Of a module that is spread
    over several devices, each tensor's copy lies where the tensor does. Raises NoReferenceError.
    """
    dtype = _HIGHER.get(own)
    if dtype is None:
        raise NoReferenceError(f"there is no precision above {str(own).removeprefix('torch.')}")
    tensors = [*module.parameters(), *module.buffers()]
    needed: dict[torch.device, int] = {}
    for one in tensors:
        taken = one.numel() * max(one.itemsize, dtype.itemsize)
        needed[one.device] = needed.get(one.device, 0) + taken
    if len(needed) > 1:
        device = None
        for there, taken in needed.items():
            _with_room(taken, (there,), dtype)
    else:
        home = next(iter(needed), torch.device("cpu"))
        device = _with_room(needed.get(home, 0), (home, torch.device("cpu")), dtype)
    try:
        with torch.no_grad():
            # What is in `memo` is taken for a copy that was made already.
            memo: dict[int, Any] = {id(one): _copied(one, dtype, device) for one in tensors}
            made = copy.deepcopy(module, memo)
            made = made if device is None else made.to(device)
    except Exception as error:  # a module copies itself as it likes
        raise NoReferenceError(f"the module cannot be copied ({type(error).__name__}: {error})") from error
    return Reference(made, own, dtype, device)


def allowed_error(own_error: float, own: torch.dtype, scale: float, multiple: int = MULTIPLE) -> float:
    """How far from the reference a right computation may be, where the module itself is `own_error` off.

    The second term is for values that the module happens to hit: half a machine epsilon of the largest value.
    """
    return multiple * own_error + torch.finfo(own).eps / 2 * scale


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _deviation(one: Tensor, other: Tensor) -> Tensor:
    """The usual difference of two tensors, over all of their numbers."""
    return (one - other).square().nanmean().sqrt().nan_to_num()


def _noise(like: Tensor, generators: Mapping[torch.device, torch.Generator]) -> Tensor:
    device = like.device
    return torch.randn(like.shape, generator=generators[device], device=device, dtype=like.dtype)


def _with_room(needed: int, devices: tuple[torch.device, ...], dtype: torch.dtype) -> torch.device:
    """The first of some devices that has room for the copy and some more."""
    free = {one: memory_free(one) for one in devices}
    for one, there in free.items():
        if there is None or 1.1 * needed <= there:
            return one
    found = " and ".join(f"{(there or 0) / 1e9:.1f} GB on {one}" for one, there in free.items())
    name = str(dtype).removeprefix("torch.")
    raise NoReferenceError(f"a copy in {name} takes {needed / 1e9:.1f} GB, and there are {found} free")


def _copied(tensor: Tensor, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    made = _lifted(tensor.detach(), dtype, device)
    made = made.clone() if made.data_ptr() == tensor.data_ptr() else made
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _lifted(value: Any, dtype: torch.dtype, device: torch.device | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    is_lower = value.is_floating_point() and torch.finfo(value.dtype).bits < torch.finfo(dtype).bits
    return value.to(device or value.device, dtype if is_lower else value.dtype)
