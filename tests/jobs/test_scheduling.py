"""Who runs what: nothing is lost, nothing is done twice, whatever workers do. Workers are played here."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conewise.errors import FleetError
from conewise.jobs.scheduling import DIED, MEMORY, OWN, TRIES, Done, Failed, FleetLedger, Share, run_shares
from conewise.sweeps.execution.reading import SweepLedger

WORLDS = 8
"""In each chunk."""

Answer = Callable[[Share], Done | Failed]


def done(share: Share) -> Done:
    sizes = [share.worlds] if share.worlds is not None else [WORLDS] * len(share.chunks)
    rows = tuple(np.zeros((size or 0, 1, 1)) for size in sizes)
    return Done(rows, np.zeros((1, 1)), None, SweepLedger(1, 1, compute_seconds=float(share.cost)))


class Player:
    def __init__(self, name: str) -> None:
        self.name = name
        self.share: Share | None = None

    def submit(self, share: Share) -> None:
        assert self.share is None, "it has a share already"
        self.share = share


class Players:
    """Answers come in any order; a worker that died never answers again."""

    def __init__(self, count: int, answer: Answer, seed: int = 0) -> None:
        self.seats: list[Player] = [Player(f"worker {number}") for number in range(count)]
        self._answer, self._random, self._count = answer, random.Random(seed), count
        self.given: list[Share] = []

    def wait(self) -> list[tuple[Any, Done | Failed]]:
        busy = [seat for seat in self.seats if seat.share is not None]
        some = self._random.sample(busy, self._random.randint(1, len(busy)))
        found: list[tuple[Any, Done | Failed]] = []
        for seat in some:
            share, seat.share = seat.share, None
            assert share is not None
            self.given.append(share)
            found.append((seat, self._answer(share)))
        return found

    def replace(self, seat: Any) -> Player:
        own = Player(f"worker {self._count}")
        self._count += 1
        self.seats[self.seats.index(seat)] = own
        return own


class Kept:
    """Which worlds were done, and which given up: each world once."""

    def __init__(self) -> None:
        self.done: dict[tuple[int, int], int] = {}
        self.lost: dict[tuple[int, int], str] = {}

    def note(self, share: Share, found: Done) -> int:
        for world in self._worlds(share):
            assert world not in self.done
            self.done[world] = 1
        return sum(map(len, found.rows))

    def give_up(self, share: Share, failed: Failed) -> None:
        for world in self._worlds(share):
            assert world not in self.lost
            self.lost[world] = failed.said

    @staticmethod
    def _worlds(share: Share) -> Sequence[tuple[int, int]]:
        if share.worlds is not None:
            return [(share.batch, share.first + at) for at in range(share.worlds)]
        return [(share.batch, chunk * WORLDS + at) for chunk in share.chunks for at in range(WORLDS)]


def worlds_of(share: Share) -> tuple[int, int]:
    return (share.chunks[0] * WORLDS, WORLDS) if share.worlds is None else (share.first, share.worlds)


def run(shares: Sequence[Share], players: Players) -> tuple[Kept, FleetLedger]:
    kept, ledger = Kept(), FleetLedger()
    run_shares(shares, players, worlds_of, kept.note, kept.give_up, ledger)
    return kept, ledger


SHARES = [Share(batch, (chunk, chunk + 1), 10 + chunk) for batch in range(2) for chunk in range(0, 10, 2)]
ALL = {(batch, world) for batch in range(2) for world in range(10 * WORLDS)}


@given(st.integers(1, 9), st.integers(0, 10**6))
def test_everything_is_done_once_the_heaviest_first(workers: int, seed: int) -> None:
    players = Players(workers, done, seed)
    kept, ledger = run(SHARES, players)
    assert kept.done.keys() == ALL
    assert not kept.lost
    assert not ledger.log
    assert sum(one.worlds for one in ledger.seats.values()) == len(ALL)
    if workers == 1:
        assert [share.cost for share in players.given] == sorted((s.cost for s in SHARES), reverse=True)


@given(st.integers(1, 5), st.integers(0, 10**6), st.data())
def test_whatever_workers_do_every_world_is_done_or_given_up(
    workers: int, seed: int, data: st.DataObject
) -> None:
    """Worlds that raise, chunks that do not fit, workers that die: all at once."""
    raising = data.draw(st.sets(st.sampled_from(sorted(ALL)), max_size=4))
    fits = data.draw(st.integers(1, 2 * WORLDS))
    deaths = data.draw(st.integers(0, 8))
    left = [deaths]

    def answer(share: Share) -> Done | Failed:
        own = set(Kept._worlds(share))
        if left[0] and len(own) % 3 == left[0] % 3:
            left[0] -= 1
            return Failed(DIED, "killed")
        if len(own) > fits:
            return Failed(MEMORY, "too large")
        return Failed(OWN, "NaN") if own & raising else done(share)

    kept, ledger = run(SHARES, Players(workers, answer, seed))
    assert kept.done.keys() | kept.lost.keys() == ALL
    assert not kept.done.keys() & kept.lost.keys()
    assert raising <= kept.lost.keys()
    assert ledger.died == deaths - left[0]


def test_what_does_not_fit_is_halved_down_to_one_world() -> None:
    def answer(share: Share) -> Done | Failed:
        return done(share) if share.worlds == 1 else Failed(MEMORY, "too large")

    kept, ledger = run([Share(0, (0,), 8)], Players(2, answer))
    assert len(kept.done) == WORLDS
    assert ledger.halved == WORLDS - 1
    assert any("was cut in half" in line for line in ledger.log)
    kept, ledger = run([Share(0, (0,), 8)], Players(2, lambda _: Failed(MEMORY, "too large")))
    assert len(kept.lost) == WORLDS
    assert set(kept.lost.values()) == {"one world alone does not fit into a worker: too large"}


def test_a_share_that_kills_its_workers_is_given_up_and_the_rest_is_done() -> None:
    def answer(share: Share) -> Done | Failed:
        return Failed(DIED, "killed") if share.chunks == (0, 1) and share.batch == 0 else done(share)

    kept, ledger = run(SHARES, Players(2, answer))
    assert kept.lost.keys() == {(0, world) for world in range(2 * WORLDS)}
    assert kept.done.keys() == ALL - kept.lost.keys()
    assert ledger.died == TRIES
    assert "was given up" in ledger.log[-1]


def test_an_error_of_one_chunk_does_not_cost_its_neighbours() -> None:
    def answer(share: Share) -> Done | Failed:
        return Failed(OWN, "NaN") if 3 in share.chunks else done(share)

    kept, _ = run(SHARES, Players(2, answer))
    assert kept.lost.keys() == {(batch, 3 * WORLDS + at) for batch in range(2) for at in range(WORLDS)}
    assert kept.done.keys() == ALL - kept.lost.keys()


def test_workers_that_die_again_and_again_end_the_run() -> None:
    with pytest.raises(FleetError, match="died one behind the other"):
        run(SHARES, Players(3, lambda _: Failed(DIED, "no memory on any node")))
