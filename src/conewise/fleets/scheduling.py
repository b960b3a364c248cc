"""Who runs which share, and what happens when a worker dies, runs out of memory, or an operation raises."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from conewise.errors import FleetError
from conewise.fleets.ledger import FleetLedger, SeatLedger
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
                own.seconds += outcome.seconds
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
