"""What can be put in place of a value: noise, vectors, other prompts, means."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from conewise.errors import PatchError
from conewise.program.tensors import sum_of
from conewise.structure.axes.selections import Selection, resolved

Tensor = torch.Tensor


def has_nan(value: Tensor) -> bool:
    """Whether there is a NaN in it."""
    return bool(torch.isnan(value).any()) if value.is_floating_point() else False


def expect_dense(value: Tensor, what: str) -> None:
    """Raise PatchError for a tensor without numbers of its own (device 'meta'), or in a sparse layout."""
    if value.is_meta or value.layout is not torch.strided:
        kind = "lies on the device 'meta', and has no numbers" if value.is_meta else f"is {value.layout}"
        raise PatchError(f"{what} {kind}; give a dense tensor with values, `value.to_dense()`.")


def added(part: Tensor, vector: Tensor, scale: float, where: str) -> Tensor:
    """`part` + scale · vector, the vector along the last axes of the part."""
    if not is_tail(vector.shape, part.shape):
        raise PatchError(
            f"the vector to add at {where} has shape {tuple(vector.shape)}, which is no tail of the part's "
            f"shape {tuple(part.shape)}."
        )
    return part + scale * vector.to(part.device, part.dtype)


def spread_over(value: Tensor | float, present: Tensor, where: str) -> Tensor:
    """A value at all of a part: the last axes of the part are those of the value.

    Nothing is cast or moved: a tensor has the part's dtype, and lies where the part lies.
    """
    if not isinstance(value, torch.Tensor):
        return torch.full_like(present, value)
    if (value.dtype, value.device) != (present.dtype, present.device):
        raise PatchError(
            f"the value for {where} is {value.dtype} on {value.device}, and the place has {present.dtype} on "
            f"{present.device}. Convert it first: nothing is cast or moved."
        )
    if not is_tail(value.shape, present.shape):
        raise PatchError(
            f"the value for {where} has shape {tuple(value.shape)}, which is no tail of the part's shape "
            f"{tuple(present.shape)}."
        )
    return value.expand_as(present).clone()


def is_tail(shape: Sequence[int], of: Sequence[int]) -> bool:
    """Whether a value of this shape stands for a part: it has its last axes, each as long or of length 1."""
    behind = list(of)[max(len(of) - len(shape), 0) :]
    return len(behind) == len(shape) and all(
        one in (1, other) for one, other in zip(shape, behind, strict=True)
    )


def first_blind(
    scores: Tensor, axes: Sequence[str], keys: int, groups: Sequence[Sequence[Selection]]
) -> int | None:
    """The first group of parts that together hide all keys that some query sees; None where none does.

    A key is seen where its score is not as low as masks make it. `keys` is the dimension of the keys.
    """
    seen = scores > torch.finfo(scores.dtype).min / 2
    sole = seen & (seen.sum(keys, keepdim=True) == 1)
    flags = []
    for parts in groups:
        if len(parts) == 1 and isinstance(parts[0].get(axes[keys]), int):
            flags.append(sole[resolved(axes, parts[0], scores.shape)].any())
            continue
        left = seen.clone()
        for part in parts:
            left[resolved(axes, part, scores.shape)] = False
        flags.append((seen.any(keys) & ~left.any(keys)).any())
    return next((number for number, flag in enumerate(torch.stack(flags).tolist()) if flag), None)


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
    before: tuple[Tensor, Tensor | int] | None,
    value: Tensor,
    axes: Sequence[str],
    over: Sequence[str],
    where: str,
    shown: Tensor | None = None,
) -> tuple[Tensor, Tensor | int]:
    """A running sum over the axes `over`, which stay as dimensions of size 1, and how many there were.

    `shown` says which entries count, where some are padding.
    """
    dims = [dim for dim, axis in enumerate(axes) if axis in over]
    total = value.sum(dims, keepdim=True, dtype=torch.float64)
    count: Tensor | int = math.prod(value.shape[dim] for dim in dims)
    if shown is not None:
        total, count = sum_of(value, dims, shown)
    if before is None:
        return total, count
    if before[0].shape != total.shape:
        raise PatchError(
            f"the mean of {where} at each position: one batch of the dataset is shaped {tuple(value.shape)}, "
            f"another leaves {tuple(before[0].shape)}. Give batches of one length."
        )
    return before[0] + total, before[1] + count


def where_shown(value: Tensor, shown: Tensor) -> Tensor:
    """A value with zeros where it is not shown."""
    return torch.where(shown, value, 0)


def spread_out(mean: Tensor, present: Tensor, axes: Sequence[str], part: Selection) -> Tensor:
    """A mean at every place of `part` of a site whose whole value is `present`."""
    whole = mean.to(present.dtype).expand_as(present)
    return whole[resolved(axes, part, present.shape)].clone()


def _generator(seed: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))


def stacked(rows: list[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one shape, one behind the other along a new dimension."""
    return torch.stack(rows, dim)


def stacked_values(rows: list[Tensor], dims: int) -> Tensor:
    """Values for parts of so many axes, one behind the other: each has the last of them, or fewer."""
    spread = [row.reshape((*[1] * (dims - row.ndim), *row.shape)) for row in rows]
    if len({row.shape for row in spread}) > 1:
        widest = [max(sizes) for sizes in zip(*(row.shape for row in spread), strict=True)]
        spread = [row.expand(widest) for row in spread]
    return torch.stack(spread)


def joined(parts: list[Tensor]) -> Tensor:
    """Tensors one behind the other along their last dimension."""
    return torch.cat(parts, dim=-1)


def reordered(chunks: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """Rows in chunks one behind the other, with row i at the place order[i]."""
    rows = torch.cat(list(chunks))
    found = torch.empty_like(rows)
    found[torch.tensor(list(order), device=rows.device)] = rows
    return found
