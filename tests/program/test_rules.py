"""The shorter ways to operations: they are the same operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conewise.program.walk import DIRECT

aten = torch.ops.aten
VALUE = torch.arange(24.0).reshape(2, 3, 4)
GIVEN: dict[Any, tuple[Any, ...]] = {
    aten.view.default: (VALUE, [6, -1]),
    aten.reshape.default: (VALUE.transpose(0, 1), [6, 4]),
    aten.transpose.int: (VALUE, 1, -1),
    aten.permute.default: (VALUE, [2, 0, 1]),
    aten.unsqueeze.default: (VALUE, -1),
    aten.layer_norm.default: (VALUE, [4], VALUE[0, 0], VALUE[0, 1], 1e-5, False),
    aten.linear.default: (VALUE, VALUE[0], VALUE[0, 0, :3]),
}


@pytest.mark.parametrize("op", DIRECT, ids=str)
def test_a_shorter_way_gives_the_same_value_in_the_same_memory(op: Any) -> None:
    expected, found = op(*GIVEN[op]), DIRECT[op](*GIVEN[op])
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    is_view = expected.untyped_storage().data_ptr() == GIVEN[op][0].untyped_storage().data_ptr()
    assert (found.untyped_storage().data_ptr() == GIVEN[op][0].untyped_storage().data_ptr()) == is_view
