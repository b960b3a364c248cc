"""What can be told apart is told apart, and what is the same has one text in every process."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conewise.frontends.torch.identity import identity

TOKEN = 3


def uses_a_global(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, TOKEN]


def scaled_by(scale: Any) -> Callable[[Any], Any]:
    return lambda value: value * scale


class Scaling:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.scale

    def method(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.scale


def with_default(value: int, scale: int = 2) -> int:
    return value * scale


SAME: list[Callable[[], object]] = [
    lambda: 3,
    lambda: torch.arange(3),
    lambda: scaled_by(2),
    lambda: scaled_by(torch.ones(3)),
    lambda: Scaling(2.0),
    lambda: Scaling(2.0).method,
    lambda: functools.partial(with_default, scale=3),
    lambda: {"a": [1, (2.0, None)], "b": {"x", "y", "z"}},
    lambda: uses_a_global,
    lambda: math.sqrt,
    lambda: torch,
    lambda: Scaling,
]


@pytest.mark.parametrize("make", SAME)
def test_the_same_made_twice_has_one_text(make: Callable[[], object]) -> None:
    assert identity(make()) == identity(make())


def test_different_things_have_different_texts() -> None:
    values = [make() for make in SAME]
    values += [
        4,
        3.0,
        "3",
        torch.arange(4),
        torch.arange(3.0),
        scaled_by(3),
        scaled_by(torch.zeros(3)),
        Scaling(3.0),
        Scaling(3.0).method,
        functools.partial(with_default, scale=4),
        lambda value: value * 2,
        lambda value: value * 3,
        lambda value: value + 3,
        lambda value, other=3: value + 3,
        {"a": [1, (2.0, 0)], "b": {"x", "y", "z"}},
        math.sin,
    ]
    texts = [identity(value) for value in values]
    assert len(set(texts)) == len(texts)


def test_a_changed_global_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(uses_a_global)
    monkeypatch.setitem(uses_a_global.__globals__, "TOKEN", 4)
    assert identity(uses_a_global) != before


def test_things_that_hold_themselves_have_a_text() -> None:
    endless: list[Any] = [1]
    endless.append(endless)

    def recursive(depth: int) -> int:
        return recursive(depth - 1) if depth else 0

    assert identity(endless) == "[1, another list]"
    assert identity(recursive) == identity(recursive)


def test_the_text_is_the_same_in_another_process() -> None:
    source = (
        "def metric(outputs, choice=frozenset({'alpha', 'beta', 'gamma'})):\n"
        "    return [outputs for name in {'x', 'y', 'z'} if name in {'p', 'q', 'r'} or name in choice]\n"
    )
    here: dict[str, Any] = {}
    exec(source, here)
    script = f"from conewise.frontends.torch.identity import identity\n{source}\nprint(identity(metric))"
    there = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert there.strip() == identity(here["metric"])
