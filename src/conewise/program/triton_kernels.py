"""CUDA kernels in Triton: float32 split into bfloat16 parts, and sums over the bits of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

COLUMNS = 1 << 10
"""Numbers of a row that one program of the kernel reads."""


@triton.jit
def _nearest(number):  # type: ignore[no-untyped-def]
    """The nearest bfloat16, as float32 that has nothing below; ties go to the even one."""
    bits = number.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _split(value, out, inner, down, across, parts: tl.constexpr, count: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """`count` parts of a row, side by side; `parts` has their numbers, two bits for each.

    A part is the upper half of a float32, whose bits are written as they are.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_there = column < inner
    number = tl.load(value + row * down + column * across, mask=is_there, other=0.0)
    bits = number.to(tl.int32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    first = (bits & -65536).to(tl.float32, bitcast=True)
    rest = tl.where(is_finite, number - first, 0.0)
    second = _nearest(rest)
    third = _nearest(rest - second)
    begin = out + row * count * inner + column
    for place in tl.static_range(count):
        if (parts >> (2 * place)) & 3 == 0:
            made = tl.where(is_finite, bits, 0)
        elif (parts >> (2 * place)) & 3 == 1:
            made = second.to(tl.int32, bitcast=True)
        elif (parts >> (2 * place)) & 3 == 2:
            made = third.to(tl.int32, bitcast=True)
        else:
            made = tl.where(is_nan, 0x7FC00000, bits)
        tl.store(begin + place * inner, (made >> 16).to(tl.int16), mask=is_there)


def split(value: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Parts of a float32 tensor [rows, inner], side by side: [rows, parts of `inner` numbers each]."""
    rows, inner = value.shape
    out = torch.empty((rows, len(parts) * inner), dtype=torch.bfloat16, device=value.device)
    numbers = sum(part << (2 * place) for place, part in enumerate(parts))
    if out.numel():
        with torch.cuda.device(value.device):
            _split[(rows, triton.cdiv(inner, COLUMNS))](
                value,
                out.view(torch.int16),
                inner,
                *value.stride(),
                parts=numbers,
                count=len(parts),
                columns=COLUMNS,
            )
    return out


WORDS = 1 << 14
"""Words of 32 bits that one program of the kernel reads."""
STEP = 1 << 10


@triton.jit  # type: ignore[untyped-decorator]
def _sums(addresses, counts, keys, out, words: tl.constexpr, step: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of each block's words, each with a factor of its own, modulo 2⁶⁴."""
    block = tl.program_id(0)
    begin = tl.load(addresses + block).to(tl.pointer_type(tl.int32))
    count = tl.load(counts + block)
    places = tl.arange(0, step)
    total = tl.zeros((step,), dtype=tl.int64)
    for first in range(0, words, step):
        at = first + places
        read = tl.load(begin + at, mask=at < count, other=0)
        total += read.to(tl.int64) * tl.load(keys + at)
    tl.store(out + block, tl.sum(total, 0))


class KernelReader:
    """Reads tensors of words of 32 bits where they lie; makes of each one number.

    `keys` are random odd numbers, `WORDS` of them; `factors(count)` gives as many as there are blocks.
    """

    def __init__(self, words: Sequence[Tensor], keys: Tensor, factors: Tensor) -> None:
        self._words, self._keys = list(words), keys  # kept: the kernel is given addresses
        addresses, counts, ends, blocks = [], [], [], []
        for one in words:
            for index, begin in enumerate(range(0, one.numel(), WORDS)):
                addresses.append(one.data_ptr() + 4 * begin)
                counts.append(min(WORDS, one.numel() - begin))
                blocks.append(index)
            ends.append(len(addresses) - 1)
        device = keys.device
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._counts = torch.tensor(counts, dtype=torch.int32, device=device)
        self._ends = torch.tensor(ends, dtype=torch.int64, device=device)
        self._factors = factors[torch.tensor(blocks)].to(device)

    @staticmethod
    def blocks(words: Tensor) -> int:
        """The number of blocks of a tensor."""
        return -(-words.numel() // WORDS)

    def read(self) -> Tensor:
        """A number for each tensor, on the device; nothing is waited for."""
        out = torch.empty_like(self._addresses)
        with torch.cuda.device(self._keys.device):
            _sums[(len(out),)](self._addresses, self._counts, self._keys, out, words=WORDS, step=STEP)
        # Blocks of a tensor lie one behind the other: differences of running totals, modulo 2⁶⁴ too.
        running = (out * self._factors).cumsum(0)[self._ends]
        return torch.diff(running, prepend=running.new_zeros(1))
