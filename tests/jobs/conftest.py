"""Workers that all tests share: starting them takes longer than most of what they are asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import conewise as cw
from conewise.model import Model
from tests.jobs.fleet_cases import small_model


@pytest.fixture(scope="session")
def model() -> Model:
    return small_model()


@pytest.fixture(scope="session", params=["processes", "ray"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Any]:
    made: Any = cw.Processes(2) if request.param == "processes" else cw.Ray(workers=2)
    with made:
        yield made
