"""The result of an attribution: a sweep's, with values that are estimated by gradients."""

from __future__ import annotations

from dataclasses import dataclass

from conewise.sweeps.result import Result


@dataclass(frozen=True, eq=False, repr=False)
class Approximation(Result):
    """Estimated values by cell: `method` says how. See `Result` for all else that can be done with it.

    A value is the base's metric plus the estimated effect. `plan` and `ledger` have what was counted: nodes
    of recorded forward passes, and again of backward passes through them; `plan.full_evaluations` is what
    one full forward for each cell would take, as in a sweep.
    """
