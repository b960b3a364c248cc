"""Attribution: what every patch of a sweep would do, estimated by gradients, as a result like a sweep's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from conewise.anatomy.places import EdgePlace
from conewise.anatomy.selectors import SelectorLike
from conewise.arguments import checked, shown_bytes
from conewise.attributing.approximation import (
    Approximation,
    Later,
    SampleError,
    drawn,
    effects_of,
    expect_whole,
    largest,
)
from conewise.attributing.pieces import (
    HYBRID,
    AttributionPlan,
    AttributionRequest,
    Piece,
    method_of,
    with_steps_from,
)
from conewise.attributing.work import Counts, Work
from conewise.errors import Argument, SweepError
from conewise.jobs.job import Ahead, BatchPlan, Computed, Computing, Job, JobRun, pool_of, run_job, run_jobs
from conewise.jobs.pool import Pool
from conewise.jobs.runnable import How, Runnable
from conewise.jobs.scheduling import Share
from conewise.jobs.store import Request
from conewise.program.foreign import within_memory
from conewise.program.tensors import Tensor, recording
from conewise.program.weights import Contents
from conewise.runs.captured import Captured
from conewise.runs.spreading import with_named
from conewise.status import Phases
from conewise.sweeps.execution.growth import SMALL, watching
from conewise.sweeps.execution.reading import PHASES, SweepLedger, summed
from conewise.sweeps.planning.plan import Lazy, SweepPlan
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.planning.spec import StoredCut
from conewise.sweeps.result import Result
from conewise.sweeps.running import trusting
from conewise.sweeps.sweep import Sweep
from conewise.templates import heading
from conewise.threads import Turn, one_thread

AT_ONCE = 256
"""The most cells that are computed exactly at a time."""


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
    effects, sweep, per_prompt = effects_of(approx, 0), approx.sweep, approx.per_prompt.clone()
    exact: dict[int, float] = {}
    results: list[Result] = []
    assert sweep is not None

    def compute(numbers: Sequence[int]) -> None:
        """One sweep over some cells: their effects by the first metric, and values of all."""
        if numbers:
            cells = sweep.of_cells(numbers)
            results.append(cells.run(progress=False, max_memory=max_memory, workers=workers))
            expect_whole(results[-1])
            exact.update(zip(numbers, effects_of(results[-1], 0).tolist(), strict=True))
            per_prompt[:, list(numbers)] = results[-1].per_prompt

    _, first = drawn(effects, 0, n, seed)
    compute(first)
    error = SampleError.of([exact[number] - float(effects[number]) for number in first])
    margin, size = abs(error.bias) + error.reach, top
    order = largest(effects, len(effects))
    while rest := [number for number in order if number not in exact]:
        known = sorted(map(abs, exact.values()), reverse=True)
        if len(known) >= top and known[top - 1] >= abs(float(effects[rest[0]])) + margin:
            break
        compute(rest[:size])
        size = min(2 * size, AT_ONCE)
    names = tuple(approx.cells[number].name for number in sorted(exact))
    plans, origin = [one.plan for one in results], approx.origin
    plan = replace(
        approx.plan,
        node_evaluations=approx.plan.node_evaluations + sum(one.node_evaluations for one in plans),
        launches=approx.plan.launches + sum(one.launches for one in plans),
        flops=approx.plan.flops + sum(one.flops for one in plans),
        peak_bytes=max([approx.plan.peak_bytes, *(one.peak_bytes for one in plans)]),
        why=f"{approx.plan.why}; {len(names):,} worlds exactly, in {len(plans)} sweeps",
    )
    own = {"method": "hybrid", "exact": list(names)}
    return replace(
        approx,
        plan=plan,
        ledger=summed([approx.ledger, *(one.ledger for one in results)]),
        table=per_prompt.mean(-1),
        per_prompt=per_prompt,
        origin=Lazy(lambda: {**origin, "attribution": {**origin["attribution"], **own}}),
        method=f"hybrid of {approx.method}, {len(names):,} of {len(approx.cells):,} cells exact, the {top} "
        f"largest unless another is off by more than {margin:.3g}",
        exact=names,
    )


TOP, SAMPLE = 10, 20
"""The numbers of largest cells that `hybrid` looks for, and of random cells whose errors it measures."""


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
            if steps is not None:
                raise SweepError(f"'hybrid' takes one gradient, and no steps: leave out steps={steps!r}.")
            self._top = min(_cells(top, TOP, 1, "top"), len(sweep.cells))
            self._n = _cells(n, SAMPLE, 2, "n")
        else:
            method_of(method).steps(steps)

    @property
    def _turn(self) -> Turn:
        return self.sweep._turn

    def _job(self, max_memory: int | str | None) -> AttributionJob:
        method = self.method
        if method == HYBRID:  # ranks by one gradient
            is_edge = any(isinstance(place, EdgePlace) for place in self.sweep.cells[0].places)
            method = "eap" if is_edge else "atp"
        return AttributionJob(AttributionRequest.of(self.sweep, method, self.steps, max_memory))

    @within_memory("planning this attribution")
    def plan(self, max_memory: int | str | None = None) -> AttributionPlan:
        """Return the cost: passes, nodes, FLOPs and memory; nothing is computed.

        For "hybrid", it is the cost of ranking; the number of worlds that are computed afterwards is not
        known before.
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
    steps_from: str | None = None,
) -> Attribution:
    """Estimate by gradients the result of `model.sweep(sites, ...)`: a job whose result has the same cells.

    `sites`, `base`, `source` and `metric` are those of a sweep. The result's `effect` is the attribution, and
    a value is the base's metric plus the attribution. It is an approximation, and plots, tables, files and
    pages label it as one.

    For sites, `method` is "atp" (attribution patching), "atp*" (with both of its corrections) or "ig"
    (integrated gradients, with `steps`). For edges, it is "eap", "eap-ig" (along the inputs, with `steps`,
    which include the base's end, or the source's with steps_from="source", as in EAP-IG's own code since
    February 2025), "eap-ig-activations" (along the output of each layer, with `steps`) or "ifr"
    (information-flow routes: shares of the values read in the base, no gradient). For both, it can be "relp"
    (relevance patching) or "gim" (gradient interaction modifications). "hybrid" ranks by "atp" or "eap",
    computes `n` cells exactly at random (20), and then cells from the top down, until no remaining cell can
    belong to the `top` largest (10) by the error of the sample; `exact` names them.

    With `max_memory`, the number of prompts computed at a time is limited to fit: see `plan`. Each batch, or
    each part of it that is computed at a time, is stored in `out` when it is done.
    """
    model._capture_for(base)
    sweep = Sweep(model, with_named(sites, model), base=base, source=source, metric=metric)
    return Attribution(sweep, with_steps_from(method, steps_from), steps, n=n, top=top, seed=seed)


def attributed_together(
    attributions: Sequence[Attribution], folders: Sequence[str | Path | None], how: How
) -> list[Approximation]:
    """Return what several attributions to one model estimate: pieces of all of them stand in one line."""
    jobs = [one._job(how.max_memory) for one in attributions]
    with recording():
        return run_jobs(jobs, folders, how)


def _expect_one_source(sweep: Sweep) -> None:
    if len(sweep.own):
        raise SweepError(
            "attribution is by one source for all cells, and here cells have sources of their own. Run the "
            "sweep itself, or attribute to places with `source=`."
        )
    put = sweep.batch(0).intervention
    if put.expect_kind is not None:
        raise SweepError(f"{put.name} puts in what no gradient tells the effect of: run the sweep itself.")


def _cells(given: int | None, default: int, least: int, what: str) -> int:
    if given is None:
        return default
    if isinstance(given, bool) or given < least:
        raise SweepError(f"{what} is a number of cells of at least {least}, and not {given!r}.")
    return given


# -- the job -----------------------------------------------------

EVALUATOR = "gradients"


class AttributionJob(Job[Approximation]):
    """One run of an attribution: its batches are pieces, of one chunk each."""

    def __init__(self, asked: AttributionRequest) -> None:
        super().__init__(asked.sweep.model, len(asked.sweep.cells), len(asked.pieces))
        self.asked, self.max_memory = asked, asked.max_memory

    def begin(self, weights: Contents, phases: Phases) -> None:
        """Begin: forget what was found out, and was run, with other weights."""
        super().begin(weights, phases)
        self.asked.sweep._expect_weights(weights.whole)

    def stored(self) -> Request:
        """Return what identifies the attribution."""
        return self.asked.stored(self.weights)

    def here(self) -> PieceComputing:
        """Return what computes pieces in this process."""
        return PieceComputing(self.asked, self.weights, self.phases)

    def elsewhere(self) -> tuple[Callable[..., Computing], dict[str, Any]]:
        """Return what makes the same of a worker's own model."""
        asked = self.asked
        how = {"method": asked.method.name, "steps": asked.steps, "pieces": asked.pieces}
        return PieceComputing.of, {"asked": asked.sweep._asked(), **how}

    def plan(self, batch: int, cut: Callable[[str], StoredCut | None]) -> BatchPlan:
        """Return the plan of a piece, which is known already."""
        del cut
        piece, cells = self.asked.pieces[batch], range(self.cells)
        own = StoredCut(EVALUATOR, (self.cells,))
        prompts, size = partial(self.asked.rows_in, piece), self.asked.inputs(piece).values()
        cost = max((value.numel() for value in size), default=1)  # as against that of other pieces
        return BatchPlan(own, self.max_memory, [cells], [cost], cells, prompts=prompts)

    def forget(self) -> None:
        """Forget the runs that were made of inputs."""
        self.asked.sweep.forget()

    def left(self, batch: int) -> None:
        """Forget a batch with its last piece."""
        pieces = self.asked.pieces
        if pieces[batch].number != pieces[min(batch + 1, len(pieces) - 1)].number:
            self.forget()

    def forget_all(self) -> None:
        """Forget all that was found out: what weights it is of is not known."""
        self.asked.sweep.facts.forget()
        self.forget()

    def result(self, run: JobRun[Approximation]) -> Approximation:
        """Return all pieces together. Raises SweepError where one could not be computed."""
        asked, sweep, ledger = self.asked, self.asked.sweep, run.ledger
        if run.missing:
            said = [f"batch {asked.pieces[one.batch].number}: {one.why}" for one in run.missing]
            left = f"; {len(said) - 3} more" if len(said) > 3 else ""
            raise SweepError(
                f"{len(said)} of {len(asked.pieces)} pieces of this attribution could not be computed "
                f"({'; '.join(said[:3])}{left})."
            )
        full = [asked.full_counts(piece) for piece in asked.pieces]
        counts = sum(run.counts, Counts())
        values = [run.values(number).transpose(0, 1) for number in range(self.batches)]
        plan = Later(lambda: self._plan(counts, full))
        found = sweep._result(
            plan,
            ledger,
            torch.cat(values, dim=-1),
            run.baselines(),
            self.weights.whole,
            Approximation,
            method=asked.described,
        )
        identified, own = found.origin, asked.provenance
        result: Approximation = replace(
            found, plan=plan, origin=Lazy(lambda: {**identified, "attribution": own})
        )
        return result

    def _plan(self, counts: Counts, full: Sequence[tuple[int, int]]) -> SweepPlan:
        """Return what was computed, as the plan of a sweep."""
        return SweepPlan(
            worlds=self.cells,
            batches=self.asked.sweep.batches,
            node_evaluations=counts.node_evaluations,
            full_evaluations=sum(nodes for nodes, _ in full),
            launches=counts.node_evaluations,
            flops=counts.flops,
            full_flops=sum(flops for _, flops in full),
            peak_bytes=self.asked.peak_bytes(),
            max_memory=self.max_memory,
            chunks=(self.cells,),
            evaluator=EVALUATOR,
            why=f"approximate, {self.asked.described}: {counts.passes(' and ')} over parts of the program",
            seconds=None,
        )


class PieceComputing(Computing):
    """Computes pieces of an attribution, in this process and in a worker."""

    def __init__(
        self, asked: AttributionRequest, weights: Contents | None = None, phases: Phases | None = None
    ) -> None:
        super().__init__()
        self.asked, self.phases, self._weights = asked, phases or Phases(PHASES), weights

    @classmethod
    def of(
        cls, model: Captured, asked: dict[str, Any], method: str, steps: int, pieces: tuple[Piece, ...]
    ) -> PieceComputing:
        """Return that of a worker."""
        sweep, chosen = Sweep(model, **asked), method_of(method)
        return cls(AttributionRequest(sweep, chosen, chosen.cells(model, sweep.cells), steps, None, pieces))

    def rest(self) -> None:
        """Let go of the batch that is under way."""
        super().rest()
        self.asked.sweep.forget()

    def lacking(self, share: Share, memory: int | None) -> str:
        """Return what is lacking where a piece is known not to fit into this worker; else nothing."""
        if memory is None or not share.chunks:
            return ""
        taken = self.asked.peak_of(self.piece(share))
        if taken <= memory:
            return ""
        return f"these prompts take up to {shown_bytes(taken)}, and this worker has {shown_bytes(memory)}"

    def piece(self, share: Share) -> Piece:
        """Return the piece of a share: some of its prompts, where it does not fit as a whole."""
        asked, piece = self.asked, self.asked.pieces[share.batch]
        if share.worlds is None:
            return piece
        rows = range(share.first, share.first + share.worlds)
        return asked.part_of(piece, rows)

    @contextmanager
    def begin(self, batch: int) -> Iterator[PieceComputing]:
        """Begin with a piece: it is computed when it is asked for."""
        del batch
        self._held = self._weights or self.asked.sweep.model.weights.contents()
        yield self

    def count(self, chunk: int, ledger: SweepLedger) -> None:
        """Count nothing: what is resumed is counted with the baselines."""

    def compute(self, share: Share, ledger: SweepLedger, memory: int | None, ahead: Ahead = None) -> Computed:
        """Compute a piece, or some of its prompts; without chunks, base and source alone."""
        del memory, ahead
        asked, sweep, during, weights = self.asked, self.asked.sweep, self.phases.during, self._held
        piece, rows = self.piece(share), list[Tensor]()
        with during("baselines"):
            batch = piece.batch(sweep)
            batch.expect_possible(sweep.spec.cells)
        with trusting(batch, weights, self.phases):
            work = Work(
                batch,
                piece.spec(sweep),
                asked.cells.reads,
                weights.whole,
                is_one_pass=asked.method.is_one_pass,
                may_replay=asked.max_memory is None and piece.rows is None,
            )
            if share.chunks:
                budget = asked.max_memory
                planned = SMALL if budget is None else asked.peak_of(piece)
                with during("passes"), watching(facts_of(sweep.model).devices, planned, budget) as watch:
                    effects = asked.method.scores(work, asked.cells, asked.steps)
                ledger.note_memory(watch.peak, watch.reserved)
            with during("baselines"):
                base, source = work.numbers("base"), work.numbers("source")
        assert base is not None
        counts = work.counts if share.chunks else asked.counts_of(piece)  # computed before, and resumed
        if share.chunks:
            rows.append((effects + base[:, None]).transpose(0, 1))
        ledger.node_evaluations += counts.node_evaluations
        ledger.launches += counts.node_evaluations
        return Computed((row for row in rows), lambda: base, lambda: source, lambda: counts)
