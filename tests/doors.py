"""What the tests of doors share: damage is tried under a time limit, and ends in errors of ours."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from conewise.errors import ConewiseError

LIMIT = 30.0
"""Seconds that one damaged file may take, on a machine that is busy: it is there for what never ends."""


class HangError(BaseException):
    """Something that did not end; no `Exception`, so that nobody takes it for one of theirs."""


@contextmanager
def limited(seconds: float = LIMIT) -> Iterator[None]:
    """Raise HangError in the block after so many seconds, where this thread can be told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise HangError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def all_ours(cases: Iterable[Any], attempt: Callable[[Any], object]) -> tuple[int, int]:
    """How many cases were taken, and how many were refused, each by an error of ours."""
    taken = refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, case in enumerate(cases):
            try:
                with limited():
                    attempt(case)
                taken += 1
            except ConewiseError:
                refused += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                pytest.fail(f"case {number}: {type(error).__name__}: {error}\n{str(case)[:2_000]}")
    return taken, refused
