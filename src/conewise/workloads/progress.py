"""Progress: cells done, time left, memory held; in a terminal, in a notebook, or to a callback.

A bar is written to stderr, never to stdout, so that what a script prints stays what it prints.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from conewise.frontends.torch.machine import memory_held
from conewise.workloads.plan import shown_bytes

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE = 1.0
"""Seconds that a run may take before a bar that nobody asked for is shown."""

Shown = bool | Callable[[int, int], None] | None


@contextmanager
def bar(progress: Shown, total: int, device: Any) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of cells that were just done.

    `progress` is True (a bar), False (nothing), a function of (cells done, cells in all), or None: a bar
    where someone is looking, once the run has taken a second.
    """
    if callable(progress):
        yield _counting(progress, total)
    elif progress or (progress is None and is_watched()):
        with _Bar(total, device, 0.0 if progress else PATIENCE) as shown:
            yield shown.advance
    else:
        yield lambda _: None


def is_watched() -> bool:
    """Whether someone is looking: stderr is a terminal, or this is a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.stderr.isatty() or type(shell).__name__ == "ZMQInteractiveShell"


def _counting(tell: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    done = 0

    def count(cells: int) -> None:
        nonlocal done
        done += cells
        tell(done, total)

    return count


class _Bar:
    """A bar that appears after `patience` seconds, and is drawn at most four times a second."""

    def __init__(self, total: int, device: Any, patience: float) -> None:
        self._total, self._device, self._patience = total, device, patience
        self._done = 0
        self._shown: Progress | None = None
        self._ended = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(patience, self._show)
        self._timer.daemon = True

    def __enter__(self) -> _Bar:
        if self._patience:
            self._timer.start()
        else:
            self._show()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._shown is not None:
                self._shown.stop()

    def advance(self, cells: int) -> None:
        """Tell that so many more cells are done."""
        with self._lock:
            self._done += cells
            if self._shown is not None:
                self._shown.update(self._shown.task_ids[0], completed=self._done, memory=self._memory())

    def _memory(self) -> str:
        return shown_bytes(memory_held(self._device))

    def _show(self) -> None:
        from rich.console import Console  # noqa: PLC0415  # needed where a bar is shown only
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        with self._lock:
            if self._ended:
                return
            self._shown = Progress(
                TextColumn("sweeping"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("cells"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[memory]}"),
                console=Console(stderr=True),
                refresh_per_second=4,
            )
            self._shown.add_task("", total=self._total, completed=self._done, memory=self._memory())
            self._shown.start()
