"""Attribution: what every patch of a sweep would do, estimated by gradients, as a result like a sweep's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from conewise.anatomy.places import EdgePlace
from conewise.anatomy.selectors import SelectorLike, with_named
from conewise.arguments import checked
from conewise.attributing.approximation import Approximation, SampleError, drawn, expect_whole
from conewise.attributing.comparison import largest
from conewise.attributing.pieces import HYBRID, Asked, AttributionPlan, method_of
from conewise.attributing.running import AttributionJob
from conewise.circuits.replaced_parts import edge_facts
from conewise.errors import Argument, SweepError
from conewise.jobs.job import pool_of, run_job, run_jobs
from conewise.jobs.pool import Pool
from conewise.jobs.runnable import How, Runnable
from conewise.program.foreign import within_memory
from conewise.program.tensors import Tensor, recording
from conewise.runs.captured import Captured
from conewise.sweeps.execution.reading import SweepLedger, most
from conewise.sweeps.planning.plan import Lazy
from conewise.sweeps.result import Result
from conewise.sweeps.sweep import Sweep
from conewise.templates import heading
from conewise.threads import Turn, one_thread

AT_ONCE = 256
"""So many cells are computed exactly at a time, at most."""


@dataclass
class _Exact:
    """The cells that were computed exactly: effects of the first metric, and values of all."""

    approx: Approximation
    max_memory: int | None = None
    workers: Pool | None = None
    effects: dict[int, float] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def compute(self, numbers: Sequence[int]) -> None:
        """One sweep over some cells."""
        if not numbers:
            return
        assert self.approx.sweep is not None
        sweep = self.approx.sweep.of_cells(numbers)
        result = sweep.run(progress=False, max_memory=self.max_memory, workers=self.workers)
        expect_whole(result)
        self.results.append(result)
        for at, number in enumerate(numbers):
            self.effects[number] = float(result.table[0, at] - result.base[0])
            self.values[number] = result.per_prompt[:, at]


def hybrid(
    approx: Approximation,
    top: int,
    n: int,
    seed: int,
    max_memory: int | None = None,
    workers: Pool | None = None,
) -> Approximation:
    """`approx` with exact values of `n` random cells, and of all that may be among the `top` largest.

    Cells are computed in the order of their approximate effects, until the `top`-th largest exact effect
    exceeds the next approximate one by more than the sample's error reaches. By the first metric.
    """
    effects = np.asarray((approx.table[0] - approx.base[0]).tolist())
    order, exact = largest(effects, len(effects)), _Exact(approx, max_memory, workers)
    _, first = drawn(effects, 0, n, seed)
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


TOP, SAMPLE = 10, 20
"""How many of the largest cells `hybrid` looks for, and of how many it learns how far gradients are off."""


@checked
@one_thread
class Attribution(Runnable[Approximation]):
    """Effects of the cells of a sweep, estimated by gradients: see `Model.attribute`."""

    def __init__(
        self,
        sweep: Sweep,
        method: str = "atp",
        steps: int | None = None,
        *,
        n: int | None = None,
        top: int | None = None,
        seed: int = 0,
    ) -> None:
        if seed and method != HYBRID:
            raise SweepError(
                f"seed={seed} draws the cells that 'hybrid' computes exactly, and method={method!r} draws "
                "none: leave it out."
            )
        if (top is not None or n is not None) and method != HYBRID:
            raise SweepError("`top` and `n` are of method='hybrid'; others compute no cell exactly.")
        _expect_one_source(sweep)
        self.sweep, self.method, self.steps, self.seed = sweep, method, steps, seed
        if method == HYBRID:
            _expect_no_steps(steps)
            self._top = min(_cells(top, TOP, 1, "top"), len(sweep.cells))
            self._n = _cells(n, SAMPLE, 2, "n")
        else:
            method_of(method).steps(steps)

    @property
    def _turn(self) -> Turn:
        return self.sweep._turn

    def _job(self, max_memory: int | str | None) -> AttributionJob:
        method = _ranking(self.sweep) if self.method == HYBRID else self.method
        return AttributionJob(Asked.of(self.sweep, method, self.steps, max_memory))

    @within_memory("planning this attribution")
    def plan(self, max_memory: int | str | None = None) -> AttributionPlan:
        """Return what it takes: passes, nodes, FLOPs, memory; nothing is computed.

        Of "hybrid" it is what ranking takes; how many worlds are computed after that is not known before.
        """
        return self._job(max_memory).asked.plan

    @within_memory("this attribution")
    @recording()
    def _run(self, how: How) -> Approximation:
        job = self._job(how.max_memory)
        if self.method != HYBRID:
            return run_job(job, how)
        if how.out is not None or how.resume:
            raise SweepError(
                "'hybrid' is not stored, since what it computes depends on what it found: leave out ",
                Argument("out"),
                ", or take another method and check it.",
            )
        with pool_of(how.workers) as pool:
            first = run_job(job, replace(how, workers=pool))
            return hybrid(first, self._top, self._n, self.seed, how.max_memory, pool)

    def __repr__(self) -> str:
        return f"Attribution by {self.method} to {len(self.sweep.cells):,} cells of {self.sweep.model.name}"

    def _repr_html_(self) -> str:
        return heading("Attribution", repr(self).removeprefix("Attribution "))


def attribute(
    model: Captured,
    sites: SelectorLike,
    *,
    base: Any,
    source: Any,
    metric: Any,
    method: str = "atp",
    steps: int | None = None,
    n: int | None = None,
    top: int | None = None,
    seed: int = 0,
) -> Attribution:
    """Estimate by gradients what `model.sweep(sites, ...)` would find: a job with a result of the same cells.

    `sites`, `base`, `source` and `metric` are those of a sweep. The result's `effect` is the attribution,
    and a value is the base's metric plus that: an approximation, which plots, tables, files and pages say.

    `method` is, for sites, "atp" (attribution patching), "atp*" (with both of its corrections) or "ig"
    (integrated gradients, with `steps`); for edges "eap", "eap-ig" (along the inputs, with `steps`) or
    "eap-ig-activations" (along what each layer writes, with `steps`); for both "relp" (relevance patching).
    "hybrid" ranks by "atp" or "eap", computes `n` cells exactly at random (20), and then cells from the top
    down, until none that is left can belong to the `top` largest (10) by the error of the sample; `exact`
    names them.

    With `max_memory`, so many prompts are computed at a time that no more is held: see `plan`. A batch, or
    what of it is computed at a time, is stored in `out` when it is done.
    """
    model._capture_for(base)
    named = with_named(
        sites, lambda stack: edge_facts(model, stack).components, model.locate, model.each_call
    )
    sweep = Sweep(model, named, base=base, source=source, metric=metric)
    return Attribution(sweep, method, steps, n=n, top=top, seed=seed)


def attributed_together(
    attributions: Sequence[Attribution], folders: Sequence[str | Path | None], how: How
) -> list[Approximation]:
    """Return what several attributions to one model estimate: pieces of all of them stand in one line."""
    jobs = [one._job(how.max_memory) for one in attributions]
    with recording():
        return run_jobs(jobs, folders, how)


def _ranking(sweep: Sweep) -> str:
    """What `hybrid` ranks by."""
    is_edge = any(isinstance(place, EdgePlace) for place in sweep.cells[0].places)
    return "eap" if is_edge else "atp"


def _expect_one_source(sweep: Sweep) -> None:
    if len(sweep.own):
        raise SweepError(
            "attribution is by one source for all cells, and here cells have sources of their own. Run the "
            "sweep itself, or attribute to places with `source=`."
        )
    put = sweep.batch(0).intervention
    if put.expect_kind is not None:
        raise SweepError(f"{put.name} puts in what no gradient tells the effect of: run the sweep itself.")


def _expect_no_steps(steps: int | None) -> None:
    if steps is not None:
        raise SweepError(f"'hybrid' takes one gradient, and no steps: leave out steps={steps!r}.")


def _cells(given: int | None, default: int, least: int, what: str) -> int:
    if given is None:
        return default
    if isinstance(given, bool) or given < least:
        raise SweepError(f"{what} is a number of cells of at least {least}, and not {given!r}.")
    return given
