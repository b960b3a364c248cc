"""How long a sweep should take: by the last run, by launches and work once runs tell them apart."""

from __future__ import annotations

import pytest

from conewise.sweeps.running import Calibration


def test_nothing_is_known_before_anything_was_timed() -> None:
    assert Calibration().seconds("wavefront", 10, 1000) is None
    assert Calibration(product=500.0).seconds("wavefront", 10, 1000) == 2.0


def test_one_sweep_run_again_and_again_gives_a_rate() -> None:
    known = Calibration(product=500.0)
    for seconds in (9.0, 4.0):
        known.note("wavefront", 10, 1000, seconds)
    assert known.clock("wavefront") is None
    assert known.seconds("wavefront", 99, 2000) == 8.0, "by the last run"
    assert known.seconds("serial", 99, 2000) == 4.0, "of which nothing was run"


def test_runs_of_several_widths_tell_launches_from_work() -> None:
    known = Calibration()
    for launches, flops in ((100, 64), (50, 64), (25, 64), (7, 32)):
        known.note("wavefront", launches, flops, 0.25 * launches + 0.5 * flops)
    assert known.seconds("wavefront", 1, 1000) == pytest.approx(500.25)


def test_runs_that_cannot_tell_them_apart_give_the_rate_of_the_last() -> None:
    known = Calibration()
    for times in (1, 2, 3):
        known.note("wavefront", 10 * times, 100 * times, 1.0 * times)
    assert known.seconds("wavefront", 1, 50) == 0.5
    odd = Calibration()
    for launches, seconds in ((100, 1.0), (50, 2.0), (25, 3.0)):
        odd.note("wavefront", launches, 100, seconds)
    assert odd.seconds("wavefront", 1, 50) == 1.5, "launches that save time are noise"


def test_what_took_no_time_says_nothing() -> None:
    known = Calibration()
    known.note("serial", 3, 0, 1.0)
    known.note("serial", 3, 10, 0.0)
    assert known.seconds("serial", 3, 10) is None
