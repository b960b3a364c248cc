"""Sweeps of random networks give what plain hooks give, however dimensions lie and whatever mixes them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.laws.module_scenes import outcome

AT_ONCE = 30
"""So many networks are part of `make test`; the others have a target of their own, `make test-laws`."""


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.slow] if first >= AT_ONCE else [])
        for first in range(0, 200, 10)
    ],
)
def test_sweeps_of_random_networks_give_what_hooks_give(first: int) -> None:
    found = Counter(outcome(seed) for seed in range(first, first + 10))
    assert found["wavefront"] > 0, found
