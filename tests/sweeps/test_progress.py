"""Progress is told where it was asked for, on stderr, and nowhere else."""

from __future__ import annotations

import io
import sys
import time
from typing import Any

import pytest
import torch

from conewise import status as phases
from conewise.jobs import progress
from conewise.jobs.progress import Lines, RunProgress, bar
from conewise.status import Phases
from conewise.sweeps.execution.reading import PHASES
from conewise.sweeps.planning.planner import Planner
from tests.sweeps.small import model, sweep_over
from tests.test_phases import Clock

CPU = torch.device("cpu")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_function_is_told_the_cells(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[int, int]] = []
    sweep = sweep_over(model())
    sweep.run(evaluator="serial", progress=lambda done, total: told.append((done, total)))
    assert told == [(6, 6)]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("asked", [False, None])
def test_nothing_is_shown_to_nobody(asked: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    with bar(asked, 10, CPU) as tell:
        tell(10)
    assert capsys.readouterr() == ("", "")


def test_a_bar_tells_cells_time_and_memory_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with bar(True, 10, CPU) as tell:
        tell(4)
        tell(6)
    out, err = capsys.readouterr()
    assert out == ""
    assert "10/10 cells" in err
    assert "left 0:00:00" in err
    assert "iB" in err


def test_in_a_terminal_a_bar_appears_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with bar(None, 10, CPU) as tell:
        tell(3)
        assert screen.getvalue() == ""
        deadline = time.monotonic() + 20
        while not screen.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
        tell(7)
    assert "10/10" in screen.getvalue()


def test_a_quick_run_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with bar(None, 10, CPU) as tell:
        tell(10)
    assert screen.getvalue() == ""


def test_a_bar_ends_when_the_run_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), bar(True, 10, CPU) as tell:
        tell(1 // 0)
    with bar(True, 10, CPU) as tell:  # rich allows one live display at a time
        tell(10)
    assert "10/10" in capsys.readouterr().err


# -- what is under way ---------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(phases, "clock", made)
    return made


def test_words_say_what_is_under_way_and_what_took_long(clock: Clock) -> None:
    state, run = RunProgress(10, CPU), Phases(PHASES)
    assert state.doing() == "sweeping"
    state.follow(run)
    with run.during("weights"):
        clock.turn(2)
        assert (state.doing(), state.taken()) == ("reading weights", "")
    with run.during("planning", "1,056 worlds"):
        clock.turn(0.01)
        assert (state.doing(), state.taken()) == ("planning 1,056 worlds", "weights 2 s")
        assert state.line().startswith("planning 1,056 worlds 0/10 cells ")
    with run.during("baselines", "3/64"):
        clock.turn(0.5)
        assert (state.doing(), state.taken()) == ("baselines 3/64", "weights 2 s")
    with run.during("passes"):
        clock.turn(7)
        assert (state.doing(), state.taken()) == ("sweeping", "weights 2 s, baselines 0.5 s")
    state.done = 10
    assert state.last().startswith("sweeping 10/10 cells in ")
    assert state.last().endswith(" (weights 2 s, baselines 0.5 s)")


def test_seconds_of_several_sweeps_are_summed(clock: Clock) -> None:
    state = RunProgress(10, CPU)
    for _ in range(2):
        state.follow(run := Phases(PHASES))
        with run.during("planning"):
            clock.turn(2)
    assert state.taken() == "planning 4 s"


def test_a_run_says_what_it_is_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    usual = Planner.plan

    def spied(*args: Any, **named: Any) -> Any:
        seen.append(bars[-1].doing())
        return usual(*args, **named)

    bars: list[Any] = []
    made = progress.RunProgress.__init__

    def kept(self: Any, *args: Any) -> None:
        bars.append(self)
        made(self, *args)

    monkeypatch.setattr(progress.RunProgress, "__init__", kept)
    monkeypatch.setattr(Planner, "plan", spied)
    sweep_over(model()).run(progress=True)
    assert seen == ["planning 6 worlds"]


def test_progress_that_is_passed_on_says_what_is_under_way() -> None:
    run = Phases()
    bar_of_all = RunProgress(10, CPU)
    with bar(bar_of_all, 5, CPU) as tell:
        tell.begin(run)
        tell(3)
        tell.begin(run)  # again, with other weights
        tell(5)
    assert bar_of_all.phases is run
    assert bar_of_all.done == 5


def test_a_file_gets_a_line_of_a_long_phase(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    state, run = RunProgress(10, CPU), Phases(PHASES)
    state.follow(run)
    lines = Lines(state)
    with run.during("planning", "1,056 worlds"):
        clock.turn(0.5)
        lines.draw(state.line())
        assert capsys.readouterr().err == ""
        clock.turn(0.6)
        lines.draw(state.line())
        lines.draw(state.line())
        assert capsys.readouterr().err.count("planning 1,056 worlds 0/10 cells") == 1
    lines.end(state.last())
    assert capsys.readouterr().err.count("\n") == 1


def test_a_terminal_shows_what_is_under_way(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with bar(True, 10, CPU) as tell:
        run = Phases(PHASES)
        tell.begin(run)
        with run.during("planning", "1,056 worlds"):
            clock.turn(3)
        tell(10)
    assert "planning 3 s" in screen.getvalue()
