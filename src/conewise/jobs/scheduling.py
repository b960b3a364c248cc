"""Shares of a job: how they are cut, given to workers, repeated after failures, and simulated."""

from __future__ import annotations

import heapq
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from conewise.errors import FleetError
from conewise.sweeps.execution.reading import SweepLedger
from conewise.sweeps.planning.plan import SweepPlan, chunks_of

Numbers = NDArray[np.float64]

DIED, MEMORY, OWN = "died", "memory", "own"
"""The ways in which a share can fail: its worker died, memory was out, or it raised an error of its own."""


@dataclass(frozen=True, slots=True)
class Done:
    """A share that was run: for each of its chunks the metrics [world, metric, prompt], and what it took.

    `base` and `source` are the metrics of the baselines. `counts` has what a kind of job counts besides.
    """

    rows: tuple[Numbers, ...]
    base: Numbers
    source: Numbers | None
    ledger: SweepLedger
    counts: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A share that was not run: which way it failed, and what was said."""

    kind: str
    said: str
    error: str = ""


PER_WORKER = 8
"""The number of shares for each worker, where there are chunks enough: the last even out the rest."""


@dataclass(frozen=True, slots=True)
class Share:
    """Chunks of a batch that stand one behind the other, and what they cost, in FLOPs.

    With `worlds`, it is a part of one chunk that did not fit into a worker's memory: so many worlds, from
    `first` on. `job` says of which job it is, where several are run together.
    """

    batch: int
    chunks: tuple[int, ...]
    cost: int
    first: int = 0
    worlds: int | None = None
    job: int | None = None

    @property
    def label(self) -> str:
        """Return its name in messages."""
        of = "" if self.job is None else f"group {self.job + 1}, "
        if self.worlds is not None:
            return f"{of}batch {self.batch}, worlds {self.first} to {self.first + self.worlds - 1}"
        if not self.chunks:
            return f"{of}batch {self.batch}, its baselines"
        if len(self.chunks) == 1:
            return f"{of}batch {self.batch}, chunk {self.chunks[0]}"
        return f"{of}batch {self.batch}, chunks {self.chunks[0]} to {self.chunks[-1]}"


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """A chunk of a batch that is to be computed: how many worlds it has, and its FLOPs."""

    batch: int
    chunk: int
    worlds: int
    cost: int
    job: int | None = None


def cut_into_shares(chunks: Sequence[ChunkCost], workers: int, per_worker: int = PER_WORKER) -> list[Share]:
    """Shares of about equal cost, the heaviest first.

    Neighbouring chunks of a batch are put together as long as a share costs no more than its even part of all
    the work, so that stacks stay dense and a baseline is computed for few shares. A chunk is never cut.
    """
    total = sum(one.cost for one in chunks)
    even = total / max(1, workers * per_worker)
    found: list[list[ChunkCost]] = []
    for one in chunks:
        last = found[-1] if found else None
        is_next = last is not None and (last[-1].job, last[-1].batch, last[-1].chunk + 1) == (
            one.job,
            one.batch,
            one.chunk,
        )
        if last is not None and is_next and sum(own.cost for own in last) + one.cost <= even:
            last.append(one)
        else:
            found.append([one])
    shares = [
        Share(own[0].batch, tuple(one.chunk for one in own), sum(one.cost for one in own), job=own[0].job)
        for own in found
    ]
    return sorted(shares, key=lambda share: -share.cost)


def halves(share: Share, first: int, worlds: int) -> tuple[Share, Share]:
    """The two halves of a share of one chunk, or of a part of one: `worlds` of them, from `first` on."""
    left = worlds // 2
    cost = share.cost * left // worlds
    return (
        replace(share, cost=cost, first=first, worlds=left),
        replace(share, cost=share.cost - cost, first=first + left, worlds=worlds - left),
    )


SLOW = 1.5
"""A worker is slow that takes so many times what the others take for the same work."""

ENOUGH = 2
"""Shares that a worker has to have run before it is called slow."""

clock = time.monotonic


@dataclass(slots=True)
class SeatLedger:
    """The ledger of one worker: shares, worlds, their cost in FLOPs, the seconds that they took.

    `share` is the one that it has now, since `since`; `is_gone`: it died.
    """

    name: str
    shares: int = 0
    worlds: int = 0
    cost: int = 0
    seconds: float = 0.0
    share: Share | None = None
    since: float = 0.0
    is_gone: bool = False

    def take(self, share: Share) -> None:
        """It was given a share."""
        self.share, self.since = share, clock()


@dataclass(slots=True)
class FleetLedger:
    """The ledger of all workers, while they compute and afterwards: what each ran, and what went wrong.

    `log` has a line for each event that a run without it would not have had: a worker that died or is slow, a
    share that was cut in half, one that was given up. `cost` is that of all shares, in FLOPs, and `left` how
    many are not done; `predicted` is how many seconds one worker would need for all, where a plan says so.
    """

    seats: dict[str, SeatLedger] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    died: int = 0
    halved: int = 0
    seconds: float = 0.0
    cost: int = 0
    left: int = 0
    predicted: float | None = None
    _began: float = 0.0
    _slow: dict[str, str] = field(default_factory=dict)

    def begin(self, cost: int) -> None:
        """Shares of so many FLOPs are given out from now on; those of calls before are done."""
        self.cost += cost
        self._began = clock()

    def end(self) -> None:
        """All shares are done, or given up."""
        self.seconds += clock() - self._began
        self.left = 0
        self._began = 0.0

    @property
    def balance(self) -> float:
        """The busiest worker over the mean: 1 is even."""
        taken = [seat.seconds for seat in self.seats.values()]
        mean = sum(taken) / len(taken) if taken else 0.0
        return max(taken) / mean if mean else 1.0

    def slowness(self, seat: SeatLedger) -> float:
        """Return how many times as long as the others a worker takes; 1 where it is not known."""
        others = [one for one in list(self.seats.values()) if one is not seat]
        cost, seconds = sum(one.cost for one in others), sum(one.seconds for one in others)
        if not cost or not seconds or not seat.cost or seat.shares < ENOUGH:
            return 1.0
        return (seat.seconds / seat.cost) / (seconds / cost)

    def note_slow(self, seat: SeatLedger) -> None:
        """Say once that a worker is slow."""
        times = self.slowness(seat)
        if times >= SLOW and seat.name not in self._slow:
            self._slow[seat.name] = f"{seat.name} is slow: it takes {times:.1f} times what the others take"
            self.log.append(self._slow[seat.name])

    def line(self) -> str:
        """Return its state in one line: shares, time against what was predicted, who is slow."""
        seats = list(self.seats.values())
        done = sum(one.shares for one in seats)
        there = [one for one in seats if not one.is_gone]
        parts = [f"{done:,}/{done + self.left:,} shares by {len(there)} workers"]
        expected = self._expected()
        if expected is not None:
            parts.append(f"{clock_time(self._passed())} of about {clock_time(expected)}")
        if self.predicted is not None and there:
            parts.append(f"planned {clock_time(self.predicted / len(there))}")
        times = [(one.name, self.slowness(one)) for one in there]
        parts += [f"{name} is slow ({taken:.1f} times)" for name, taken in times if taken >= SLOW]
        return ", ".join(parts)

    def lines(self) -> list[str]:
        """Each worker in a line: what it ran and how long that took, against what was predicted."""
        seats = list(self.seats.values())
        total, cost = sum(one.seconds for one in seats), sum(one.cost for one in seats)
        return [self._shown(one, total * one.cost / cost if cost else 0.0) for one in seats]

    def __str__(self) -> str:
        head = (
            f"{len(self.seats)} workers, {self.seconds:.1f} s; the busiest over the mean: {self.balance:.2f}"
        )
        if self.predicted is not None and self.seats:
            head += f"; planned {self.predicted / len(self.seats):.1f} s"
        return "\n".join([head, *(f"  {line}" for line in (*self.lines(), *self.log))])

    def _shown(self, seat: SeatLedger, predicted: float) -> str:
        line = (
            f"{seat.name:24} {seat.shares:5,} shares {seat.worlds:8,} cells {seat.seconds:8.1f} s, "
            f"predicted {predicted:.1f} s"
        )
        share, times = seat.share, self.slowness(seat)
        slow = ", died" if seat.is_gone else f", slow ({times:.1f} times)" if times >= SLOW else ""
        now = f"; {share.label} for {clock() - seat.since:.1f} s" if share is not None else ""
        return line + slow + now

    def _passed(self) -> float:
        return self.seconds + (clock() - self._began if self._began else 0.0)

    def _expected(self) -> float | None:
        """The seconds that all will take, by the shares that are done; None where none is."""
        done = sum(one.cost for one in list(self.seats.values()))
        return self._passed() * self.cost / done if done and self.cost else None


def clock_time(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))


TRIES = 3
"""The number of times that a share is given out, where workers die over it, before it is given up."""

DEATHS = 10
"""The number of workers that may die in a row without any share being done."""


class WorkerJob:
    """A job as a worker has it."""

    def know_plan(self, batch: int, text: str) -> None:
        """Be told the `text` of the plan of a batch; this job has none."""

    def lacking(self, share: Share, memory: int | None) -> str:
        """Return what is lacking where a share is known not to fit into so many bytes; else nothing."""
        del share, memory
        return ""

    @abstractmethod
    def run(self, share: Share, memory: int | None) -> Done:
        """Run a share."""

    def rest(self) -> None:
        """Let go of what is held for shares to come."""


class Crew(Protocol):
    """Workers, one to a seat: each seat has a `name` for the log, and `submit`s a share to its worker."""

    seats: Any

    def wait(self) -> list[tuple[Any, Done | Failed]]:
        """Wait until something comes back of some of the shares that are out: of which seats, and what."""

    def replace(self, seat: Any) -> Any:
        """Put another worker in the place of one that died; return its seat."""


def run_shares(
    shares: Iterable[Share],
    crew: Crew,
    worlds_of: Callable[[Share], tuple[int, int]],
    done: Callable[[Share, Done], int],
    given_up: Callable[[Share, Failed], None],
    ledger: FleetLedger,
) -> None:
    """Run all shares, the heaviest first, each by whoever is free.

    `worlds_of` says which worlds of its batch a share of one chunk has: the first, and how many. `done` and
    `given_up` are called once for each share, or for the parts that it was cut into; `done` returns how many
    cells there were. `ledger` is kept up to date. Raises FleetError where workers die again and again.
    """
    line = [(-share.cost, number, share, 0) for number, share in enumerate(shares)]
    heapq.heapify(line)
    count = len(line)
    free = list(crew.seats)
    for seat in free:
        ledger.seats.setdefault(seat.name, SeatLedger(seat.name))
    ledger.begin(sum(-cost for cost, *_ in line))
    out: dict[str, tuple[Share, int]] = {}
    deaths = 0

    def again(share: Share, tries: int) -> None:
        nonlocal count
        heapq.heappush(line, (-share.cost, count, share, tries))
        count += 1

    while line or out:
        while line and free:
            *_, share, tries = heapq.heappop(line)
            seat = free.pop(0)
            out[seat.name] = share, tries
            seat.submit(share)
            ledger.seats[seat.name].take(share)
        ledger.left = len(line) + len(out)
        for seat, outcome in crew.wait():
            share, tries = out.pop(seat.name)
            own = ledger.seats[seat.name]
            own.share = None
            if isinstance(outcome, Done):
                deaths = 0
                own.shares += 1
                own.cost += share.cost
                own.seconds += outcome.ledger.compute_seconds
                own.worlds += done(share, outcome)
                ledger.note_slow(own)
            elif outcome.kind == DIED:
                deaths += 1
                ledger.died += 1
                own.is_gone = True
                ledger.log.append(f"{seat.name} died over {share.label}: {outcome.said}")
                if deaths > DEATHS:
                    raise FleetError(
                        f"{deaths} workers died one behind the other, the last over {share.label}: "
                        f"{outcome.said}. What was finished is kept; look at the workers' own logs."
                    )
                free.append(crew.replace(seat))
                ledger.seats.setdefault(free[-1].name, SeatLedger(free[-1].name))
                if tries + 1 < TRIES:
                    again(share, tries + 1)
                else:
                    ledger.log.append(f"{share.label} was given up after {TRIES} workers died over it")
                    given_up(share, Failed(DIED, f"{TRIES} workers died over it, the last: {outcome.said}"))
            elif outcome.kind == MEMORY:
                _cut(share, outcome, worlds_of, ledger, again, given_up)
            else:
                ledger.log.append(f"{share.label} failed: {outcome.said}")
                _alone(share, outcome, again, given_up)
            if not (isinstance(outcome, Failed) and outcome.kind == DIED):
                free.append(seat)
    ledger.end()


def _alone(
    share: Share,
    failed: Failed,
    again: Callable[[Share, int], None],
    given_up: Callable[[Share, Failed], None],
) -> None:
    """Try each of several chunks alone, so that those without the error are not lost."""
    if len(share.chunks) < 2:
        given_up(share, failed)
        return
    each = share.cost // len(share.chunks)
    for chunk in share.chunks:
        again(replace(share, chunks=(chunk,), cost=each), 0)


def _cut(
    share: Share,
    failed: Failed,
    worlds_of: Callable[[Share], tuple[int, int]],
    ledger: FleetLedger,
    again: Callable[[Share, int], None],
    given_up: Callable[[Share, Failed], None],
) -> None:
    """A share that did not fit into memory: each chunk alone, then half of its worlds, down to one."""
    if len(share.chunks) > 1:
        _alone(share, failed, again, given_up)
        return
    first, worlds = worlds_of(share)
    if worlds < 2:
        ledger.log.append(f"{share.label} does not fit into a worker: {failed.said}")
        given_up(
            share, Failed(OWN, f"one world alone does not fit into a worker: {failed.said}", "MemoryError")
        )
        return
    ledger.halved += 1
    ledger.log.append(f"{share.label} did not fit into memory and was cut in half: {failed.said}")
    for half in halves(share, first, worlds):
        again(half, 0)


# -- simulation: what workers would take, before any is started ---


def shares_of(plans: Sequence[SweepPlan], workers: int) -> list[tuple[int, int]]:
    """The shares of sweeps that are run together, as they would be given out: (batch, FLOPs).

    Batches are counted through all sweeps.
    """
    wanted: list[ChunkCost] = []
    before = 0
    for plan in plans:
        chunks, costs = chunks_of(plan)
        wanted += [
            ChunkCost(before + batch, number, len(one), cost)
            for batch in range(plan.batches)
            for number, (one, cost) in enumerate(zip(chunks, costs, strict=True))
        ]
        before += plan.batches
    return [(share.batch, share.cost) for share in cut_into_shares(wanted, workers)]


WORTH = 0.9
"""Workers are worth having as long as their number times the gain of one more is at least so much of it."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of what a fleet does: setting a worker up, a batch's baselines, a FLOP, a share's way there."""

    setup: float
    baseline: float
    flop: float
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Simulated:
    """The time of workers. `makespan`: seconds until all is done; `busy`: those of each worker."""

    workers: int
    makespan: float
    busy: tuple[float, ...]
    setup: float
    baselines: float

    @property
    def balance(self) -> float:
        """The busiest worker over the mean, after it was set up: 1 is even."""
        mean = sum(self.busy) / len(self.busy)
        return max(self.busy) / mean if mean else 1.0


def simulate(shares: Sequence[tuple[int, int]], workers: int, rates: Rates) -> Simulated:
    """Give shares, (batch, FLOPs) in the order in which they are given out, to whoever is free first.

    A worker computes the baselines of a batch once as long as it has shares of the same.
    """
    free = [(rates.setup, number) for number in range(workers)]
    heapq.heapify(free)
    busy, batches, baselines = [0.0] * workers, [-1] * workers, 0.0
    for batch, cost in shares:
        start, number = heapq.heappop(free)
        seconds = rates.share + cost * rates.flop
        if batches[number] != batch:
            seconds += rates.baseline
            baselines += rates.baseline
            batches[number] = batch
        busy[number] += seconds
        heapq.heappush(free, (start + seconds, number))
    return Simulated(workers, max(end for end, _ in free), tuple(busy), rates.setup * workers, baselines)


def worth_having(shares: Sequence[tuple[int, int]], most: int, rates: Rates) -> int:
    """Beyond how many workers, up to `most`, more hardly help: the least that comes near the best span."""
    spans = [simulate(shares, count, rates).makespan for count in range(1, most + 1)]
    best = min(spans)
    return next(count for count, span in enumerate(spans, 1) if best >= WORTH * span)
