"""How fast a device is: its own value, measured on demand, and kept with the model it was measured for."""

from __future__ import annotations

import time
import weakref
from collections import deque
from dataclasses import dataclass, field

from conewise.errors import TheoryError
from conewise.paper.theory.clocks import StackClock, calibrate_stacks
from conewise.runs.captured import Captured
from conewise.sweeps.planning.model_facts import facts_of
from conewise.sweeps.planning.shapes.costs import matmul_rate

KEPT = 32
"""So many runs of an evaluator are looked at."""


@dataclass(slots=True)
class Calibration:
    """How long sweeps take: launches · c + FLOPs / rate, as far as runs tell the two apart.

    `product` is the rate of a matrix product, in operations a second, where one was timed; `runs` are sweeps
    that were run, by evaluator: launches, FLOPs and seconds of each.
    """

    product: float | None = None
    runs: dict[str, deque[tuple[int, int, float]]] = field(default_factory=dict)

    def note(self, evaluator: str, launches: int, flops: int, seconds: float) -> None:
        """Keep how fast a sweep was."""
        if flops and seconds > 0:
            self.runs.setdefault(evaluator, deque(maxlen=KEPT)).append((launches, flops, seconds))

    def clock(self, evaluator: str) -> StackClock | None:
        """What a launch and an operation take, by the runs there were; None where they do not say."""
        found = self.runs.get(evaluator, ())
        if len({(launches, flops) for launches, flops, _ in found}) < 3:
            return None
        try:
            clock = calibrate_stacks(found)
        except TheoryError:  # runs that are multiples of one
            return None
        return clock if clock.launch.value >= 0 and clock.work.value > 0 else None

    def seconds(self, evaluator: str, launches: int, flops: int) -> float | None:
        """How long so many launches and operations take, as far as anything is known."""
        if (clock := self.clock(evaluator)) is not None:
            return clock.seconds(launches, flops)
        if found := self.runs.get(evaluator):
            _, known, taken = found[-1]
            return flops * taken / known
        return None if self.product is None else flops / self.product


_KNOWN: weakref.WeakKeyDictionary[Captured, Calibration] = weakref.WeakKeyDictionary()


def calibration_of(model: Captured) -> Calibration:
    """What is known of the speed of a model's device; nothing is measured for it."""
    if model not in _KNOWN:
        _KNOWN[model] = Calibration()
    return _KNOWN[model]


def calibrate(model: Captured) -> Calibration:
    """The same, with one matrix product timed where nothing was: milliseconds."""
    known = calibration_of(model)
    if not known.runs and known.product is None:
        facts = facts_of(model)
        known.product = matmul_rate(facts.device, facts.dtype, time.perf_counter)
    return known
