"""Commands in one process that share the models that they load, and what is captured of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from conewise import model
from conewise.cli.output import Status
from conewise.cli.questions import ModelName
from conewise.text import ask


@contextmanager
def captured_once() -> Iterator[None]:
    """Load each model once, and capture it once: commands only read it."""
    with pytest.MonkeyPatch.context() as patched:
        given_load, given_capture = ModelName.load, model.capture
        loads: dict[ModelName, Any] = {}
        captures: dict[tuple[int, tuple[str, ...]], Any] = {}

        def load(named: ModelName, status: Status) -> Any:
            if named not in loads:
                loads[named] = given_load(named, status)
            return loads[named]

        def capture(module: Any, **given: Any) -> Any:
            key = id(module), tuple(given)
            if key not in captures:
                captures[key] = given_capture(module, **given)
            return captures[key]

        patched.setattr(ModelName, "load", load)
        patched.setattr(model, "capture", capture)
        patched.setattr(ask, "capture", capture)
        yield
