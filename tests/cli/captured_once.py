"""Commands in one process that share the models that they load, and so what is captured of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from conewise.cli.output import Status
from conewise.cli.questions import ModelName


@contextmanager
def captured_once() -> Iterator[None]:
    """Load each model once: commands only read it."""
    with pytest.MonkeyPatch.context() as patched:
        given_load = ModelName.load
        loads: dict[ModelName, Any] = {}

        def load(named: ModelName, status: Status) -> Any:
            if named not in loads:
                loads[named] = given_load(named, status)
            return loads[named]

        patched.setattr(ModelName, "load", load)
        yield
