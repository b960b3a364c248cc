"""Progress: what is under way, cells done, time left, memory held; on a screen, as lines, or to a callback.

A bar is written to stderr, or is one output of a notebook that is drawn anew, and never to stdout, so that
what a script prints stays what it prints.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from conewise.arguments import expect, shown_bytes
from conewise.jobs.digests import memory_held
from conewise.jobs.scheduling import FleetLedger, clock_time
from conewise.status import REST, Phases, is_notebook, is_terminal, is_watched, shown_phases
from conewise.templates import progress as progress_line

if TYPE_CHECKING:
    from rich.console import RenderableType

PATIENCE = 1.0
"""Seconds that a run may take before a bar that nobody asked for is shown."""

REFRESH = 0.25
"""Seconds from one drawing of a bar to the next."""

EVERY = 10.0
"""Seconds from one line to the next, where lines are written and no bar is drawn."""

WORTH = 0.1
"""Seconds from which on a phase is told beside a bar."""

_DOING = {"weights": "reading weights", "passes": "sweeping", REST: "sweeping"}
"""Words for phases whose name does not say what is under way."""


class ProgressCallback:
    """Is told how far a run is. This one tells nobody."""

    def __call__(self, cells: int) -> None:
        """Note that so many more cells are done."""

    def begin(self, phases: Phases) -> None:
        """Note that a run begins, or begins again: none of its cells is done."""

    def follow(self, phases: Phases) -> None:
        """Show these phases from now on."""

    def follow_workers(self, workers: FleetLedger) -> None:
        """Show what workers do from now on. Another thread reads the ledger."""


Shown = bool | Callable[[int, int], None] | ProgressCallback | None


class _Part(ProgressCallback):
    """The progress of a run that is a part of another, or that is told to a function.

    Where `whole` is a function, it is called with the cells that are done, and with their total.
    """

    def __init__(self, whole: ProgressCallback | Callable[[int, int], None], total: int) -> None:
        self._whole, self._total, self._done, self._told = whole, total, 0, 0

    def __call__(self, cells: int) -> None:
        self._done += cells
        if isinstance(self._whole, ProgressCallback):
            self._whole(self._done - self._told)
            self._told = self._done
        else:
            self._whole(self._done, self._total)

    def begin(self, phases: Phases) -> None:
        self._done = 0
        self.follow(phases)

    def follow(self, phases: Phases) -> None:
        getattr(self._whole, "follow", _ignore)(phases)

    def follow_workers(self, workers: FleetLedger) -> None:
        getattr(self._whole, "follow_workers", _ignore)(workers)


def _ignore(_: object) -> None:
    """Show nothing: a plain function is told of cells alone."""


@contextmanager
def bar(progress: Shown, total: int, device: Any) -> Iterator[ProgressCallback]:
    """A function to call with the number of cells that were just done.

    `progress` is True (a bar), False (nothing), a function of (cells done, cells in all), or None: a bar
    where someone is looking, once the run has taken a second.
    """
    expect("progress", progress, "bool | Callable | None")
    if callable(progress):
        yield _Part(progress, total)
    elif progress or (progress is None and is_watched()):
        with _Bar(total, device, 0.0 if progress else PATIENCE) as shown:
            yield shown
    else:
        yield ProgressCallback()


class _State:
    """The state of a run, in words. Another thread may read them."""

    def __init__(self, total: int, device: Any) -> None:
        self.total, self.done = total, 0
        self.started = time.monotonic()
        self._device = device
        self._followed: list[Phases] = []
        self.workers: FleetLedger | None = None

    def follow(self, phases: Phases) -> None:
        """Show these phases from now on."""
        if phases not in self._followed:
            self._followed.append(phases)

    @property
    def phases(self) -> Phases | None:
        """The phases that are under way."""
        return self._followed[-1] if self._followed else None

    def doing(self) -> str:
        """Return what is under way."""
        phases = self.phases
        if phases is None:
            return _DOING[REST]
        name, words = phases.name, phases.words
        return " ".join(part for part in (_DOING.get(name, name), words) if part)

    def taken(self) -> str:
        """The seconds of the phases that are done and took a while; passes are what the bar is of."""
        found: dict[str, float] = {}
        for phases in list(self._followed):
            now = phases.name
            for name, seconds in phases.seconds().items():
                if name != now or phases is not self.phases:
                    found[name] = found.get(name, 0.0) + seconds
        return shown_phases(
            {n: s for n, s in found.items() if s >= WORTH and n not in (REST, "passes")}, least=0.0
        )

    def memory(self) -> str:
        """Return what is held."""
        return shown_bytes(memory_held(self._device))

    def line(self) -> str:
        """All of it, while the run goes on."""
        passed = time.monotonic() - self.started
        left = clock_time(passed / self.done * (self.total - self.done)) if self.done else "-:--:--"
        by = "" if self.workers is None else f"; {self.workers.line()}"
        taken = clock_time(passed)
        return f"{self.doing()} {self._cells()} {taken} left {left} {self.memory()}{self._behind()}{by}"

    def last(self) -> str:
        """All of it, after its end."""
        state = "" if self.done >= self.total else "stopped at "
        passed = clock_time(time.monotonic() - self.started)
        return f"sweeping {state}{self._cells()} in {passed}, {self.memory()}{self._behind()}"

    def _cells(self) -> str:
        return f"{self.done:,}/{self.total:,} cells"

    def _behind(self) -> str:
        taken = self.taken()
        return f" ({taken})" if taken else ""


class _Bar(ProgressCallback):
    """A bar that appears after `patience` seconds, and is drawn at most four times a second."""

    def __init__(self, total: int, device: Any, patience: float) -> None:
        self._state, self._patience = _State(total, device), patience
        self._shown: _TerminalBar | _Drawing | None = None
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

    def __call__(self, cells: int) -> None:
        """Note that so many more cells are done."""
        with self._lock:
            self._state.done += cells
            if self._shown is not None:
                self._shown.update()

    def begin(self, phases: Phases) -> None:
        """A run begins, or begins again: none of its cells is done."""
        self.follow(phases)
        self(-self._state.done)

    def follow(self, phases: Phases) -> None:
        """Show these phases from now on."""
        self._state.follow(phases)

    def follow_workers(self, workers: FleetLedger) -> None:
        """Show these workers from now on."""
        self._state.workers = workers

    def _show(self) -> None:
        with self._lock:
            if not self._ended:
                self._shown = _drawn(self._state)


def _drawn(state: _State) -> _TerminalBar | _Drawing:
    if is_notebook():
        return _NotebookBar(state)
    return _TerminalBar(state) if is_terminal() else _Lines(state)


class _TerminalBar:
    """A bar of rich, on stderr."""

    def __init__(self, state: _State) -> None:
        from rich.console import Console  # noqa: PLC0415  # needed where a bar is shown only
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            Task,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.text import Text  # noqa: PLC0415

        class Words(ProgressColumn):
            """Words that are asked for whenever the bar is drawn."""

            def __init__(self, words: Callable[[], str]) -> None:
                super().__init__()
                self._words = words

            def render(self, _: Task) -> Text:
                return Text(self._words())

        class WithWorkers(Progress):
            """The bar, and below it a line for each worker."""

            def get_renderables(self) -> Iterable[RenderableType]:
                yield from super().get_renderables()
                if state.workers is not None:
                    yield Text(
                        "\n".join(f"  {line}" for line in (state.workers.line(), *state.workers.lines()))
                    )

        self._state = state
        self._progress = WithWorkers(
            Words(state.doing),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("cells"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[memory]}"),
            Words(state.taken),
            console=Console(stderr=True),
            refresh_per_second=1 / REFRESH,
        )
        self._task = self._progress.add_task(
            "", total=state.total, completed=state.done, memory=state.memory()
        )
        # Time that passed before the bar was shown is time that the run took.
        self._progress.tasks[0].start_time = self._progress.get_time() - (time.monotonic() - state.started)
        self._progress.start()

    def update(self) -> None:
        """Take note of how far the run is."""
        self._progress.update(self._task, completed=self._state.done, memory=self._state.memory())

    def stop(self) -> None:
        """Draw the bar a last time, and leave it there."""
        self._progress.stop()


class _Drawing:
    """Something that a thread draws anew, so that its time goes on while a long chunk is computed."""

    def __init__(self, state: _State) -> None:
        self._state = state
        self._stopped = threading.Event()
        drawing = contextvars.copy_context().run
        self._drawer = threading.Thread(target=drawing, args=[self._draw], daemon=True)
        self._drawer.start()

    def update(self) -> None:
        """It is drawn soon."""

    def stop(self) -> None:
        """Draw it a last time, and leave it there."""
        self._stopped.set()
        self._drawer.join()
        self._redraw()

    def _draw(self) -> None:
        while not self._stopped.wait(REFRESH):
            self._redraw()

    def _redraw(self) -> None:
        raise NotImplementedError


class _NotebookBar(_Drawing):
    """One output of a notebook's cell, replaced as the run goes on; it needs no widgets.

    What is stored with the notebook is the last state.
    """

    def __init__(self, state: _State) -> None:
        from IPython.display import display  # noqa: PLC0415  # there, where this is a notebook

        self._state, self._stopped = state, threading.Event()
        self._handle = display(self, display_id=True)  # type: ignore[no-untyped-call]
        super().__init__(state)

    def _redraw(self) -> None:
        self._handle.update(self)

    def __repr__(self) -> str:
        return self._state.last() if self._stopped.is_set() else self._state.line()

    def _repr_html_(self) -> str:
        words = repr(self).removeprefix("sweeping ")
        return progress_line(self._state.done, self._state.total, words)


class _Lines(_Drawing):
    """Lines on stderr, where it is a file: of a phase that takes more than a second, of a run every ten."""

    def __init__(self, state: _State) -> None:
        self._told_at, self._told_of = state.started, state.doing()
        super().__init__(state)

    def _redraw(self) -> None:
        phases, doing = self._state.phases, self._state.doing()
        is_new = phases is not None and doing != self._told_of and phases.lasting() >= PATIENCE
        if is_new or self._stopped.is_set() or time.monotonic() - self._told_at >= EVERY:
            self._told_at, self._told_of = time.monotonic(), doing
            if sys.stderr is not None:
                sys.stderr.write(f"{self._state.line()}\n")
                sys.stderr.flush()
