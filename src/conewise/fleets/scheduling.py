"""Who runs which share, and what happens when a worker dies, runs out of memory, or an operation raises."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from conewise.errors import FleetError
from conewise.fleets.outcomes import DIED, MEMORY, OWN, Done, Failed
from conewise.fleets.shares import Share, halves

TRIES = 3
"""How often a share is given out before it is given up, where workers die over it."""

DEATHS = 10
"""How many workers may die one behind the other without any share being done."""


class Seat(Protocol):
    """Where one worker is, and the share that it has."""

    @property
    def name(self) -> str:
        """What it is called in the log."""

    def submit(self, share: Share) -> None:
        """Give it a share; it has none."""


class Crew(Protocol):
    """Workers, one to a seat."""

    @property
    def seats(self) -> Sequence[Seat]:
        """All seats."""

    def wait(self) -> list[tuple[Seat, Done | Failed]]:
        """Wait until something comes back of some of the shares that are out."""

    def replace(self, seat: Seat) -> Seat:
        """Another worker in the place of one that died."""


@dataclass(slots=True)
class SeatLedger:
    """What one worker did: shares, worlds, their cost in FLOPs, the seconds that they took."""

    name: str
    shares: int = 0
    worlds: int = 0
    cost: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class FleetLedger:
    """What a fleet did: for each worker what it ran, and what went wrong on the way.

    `log` has a line for each event that a run without it would not have had: a worker that died, a share that
    was cut in half, one that was given up.
    """

    seats: dict[str, SeatLedger] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    died: int = 0
    halved: int = 0
    seconds: float = 0.0

    def add(self, other: FleetLedger) -> None:
        """Add what was done behind it, by the same workers or by others in their places."""
        for name, one in other.seats.items():
            own = self.seats.setdefault(name, SeatLedger(name))
            own.shares += one.shares
            own.worlds += one.worlds
            own.cost += one.cost
            own.seconds += one.seconds
        self.log += other.log
        self.died += other.died
        self.halved += other.halved
        self.seconds += other.seconds

    @property
    def balance(self) -> float:
        """The busiest worker over the mean: 1 is even."""
        taken = [seat.seconds for seat in self.seats.values()]
        mean = sum(taken) / len(taken) if taken else 0.0
        return max(taken) / mean if mean else 1.0

    def __str__(self) -> str:
        total, cost = (
            sum(one.seconds for one in self.seats.values()),
            sum(s.cost for s in self.seats.values()),
        )
        lines = [
            f"{len(self.seats)} workers, {self.seconds:.1f} s; the busiest over the mean: {self.balance:.2f}"
        ]
        for one in self.seats.values():
            predicted = total * one.cost / cost if cost else 0.0
            lines.append(
                f"  {one.name:24} {one.shares:5,} shares {one.worlds:8,} cells {one.seconds:8.1f} s, "
                f"predicted {predicted:.1f} s"
            )
        return "\n".join([*lines, *(f"  {line}" for line in self.log)])


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
    started = time.perf_counter()
    line = [(-share.cost, number, share, 0) for number, share in enumerate(shares)]
    heapq.heapify(line)
    count = len(line)
    free = list(crew.seats)
    for seat in free:
        ledger.seats[seat.name] = SeatLedger(seat.name)
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
        for seat, outcome in crew.wait():
            share, tries = out.pop(seat.name)
            if isinstance(outcome, Done):
                deaths = 0
                own = ledger.seats[seat.name]
                own.shares += 1
                own.cost += share.cost
                own.seconds += outcome.seconds
                own.worlds += done(share, outcome)
            elif outcome.kind == DIED:
                deaths += 1
                ledger.died += 1
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
    ledger.seconds = time.perf_counter() - started


def _alone(
    share: Share,
    failed: Failed,
    again: Callable[[Share, int], None],
    given_up: Callable[[Share, Failed], None],
) -> None:
    """Of several chunks, each is tried alone, so that those without the error are not lost."""
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
