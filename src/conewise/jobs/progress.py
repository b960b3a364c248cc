"""Progress: what is under way, cells done, time left, memory held; on a screen, as lines, or to a callback.

A bar is written to stderr, or is one output of a notebook that is drawn anew, and never to stdout, so that
what a script prints stays what it prints.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from conewise.arguments import expect, shown_bytes
from conewise.jobs.digests import memory_held
from conewise.jobs.scheduling import FleetLedger, clock_time
from conewise.status import (
    REFRESH,
    REST,
    NotebookOutput,
    Phases,
    Screen,
    drawn,
    is_notebook,
    is_terminal,
    is_watched,
    shown_phases,
)
from conewise.templates import progress as progress_line

if TYPE_CHECKING:
    from rich.console import RenderableType

PATIENCE = 1.0
"""Seconds that a run may take before a bar that nobody asked for is shown."""

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
    """Yield a function to call with the number of cells that were just done.

    `progress` is True (a bar), False (nothing), a function of (cells done, cells in all), or None: a bar
    where someone is looking, once the run has taken a second.
    """
    expect("progress", progress, "bool | Callable | None")
    if callable(progress):
        yield _Part(progress, total)
    elif progress or (progress is None and is_watched()):
        run = RunProgress(total, device)
        with drawn(run.screen, run.line, run.last, 0.0 if progress else PATIENCE):
            yield run
    else:
        yield ProgressCallback()


class RunProgress(ProgressCallback):
    """The state of a run, in words. Another thread reads them."""

    def __init__(self, total: int, device: Any) -> None:
        self.total, self.done = total, 0
        self.started = time.monotonic()
        self._device = device
        self._followed: list[Phases] = []
        self.workers: FleetLedger | None = None

    def __call__(self, cells: int) -> None:
        """Note that so many more cells are done."""
        self.done += cells

    def begin(self, phases: Phases) -> None:
        """Note that a run begins, or begins again: none of its cells is done."""
        self.follow(phases)
        self.done = 0

    def follow(self, phases: Phases) -> None:
        """Show these phases from now on."""
        if phases not in self._followed:
            self._followed.append(phases)

    def follow_workers(self, workers: FleetLedger) -> None:
        """Show these workers from now on."""
        self.workers = workers

    def screen(self) -> Screen:
        """Return where it is drawn."""
        if is_notebook():
            return NotebookOutput(lambda text: progress_line(self.done, self.total, _bare(text)))
        return _TerminalBar(self) if is_terminal() else Lines(self)

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
        """Return the seconds of the phases that are done and took a while; passes are what the bar is of."""
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
        """Return all of it, while the run goes on."""
        passed = time.monotonic() - self.started
        left = clock_time(passed / self.done * (self.total - self.done)) if self.done else "-:--:--"
        by = "" if self.workers is None else f"; {self.workers.line()}"
        taken = clock_time(passed)
        return f"{self.doing()} {self._cells()} {taken} left {left} {self.memory()}{self._behind()}{by}"

    def last(self) -> str:
        """Return all of it, after its end."""
        state = "" if self.done >= self.total else "stopped at "
        passed = clock_time(time.monotonic() - self.started)
        return f"sweeping {state}{self._cells()} in {passed}, {self.memory()}{self._behind()}"

    def _cells(self) -> str:
        return f"{self.done:,}/{self.total:,} cells"

    def _behind(self) -> str:
        taken = self.taken()
        return f" ({taken})" if taken else ""


def _bare(text: str) -> str:
    return text.removeprefix("sweeping ")


class _TerminalBar:
    """A bar of rich, on stderr."""

    def __init__(self, run: RunProgress) -> None:
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
                if run.workers is not None:
                    yield Text("\n".join(f"  {line}" for line in (run.workers.line(), *run.workers.lines())))

        self._run = run
        self._progress = WithWorkers(
            Words(run.doing),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("cells"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            Words(run.memory),
            Words(run.taken),
            console=Console(stderr=True),
            refresh_per_second=1 / REFRESH,
        )
        self._task = self._progress.add_task("", total=run.total, completed=run.done)
        # Time that passed before the bar was shown is time that the run took.
        self._progress.tasks[0].start_time = self._progress.get_time() - (time.monotonic() - run.started)
        self._progress.start()

    def draw(self, _: str) -> None:
        """Take note of how far the run is: the bar draws itself."""
        self._progress.update(self._task, completed=self._run.done)

    def end(self, text: str) -> None:
        """Draw the bar a last time, and leave it there."""
        self.draw(text)
        self._progress.stop()


class Lines:
    """Lines on stderr, where it is a file: of a phase that takes more than a second, of a run every ten."""

    def __init__(self, run: RunProgress) -> None:
        self._run = run
        self._told_at, self._told_of = run.started, run.doing()

    def draw(self, text: str) -> None:
        """Write a line, where it is time for one."""
        phases, doing = self._run.phases, self._run.doing()
        is_new = phases is not None and doing != self._told_of and phases.lasting() >= PATIENCE
        if is_new or time.monotonic() - self._told_at >= EVERY:
            self._told_at, self._told_of = time.monotonic(), doing
            self._write(text)

    def end(self, _: str) -> None:
        """Write how far it got."""
        self._write(self._run.line())

    def _write(self, text: str) -> None:
        if sys.stderr is not None:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
