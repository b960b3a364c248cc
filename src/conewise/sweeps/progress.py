"""Progress: cells done, time left, memory held; in a terminal, in a notebook, or to a callback.

A bar is written to stderr, or is one output of a notebook that is drawn anew, and never to stdout, so that
what a script prints stays what it prints.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from conewise.amounts import shown_bytes
from conewise.identity.machine import memory_held
from conewise.markup import progress as progress_line

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE = 1.0
"""Seconds that a run may take before a bar that nobody asked for is shown."""

REFRESH = 0.25
"""Seconds from one drawing of a bar to the next."""

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
    return is_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def is_notebook() -> bool:
    """Whether this runs in a Jupyter kernel; those of Colab and others are made of Jupyter's."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


def _counting(tell: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    done = 0

    def count(cells: int) -> None:
        nonlocal done
        done += cells
        tell(done, total)

    return count


class _Drawn(Protocol):
    """A bar on a screen."""

    def update(self, done: int, memory: str) -> None:
        """Take note of how far the run is."""

    def stop(self) -> None:
        """Draw the bar a last time, and leave it there."""


class _Bar:
    """A bar that appears after `patience` seconds, and is drawn at most four times a second."""

    def __init__(self, total: int, device: Any, patience: float) -> None:
        self._total, self._device, self._patience = total, device, patience
        self._started = time.monotonic()
        self._done = 0
        self._shown: _Drawn | None = None
        self._ended = False
        self._lock = threading.Lock()
        # A notebook knows by the context to which cell an output belongs.
        self._timer = threading.Timer(patience, contextvars.copy_context().run, [self._show])
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
                self._shown.update(self._done, self._memory())

    def _memory(self) -> str:
        return shown_bytes(memory_held(self._device))

    def _show(self) -> None:
        with self._lock:
            if not self._ended:
                made = _NotebookBar if is_notebook() else _TerminalBar
                self._shown = made(self._total, self._done, self._memory(), self._started)


class _TerminalBar:
    """A bar of rich, on stderr."""

    def __init__(self, total: int, done: int, memory: str, started: float) -> None:
        from rich.console import Console  # noqa: PLC0415  # needed where a bar is shown only
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress: Progress = Progress(
            TextColumn("sweeping"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("cells"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[memory]}"),
            console=Console(stderr=True),
            refresh_per_second=1 / REFRESH,
        )
        self._task = self._progress.add_task("", total=total, completed=done, memory=memory)
        # Time that passed before the bar was shown is time that the run took.
        self._progress.tasks[0].start_time = self._progress.get_time() - (time.monotonic() - started)
        self._progress.start()

    def update(self, done: int, memory: str) -> None:
        """Take note of how far the run is."""
        self._progress.update(self._task, completed=done, memory=memory)

    def stop(self) -> None:
        """Draw the bar a last time, and leave it there."""
        self._progress.stop()


class _NotebookBar:
    """One output of a notebook's cell, replaced as the run goes on; it needs no widgets.

    A thread draws it, so that its time goes on while a long chunk is computed; what is stored with the
    notebook is the last state.
    """

    def __init__(self, total: int, done: int, memory: str, started: float) -> None:
        from IPython.display import display  # noqa: PLC0415  # there, where this is a notebook

        self._total, self._done, self._memory, self._started = total, done, memory, started
        self._stopped = threading.Event()
        self._handle = display(self, display_id=True)  # type: ignore[no-untyped-call]
        drawing = contextvars.copy_context().run
        self._drawer = threading.Thread(target=drawing, args=[self._draw], daemon=True)
        self._drawer.start()

    def update(self, done: int, memory: str) -> None:
        """Take note of how far the run is; it is drawn soon."""
        self._done, self._memory = done, memory

    def stop(self) -> None:
        """Draw the bar a last time, and leave it there."""
        self._stopped.set()
        self._drawer.join()
        self._handle.update(self)

    def _draw(self) -> None:
        while not self._stopped.wait(REFRESH):
            self._handle.update(self)

    def _told(self) -> str:
        passed = time.monotonic() - self._started
        cells = f"{self._done:,}/{self._total:,} cells"
        if self._stopped.is_set():
            state = "" if self._done >= self._total else "stopped at "
            return f"{state}{cells} in {_clock(passed)}, {self._memory}"
        left = _clock(passed / self._done * (self._total - self._done)) if self._done else "-:--:--"
        return f"{cells} {_clock(passed)} left {left} {self._memory}"

    def __repr__(self) -> str:
        return f"sweeping {self._told()}"

    def _repr_html_(self) -> str:
        return progress_line(self._done, self._total, self._told())


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
