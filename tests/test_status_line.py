"""A line says what is under way once it takes long, to someone who looks; to nobody else."""

from __future__ import annotations

import sys
import threading

import pytest

import conewise as cw
from conewise import status as phases
from conewise import status as status_line
from conewise.loading import load
from conewise.status import StatusLine, _TerminalLine, status_to
from tests.sweeps.small import module, prompts
from tests.sweeps.test_progress import Terminal
from tests.test_phases import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(phases, "clock", made)
    return made


def test_words_say_the_phase_and_what_those_before_took(clock: Clock) -> None:
    line = StatusLine("capturing GPT2")
    assert line.text() == "capturing GPT2"
    line("exporting")
    clock.turn(2)
    assert line.text() == "capturing GPT2: exporting"
    line("comparing")
    clock.turn(0.5)
    assert line.text() == "capturing GPT2: comparing (exporting 2 s)"
    assert line.last() == "capturing GPT2: exporting 2 s, comparing 0.5 s"
    assert line.seconds() == {"exporting": 2, "comparing": 0.5}


def shown(monkeypatch: pytest.MonkeyPatch, patience: float) -> str:
    """What a terminal shows of some work, which waits for the line where there is to be one."""
    monkeypatch.setattr(status_line, "PATIENCE", patience)
    screen, drawn = Terminal(), threading.Event()
    monkeypatch.setattr(sys, "stderr", screen)
    usual = _TerminalLine.draw

    def draw(self: _TerminalLine, text: str) -> None:
        usual(self, text)
        drawn.set()

    monkeypatch.setattr(_TerminalLine, "draw", draw)
    with status_line.status_line("capturing GPT2") as line:
        line("exporting")
        if not patience:
            assert drawn.wait(20)
    return screen.getvalue()


def test_a_terminal_shows_a_line_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, 0.0)
    assert "capturing GPT2" in text
    assert text.endswith(_TerminalLine.CLEAR)


def test_what_is_quick_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, 600.0) == ""


def test_nothing_is_said_to_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status_line, "PATIENCE", 0.0)
    cw.capture(module(), input_ids=prompts(0, 2))
    load("tiny")
    assert capsys.readouterr() == ("", "")


def test_another_may_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_line, "PATIENCE", 0.0)
    screen, told = Terminal(), list[str]()
    monkeypatch.setattr(sys, "stderr", screen)
    drawn = threading.Event()

    def say(text: str) -> None:
        told.append(text)
        drawn.set()

    with status_to(say), status_line.status_line("capturing GPT2"):
        assert drawn.wait(20)
    assert set(told) == {"capturing GPT2"}
    assert screen.getvalue() == ""


def test_a_capture_and_a_load_say_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []
    usual = StatusLine.__call__

    def spied(self: StatusLine, phase: str) -> None:
        usual(self, phase)
        told.append((self.title, phase))

    monkeypatch.setattr(StatusLine, "__call__", spied)
    captured = cw.capture(module(), input_ids=prompts(0, 2))
    load("tiny", device="cpu")
    capturing = "capturing GPT2LMHeadModel"
    assert told == [
        *((capturing, phase) for phase in ("exporting", "building", "comparing", "weights", "building")),
        ("tiny", "loading tiny"),
        ("tiny", "moving it to cpu"),
    ]
    assert list(captured.phases) == ["exporting", "building", "comparing", "weights"]
    assert "captured in" in captured._repr_html_()
