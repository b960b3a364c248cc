"""A float32 product in three bfloat16 parts: six products of parts on tensor cores, added up in float32.

A float32 number has 24 bits, and bfloat16 has 8 of them and the same exponents, so x = x1 + x2 + x3. Of the
nine products of parts, the three smallest are left out: together they are less than what float32 itself
rounds away. The six others are one product, or a few, over parts that lie side by side. Tensor cores keep
fewer bits of a long sum than float32 does, so that the largest terms are added up in short ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 1 << 25
"""The most numbers of a factor that are split at a time: more rows are multiplied block by block."""

TERMS = 512
"""The number of largest terms that are added up on tensor cores, which cut off what they round.

The error of such a sum grows with its length: on an H200 it is that of float32 at about 600 terms, and eight
times it at 4,096. Shorter sums write the result more often.
"""

WHOLE = 64
"""Sums begin at multiples of this, where inner ones are cut: so a product's tiles are full."""

FIRST, SECOND, THIRD, FIRST_OR_NOT_FINITE = range(4)
"""The parts. Where a number is not finite, only the last has it, and the others are zero there.

Infinity times a part of a weight that is zero would be no number, and with the other sign it would cancel the
one that is right. So it is multiplied once, with the first part of the weight, which has the weight's sign.
"""


LEFT, RIGHT = (FIRST, SECOND, THIRD, FIRST_OR_NOT_FINITE), (THIRD, SECOND, FIRST)
"""The parts of the factors that lie side by side: each once, though some are multiplied twice."""

PRODUCTS = (0, 0, 3), (0, 1, 2), (3, 2, 1)
"""The products over them, smallest terms first: the first part on either side, and how many parts are summed.

The last one has the largest terms.
"""


@functools.cache
def sums_of(inner: int) -> tuple[tuple[int, int, int], ...]:
    """The sums that are added up: where each begins on the left and on the right, and how many terms."""
    *smaller, (left, right, _) = ((one * inner, other * inner, n * inner) for one, other, n in PRODUCTS)
    pieces = -(-inner // TERMS)
    step = -(-inner // (pieces * WHOLE)) * WHOLE if pieces > 1 else inner
    return (*smaller, *((left + cut, right + cut, min(step, inner - cut)) for cut in range(0, inner, step)))


@dataclass(frozen=True, slots=True)
class SplitWeight:
    """The parts of a weight, [columns, parts of `inner` numbers each]."""

    parts: Tensor
    inner: int

    @property
    def columns(self) -> int:
        """The number of columns of a product with it."""
        return len(self.parts)


def weight_bytes(inner: int, columns: int) -> int:
    """The bytes of the parts of a weight."""
    return 2 * len(RIGHT) * inner * columns


def factor_bytes(rows: int, inner: int) -> int:
    """The most bytes of the parts of the other factor."""
    return 2 * len(LEFT) * min(rows, _block(inner, BLOCK)) * inner


def split_weight(weight: Tensor) -> SplitWeight | None:
    """The parts of a weight [inner, columns]; None where one of its numbers is not finite."""
    by_column = weight.t()
    columns, inner = by_column.shape
    parts = torch.empty((columns, len(RIGHT) * inner), dtype=torch.bfloat16, device=weight.device)
    for rows in _blocks(columns, inner, weight.device):
        block = by_column[rows]
        if not bool(torch.isfinite(block).all()):
            return None
        parts[rows] = split(block, RIGHT)
    return SplitWeight(parts, inner)


def split_factor(value: Tensor) -> Tensor | None:
    """The parts of the other factor, for several products with it; None where it is more than one block."""
    rows, inner = value.shape
    if not inner or len(list(_blocks(rows, inner, value.device))) != 1:
        return None
    return split(value, LEFT)


def split_product(value: Tensor, weight: SplitWeight, parts: Tensor | None = None) -> Tensor:
    """`value` [rows, inner] times a weight, in float32; `parts` are those of the value, where there are any.

    Numbers that are not finite give what they give in float32.
    """
    rows, inner = value.shape
    out = torch.empty((rows, weight.columns), dtype=torch.float32, device=value.device)
    if not inner:
        return out.zero_()
    for block in _blocks(rows, inner, value.device):
        _multiply_parts(out[block], split(value[block], LEFT) if parts is None else parts, weight)
    return out


def _multiply_parts(out: Tensor, left: Tensor, weight: SplitWeight) -> None:
    """Write the product of a factor in parts with a weight; the parts go with it."""
    for number, (first, there, terms) in enumerate(sums_of(weight.inner)):
        right = weight.parts[:, there : there + terms].t()
        _multiply(out, left[:, first : first + terms], right, adds=number > 0)


def _multiply(out: Tensor, left: Tensor, right: Tensor, *, adds: bool) -> None:
    """Write the float32 product of bfloat16 factors into `out`, or add it there."""
    if not out.is_cuda:  # where products of bfloat16 have no other result: the same numbers, multiplied wide
        left, right = left.float(), right.float()
        out.addmm_(left, right, beta=int(adds))
    elif adds:
        torch.addmm(out, left, right, out_dtype=torch.float32, out=out)
    else:
        torch.mm(left, right, out_dtype=torch.float32, out=out)


def _blocks(rows: int, inner: int, device: torch.device) -> Iterator[slice]:
    # Without the fused kernel, splitting takes four times as much beside its result.
    step = _block(inner, BLOCK if _fused(device) else BLOCK // 4)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _block(inner: int, numbers: int) -> int:
    return max(1, numbers // max(1, inner))


# -- splitting ---------------------------------------------------------------------------------


def split(value: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Parts of a float32 tensor [rows, inner], side by side: [rows, parts of `inner` numbers each]."""
    fused = _fused(value.device)
    return split_by_operations(value, parts) if fused is None else fused(value, parts)


def split_by_operations(value: Tensor, parts: tuple[int, ...]) -> Tensor:
    """The same, by torch's own operations."""
    is_finite = torch.isfinite(value)
    clean = torch.where(is_finite, value, 0.0)
    # The upper half of the bits: unlike the nearest bfloat16, it is finite where the number is.
    first = clean.view(torch.int32).bitwise_and(-(1 << 16)).view(torch.float32)
    rest = clean.sub_(first)
    second = rest.bfloat16()
    made = {FIRST: first.bfloat16(), SECOND: second, THIRD: rest.sub_(second).bfloat16()}
    if FIRST_OR_NOT_FINITE in parts:
        made[FIRST_OR_NOT_FINITE] = torch.where(is_finite, first, value).bfloat16()
    return torch.cat([made[part] for part in parts], 1)


Splitting = Callable[[Tensor, tuple[int, ...]], Tensor]


@functools.lru_cache(maxsize=16)
def _fused(device: torch.device) -> Splitting | None:
    """The kernel that splits in one go; None where there is none, or where it does not do what it should."""
    if device.type != "cuda":
        return None
    try:
        from conewise.program import triton_kernels as cuda_split  # noqa: PLC0415  # needs Triton

        sample = _sample(device)
        found = cuda_split.split(sample, LEFT)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001  # no Triton, or no compiler for what it makes: operations of torch do as well
        return None
    expected = split_by_operations(sample, LEFT)
    is_same = torch.equal(found.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    return cuda_split.split if is_same else None


def _sample(device: torch.device) -> Tensor:
    """Numbers of all sizes and signs, zeros, the largest ones, and those that are not finite."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(64, 256, generator=generator)
    numbers *= 2.0 ** torch.randint(-120, 120, numbers.shape, generator=generator)
    least, most = torch.finfo(torch.float32).smallest_normal, torch.finfo(torch.float32).max
    given = [0.0, -0.0, least, -least, most, -most, float("inf"), -float("inf"), float("nan"), 1.0]
    numbers[0, : len(given)] = torch.tensor(given)
    return numbers.to(device)
