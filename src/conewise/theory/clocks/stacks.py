"""The clock of stacks: seconds = launches · c + work / rate, fitted; and how many worlds are enough."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from conewise.errors import TheoryError
from conewise.theory.clocks.regression import Estimate, least_squares
from conewise.theory.wavefront import saturating_worlds
from conewise.theory.weights import (
    Exact,
    Weight,
    as_float,
    exact,
    expect_float,
    expect_items,
    expect_number,
    expect_weight,
    ratio,
    shown,
)

StackSample = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class StackClock:
    """What a stack of worlds takes: `launch` seconds for each launch, `work` for each unit of work.

    docs/theory.md#wavefront. Work is FLOPs, or node evaluations; 1/`work` is the rate. Noise can put either
    constant below zero, which nothing can take; predictions then take it for zero. Both at once predict
    nothing: TheoryError.
    """

    launch: Estimate
    work: Estimate
    r_squared: float

    @property
    def rate(self) -> float:
        """Units of work a second."""
        _, each = self._constants
        if each == 0:
            raise TheoryError("work was fitted to take no time, so there is no rate. Measure larger stacks.")
        return as_float(ratio(1, each), "the rate")

    def seconds(self, launches: Weight, work: Weight) -> float:
        """The predicted time of so many launches and so much work."""
        count, amount = expect_weight(launches, "`launches`"), expect_weight(work, "`work`")
        c, each = self._constants
        return as_float(c * exact(count) + each * exact(amount), "the predicted time")

    def enough_worlds(self, node: Weight, share: Weight) -> int:
        """With more worlds at once than that, stacks save less than `share` of the work.

        `node` is the work of one node in one world: see `saturating_worlds`.
        """
        c, each = self._constants
        return saturating_worlds(c, each * exact(expect_weight(node, "the work of a node")), share)

    @property
    def _constants(self) -> tuple[Exact, Exact]:
        c, each = (
            max(exact(expect_number(one.value, f"the fitted {what}")), 0)
            for one, what in ((self.launch, "launch"), (self.work, "work"))
        )
        if not c and not each:
            raise TheoryError("neither launches nor work were fitted to take any time. Measure more often.")
        return c, each


def calibrate_stacks(samples: Iterable[StackSample], *, confidence: float = 0.95) -> StackClock:
    """Fit the two constants to measurements (launches, work, seconds) by least squares.

    Stacks of several widths tell them apart: the work stays, and the launches fall.
    """
    found = []
    for place, sample in enumerate(expect_items(samples, "the list of samples", _OF), 1):
        numbers = expect_items(sample, f"sample {place}", _OF)
        if len(numbers) != 3:
            raise TheoryError(f"sample {place} is {shown(sample)}; a sample is {_OF}.")
        found.append(
            [expect_float(expect_weight(one, f"a number of sample {place}"), _OF) for one in numbers]
        )
    if not found:
        raise TheoryError("no samples are given; a calibration needs more of them than constants.")
    fit = least_squares(
        [(launches, work) for launches, work, _ in found],
        [seconds for _, _, seconds in found],
        confidence=confidence,
    )
    launch, work = fit.coefficients
    return StackClock(launch, work, fit.r_squared)


_OF = "launches, work and seconds"
