"""Sums over the bits of many tensors on a CUDA device, by one kernel. Importing this needs Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

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
        """How many blocks a tensor has."""
        return -(-words.numel() // WORDS)

    def read(self) -> Tensor:
        """A number for each tensor, on the device; nothing is waited for."""
        out = torch.empty_like(self._addresses)
        with torch.cuda.device(self._keys.device):
            _sums[(len(out),)](self._addresses, self._counts, self._keys, out, words=WORDS, step=STEP)
        # Blocks of a tensor lie one behind the other: differences of running totals, modulo 2⁶⁴ too.
        running = (out * self._factors).cumsum(0)[self._ends]
        return torch.diff(running, prepend=running.new_zeros(1))
