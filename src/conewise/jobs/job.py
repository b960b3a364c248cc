"""The driver of all jobs: plan, find what is stored, compute the rest here or by workers, store, add up.

A kind of job is a subclass of `Job`, which says what identifies it, how a batch is cut into chunks, and what
its result is; and a subclass of `Computing`, which computes chunks. The driver does all else, in the same way
for every kind: `run_jobs`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from conewise.errors import FleetError, WeightsChangedError
from conewise.jobs.payload import Work, packed
from conewise.jobs.pool import Pool
from conewise.jobs.progress import ProgressCallback, bar
from conewise.jobs.runnable import How
from conewise.jobs.scheduling import ChunkCost, Done, Failed, Share, WorkerJob, cut_into_shares, run_shares
from conewise.jobs.store import Recorder, Request, recorder
from conewise.program.streaming import reads_of
from conewise.program.tensors import Tensor
from conewise.program.weights import Contents
from conewise.runs.captured import Captured
from conewise.status import Phases
from conewise.sweeps.execution.growth import Holes
from conewise.sweeps.execution.reading import PHASES, SweepLedger
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.planning.spec import StoredCut
from conewise.sweeps.storage.result_data import Missing

R = TypeVar("R")


# -- what a kind of job provides -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The plan of a batch: the worlds of each chunk, and its FLOPs.

    `cut` and `max_memory` are what a store keeps of it, `text` is what workers are told. `order` has the
    number of the cell of each world. A chunk that does not fit into a worker is cut by worlds, or, where
    `prompts` are given, by prompts.
    """

    cut: StoredCut
    max_memory: int | None
    chunks: Sequence[range]
    costs: Sequence[int]
    order: Sequence[int]
    text: Callable[[], str] | None = None
    prompts: Callable[[], range] | None = None
    plan: Any = None


@dataclass(frozen=True, slots=True)
class Computed:
    """The results of a share: for each chunk [world, metric, prompt], as it is asked for.

    `base` and `source` fetch the metrics of the baselines, [metric, prompt]. `counts` may have more to be
    counted, once the rows are there.
    """

    rows: Generator[Tensor]
    base: Callable[[], Tensor]
    source: Callable[[], Tensor | None]
    counts: Callable[[], Any] = lambda: None


class BatchUnderWay(Protocol):
    """A batch whose baselines are there, or will be when they are first needed."""

    def compute(self, share: Share, ledger: SweepLedger, memory: int | None, ahead: Ahead = None) -> Computed:
        """Compute the chunks of a share, in so much memory.

        With `ahead`, a chunk may be begun before the one before it is fetched, and `ahead` is called when the
        last one was begun.
        """

    def count(self, chunk: int, ledger: SweepLedger) -> None:
        """Count what a chunk computes that was computed before, and is resumed."""


Ahead = Callable[[], None] | None


class Computing(WorkerJob, ABC):
    """Computes the chunks of a job: in the process of the driver, and in every worker."""

    def __init__(self) -> None:
        self._at: int | None = None
        self._batch: BatchUnderWay | None = None
        self._open = ExitStack()

    @abstractmethod
    def begin(self, batch: int) -> AbstractContextManager[BatchUnderWay]:
        """Begin with a batch. What is held of it is let go at the end."""

    def run(self, share: Share, memory: int | None) -> Done:
        """Compute a share; its batch stays under way, for those that follow."""
        if self._batch is None or self._at != share.batch:
            self.rest()
            self._batch, self._at = self._open.enter_context(self.begin(share.batch)), share.batch
        ledger = SweepLedger()
        found = self._batch.compute(share, ledger, memory)
        rows = tuple(row.double().cpu().numpy() for row in found.rows)
        base, source = found.base().double().cpu().numpy(), found.source()
        own = None if source is None else source.double().cpu().numpy()
        return Done(rows, base, own, ledger, found.counts())

    def rest(self) -> None:
        """Let go of the batch that is under way."""
        self._at = self._batch = None
        self._open.close()


class Job(ABC, Generic[R]):
    """One run of something that is asked of a model: `batches` of `cells` worlds each.

    Once it has begun it knows the `weights` that all is computed with, and the `phases` of its seconds.
    """

    weights: Contents
    phases: Phases
    reads_all_weights: bool = True
    """True if every bit of the weights is read, before and after; else a sample of them."""
    max_memory: int | None = None
    """Bytes that chunks may take in this process."""

    def __init__(self, model: Captured, cells: int, batches: int) -> None:
        self.model, self.cells, self.batches = model, cells, batches

    @abstractmethod
    def stored(self) -> Request:
        """Return what identifies the job: what a folder compares with what was asked then."""

    @abstractmethod
    def plan(self, batch: int, cut: Callable[[str], StoredCut | None]) -> BatchPlan:
        """Plan a batch; `cut`, of an evaluator, is how a run that is resumed was cut. Nothing is computed."""

    @abstractmethod
    def here(self) -> Computing:
        """Return what computes chunks in this process."""

    @abstractmethod
    def elsewhere(self) -> tuple[Callable[..., Computing], Mapping[str, Any]]:
        """Return what makes the `Computing` of a worker, of its model, and all that it is given beside."""

    @abstractmethod
    def result(self, run: JobRun[R]) -> R:
        """Return what all batches add up to. Raises SweepError where too much of it is missing."""

    def begin(self, weights: Contents, phases: Phases) -> None:
        """Begin with these weights: forget what was found out, and was run, with others."""
        self.weights, self.phases = weights, phases

    def forget(self) -> None:
        """Forget the runs that were made of inputs: what asks for them next makes them again."""

    def left(self, batch: int) -> None:
        """Forget what is held of a batch that is done."""
        del batch
        self.forget()

    def forget_all(self) -> None:
        """Forget all that was found out: what weights it is of is not known."""
        self.forget()

    def expect_room(self) -> None:
        """Raise BudgetError where a batch takes more than the budget, however it is cut."""

    def names(self, cells: Sequence[int]) -> tuple[str, ...]:
        """Return the names of cells."""
        return tuple(map(str, cells))

    def weights_now(self) -> Contents:
        """Return the contents of the weights, of which as much is read as the job asks for."""
        weights = self.model.weights
        return weights.whole_contents() if self.reads_all_weights else weights.contents()

    def expect_unchanged(self, now: Contents | None = None) -> None:
        """Raise WeightsChangedError where a weight was written to since the job began."""
        with self.phases.during("weights"):
            weights = self.model.weights
            changed = weights.changed(self.weights.whole, (now or self.weights_now()).whole)
        if changed:
            raise WeightsChangedError(
                f"the weights of {self.model.name} were written to while the sweep ran: {changed}. Its cells "
                "are of no one model, and there is no result. Leave the weights alone until it has ended."
            )


# -- the driver ------------------------------------------------------------------------------------


def run_job(job: Job[R], how: How) -> R:
    """Run one job: see `run_jobs`."""
    (found,) = run_jobs([job], [how.out], how)
    return found


def run_jobs(
    jobs: Sequence[Job[R]],
    folders: Sequence[str | Path | None],
    how: How,
) -> list[R]:
    """Run jobs over one model, and return their results; each is stored in its folder, if it has one.

    Without `workers`, this process computes batch after batch, and what goes wrong is raised as it is. They
    (see `pool_of`) are given shares of all jobs together. A job that goes on, with `resume`, computes what is
    not stored. The seconds of all are those of the first.

    The weights are mostly those that were last read, so that is assumed where nothing is stored or sent: they
    are looked at in the end. Only where they turn out to be others is all done again, with those that were
    read. Of a large model on a CPU, a look means counted writes and a sample of the bits; with
    `check_weights` as "full", and where something is stored or sent, it means every bit.
    """
    phases = Phases(PHASES)
    model, total = jobs[0].model, sum(job.cells * job.batches for job in jobs)
    with pool_of(how.workers) as pool, bar(how.progress, total, facts_of(model).device) as tell:
        tell.begin(phases)
        attempt = partial(_attempt, jobs, folders, tell=tell, phases=phases, resume=how.resume, pool=pool)
        with phases.during("weights"):
            can_assume = pool is None and all(out is None for out in folders)
            for job in jobs:
                job.reads_all_weights = how.check_weights == "full" or not can_assume
            assumed = model.weights.assumed() if can_assume else None
        if assumed is not None:
            try:
                return attempt(assumed)
            except Exception:
                if jobs[0].weights_now().whole == assumed.whole:
                    raise
            except BaseException:
                # Interrupted before the weights were read: what was found may be of others.
                for job in jobs:
                    job.forget_all()
                raise
        with phases.during("weights"):
            contents = jobs[0].weights_now()
        return attempt(contents)


def _attempt(
    jobs: Sequence[Job[R]],
    folders: Sequence[str | Path | None],
    weights: Contents,
    *,
    tell: ProgressCallback,
    phases: Phases,
    resume: bool,
    pool: Pool | None,
) -> list[R]:
    """The results with the weights that are there."""
    tell.begin(phases)
    with ExitStack() as recording:
        runs: list[JobRun[R]] = []
        for job, out in zip(jobs, folders, strict=True):
            job.begin(weights, phases)
            with phases.during("storing"):
                record = recording.enter_context(recorder(job.stored(), out, resume))
            runs.append(JobRun(job, record, tell))
        if pool is None:
            for run in runs:
                run.compute_here()
        else:
            for run in runs:
                run.plan_all()
            with phases.during("passes"):
                _run_by_workers(runs, pool, tell)
        jobs[0].expect_unchanged(runs[-1].ending)
        found = [run.job.result(run) for run in runs]
    for number, run in enumerate(runs):
        seconds = phases.seconds()
        run.ledger.phases = {name: 0.0 if number else taken for name, taken in seconds.items()}
        run.ledger.seconds = sum(run.ledger.phases.values())
    return found


def _run_by_workers(runs: Sequence[JobRun[Any]], pool: Pool, tell: ProgressCallback) -> None:
    """Have all shares of all jobs computed: they stand in one line, so that no worker waits for the last."""
    numbers = [None] if len(runs) == 1 else range(len(runs))
    chunks: list[ChunkCost] = []
    shares: list[Share] = []
    for number, run in zip(numbers, runs, strict=True):
        some, baselines = run.wanted()
        chunks += [replace(one, job=number) for one in some]
        shares += [replace(one, job=number) for one in baselines]
    known = [run.seconds for run in runs if run.seconds is not None]

    def of(share: Share) -> JobRun[Any]:
        return runs[share.job or 0]

    with pool.at_work([run.work for run in runs]) as ledger:
        ledger.predicted = sum(known) if len(known) == len(runs) else None
        tell.follow_workers(ledger)
        run_shares(
            [*shares, *cut_into_shares(chunks, pool.workers)],
            pool,
            lambda share: of(share).worlds_of(share),
            lambda share, found: of(share).done(share, found),
            lambda share, failed: of(share).given_up(share, failed),
            ledger,
        )


@contextmanager
def pool_of(workers: object) -> Iterator[Pool | None]:
    """Have the workers that `workers` says; those that are started for it end with the block.

    None: this process computes. A number: so many processes. "ray": a local cluster of Ray. Another text: the
    address of a cluster. `cw.Processes(...)` and `cw.Ray(...)` are what they are, and stay open.
    """
    from conewise.jobs.pool import Processes  # noqa: PLC0415  # both are pools
    from conewise.jobs.ray_workers import Ray  # noqa: PLC0415

    if workers is None or isinstance(workers, Pool):
        yield workers
    elif isinstance(workers, str):
        with Ray(None if workers == "ray" else workers) as ray:
            yield ray
    elif isinstance(workers, int) and not isinstance(workers, bool):
        with Processes(workers) as processes:
            yield processes
    else:
        raise FleetError(
            f"`workers` is a number of processes, 'ray', the address of a cluster, or a pool such as "
            f"`cw.Processes(4)`, and not {workers!r}."
        )


@dataclass(slots=True)
class _Batch:
    """A batch of which some chunks are done. `parts` are pieces of chunks that did not fit into a worker."""

    plan: BatchPlan
    rows: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[int, dict[int, Done]] = field(default_factory=dict)
    base: Tensor | None = None
    source: Tensor | None = None


class JobRun(Generic[R]):
    """A job under way: what is there of each batch, what was counted, and what is missing."""

    def __init__(self, job: Job[R], record: Recorder, tell: ProgressCallback) -> None:
        self.job, self.record, self._tell = job, record, tell
        self.ledger = SweepLedger()
        self.missing: list[Missing] = []
        self.counts: list[Any] = []
        """Counts of the shares, beside the ledger."""
        self.batches: list[_Batch] = []
        self.ending: Contents | None = None
        self.is_here = True

    # -- in this process -----------------------------------------------------------------------

    def compute_here(self) -> None:
        """Compute batch after batch, so that the runs of no two are held at a time."""
        job, during, holes = self.job, self.job.phases.during, Holes()
        here = job.here()
        if job.batches > 1 and not self.record.keeps:
            with during("planning"):
                job.expect_room()
        for number in range(job.batches):
            self._compute_batch(number, here)
            if job.batches > 1:
                job.left(number)
                holes.settle()

    def _compute_batch(self, number: int, here: Computing) -> None:
        """Compute what is not stored of a batch; nothing of it is held when the next one is made."""
        job, keeps, batch = self.job, self.record.keeps, self._planned(number)
        wanted = [chunk for chunk in range(len(batch.plan.chunks)) if chunk not in batch.rows]
        is_last = number == job.batches - 1 and job.model.weights.are_on_gpu
        ahead = None if keeps else self._read_weights if is_last else _nothing
        with here.begin(number) as under_way:
            for chunk in batch.rows:
                under_way.count(chunk, self.ledger)
            found = under_way.compute(Share(number, tuple(wanted), 0), self.ledger, job.max_memory, ahead)

            def read_baselines() -> None:
                with job.phases.during("baselines"):
                    batch.base, batch.source = found.base(), found.source()

            # Where weights stream, base and source are computed along with the first chunk.
            is_along = bool(wanted) and reads_of(job.model.program).stream is not None
            if keeps and not is_along:
                read_baselines()
                self._store(number, batch)
            with closing(found.rows) as all_rows:
                for chunk, rows in zip(wanted, all_rows, strict=True):
                    if keeps and batch.base is None:
                        read_baselines()
                        self._store(number, batch)
                    self._keep(number, chunk, rows)
                    self._tell(len(rows))
            if not keeps:  # last, since reading them waits for a device
                read_baselines()
            counts = found.counts()
            self.counts += [counts] if counts is not None else []

    def _read_weights(self) -> None:
        """Read the weights behind all that a device was given to do, so that it is waited for once."""
        with self.job.phases.during("weights"):
            self.ending = self.job.weights_now()

    # -- by workers ----------------------------------------------------------------------------

    def plan_all(self) -> None:
        """Plan all batches, so that all shares can be given out together."""
        self.is_here = False
        for number in range(self.job.batches):
            self._planned(number)
        make, given = self.job.elsewhere()
        texts = {number: one.plan.text for number, one in enumerate(self.batches)}
        plans = {number: text() for number, text in texts.items() if text is not None}
        self.work = Work(self.job.model, packed((make, given), self.job.model), plans)

    @property
    def seconds(self) -> float | None:
        """Return what all of it is predicted to take in one process; None where nothing was timed."""
        each = [getattr(one.plan.plan, "seconds", None) for one in self.batches]
        known = [seconds / len(each) for seconds in each if seconds is not None]
        return sum(known) if len(known) == len(each) else None

    def wanted(self) -> tuple[list[ChunkCost], list[Share]]:
        """Return the chunks that are not stored, and of batches that are stored whole the baselines."""
        chunks: list[ChunkCost] = []
        baselines: list[Share] = []
        for number, batch in enumerate(self.batches):
            plan = batch.plan
            chunks += [
                ChunkCost(number, chunk, len(worlds), plan.costs[chunk])
                for chunk, worlds in enumerate(plan.chunks)
                if chunk not in batch.rows
            ]
            if len(batch.rows) == len(plan.chunks):
                baselines.append(Share(number, (), 0))
        return chunks, baselines

    def worlds_of(self, share: Share) -> tuple[int, int]:
        """Return what a share of one chunk can be cut by: its first world, or prompt, and how many."""
        if share.worlds is not None:
            return share.first, share.worlds
        plan = self.batches[share.batch].plan
        if plan.prompts is not None:
            prompts = plan.prompts()
            return prompts.start, len(prompts)
        chunks = [plan.chunks[chunk] for chunk in share.chunks]
        return (chunks[0].start, sum(map(len, chunks))) if chunks else (0, 0)

    def done(self, share: Share, found: Done) -> int:
        """Keep what came back, store the chunks that are whole; return how many cells are done by it."""
        batch = self.batches[share.batch]
        self.ledger.add(found.ledger)
        self.counts += [found.counts] if found.counts is not None else []
        if share.worlds is not None:
            return self._take_part(batch, share, found)
        self._take_base(share.batch, batch, [found])
        for chunk, rows in zip(share.chunks, map(torch.tensor, found.rows), strict=True):
            self._keep(share.batch, chunk, rows)
            self._tell(len(rows))
        return sum(map(len, found.rows))

    def _take_part(self, batch: _Batch, share: Share, found: Done) -> int:
        """Take some worlds of a chunk, or some prompts: no cell is done before all prompts are."""
        (chunk,), is_of_prompts = share.chunks, batch.plan.prompts is not None
        parts, dim = batch.parts.setdefault(chunk, {}), -1 if is_of_prompts else 0
        parts[share.first] = found
        own = [parts[first] for first in sorted(parts)]
        _, wanted = self.worlds_of(Share(share.batch, share.chunks, 0))
        is_whole = sum(one.rows[0].shape[dim] for one in own) == wanted
        done = len(found.rows[0]) if is_whole or not is_of_prompts else 0
        if is_whole or not is_of_prompts:
            self._take_base(share.batch, batch, own if is_of_prompts else [found])
        if done:
            self._tell(done)
        if is_whole:
            self._keep(share.batch, chunk, torch.cat([torch.tensor(one.rows[0]) for one in own], dim))
        return done

    def _take_base(self, number: int, batch: _Batch, own: Sequence[Done]) -> None:
        if batch.base is None:
            sources = [torch.tensor(one.source) for one in own if one.source is not None]
            batch.base = torch.cat([torch.tensor(one.base) for one in own], -1)
            batch.source = torch.cat(sources, -1) if sources else None
            self._store(number, batch)

    def given_up(self, share: Share, failed: Failed) -> None:
        """Note worlds that will not be there: the result says which and why."""
        plan = self.batches[share.batch].plan
        first, count = self.worlds_of(share)
        if plan.prompts is not None:
            if any(one.batch == share.batch for one in self.missing):
                return
            first, count = 0, len(plan.order)
        cells = tuple(plan.order[first : first + count])
        names = self.job.names(cells)
        self.missing.append(Missing(share.batch, cells, names, failed.said))
        self._tell(count)

    # -- what is stored ------------------------------------------------------------------------

    def _planned(self, number: int) -> _Batch:
        """A batch with its plan, and the chunks that are stored."""
        plan = self.job.plan(number, partial(self.record.cut, number))
        batch = _Batch(plan)
        self.batches.append(batch)
        for chunk, worlds in enumerate(plan.chunks):
            with self.job.phases.during("storing"):
                stored = self.record.get(number, chunk, len(worlds))
            if stored is not None:
                batch.rows[chunk] = stored
                self.ledger.resumed += len(worlds)
                self._tell(len(worlds))
        return batch

    def _store(self, number: int, batch: _Batch) -> None:
        """Let the store know a batch, or compare it with what it knows."""
        if self.record.keeps and batch.base is not None:
            plan = batch.plan
            with self.job.phases.during("storing"):
                self.record.begin(number, plan.cut, plan.max_memory, batch.base, batch.source)

    def _keep(self, number: int, chunk: int, rows: Tensor) -> None:
        """Keep a chunk that is done."""
        self.batches[number].rows[chunk] = rows
        if self.record.keeps:
            if self.is_here:
                self.job.expect_unchanged()
            with self.job.phases.during("storing"):
                self.record.put(number, chunk, rows)

    # -- what it adds up to --------------------------------------------------------------------

    def baselines(self) -> tuple[Tensor, Tensor | None]:
        """Return the metrics of the bases and of the sources of all batches, [metric, prompt]."""
        bases = [one.base for one in self.batches if one.base is not None]
        sources = [one.source for one in self.batches if one.source is not None]
        found = torch.cat(sources, dim=-1) if len(sources) == len(self.batches) else None
        return torch.cat(bases, dim=-1), found

    def values(self, number: int) -> Tensor:
        """Return [world, metric, prompt] of a batch in the order of its worlds; NaN is missing."""
        batch = self.batches[number]
        assert batch.base is not None
        metrics, prompts = batch.base.shape
        found = []
        for chunk, worlds in enumerate(batch.plan.chunks):
            if chunk in batch.rows:
                found.append(batch.rows[chunk])
                continue
            rows = torch.full((len(worlds), metrics, prompts), torch.nan, dtype=torch.float64)
            for first, part in batch.parts.get(chunk, {}).items():
                at = first - worlds.start
                rows[at : at + len(part.rows[0])] = torch.tensor(part.rows[0])
            found.append(rows)
        return torch.cat(found)


def _nothing() -> None:
    """Nothing is done when the last chunk was begun."""
