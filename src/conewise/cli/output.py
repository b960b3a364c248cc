"""What commands print: JSON for machines, tables for people, and what is being done meanwhile, on stderr."""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conewise import errors
from conewise.cli.failing import CommandError
from conewise.files import expect_file, expect_replaceable, expect_room
from conewise.status import said_by

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from conewise.jobs.progress import Told, Workers
    from conewise.status import Phases

PLENTY = 10_000
"""Columns of a line that goes to a file or a pipe: nothing is wrapped there."""

EVERY = 1.0
"""Seconds between two lines of progress, where no bar can be drawn."""


def print_json(command: str, body: Mapping[str, Any]) -> None:
    """One JSON object; numbers that JSON cannot say (NaN, infinity) are null."""
    print_as_json({"command": command, **body})


def print_as_json(value: Any) -> None:
    """A value as JSON, in the characters that stdout can say: escapes where it cannot."""
    value = plain(value)
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False)
    print(text)


def plain(value: Any) -> Any:
    """Nested values as JSON has them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def stdout() -> Console:
    """Where people read results. Without a terminal: plain text, lines as long as they are."""
    from rich.console import Console

    is_watched = sys.stdout.isatty()
    return Console(highlight=False, soft_wrap=not is_watched, width=None if is_watched else PLENTY)


def table(title: str, columns: Sequence[str], *, right: Iterable[int] = ()) -> Table:
    """An empty table; the columns `right` are numbers."""
    from rich import box
    from rich.table import Table

    numbers = set(right)
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD if sys.stdout.isatty() else None,
        pad_edge=sys.stdout.isatty(),
    )
    for place, name in enumerate(columns):
        made.add_column(name, justify="right" if place in numbers else "left", no_wrap=place in numbers)
    return made


def add_row(grid: Table, *texts: str) -> None:
    """Add a row of texts, in which brackets are brackets."""
    from rich.text import Text

    grid.add_row(*map(Text, texts))


class Status:
    """Says on stderr what is being done; nothing when `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._doing = ""

    def __call__(self, words: str) -> None:
        """Say a line, unless it is what is said to be done already."""
        if not self.quiet and words != self._doing:
            print(words, file=sys.stderr, flush=True)

    def warn(self, words: str) -> None:
        """Say something that a careful person wants to know, even when quiet."""
        print(f"note: {words}", file=sys.stderr, flush=True)

    def counter(self, words: str) -> Callable[[int, int], None]:
        """Says how many are done, of how many, once a second where it takes longer than one."""
        told_at = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal told_at
            if time.monotonic() - told_at >= EVERY:
                told_at = time.monotonic()
                self(f"{done:,} of {total:,} {words}")

        return progress

    @contextmanager
    def warnings_as_notes(self) -> Iterator[None]:
        """Say our own warnings as notes, without the line of code that they come from."""
        with warnings.catch_warnings():
            usual = warnings.showwarning

            def say(message: Warning | str, category: type[Warning], *where: Any, **named: Any) -> None:
                if category.__module__ == errors.__name__:
                    self.warn(str(message))
                else:
                    usual(message, category, *where, **named)

            warnings.showwarning = say
            yield

    @contextmanager
    def doing(self, words: str) -> Iterator[None]:
        """Say what is being done now: a moving line in a terminal, a plain one elsewhere."""
        if self.quiet or not sys.stderr.isatty():
            self(words)
            self._doing = words
            with said_by(lambda _: None):
                yield
        else:
            from rich.console import Console

            self._doing = words
            with Console(stderr=True).status(words) as spinner, said_by(spinner.update):
                yield
        self._doing = ""


class CellCounter:
    """Progress of a sweep: passed on to the bar `advance`, or printed as lines; remembers how far it got."""

    def __init__(self, status: Status, is_shown: bool) -> None:
        self._status, self._is_shown = status, is_shown
        self._told_at = -math.inf
        self._workers: Workers | None = None
        self.advance: Told | None = None
        self.done = 0

    def __call__(self, done: int, total: int) -> None:
        """Cells that are done, of so many."""
        if self.advance is not None:
            self.advance(done - self.done)
        self.done = done
        now = time.monotonic()
        if self._is_shown and (done == total or now - self._told_at >= EVERY):
            self._told_at = now
            by = "" if self._workers is None else f"; {self._workers.line()}"
            self._status(f"{done} of {total} cells done{by}")

    def follow(self, phases: Phases) -> None:
        """What is under way is shown by the bar."""
        if self.advance is not None:
            from conewise.jobs.progress import follow

            follow(self.advance, phases)

    def follow_workers(self, workers: Workers) -> None:
        """What workers do is shown by the bar, or in the lines."""
        self._workers = workers
        if self.advance is not None:
            from conewise.jobs.progress import follow_workers

            follow_workers(self.advance, workers)


def progress_for(status: Status, wanted: bool | None) -> bool | Callable[[int, int], None] | None:
    """How a run shows its progress: a bar in a terminal, lines elsewhere if they are wanted, or nothing."""
    if wanted is False or (wanted is None and status.quiet):
        return False
    if sys.stderr.isatty():
        return wanted
    return CellCounter(status, is_shown=True) if wanted else False


def expect_writable(folder: Path, option: str) -> None:
    """Find out before the run, not after it, that nothing can be written into a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        expect_room(folder)
    except OSError as cause:
        raise CommandError(
            f"cannot write into {option} {folder}: {cause.strerror}. Name a folder that exists and is yours, "
            "or one that can be made."
        ) from None


def expect_writable_file(path: Path, option: str) -> None:
    """Find out before the run, not after it, that a page or a picture cannot be written there."""
    expect_writable(path.parent, option)
    try:
        expect_replaceable(path)
        expect_file(path)
    except OSError as cause:
        raise CommandError(f"cannot write {option} {path}: {cause.strerror}. Name another file.") from None
