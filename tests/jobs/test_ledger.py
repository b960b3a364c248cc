"""What is said of workers while they work: shares, time against what was predicted, who is slow."""

from __future__ import annotations

import sys

import pytest
import torch

from conewise.jobs import scheduling as ledgers
from conewise.jobs.progress import RunProgress, bar
from conewise.jobs.scheduling import FleetLedger, SeatLedger, Share
from conewise.status import Phases
from conewise.sweeps.execution.reading import PHASES
from tests.sweeps.test_progress import CPU, Terminal
from tests.test_phases import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(ledgers, "clock", made)
    return made


def under_way(clock: Clock) -> FleetLedger:
    """Two workers after twenty seconds: one ran six shares, the other three that cost as much each."""
    made = FleetLedger(predicted=50.0)
    for number, shares in ((1, 6), (2, 3)):
        seat = made.seats[f"worker {number}"] = SeatLedger(f"worker {number}")
        seat.shares, seat.worlds, seat.cost, seat.seconds = shares, 10 * shares, 100 * shares, 18.0
    clock.turn(1)
    made.begin(1800)
    clock.turn(17)
    made.seats["worker 2"].take(Share(0, (4,), 100))
    clock.turn(3)
    made.left = 9
    return made


def test_a_line_says_shares_time_and_who_is_slow(clock: Clock) -> None:
    made = under_way(clock)
    assert made.line() == (
        "9/18 shares by 2 workers, 0:00:20 of about 0:00:40, planned 0:00:25, worker 2 is slow (2.0 times)"
    )
    first, second = made.lines()
    assert first.split() == [
        "worker",
        "1",
        "6",
        "shares",
        "60",
        "cells",
        "18.0",
        "s,",
        "predicted",
        "24.0",
        "s",
    ]
    assert second.endswith("18.0 s, predicted 12.0 s, slow (2.0 times); batch 0, chunk 4 for 3.0 s")


def test_that_a_worker_is_slow_is_logged_once_and_not_of_one_share(clock: Clock) -> None:
    made = under_way(clock)
    for seat in (*made.seats.values(), *made.seats.values()):
        made.note_slow(seat)
    assert made.log == ["worker 2 is slow: it takes 2.0 times what the others take"]
    assert "worker 2 is slow" in str(made)
    made.seats["worker 3"] = SeatLedger("worker 3", 1, 1, 1, 100.0)
    made.note_slow(made.seats["worker 3"])
    assert len(made.log) == 1
    made.seats["worker 2"].is_gone = True
    assert "by 2 workers" in made.line()
    assert "slow" not in made.line()


def test_nothing_is_predicted_before_anything_is_done(clock: Clock) -> None:
    made = FleetLedger(seats={"worker 1": SeatLedger("worker 1")}, left=4)
    assert made.line() == "0/4 shares by 1 workers"
    clock.turn(1)
    assert str(FleetLedger()).startswith("0 workers")


def test_lines_and_terminals_show_workers(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    made = under_way(clock)
    state = RunProgress(10, CPU)
    state.workers = made
    assert made.line() in state.line()
    monkeypatch.setenv("COLUMNS", "160")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with bar(True, 10, torch.device("cpu")) as tell:
        tell.begin(Phases(PHASES))
        with bar(tell, 10, CPU) as passed:  # as a question does
            passed.follow_workers(made)
            passed(10)
    assert "9/18 shares by 2 workers" in screen.getvalue()
    assert "slow (2.0 times); batch 0, chunk 4" in screen.getvalue()
