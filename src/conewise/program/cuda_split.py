"""Float32 numbers split into bfloat16 parts on a CUDA device, by one kernel. Importing this needs Triton."""

from __future__ import annotations

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
