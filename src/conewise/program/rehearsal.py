"""Rehearsals: the most that a computation holds, found by following it over tensors that hold no numbers.

The very code that will compute is run, with tensors that have shapes, strides and devices but no data. Blocks
of memory are counted while they are held: values that a walk drops, what autograd saves and lets go of,
gradients, metrics. So the peak is that of the walk itself, in the order of its steps, for any walk.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._python_dispatch import TorchDispatchMode

MOST_KNOWN = 1 << 14
_MADE: dict[Hashable, Any] = {}
"""The layouts of results, by the operation and the layouts of its operands."""

_ZERO = {True: 0.0, False: 0}

_UNDER_WAY: ContextVar[_Blocks | None] = ContextVar("rehearsal", default=None)


def peak_of(compute: Callable[[], object]) -> int:
    """Return the most bytes that `compute` holds at a time, beyond what is held before it.

    It must keep nothing that it finds: that has no numbers. Questions about them are answered with False and
    0. Where something cannot be followed so, as a function that leaves torch, it is computed with numbers.
    """
    try:
        return _followed(compute, 0)
    except Exception:  # noqa: BLE001  # whatever cannot be followed: computing it says why
        return _followed(compute, 1)


def _followed(compute: Callable[[], object], depth: int) -> int:
    blocks = _Blocks(depth)
    token = _UNDER_WAY.set(blocks)
    try:
        with blocks:
            compute()
    finally:
        _UNDER_WAY.reset(token)
    return blocks.peak


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the blocks that tensors lie in, each counted once."""
    blocks = (tensor.untyped_storage() for tensor in tensors)
    return sum({block.data_ptr(): block.nbytes() for block in blocks}.values())


def is_rehearsal() -> bool:
    """Return True while a rehearsal is under way: numbers must not be looked at, nor results be kept."""
    return _UNDER_WAY.get() is not None


def as_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor's numbers; zeros in a rehearsal, where it has none."""
    if not isinstance(tensor, FakeTensor):
        return tensor.numpy()
    found = np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    weakref.finalize(found, lambda _: None, tensor)  # the numbers' memory is held for as long as they are
    return found


@contextmanager
def with_numbers() -> Iterator[None]:
    """In a rehearsal too, compute with numbers: what is found about a model, from its weights and inputs."""
    blocks = _UNDER_WAY.get()
    if blocks is None:
        yield
        return
    blocks.depth += 1
    try:
        yield
    finally:
        blocks.depth -= 1


class _Blocks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the blocks that operations make, until each goes; `peak` is the most.

    Operations on weights and on values of runs are followed without numbers, and so is what reads their
    results. Indices and masks are computed.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.depth = depth
        self._without = FakeTensorMode()
        self._held: set[int] = set()
        self._empty: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        given = list(_tensors((*args, *kwargs.values())))
        if self._is_computed(given):
            made = func(*args, **kwargs)
        else:
            args, kwargs = (
                _mapped(args, self._emptied),
                {key: _mapped(one, self._emptied) for key, one in kwargs.items()},
            )
            given = list(_tensors((*args, *kwargs.values())))
            try:
                made = self._followed(func, args, kwargs, given)
            except DataDependentOutputException:
                return (
                    False if func is torch.ops.aten.equal.default else _ZERO[given[0].dtype.is_floating_point]
                )
        there = {leaf.untyped_storage()._cdata for leaf in given}
        for leaf in _tensors((made,)):
            self._note(leaf.untyped_storage(), there)
        return made

    def _followed(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        """The result of an operation without numbers: found once for operands that lie alike."""
        mode, key = self._without, (func, _lie(args), _lie(tuple(kwargs.items())))
        lies = _MADE.get(key)
        if lies is None:
            with mode:
                made = func(*args, **kwargs)
            if len(_MADE) >= MOST_KNOWN:
                _MADE.clear()
            _MADE[key] = _lies_of(func, made, given)
            return made
        device = given[0].fake_device  # type: ignore[attr-defined]
        with in_kernel_invocation_manager(mode):
            if isinstance(lies, str):
                made = args[0] if lies == "written" else func(*args, **kwargs)
            else:
                made = [torch.empty_strided(*lie, dtype=dtype, device="meta") for *lie, dtype in lies]
                made = made[0] if len(made) == 1 else tuple(made)
        return _mapped(
            made, lambda one: one if isinstance(one, FakeTensor) else FakeTensor(mode, one, device)
        )

    def _is_computed(self, given: list[Tensor]) -> bool:
        if any(isinstance(leaf, FakeTensor) for leaf in given):
            return False
        return self.depth > 0 or not any(
            leaf.dim() > 1 and leaf.is_floating_point() and leaf.untyped_storage()._cdata not in self._held
            for leaf in given
        )

    def _emptied(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        known = self._empty.get(id(tensor))
        if known is None or known[0]() is not tensor:
            lie = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            known = weakref.ref(tensor), FakeTensor(self._without, lie, tensor.device)
            self._empty[id(tensor)] = known
        return known[1]

    def _note(self, block: torch.UntypedStorage, there: set[int]) -> None:
        place, size = block._cdata, block.nbytes()
        if place not in there and place not in self._held:
            self._held.add(place)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(block, self._gone, place, size)

    def _gone(self, place: int, size: int) -> None:
        self._held.discard(place)
        self.live -= size


def _lie(value: Any) -> Hashable:
    """Operands as a key: tensors by how they lie in memory."""
    if isinstance(value, FakeTensor):
        return value.shape, value.stride(), value.dtype, value.fake_device, value.storage_offset()
    if isinstance(value, tuple | list):
        return tuple([_lie(one) for one in value])
    return type(value), value


def _lies_of(func: Any, made: Any, given: list[Tensor]) -> Any:
    """Return the layouts of new results; "written" where an operand is, "shown" for views, else None."""
    found = list(_tensors((made,)))
    device = given[0].fake_device  # type: ignore[attr-defined]
    if not found or any(one.fake_device != device for one in (*given, *found)):  # type: ignore[attr-defined]
        return None
    if func._schema.is_mutable:
        return "written" if made is given[0] else None
    there = {one.untyped_storage()._cdata for one in given}
    if any(one.untyped_storage()._cdata in there for one in found):
        return "shown"
    plain = isinstance(made, Tensor) or (isinstance(made, tuple) and len(found) == len(made))
    return [(one.shape, one.stride(), one.dtype) for one in found] if plain else None


def _tensors(values: Any) -> Iterator[Tensor]:
    for one in values:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, tuple | list):
            yield from _tensors(one)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    return type(value)([_mapped(one, change) for one in value]) if type(value) in (tuple, list) else value
