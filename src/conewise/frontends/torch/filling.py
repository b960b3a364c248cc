"""What can be put in place of a value: noise, vectors, other prompts, means."""

from __future__ import annotations

import hashlib

import torch

from conewise.errors import PatchError

Tensor = torch.Tensor


def has_nan(value: Tensor) -> bool:
    """Whether there is a NaN in it."""
    return bool(torch.isnan(value).any()) if value.is_floating_point() else False


def added(part: Tensor, vector: Tensor, scale: float, where: str) -> Tensor:
    """`part` + scale · vector, the vector along the last axes of the part."""
    if tuple(part.shape[part.ndim - vector.ndim :]) != tuple(vector.shape):
        raise PatchError(
            f"the vector to add at {where} has shape {tuple(vector.shape)}, which is no tail of the part's "
            f"shape {tuple(part.shape)}."
        )
    return part + scale * vector.to(part.device, part.dtype)


def noised(part: Tensor, scale: float, seed: str) -> Tensor:
    """`part` with Gaussian noise, drawn on the CPU so that it is the same on every device."""
    drawn = torch.randn(part.shape, generator=_generator(seed))
    return part + (scale * drawn).to(part.device, part.dtype)


def permuted(part: Tensor, seed: str) -> Tensor:
    """`part` with its prompts exchanged: no prompt keeps its own while there are two or more."""
    count = part.shape[0]
    if count < 2:
        return part
    shift = 1 + int(torch.randint(0, count - 1, (1,), generator=_generator(seed)))
    return part.roll(shift, 0)


def averaged(before: tuple[Tensor, int] | None, part: Tensor) -> tuple[Tensor, int]:
    """A running sum over prompts and positions, and how many there were."""
    rows = part.reshape(-1, *part.shape[2:]) if part.ndim > 2 else part
    total, count = rows.sum(0, dtype=torch.float64), rows.shape[0]
    return (total, count) if before is None else (before[0] + total, before[1] + count)


def _generator(seed: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))


def stacked(rows: list[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one shape, one behind the other along a new dimension."""
    return torch.stack(rows, dim)


def joined(parts: list[Tensor]) -> Tensor:
    """Tensors one behind the other along their last dimension."""
    return torch.cat(parts, dim=-1)
