"""Values to patch with: noise, corrupted embeddings, other prompts, means, and sources of single cells."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from conewise.anatomy.axes import Selection, resolved
from conewise.errors import MissingSiteError, PatchError
from conewise.program.records import TOKEN_KEEPING, Program, Ref
from conewise.program.tensors import sum_of
from conewise.runs.metrics import Metric, expect_prompts

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
    return torch.randn(tuple(shape), generator=_generator(seed), dtype=torch.float32, device="cpu")


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


@dataclass(frozen=True, slots=True)
class Embedding:
    """The node that holds the embeddings of an input's tokens, and the table that they come from."""

    node: str
    input: str
    table: Tensor

    @property
    def deviation(self) -> float:
        """The standard deviation of the table's numbers."""
        return float(self.table.detach().float().std())


def find_embedding(program: Program) -> Embedding:
    """The first look-up of the token ids in a table of embeddings.

    Token ids are the input named `input_ids`, or else the first input of integers. Raises
    MissingSiteError where they are not looked up in a table.
    """
    integers = [leaf.name for leaf in program.inputs if not leaf.dtype.is_floating_point]
    named = [name for name in integers if name.rpartition(".")[2] == "input_ids"]
    tables = program.source_values
    for tokens in (named or integers)[:1]:
        ids = {tokens}
        for record in program.records:
            first, second = (*record.args, None, None)[:2]
            if record.op == "embedding" and isinstance(first, Ref) and first.name in tables:
                if isinstance(second, Ref) and second.name in ids:
                    return Embedding(record.name, tokens, tables[first.name])
            elif record.op in TOKEN_KEEPING and isinstance(first, Ref) and first.name in ids:
                ids.add(record.name)
    raise MissingSiteError(
        f"no embedding of tokens in {program.module_name}: its inputs are "
        f"{', '.join(leaf.name for leaf in program.inputs)}, and no token ids among them are looked up in a "
        "table. Make the corrupted run yourself: patch a fork of the clean one, and sweep with that as base."
    )


def repeated_inputs(program: Program, inputs: Mapping[str, Tensor], times: int) -> dict[str, Tensor]:
    """The inputs `times` times along the batch; what has no batch stays as it is."""
    if times == 1:
        return dict(inputs)
    found = {}
    for name, value in inputs.items():
        times_along = [
            times if str(size) in program.dimensions.batch else 1 for size in program.shapes[name] or ()
        ]
        found[name] = value.repeat(times_along) if times in times_along else value
    return found


def noisy(present: Tensor, scale: float, seed: int, samples: Sequence[int]) -> Tensor:
    """`present` [sample·prompt, ...] with noise; a sample's depends on the seed and its own number alone."""
    rows = present.shape[0] // len(samples)
    drawn = [noise_of((rows, *present.shape[1:]), f"{seed}/{sample}") for sample in samples]
    return present + (scale * torch.cat(drawn)).to(present.device, present.dtype)


def repeated_part(part: Tensor, times: int) -> Tensor:
    """A clean value [prompt, ...], once for each sample."""
    return part.repeat(times, *[1] * (part.ndim - 1))


def repeated_rows(rows: Tensor, times: int) -> Tensor:
    """The metrics [metric, prompt] of the clean run, once for each sample."""
    return rows.repeat(1, times)


def sampled(metric: Metric, prompts: int) -> Metric:
    """A metric of `prompts` prompts, as one of a batch in which each sample has all of these prompts."""
    expect_prompts(metric, prompts, "the clean run")
    compute: Callable[..., Tensor] = metric.compute

    def of_stack(stack: Tensor) -> Tensor:
        """Samples are worlds to the metric: [world, sample·prompt, ...] as [world·sample, prompt, ...]."""
        worlds, rows = stack.shape[:2]
        found = compute(stack.reshape(worlds * (rows // prompts), prompts, *stack.shape[2:]))
        return found.reshape(worlds, rows) if found.numel() == worlds * rows else found

    def of_outputs(outputs: Any) -> Tensor:
        rows = _rows(outputs)
        found = []
        for start in range(0, rows, prompts):
            own = tree_map(lambda leaf, s=start: _cut(leaf, rows, s, s + prompts), outputs)
            one = torch.as_tensor(compute(own))
            found.append(one.expand(prompts) if one.ndim == 0 else one)
        return torch.cat(found)

    shown, among = metric.shown, metric.among
    return replace(
        metric,
        compute=of_outputs if metric.whole else of_stack,
        prompts=None,
        of_prompts=None,
        among=None if among is None else lambda columns: sampled(among(columns), prompts),
        shown=None if shown is None else lambda mask: sampled(shown(mask[:prompts]), prompts),
    )


def _rows(outputs: Any) -> int:
    rows: list[int] = []
    tree_map(lambda leaf: rows.append(leaf.shape[0]) if isinstance(leaf, torch.Tensor) else None, outputs)
    return max(rows, default=1)


def _cut(leaf: Any, rows: int, start: int, stop: int) -> Any:
    is_batch = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == rows
    return leaf[start:stop] if is_batch else leaf


def groups(samples: int, together: int) -> list[list[int]]:
    """The numbers of the samples, cut into groups of at most `together`."""
    count = math.ceil(samples / together)
    return [list(range(n * together, min(samples, (n + 1) * together))) for n in range(count)]
