"""Products in bfloat16 parts on a CUDA device: one kernel splits, infinities are float32's, graphs replay."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from conewise.program import split_products
from conewise.program.split_products import LEFT, split, split_by_operations, split_product, split_weight
from tests.gpu.scenes import DEVICE, needs_cuda

pytestmark = needs_cuda


def product(value: Tensor, weight: Tensor) -> Tensor:
    parts = split_weight(weight)
    assert parts is not None
    return split_product(value, parts)


def test_one_kernel_splits_as_operations_do() -> None:
    assert split_products._fused(DEVICE) is not None, "torch could not compile it"
    torch.manual_seed(0)
    value = torch.randn(513, 96, device=DEVICE) * torch.logspace(-30, 30, 96, device=DEVICE)
    for rows in (value, value[::2], value[:, 8:80], value.t().contiguous().t()):
        assert torch.equal(split(rows, LEFT), split_by_operations(rows, LEFT))


@pytest.mark.parametrize("shape", [(4096, 1024, 1024), (3120, 768, 3072), (1000, 4096, 1024)], ids=str)
def test_its_error_is_that_of_float32(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    torch.manual_seed(0)
    value, weight = torch.randn(rows, inner, device=DEVICE), torch.randn(columns, inner, device=DEVICE).t()
    exact = value.double() @ weight.double()

    def error(found: Tensor) -> float:
        return float((found.double() - exact).square().mean().sqrt())

    assert error(product(value, weight)) <= 2 * error(value @ weight)


def test_numbers_that_are_not_finite_give_what_they_give_in_float32() -> None:
    torch.manual_seed(0)
    value, weight = torch.randn(64, 64, device=DEVICE), torch.randn(64, 64, device=DEVICE)
    for row, number in enumerate([math.inf, -math.inf, math.nan, torch.finfo(torch.float32).max]):
        value[row, row] = number
    weight[:, 0], weight[:4, 1] = 1.0, 0.0
    found, expected = product(value, weight), value @ weight
    for row in range(3):
        torch.testing.assert_close(found[row], expected[row], equal_nan=True)
    torch.testing.assert_close(found[4:], expected[4:], rtol=1e-4, atol=1e-4)


def test_a_captured_product_is_replayed() -> None:
    torch.manual_seed(0)
    value, other = torch.randn(2, 1024, 256, device=DEVICE)
    parts = split_weight(torch.randn(256, 512, device=DEVICE))
    assert parts is not None
    value = value.clone()
    split_product(value, parts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = split_product(value, parts)
    value.copy_(other)
    graph.replay()
    assert torch.equal(out, split_product(other, parts))
