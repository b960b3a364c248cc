"""What the layers above need of tensors, so that they need not import torch themselves."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

Tensor = torch.Tensor


def computing() -> AbstractContextManager[None]:
    """The context in which a captured graph is computed: no gradients are recorded."""
    return torch.no_grad()


def zeros_like(part: Tensor) -> Tensor:
    """Zeros in place of `part`."""
    return torch.zeros_like(part)


def mean_of(part: Tensor, axes: tuple[str, ...]) -> Tensor:
    """The mean of `part` over its batch and position axes, at every place of it."""
    over = [dim for dim, axis in enumerate(axes) if axis in {"batch", "pos"}]
    if not over:
        return part.mean().expand_as(part).clone()
    return part.mean(dim=over, keepdim=True).expand_as(part).clone()


def same_bits(one: Any, other: Any) -> bool:
    """Whether two tensors are equal bit for bit, NaN equal to NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one, other) or torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Max |one − other|; NaN where they differ in kind, 0 for empty tensors."""
    if one.numel() == 0:
        return 0.0
    return float((one.to(torch.float64) - other.to(torch.float64)).abs().max())


def storage_bytes(values: list[Any]) -> int:
    """The bytes that these values hold in memory, shared storage counted once."""
    storages: dict[int, int] = {}
    stack = list(values)
    while stack:
        value = stack.pop()
        if isinstance(value, tuple | list):
            stack.extend(value)
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def row_tolerance(value: Tensor) -> float:
    """How far a row of a batch may lie from the row alone: 100 roundings of the dtype.

    Batched kernels sum in another order; the deviation grows with depth, not with the batch.
    """
    return 100 * torch.finfo(value.dtype).eps
