"""Gradients first, exact values from the top down: a ranking whose first cells are exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from conewise.attributing.approximation import Approximation
from conewise.attributing.checking import SampleError, drawn, expect_whole
from conewise.attributing.ranks import largest
from conewise.fleets.jobs import Fleet
from conewise.program.tensors import Tensor
from conewise.sweeps.execution.ledger import SweepLedger, most
from conewise.sweeps.planning.plan import Lazy
from conewise.sweeps.result import Result

AT_ONCE = 256
"""So many cells are computed exactly at a time, at most."""


@dataclass
class _Exact:
    """The cells that were computed exactly: effects of the first metric, and values of all."""

    approx: Approximation
    max_memory: int | str | None = None
    executor: Fleet | None = None
    effects: dict[int, float] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def compute(self, numbers: Sequence[int]) -> None:
        """One sweep over some cells."""
        if not numbers:
            return
        assert self.approx.sweep is not None
        sweep = self.approx.sweep.of_cells(numbers)
        result = sweep.run(progress=False, max_memory=self.max_memory, executor=self.executor)
        expect_whole(result)
        self.results.append(result)
        for at, number in enumerate(numbers):
            self.effects[number] = float(result.table[0, at] - result.base[0])
            self.values[number] = result.per_prompt[:, at]


def hybrid(
    approx: Approximation,
    top: int,
    sample: int,
    seed: int,
    max_memory: int | str | None = None,
    executor: Fleet | None = None,
) -> Approximation:
    """`approx` with exact values of `sample` random cells, and of all that may be among the `top` largest.

    Cells are computed in the order of their approximate effects, until the `top`-th largest exact effect
    exceeds the next approximate one by more than the sample's error reaches. By the first metric.
    """
    effects = np.asarray((approx.table[0] - approx.base[0]).tolist())
    order, exact = largest(effects, len(effects)), _Exact(approx, max_memory, executor)
    _, first = drawn(effects, 0, sample, seed)
    exact.compute(first)
    error = SampleError.of([exact.effects[number] - float(effects[number]) for number in first])
    margin, size = abs(error.bias) + error.reach, top
    while rest := [number for number in order if number not in exact.effects]:
        known = sorted(map(abs, exact.effects.values()), reverse=True)
        if len(known) >= top and known[top - 1] >= abs(float(effects[rest[0]])) + margin:
            break
        exact.compute(rest[:size])
        size = min(2 * size, AT_ONCE)
    return _replaced(approx, exact, f"the {top} largest unless another is off by more than {margin:.3g}")


def _replaced(approx: Approximation, exact: _Exact, known: str) -> Approximation:
    """The approximation with exact values in the place of those that were computed, and the cost of both."""
    per_prompt = approx.per_prompt.clone()
    for number, values in exact.values.items():
        per_prompt[:, number] = values
    names = tuple(approx.cells[number].name for number in sorted(exact.values))
    method = f"hybrid of {approx.method}, {len(names):,} of {len(approx.cells):,} cells exact, {known}"
    plans, ledgers = [one.plan for one in exact.results], [one.ledger for one in exact.results]
    plan = replace(
        approx.plan,
        node_evaluations=approx.plan.node_evaluations + sum(one.node_evaluations for one in plans),
        launches=approx.plan.launches + sum(one.launches for one in plans),
        flops=approx.plan.flops + sum(one.flops for one in plans),
        peak_bytes=max([approx.plan.peak_bytes, *(one.peak_bytes for one in plans)]),
        why=f"{approx.plan.why}; {len(names):,} worlds exactly, in {len(plans)} sweeps",
    )
    own = approx.ledger
    ledger = SweepLedger(
        own.node_evaluations + sum(one.node_evaluations for one in ledgers),
        own.launches + sum(one.launches for one in ledgers),
        0,
        own.seconds + sum(one.seconds for one in ledgers),
        own.compute_seconds + sum(one.compute_seconds for one in ledgers),
        most([own.peak_bytes, *(one.peak_bytes for one in ledgers)]),
        most([own.reserved_bytes, *(one.reserved_bytes for one in ledgers)]),
        {
            phase: sum(one.phases.get(phase, 0.0) for one in (own, *ledgers))
            for phase in dict.fromkeys(phase for one in (own, *ledgers) for phase in one.phases)
        },
    )
    origin = approx.origin
    return replace(
        approx,
        plan=plan,
        ledger=ledger,
        table=per_prompt.mean(-1),
        per_prompt=per_prompt,
        origin=Lazy(
            lambda: {
                **origin,
                "attribution": {**origin["attribution"], "method": "hybrid", "exact": list(names)},
            }
        ),
        method=method,
        exact=names,
    )
