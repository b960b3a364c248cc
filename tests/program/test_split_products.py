"""Products in bfloat16 parts: float32's own error, and its own infinities."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conewise.program import split_products
from conewise.program.split_products import (
    LEFT,
    PRODUCTS,
    split,
    split_factor,
    split_product,
    split_weight,
    sums_of,
)

INF, NAN, MOST = math.inf, math.nan, torch.finfo(torch.float32).max


def product(value: Tensor, weight: Tensor) -> Tensor:
    parts = split_weight(weight)
    assert parts is not None
    return split_product(value, parts)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, value: Tensor, weight: Tensor) -> float:
    exact = value.double() @ weight.double()
    return float((found.double() - exact).square().mean().sqrt())


@pytest.mark.parametrize("shape", [(64, 768, 96), (1, 1024, 64), (40, 64, 40), (8, 4096, 24), (7, 33, 5)])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e15])
def test_its_error_is_that_of_float32(shape: tuple[int, int, int], scale: float) -> None:
    rows, inner, columns = shape
    value, weight = numbers(rows, inner) * scale, numbers(inner, columns, seed=1)
    weight *= 10.0 ** numbers(inner, 1, seed=2)  # some rows count for much more than others
    found = product(value, weight)
    own, theirs = error(found, value, weight), error(value @ weight, value, weight)
    assert own <= 2 * theirs
    rounded = error((value.bfloat16() @ weight.bfloat16()).float(), value, weight)
    assert rounded > 100 * own  # what one part alone would do


@given(
    st.integers(1, 5), st.integers(1, 40), st.integers(1, 5), st.integers(-30, 30), st.integers(0, 1 << 20)
)
def test_the_error_of_any_product_is_within_float32s_bound(
    rows: int, inner: int, columns: int, exponent: int, seed: int
) -> None:
    value, weight = numbers(rows, inner, seed=seed) * 2.0**exponent, numbers(inner, columns, seed=seed + 1)
    exact = value.double() @ weight.double()
    bound = (inner + 2) * 2.0**-23 * (value.double().abs() @ weight.double().abs())
    assert ((product(value, weight) - exact).abs() <= bound).all()


@given(st.lists(st.floats(width=32, allow_subnormal=False), min_size=1, max_size=12))
def test_parts_add_up_to_the_number(given_numbers: list[float]) -> None:
    value = torch.tensor([given_numbers], dtype=torch.float32)
    first, second, third, last = split(value, LEFT).double().chunk(4, 1)
    finite = value.isfinite()
    whole = first + second + third
    lost = 2.0**-133  # below the smallest bfloat16
    assert ((whole - value.double())[finite].abs() <= lost).all()
    assert (whole[~finite] == 0).all()
    assert torch.equal(last[finite], first[finite])
    torch.testing.assert_close(last[~finite], value.double()[~finite], equal_nan=True)


@pytest.mark.parametrize(
    "special",
    [[INF], [-INF], [NAN], [INF, -INF], [INF, INF], [INF, NAN], [MOST], [-MOST], [0.0], [-0.0]],
    ids=str,
)
@pytest.mark.parametrize("factor", [1.01, -0.99, 0.0, 1.0, 1e-3])
def test_numbers_that_are_not_finite_give_what_they_give_in_float32(
    special: list[float], factor: float
) -> None:
    value, weight = numbers(3, 16), numbers(16, 8, seed=1)
    value[1, : len(special)] = torch.tensor(special)
    weight[: len(special)] = factor
    weight[:, 0] = 1.0  # without a second part
    expected = value @ weight
    exact = value.double() @ weight.double()
    found = product(value, weight)
    assert torch.equal(found.isnan(), expected.isnan())
    settled = exact.abs() < 0.99 * MOST  # beyond it, the order of the sum decides whether it overflows
    settled |= ~exact.isfinite()
    torch.testing.assert_close(found[settled], expected[settled], equal_nan=True)


def test_the_nan_that_has_its_bits_below_is_no_infinity() -> None:
    value = torch.tensor([[0x7F800001, 0, 0, 0]], dtype=torch.int32).view(torch.float32)
    assert product(value, torch.ones(4, 2)).isnan().all()


def test_a_weight_that_is_not_finite_is_not_split() -> None:
    for number in (INF, -INF, NAN):
        weight = torch.ones(8, 8)
        weight[3, 4] = number
        assert split_weight(weight) is None


def test_operands_lie_in_memory_as_they_like() -> None:
    value, weight = numbers(24, 32), numbers(32, 40, seed=1)
    expected = product(value, weight)
    apart = torch.zeros(24, 64)
    apart[:, ::2] = value
    for other in (value.t().contiguous().t(), apart[:, ::2], value.expand(1, 24, 32)[0]):
        for turned in (weight, weight.t().contiguous().t()):
            assert torch.equal(product(other, turned), expected)


@pytest.mark.parametrize("shape", [(0, 8, 8), (3, 0, 8), (3, 8, 0), (1, 1, 1)])
def test_empty_ones(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    value, weight = numbers(rows, inner), numbers(inner, columns)
    torch.testing.assert_close(product(value, weight), value @ weight)


def test_many_rows_are_multiplied_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    value, weight = numbers(21, 32), numbers(32, 24, seed=1)
    whole = product(value, weight)
    monkeypatch.setattr(split_products, "BLOCK", 4 * 4 * 32)
    torch.testing.assert_close(product(value, weight), whole)
    assert split_factor(value) is None
    assert split_products.factor_bytes(21, 32) == 2 * len(split_products.LEFT) * 16 * 32


def test_the_parts_of_a_block_go_before_those_of_the_next_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan says of memory is one block."""
    made: list[weakref.ref[Tensor]] = []
    whole = split_products.split

    def noting(value: Tensor, parts: tuple[int, ...]) -> Tensor:
        assert not any(one() is not None for one in made)
        found = whole(value, parts)
        made.append(weakref.ref(found))
        return found

    weight = split_weight(numbers(32, 24, seed=1))
    assert weight is not None
    monkeypatch.setattr(split_products, "BLOCK", 4 * 4 * 32)
    monkeypatch.setattr(split_products, "split", noting)
    split_product(numbers(21, 32), weight)
    assert len(made) > 2


def test_parts_of_a_factor_serve_several_products() -> None:
    value, parts = numbers(21, 32), split_factor(numbers(21, 32))
    assert parts is not None
    for seed in (1, 2):
        weight = split_weight(numbers(32, 24, seed=seed))
        assert weight is not None
        assert torch.equal(split_product(value, weight, parts), split_product(value, weight))


@pytest.mark.parametrize("inner", [1, 33, 512, 513, 1024, 2752, 4096])
def test_the_largest_terms_are_added_up_in_short_sums(inner: int) -> None:
    """All terms once, in order; what is cut is the last part, which has the largest of them."""
    sums = list(sums_of(inner))
    ends = [(left + at, right + at) for left, right, terms in sums for at in (0, terms)]
    for left, right, count in PRODUCTS:
        assert (left * inner, right * inner) in ends
        assert ((left + count) * inner, (right + count) * inner) in ends
    assert sum(terms for *_, terms in sums) == 6 * inner
    largest = [terms for left, _, terms in sums if left >= LEFT.index(3) * inner]
    assert sum(largest) == inner
    assert max(largest) <= split_products.TERMS
