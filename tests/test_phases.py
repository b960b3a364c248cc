"""Every second of some work belongs to one phase; read off a clock that a test turns."""

from __future__ import annotations

import pytest

from conewise import status as phases
from conewise.status import Phases, shown_phases


class Clock:
    """A clock that stands still until it is turned."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def turn(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(phases, "clock", made)
    return made


def test_phases_add_up_to_the_whole(clock: Clock) -> None:
    found = Phases(["weights", "passes"])
    clock.turn(1)
    with found.during("passes"):
        clock.turn(2)
        with found.during("weights"):
            clock.turn(4)
        clock.turn(8)
    clock.turn(16)
    assert found.seconds() == {"weights": 4, "passes": 10, "other": 17}


def test_what_is_under_way_is_counted_until_now(clock: Clock) -> None:
    found = Phases()
    with found.during("planning", "8 worlds"):
        clock.turn(3)
        assert (found.name, found.words, found.lasting()) == ("planning", "8 worlds", 3)
        assert found.seconds() == {"other": 0, "planning": 3}
    assert (found.name, found.words) == ("other", "")


def test_a_phase_that_fails_is_counted(clock: Clock) -> None:
    found = Phases()

    def failing() -> None:
        with found.during("planning"):
            clock.turn(3)
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    clock.turn(1)
    assert found.seconds() == {"other": 1, "planning": 3}


def test_phases_are_shown_where_they_matter() -> None:
    assert (
        shown_phases({"weights": 0.25, "planning": 0.0001, "passes": 1.5}) == "weights 0.25 s, passes 1.5 s"
    )
    assert shown_phases({"weights": 0.0, "passes": 0.0}) == ""
