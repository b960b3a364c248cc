"""What workers would gain of a search, on paper: a batch of candidates is cut into a part for each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from conewise.circuits.forwards.forwards import Asked
from conewise.circuits.forwards.masked_forward import Forward

ENOUGH = 0.9
"""Workers are worth having until a batch goes so near to as fast as it could."""


@dataclass(frozen=True, slots=True)
class BatchRates:
    """A narrow batch of a search: its worlds, and the seconds that it takes for itself and for each of them.

    So many candidates are tried at once even where guesses fail; where they turn out right batches are wider,
    and workers gain more. `seconds` is without the way to a worker and back.
    """

    worlds: int
    launch: float
    world: float

    def seconds(self, workers: int) -> float:
        """What a batch takes that is cut into parts; all but one of them have the current world beside."""
        part = -(-self.worlds // workers) + (workers > 1)
        return self.launch + min(part, self.worlds) * self.world

    def gain(self, workers: int) -> float:
        """How many times faster a batch is with so many workers."""
        return self.seconds(1) / self.seconds(workers)

    def worth_having(self, most: int) -> int:
        """Beyond how many workers, up to `most`, more hardly help."""
        best = self.gain(most)
        return next(count for count in range(1, most + 1) if self.gain(count) >= ENOUGH * best)


def batch_rates(asked: Asked, clock: Callable[[], float] = time.perf_counter) -> BatchRates:
    """Time batches of a search on this machine, with nothing removed: below the attention in the middle."""
    with asked.forward() as forward:
        worlds = forward.few + 1
        few, many = (_seconds(forward, count, clock) for count in (1, worlds))
    world = max(0.0, many - few) / (worlds - 1)
    return BatchRates(worlds, max(0.0, few - world), world)


def _seconds(forward: Forward, count: int, clock: Callable[[], float]) -> float:
    stages = [stage for stage in forward.stages if stage.kind == "attention"] or forward.stages
    stage = stages[len(stages) // 2]
    removed = np.zeros((count, len(stage.readers), forward.shape[1]), dtype=bool)
    for world in range(count):  # one edge more in each world
        reader, writer = divmod(world, stage.readers[0].writers)
        removed[world:, -1 - reader % len(stage.readers), writer] = True
    forward.below(stage.number, removed)
    taken = []
    for _ in range(3):
        started = clock()
        forward.below(stage.number, removed)
        taken.append(clock() - started)
    return min(taken)
