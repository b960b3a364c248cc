"""What comes back of a share: numbers, or in which way it failed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

DIED, MEMORY, OWN = "died", "memory", "own"
"""How a share can fail: its worker is gone, it did not fit into memory, or it raised an error of its own."""


@dataclass(frozen=True, slots=True)
class Done:
    """A share that was run: for each of its chunks the metrics [world, metric, prompt], and what it took.

    `base` and `source` are the metrics of the baselines.
    """

    rows: tuple[Numbers, ...]
    base: Numbers
    source: Numbers | None
    node_evaluations: int
    launches: int
    seconds: float
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A share that was not run: which way it failed, and what was said."""

    kind: str
    said: str
    error: str = ""
