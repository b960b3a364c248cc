"""The journal: whether a change is under way is asked while anything else may happen."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from types import FrameType

import pytest

from conewise.errors import BusyError
from conewise.reactive.journal import Journal

GARBAGE = """
import gc, sys, threading
from conewise.reactive.journal import Journal

class Cycle:
    pass

frames = sys._current_frames

def with_garbage():
    for _ in range(20):
        cycle = Cycle()
        cycle.itself, cycle.local = cycle, threading.local()
    del cycle
    gc.set_threshold(gc.get_count()[0] + later)
    return frames()

sys._current_frames = with_garbage
for later in range(6):
    gc.set_threshold(10**6)
    gc.collect()
    journal = Journal()
    journal.doing = (lambda: sys._getframe())()
    journal.recover()
    assert journal.doing is None
"""


def test_garbage_does_not_wait_for_the_frames_of_threads() -> None:
    """Python makes frames under a lock that locals of threads need to be dropped: a collection then hangs."""
    assert subprocess.run([sys.executable, "-c", GARBAGE], check=False, timeout=60).returncode == 0


def _returned() -> FrameType:
    """The frame of a call that is over."""
    return sys._getframe()


@pytest.mark.parametrize("is_on", [True, False])
def test_collecting_is_as_it_was_after_asking(is_on: bool) -> None:
    was_on = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        journal = Journal()
        journal.doing = _returned()
        journal.recover()
        assert gc.isenabled() is is_on
    finally:
        (gc.enable if was_on else gc.disable)()


def test_a_change_that_another_thread_makes_is_under_way() -> None:
    journal, begun, end = Journal(), threading.Event(), threading.Event()

    def change() -> None:
        begun.set()
        end.wait(30)

    other = threading.Thread(target=journal.make, args=(change,))
    other.start()
    try:
        assert begun.wait(30)
        with pytest.raises(BusyError):
            journal.expect_idle("world.patch")
    finally:
        end.set()
        other.join()
    journal.expect_idle("world.patch")
