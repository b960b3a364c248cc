"""What a module under test reads from another module: numbers, a function, an object, an array."""

from __future__ import annotations

from torch import Tensor

SCALE = 2.0
BY_NAME = {"scale": 2.0}


class Settings:
    scale = 2.0


def scaled(x: Tensor) -> Tensor:
    return x * SCALE
