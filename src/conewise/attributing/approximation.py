"""The result of an attribution: a sweep's, with values that are estimated by gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from conewise.arguments import checked
from conewise.attributing.checking import Check, check_of, drawn, expect_whole
from conewise.errors import SweepError
from conewise.fleets.jobs import Fleet
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.result import Result


@dataclass(frozen=True, slots=True)
class Later:
    """A plan that is made when it is first asked for."""

    make: Callable[[], SweepPlan]


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Approximation(Result):
    """Estimated values by cell: `method` says how. See `Result` for all else that can be done with it.

    A value is the base's metric plus the estimated effect. `plan` and `ledger` have what was counted: nodes
    of recorded forward passes, and again of backward passes through them; `plan.full_evaluations` is what
    one full forward for each cell would take, as in a sweep. `exact` names the cells whose values were
    computed in their worlds all the same, as `method="hybrid"` does.
    """

    exact: tuple[str, ...] = ()

    @property  # type: ignore[misc]
    def plan(self) -> SweepPlan:
        """The plan, made when it is first asked for: a rehearsal says how much memory it takes."""
        held = vars(self)["plan"]
        if isinstance(held, Later):
            held = vars(self)["plan"] = held.make()
        found: SweepPlan = held
        return found

    @plan.setter
    def plan(self, made: SweepPlan) -> None:
        vars(self)["plan"] = made

    def check(
        self,
        top: int = 50,
        sample: int = 200,
        seed: int = 0,
        *,
        metric: str | None = None,
        executor: Fleet | None = None,
    ) -> Check:
        """Compute some cells exactly, by one sweep, and say what that means for all.

        The `top` largest, and `sample` others at random; fewer where there are no more. See `Check`.
        `executor` has workers that run the sweep.
        """
        if self.sweep is None:
            raise SweepError("a loaded result has no model at hand; attribute again to check it.")
        for name, count in (("top", top), ("sample", sample)):
            if isinstance(count, bool) or count < 0:
                raise SweepError(f"{name} is a number of cells, and not {count!r}.")
        if not top and not sample:
            raise SweepError("a check of no cells: give `top`, `sample` or both.")
        self.sweep.model.expect_program("check estimates from before that")
        self._expect_weights(self.sweep.model)
        row = 0 if metric is None else self._number(metric)
        effects = np.asarray((self.table[row] - self.base[row]).tolist())
        first, others = drawn(effects, top, sample, seed)
        result = self.sweep.of_cells([*first, *others]).run(progress=False, executor=executor)
        expect_whole(result)
        return check_of(self, row, first, others, result)
