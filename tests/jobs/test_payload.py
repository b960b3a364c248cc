"""What travels: tensors have the same bits there, and lie in memory as they did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conewise.jobs.payload import packed, unpacked
from conewise.jobs.pickler import ALIGNED


def unaligned(offset: int) -> Tensor:
    return torch.arange(40, dtype=torch.float32).view(torch.uint8)[offset : offset + 96].view(torch.float32)


@pytest.mark.parametrize(
    "given",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).T,
        torch.randn(2, 3, 4).permute(1, 2, 0),
        torch.randn(6, 4)[::2],
        torch.randn(1, 5).expand(3, 5),
        unaligned(8).reshape(4, 6),
        unaligned(56).reshape(4, 6).T,
        torch.zeros(0, 3),
        torch.tensor(3),
        torch.randn(3).bfloat16(),
        torch.tensor([True, False]),
        torch.randn(2, 2, dtype=torch.complex64),
    ],
)
def test_a_tensor_lies_in_memory_as_the_senders_does(given: Tensor) -> None:
    found: Any = unpacked(packed(given))
    assert torch.equal(found, given)
    assert found.dtype == given.dtype
    is_dense = given.is_contiguous() or given.permute(*reversed(range(given.ndim))).is_contiguous()
    if is_dense and given.numel():
        assert found.stride() == given.stride()
        assert found.data_ptr() % ALIGNED == given.data_ptr() % ALIGNED


def test_products_with_weights_that_were_sent_round_alike() -> None:
    """A product with one row is rounded by where the weight begins in memory."""
    torch.manual_seed(0)
    room = torch.empty(4 * 64 * 300 + ALIGNED, dtype=torch.uint8)
    weight = room[56:-8].view(torch.float32).reshape(300, 64)
    weight.copy_(torch.randn(300, 64))
    sent: Any = unpacked(packed(weight))
    for _ in range(20):
        value = torch.randn(1, 1, 64)
        here, there = (torch.nn.functional.linear(value, one) for one in (weight, sent))
        assert torch.equal(here, there)
