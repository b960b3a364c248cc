"""The greedy search of ACDC over worlds that are asked for their metric: one edge at a time, or many at once.

What is decided does not depend on how: a guess that turns out wrong is thrown away with all that rests on
it, and a change that is too close to the threshold to tell from rounding is computed once more, in a way
that depends on nothing but what is removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from conewise.circuits.forwards import Asked
from conewise.circuits.masked_forward import Forward
from conewise.circuits.replaced_parts import Mask

TIE = 8.0
"""A change is too close to the threshold where it is within so many times the rounding that was seen."""
ULPS = 32.0
"""Rounding that is taken for granted, in units of the last place of the metric."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An edge in line: its reader's number within the stage, and its writer's number."""

    reader: int
    writer: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """True if a candidate is kept, and what removing it changed."""

    kept: bool
    change: float


class Worlds(Protocol):
    """Evaluates worlds that differ in what is removed of the edges into one stage."""

    @property
    def epsilon(self) -> float:
        """The unit of rounding of the model's numbers."""

    @property
    def most(self) -> int:
        """The number of worlds that fit into memory at once."""

    @property
    def few(self) -> int:
        """The number of worlds that take hardly longer than one does."""

    def values(self, removed: Mask) -> NDArray[np.float64]:
        """The metric of each world, [world]; `removed` is [world, reader, writer]."""

    def exact(self, removed: Mask) -> float:
        """The metric of one world by a computation that depends on what is removed and on nothing else."""


@dataclass(slots=True)
class Spent:
    """Counts of a search: worlds evaluated in so many stacks; some were guessed `in_vain`.

    `ties` are changes that were too close to the threshold, and were computed once more.
    """

    worlds: int = 0
    stacks: int = 0
    in_vain: int = 0
    ties: int = 0


@dataclass(slots=True)
class Greedy:
    """Decides candidates in line: one is removed where the harm of its change is below `threshold`.

    `value` is the metric of the current world, as it was computed last, `width` how many candidates are
    tried at once: it follows how far guesses turn out right. `rounding` is the largest difference that was
    seen between two computations of one world's metric.
    """

    threshold: float
    harm: Callable[[float], float]
    speculative: bool = True
    value: float = 0.0
    rounding: float = 0.0
    width: int = 0
    spent: Spent = field(default_factory=Spent)

    def decide(self, worlds: Worlds, line: Sequence[Candidate], removed: Mask) -> Iterator[list[Verdict]]:
        """The verdicts on all of `line`, in order, some at a time; `removed` and `value` follow them.

        In the beginning `value` is the metric of the world with `removed` as it is given.
        """
        guesses = [True] * len(line)
        done = 0
        while done < len(line):
            most = min(max(self.width, worlds.few), worlds.most - 1)
            if self.speculative and most > 1:
                found = self._together(worlds, line, done, most, guesses, removed)
            else:
                found = [self._alone(worlds, line[done], removed)]
            done += len(found)
            yield found

    def _alone(self, worlds: Worlds, candidate: Candidate, removed: Mask) -> Verdict:
        """The verdict on the next candidate, in a world of its own."""
        (value,) = self._values(worlds, _with(removed, candidate)[None]).tolist()
        verdict = self._verdict(
            worlds, candidate, removed, value - self.value, max(abs(value), abs(self.value))
        )
        self._settle(candidate, verdict, removed, value)
        return verdict

    def _together(
        self,
        worlds: Worlds,
        line: Sequence[Candidate],
        done: int,
        most: int,
        guesses: list[bool],
        removed: Mask,
    ) -> list[Verdict]:
        """The verdicts on the next candidates as far as guesses about those before them are right.

        World 0 is the current one. World i has candidate i removed, and those before it as guessed. What is
        seen behind a wrong guess is no verdict, but the best guess there is.
        """
        ahead = range(done, min(done + most, len(line)))
        stack = np.repeat(removed[None], len(ahead) + 1, 0)
        for world, at in enumerate(ahead, 1):
            candidate = line[at]
            stack[world:, candidate.reader, candidate.writer] = True
            if not guesses[at]:
                stack[world + 1 :, candidate.reader, candidate.writer] = False
        values = self._values(worlds, stack)
        self.rounding = max(self.rounding, abs(float(values[0]) - self.value))  # one world, twice
        size = float(np.abs(values).max())
        here = self.value = float(values[0])
        found: list[Verdict] = []
        is_right = True
        for at, value in zip(ahead, values[1:].tolist(), strict=True):
            guess = guesses[at]
            if is_right:
                verdict = self._verdict(worlds, line[at], removed, value - here, size)
                self._settle(line[at], verdict, removed, value)
                found.append(verdict)
                is_right = verdict.kept is not guess
            else:
                guesses[at] = self.harm(value - here) < self.threshold
            if guess:
                here = value
        wasted = len(ahead) - len(found)
        self.spent.in_vain += wasted
        self.width = 2 * most if not wasted else min(most, 2 * len(found))
        return found

    def _verdict(
        self, worlds: Worlds, candidate: Candidate, removed: Mask, change: float, size: float
    ) -> Verdict:
        """The verdict on the next candidate, whose removal changed the metric as it seems by `change`."""
        doubt = TIE * max(self.rounding, ULPS * worlds.epsilon * size)
        if abs(self.harm(change) - self.threshold) <= doubt:
            self.spent.ties += 1
            change = worlds.exact(_with(removed, candidate)) - worlds.exact(removed)
        return Verdict(kept=not self.harm(change) < self.threshold, change=change)

    def _settle(self, candidate: Candidate, verdict: Verdict, removed: Mask, value: float) -> None:
        """Go on in the world that the verdict leads to; `value` is the metric without the candidate."""
        if not verdict.kept:
            removed[candidate.reader, candidate.writer] = True
            self.value = value

    def _values(self, worlds: Worlds, removed: Mask) -> NDArray[np.float64]:
        self.spent.worlds += len(removed)
        self.spent.stacks += 1
        return worlds.values(removed)


def _with(removed: Mask, candidate: Candidate) -> Mask:
    """The same with one candidate removed too."""
    found = removed.copy()
    found[candidate.reader, candidate.writer] = True
    return found


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
        """The seconds of a batch cut into parts; all but one of them have the current world beside."""
        part = -(-self.worlds // workers) + (workers > 1)
        return self.launch + min(part, self.worlds) * self.world

    def gain(self, workers: int) -> float:
        """The speedup of a batch with so many workers."""
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
