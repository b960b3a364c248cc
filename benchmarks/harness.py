"""Measuring: run the contenders in turn, many times, and compare the best of one run."""

from __future__ import annotations

import gc
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True)
class Line:
    """One row of the table: what was measured, what was to be reached, what was."""

    what: str
    target: str
    reached: str
    is_met: bool
    note: str = ""


def seconds(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    action()
    return clock() - start


def interleaved(
    *actions: Callable[[], object], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """The least seconds of each action. All take turns, so that a noisy moment hits all alike."""
    times: list[list[float]] = [[] for _ in actions]
    gc.collect()
    gc.disable()
    try:
        for action in actions:
            action()
        for turn in range(rounds):
            # Odd turns go backwards: no action always runs on the heels of the same other one.
            places = range(len(actions)) if turn % 2 == 0 else reversed(range(len(actions)))
            for place in places:
                times[place].append(seconds(actions[place], clock))
    finally:
        gc.enable()
    return [min(series) for series in times]


def at_most(what: str, ratio: float, target: float, note: str = "") -> Line:
    return Line(what, f"<= {target:g}x", f"{ratio:.2f}x", ratio <= target, note)


def at_least(what: str, ratio: float, target: float, note: str = "") -> Line:
    return Line(what, f">= {target:g}x", f"{ratio:.2f}x", ratio >= target, note)


def print_table(title: str, lines: list[Line]) -> None:
    print(f"\n{title}")
    print(
        f"Python {platform.python_version()}, {platform.machine()}, "
        f"{datetime.now(UTC).date().isoformat()}; the best of interleaved rounds\n"
    )
    width = max(len(line.what) for line in lines)
    for line in lines:
        verdict = "met   " if line.is_met else "MISSED"
        print(f"  {verdict}  {line.what:<{width}}  {line.target:>12}  reached {line.reached:<14} {line.note}")
    missed = sum(not line.is_met for line in lines)
    print(f"\n{len(lines) - missed} of {len(lines)} targets met")
    sys.stdout.flush()
