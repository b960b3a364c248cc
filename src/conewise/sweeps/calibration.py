"""How fast a device is: its own value, measured on demand, and kept with the model it was measured for."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field

from conewise.runs.captured import Captured
from conewise.sweeps.planning.model_facts import facts_of
from conewise.sweeps.planning.shapes.costs import matmul_rate


@dataclass(slots=True)
class Calibration:
    """`rates` are operations a second: of a matrix product, and of sweeps that were run, by evaluator."""

    rates: dict[str, float] = field(default_factory=dict)

    def note(self, evaluator: str, flops: int, seconds: float) -> None:
        """Keep how fast a sweep was."""
        if flops and seconds > 0:
            self.rates[evaluator] = flops / seconds

    def seconds(self, evaluator: str, flops: int) -> float | None:
        """How long so many operations take, as far as anything is known."""
        rate = self.rates.get(evaluator) or self.rates.get("product")
        return None if rate is None else flops / rate


_KNOWN: weakref.WeakKeyDictionary[Captured, Calibration] = weakref.WeakKeyDictionary()


def calibration_of(model: Captured) -> Calibration:
    """What is known of the speed of a model's device; nothing is measured for it."""
    if model not in _KNOWN:
        _KNOWN[model] = Calibration()
    return _KNOWN[model]


def calibrate(model: Captured) -> Calibration:
    """The same, with one matrix product timed where nothing was: milliseconds."""
    known = calibration_of(model)
    if not known.rates:
        facts = facts_of(model)
        known.rates["product"] = matmul_rate(facts.device, facts.dtype, time.perf_counter)
    return known
