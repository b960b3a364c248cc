"""What products read is what torch saves, and products computed from that alone are torch's own gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conewise.reactive.gradients import GRADIENT, OUTPUT
from conewise.runs.backward_cost import Parts, TorchRule, reads_of

GENERATOR = torch.Generator().manual_seed(0)


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


CASES: dict[str, tuple[Callable[..., Any], list[Any], list[tuple[Any, ...] | None]]] = {
    "add": (torch.add, [some(3), some(3)], [(), ()]),
    "mul": (torch.mul, [some(3), some(3)], [(1,), (0,)]),
    "mul, by a number": (lambda x: x * 2.5, [some(3)], [()]),
    "square": (torch.square, [some(3)], [(0,)]),
    "tanh": (torch.tanh, [some(3)], [(OUTPUT,)]),
    "gelu": (nn.functional.gelu, [some(3)], [(0,)]),
    "relu": (torch.relu, [some(3)], [(OUTPUT,)]),
    "softmax": (lambda x: x.softmax(-1), [some(2, 3)], [(OUTPUT,)]),
    "linear": (nn.functional.linear, [some(2, 4, 3), some(5, 3), some(5)], [(1,), (0,), ()]),
    "matmul, of turned heads": (
        lambda q, k: q.transpose(1, 2) @ k.transpose(1, 2).transpose(-1, -2),
        [some(2, 4, 3, 5), some(2, 4, 3, 5)],
        [(1,), (0,)],
    ),
    "layer norm, one kernel for all three": (
        lambda x, w, b: nn.functional.layer_norm(x, (4,), w, b),
        [some(2, 4), some(4), some(4)],
        [(0, 1, 2), (0, 1, 2), (0, 1, 2)],
    ),
    "embedding": (
        lambda w, i: nn.functional.embedding(i, w),
        [some(7, 2), torch.tensor([1, 3])],
        [(1,), None],
    ),
    "masked": (
        lambda x, m: x.masked_fill(m, 0.0),
        [some(3), torch.tensor([True, False, True])],
        [(1,), None],
    ),
    "max pool": (lambda x: nn.functional.max_pool2d(x, 2), [some(1, 1, 4, 4)], [(0,)]),
    "view": (lambda x: x.view(6), [some(2, 3)], [()]),
    "argmax": (torch.argmax, [some(3)], [None]),
    "rounded": (lambda x: x.round().long(), [some(3)], [None]),
    "attention": (
        lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        [some(1, 2, 4, 8), some(1, 2, 4, 8), some(1, 2, 4, 8)],
        [(0, 1, 2, OUTPUT), (0, 1, 2, OUTPUT), (0, 1, 2, OUTPUT)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_reads_are_what_the_gradient_by_one_input_needs(name: str) -> None:
    rule, values, expected = CASES[name]
    found = reads_of(rule, values)
    assert found == [None if one is None else (GRADIENT, *one) for one in expected]


@pytest.mark.parametrize("name", CASES)
def test_a_product_of_what_it_reads_alone_is_torch_s_own_gradient(name: str) -> None:
    """All else is NaN in it: what it did not read cannot have mattered."""
    rule, values, _ = CASES[name]
    made = TorchRule(rule, values)
    output = made(*values)
    for index, vjp in enumerate(made.vjps):
        if vjp is None:
            continue
        gradient = some(*output.shape)
        given = {GRADIENT: gradient, OUTPUT: output} | dict(enumerate(values))
        leaves = [value.clone().requires_grad_(at == index) for at, value in enumerate(values)]
        expected = torch.autograd.grad(rule(*leaves), leaves[index], gradient)[0]
        assert torch.equal(vjp.function(*(given[read] for read in vjp.reads)), expected)


def test_values_of_several_tensors_have_gradients_part_by_part() -> None:
    split = TorchRule(lambda x: x.split(2, -1), [some(3, 4)])
    first, second = split(value := some(3, 4))
    assert split.reads == ((GRADIENT,),)
    taken = TorchRule(lambda parts: parts[1], [(first, second)])
    one, other = taken.vjps[0], split.vjps[0]
    assert one is not None
    assert other is not None
    gradient = one.function(torch.ones(3, 2))
    assert gradient[0] is None
    both = gradient + Parts((torch.full((3, 2), 2.0), None))
    assert torch.equal(other.function(both), torch.tensor([2.0, 2.0, 1.0, 1.0]).expand(3, 4))
    assert torch.equal(other.function(gradient), torch.tensor([0.0, 0.0, 1.0, 1.0]).expand_as(value))


def test_a_patched_output_is_what_a_product_reads() -> None:
    rule = TorchRule(torch.tanh, [some(3)])
    (vjp,) = rule.vjps
    assert vjp is not None
    assert torch.equal(vjp.function(torch.ones(3), torch.full((3,), 0.5)), torch.full((3,), 0.75))
