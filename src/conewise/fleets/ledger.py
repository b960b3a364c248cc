"""What a fleet does, by worker: what each ran, how long it took and should have taken, who is slow."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta

from conewise.fleets.shares import Share

SLOW = 1.5
"""A worker is slow that takes so many times what the others take for the same work."""

ENOUGH = 2
"""Shares that a worker has to have run before it is called slow."""

clock = time.monotonic


@dataclass(slots=True)
class SeatLedger:
    """What one worker did: shares, worlds, their cost in FLOPs, the seconds that they took.

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
    """What a fleet does, while it does it and afterwards: for each worker what it ran, and what went wrong.

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

    def add(self, other: FleetLedger) -> None:
        """Add what was done behind it, by the same workers or by others in their places."""
        for name, one in other.seats.items():
            own = self.seats.setdefault(name, SeatLedger(name))
            own.shares += one.shares
            own.worlds += one.worlds
            own.cost += one.cost
            own.seconds += one.seconds
            own.is_gone = one.is_gone
        self.log += [line for line in other.log if line not in other._slow.values()]
        self.died += other.died
        self.halved += other.halved
        self.seconds += other.seconds
        self.cost += other.cost
        for own in self.seats.values():
            self.note_slow(own)

    @property
    def balance(self) -> float:
        """The busiest worker over the mean: 1 is even."""
        taken = [seat.seconds for seat in self.seats.values()]
        mean = sum(taken) / len(taken) if taken else 0.0
        return max(taken) / mean if mean else 1.0

    def slowness(self, seat: SeatLedger) -> float:
        """How many times as long as the others a worker takes for the same work; 1 where it is not known."""
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
        """How far it is, in one line: shares, time against what was predicted, who is slow."""
        seats = list(self.seats.values())
        done = sum(one.shares for one in seats)
        parts = [f"{done:,}/{done + self.left:,} shares by {len(self._there())} workers"]
        expected, planned = self._expected(), self._planned()
        if expected is not None:
            parts.append(f"{_clock(self._passed())} of about {_clock(expected)}")
        if planned is not None:
            parts.append(f"planned {_clock(planned)}")
        slow = [f"{one.name} is slow ({self.slowness(one):.1f} times)" for one in seats if self._is_slow(one)]
        return ", ".join([*parts, *slow])

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

    def _is_slow(self, seat: SeatLedger) -> bool:
        return not seat.is_gone and self.slowness(seat) >= SLOW

    def _there(self) -> list[SeatLedger]:
        return [one for one in list(self.seats.values()) if not one.is_gone]

    def _planned(self) -> float | None:
        """The seconds that the plan says, with so many workers."""
        count = len(self._there())
        return self.predicted / count if self.predicted is not None and count else None

    def _passed(self) -> float:
        return self.seconds + (clock() - self._began if self._began else 0.0)

    def _expected(self) -> float | None:
        """The seconds that all will take, by the shares that are done; None where none is."""
        done = sum(one.cost for one in list(self.seats.values()))
        return self._passed() * self.cost / done if done and self.cost else None


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
