"""Interruptions at chosen moments of a call: what Ctrl-C does, at every place in turn.

A moment is an event of `sys.settrace`: a call, a line (with `opcodes` an instruction) or a return, in
whatever Python code runs. That is finer than CPython, which looks for signals at fewer places.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass
class Moments:
    """Counts the moments of `action`, and interrupts it at the one numbered `at`.

    With `again`, what cleans up after the interruption is interrupted too: at that many calls or
    returns after it. With `within`, only moments in modules of those names, or below them, count. With
    `calls`, only the moments at which a function is entered, or a generator goes on: CPython looks for
    signals there, and hardly anywhere else.
    """

    at: int = 0
    again: int = 0
    opcodes: bool = False
    within: str | tuple[str, ...] = ""
    calls: bool = False
    passed: int = 0
    passed_since: int = 0
    interruptions: int = 0

    def run(self, action: Callable[[], object]) -> None:
        before = sys.gettrace(), sys.getprofile()
        if self.again:
            sys.setprofile(self._profile)
        sys.settrace(self._trace)
        try:
            action()
        except KeyboardInterrupt:
            assert self.interruptions
        finally:
            sys.settrace(before[0])
            sys.setprofile(before[1])

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        # Asked for a module, it looks into generators too: its context managers are some.
        is_outside = not frame.f_globals.get("__name__", "").startswith(self.within)
        if is_outside or (_is_generator(frame) and not self.within):
            return None
        frame.f_trace_opcodes = self.opcodes
        if event == "call" or (event != "exception" and not self.calls):
            self.passed += 1
            if self.passed == self.at:
                self.interruptions = 1
                raise KeyboardInterrupt
        return self._trace

    def _profile(self, frame: FrameType, _event: str, _: Any) -> None:
        is_ours = "conewise" in frame.f_globals.get("__name__", "") and not _is_generator(frame)
        if self.interruptions == 1 and is_ours:
            self.passed_since += 1
            if self.passed_since == self.again:
                self.interruptions = 2
                raise KeyboardInterrupt


def _is_generator(frame: FrameType) -> bool:
    """Python ignores, with a warning, what is raised while it closes a generator: that interrupts nobody."""
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


def moments_of(action: Callable[[], object], **how: Any) -> int:
    """How many moments `action` has."""
    moments = Moments(**how)
    moments.run(action)
    return moments.passed


def interrupt(action: Callable[[], object], at: int, **how: Any) -> int:
    """Run `action`, interrupted at the moment `at`; returns how often it was interrupted."""
    moments = Moments(at, **how)
    moments.run(action)
    return moments.interruptions
