"""What can be put in place of a value: noise, vectors, other prompts, means."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from conewise.errors import PatchError
from conewise.structure.selections import Selection, resolved

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
    return part + (scale * noise_of(part.shape, seed)).to(part.device, part.dtype)


def noise_of(shape: Sequence[int], seed: str) -> Tensor:
    """Gaussian noise of deviation 1, on the CPU; the same for the same shape and seed."""
    return torch.randn(tuple(shape), generator=_generator(seed))


def resampled(part: Tensor, present: Tensor, batch: int, seed: str) -> Tensor:
    """A prompt of `part` for each of `present`: not the one of the same row, where both have as many.

    `batch` is the dimension of the prompts.
    """
    count, wanted = part.shape[batch], present.shape[batch]
    generator = _generator(seed)
    if count != wanted:
        drawn = torch.randint(0, count, (wanted,), generator=generator)
        return part.index_select(batch, drawn.to(part.device))
    if count < 2:
        return part
    return part.roll(1 + int(torch.randint(0, count - 1, (1,), generator=generator)), batch)


def averaged(
    before: tuple[Tensor, int] | None, value: Tensor, axes: Sequence[str], over: Sequence[str], where: str
) -> tuple[Tensor, int]:
    """A running sum over the axes `over`, which stay as dimensions of size 1, and how many there were."""
    dims = [dim for dim, axis in enumerate(axes) if axis in over]
    total = value.sum(dims, keepdim=True, dtype=torch.float64)
    count = math.prod(value.shape[dim] for dim in dims)
    if before is None:
        return total, count
    if before[0].shape != total.shape:
        raise PatchError(
            f"the mean of {where} at each position: one batch of the dataset is shaped {tuple(value.shape)}, "
            f"another leaves {tuple(before[0].shape)}. Give batches of one length."
        )
    return before[0] + total, before[1] + count


def spread_out(mean: Tensor, present: Tensor, axes: Sequence[str], part: Selection) -> Tensor:
    """A mean at every place of `part` of a site whose whole value is `present`."""
    whole = mean.to(present.dtype).expand_as(present)
    return whole[resolved(axes, part, present.shape)].clone()


def _generator(seed: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))


def stacked(rows: list[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one shape, one behind the other along a new dimension."""
    return torch.stack(rows, dim)


def joined(parts: list[Tensor]) -> Tensor:
    """Tensors one behind the other along their last dimension."""
    return torch.cat(parts, dim=-1)


def reordered(chunks: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """Rows in chunks one behind the other, with row i at the place order[i]."""
    rows = torch.cat(list(chunks))
    found = torch.empty_like(rows)
    found[torch.tensor(list(order), device=rows.device)] = rows
    return found
