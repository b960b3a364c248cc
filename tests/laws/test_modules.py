"""Sweeps of random networks give what plain hooks give, however dimensions lie and whatever mixes them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.laws.module_scenes import outcome


@pytest.mark.parametrize("first", range(0, 200, 10))
def test_sweeps_of_random_networks_give_what_hooks_give(first: int) -> None:
    found = Counter(outcome(seed) for seed in range(first, first + 10))
    assert found["wavefront"] > 0, found
