"""Progress is told where it was asked for, on stderr, and nowhere else."""

from __future__ import annotations

import io
import sys
import time

import pytest
import torch

from conewise.sweeps import progress
from conewise.sweeps.progress import bar
from tests.sweeps.small import model, sweep_over

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
