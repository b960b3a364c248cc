"""What a mask hides, position by position, against looking at it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conewise.sweeps.planning.regions import mask_of

LOW = torch.finfo(torch.float32).min


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor:
    rows = draw(st.integers(1, 5))
    bits = draw(st.lists(st.booleans(), min_size=rows * rows, max_size=rows * rows))
    return torch.tensor(bits).reshape(rows, rows)


@given(masks())
def test_it_hides_from_a_start_if_no_row_before_sees_anything_from_there_on(mask: torch.Tensor) -> None:
    found = mask_of(mask)
    for start in range(1, len(mask)):
        assert found.hides_from(start) == (not bool(mask[:start, start:].any()))


@given(masks())
def test_a_mask_of_numbers_hides_the_same_unless_a_row_sees_nothing(mask: torch.Tensor) -> None:
    found = mask_of(torch.where(mask, 0.0, LOW))
    for start in range(1, len(mask)):
        sees_nothing = bool((~mask[:start].any(1)).any())
        assert found.hides_from(start) == (not bool(mask[:start, start:].any()) and not sees_nothing)


@pytest.mark.parametrize("length", [1, 2, 6])
def test_the_causal_mask_is_known(length: int) -> None:
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    assert mask_of(mask[None, None]).is_causal
    assert not mask_of(torch.where(mask, 0.0, LOW)).is_causal
    assert all(mask_of(mask).hides_from(start) for start in range(1, length))
    assert not mask_of(None).is_causal
