"""Scores, faithfulness and areas against the published code, where it is there."""

from __future__ import annotations

import pytest

from tests.circuits.published import compared, is_there
from tests.circuits.small_models import small


@pytest.mark.skipif(not is_there(), reason="the published code is not here: see tests/circuits/published.py")
def test_scores_and_areas_are_those_of_the_published_code() -> None:
    given = small("gpt2")
    found = compared(given.plain.module, given.ids, given.other)
    assert max(found.apart.values()) < 1e-12
