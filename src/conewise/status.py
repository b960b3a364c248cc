"""Seconds of a job by phase, and a status line that says what is under way."""

from __future__ import annotations

import contextvars
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol

clock = time.perf_counter

REST = "other"
"""The phase of all that no other is named for."""

LEAST = 0.01
"""The share of the whole below which a phase is not worth showing."""


class Phases:
    """A stopwatch of phases. Every second belongs to one of them, so that together they are the whole.

    It reads the host's clock alone and waits for nothing: of what a device does meanwhile, a phase has the
    time that the host waited for it. `name` and `words` say what is under way; another thread may look.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.name, self.words = REST, ""
        self._done = dict.fromkeys([*names, REST], 0.0)
        self._since = clock()

    @contextmanager
    def during(self, name: str, words: str = "") -> Iterator[None]:
        """Be in a phase until the block ends, and then in the one before. `words` say more of it."""
        before = self.name, self.words
        self.begin(name, words)
        try:
            yield
        finally:
            self.begin(*before)

    def begin(self, name: str, words: str = "") -> None:
        """Go over to another phase."""
        now = clock()
        self._done[self.name] += now - self._since
        self._done.setdefault(name, 0.0)
        self.name, self.words, self._since = name, words, now

    def seconds(self) -> dict[str, float]:
        """The seconds of each phase until now."""
        found, name, since = dict(self._done), self.name, self._since
        found[name] += clock() - since
        return found

    def lasting(self) -> float:
        """For how many seconds the phase has been under way."""
        return clock() - self._since


def shown_phases(seconds: Mapping[str, float], least: float = LEAST) -> str:
    """The seconds of phases as people read them: those of a share of at least `least`, in their order."""
    whole = sum(seconds.values())
    return ", ".join(
        f"{name} {taken:.3g} s" for name, taken in seconds.items() if taken > 0 and taken >= least * whole
    )


PATIENCE = 1.0
"""Seconds that some work may take before anything is said of it."""

REFRESH = 0.25
"""Seconds from one drawing of a line to the next."""

StatusCallback = Callable[[str], None]

_CALLBACK: ContextVar[StatusCallback | None] = ContextVar("status callback", default=None)


def is_watched() -> bool:
    """True if someone is looking: stderr is a terminal, or this is a notebook."""
    return is_notebook() or is_terminal()


def is_terminal() -> bool:
    """True if stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def is_notebook() -> bool:
    """True if this runs in a Jupyter kernel; those of Colab and others are made of Jupyter's."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


class StatusLine:
    """A line that says what is under way; called with each next phase. `phases` has their seconds."""

    def __init__(self, title: str) -> None:
        self.title, self.phases = title, Phases()

    def __call__(self, phase: str) -> None:
        """Go over to another phase."""
        self.phases.begin(phase)

    def seconds(self) -> dict[str, float]:
        """The seconds of each phase that was named."""
        return {name: taken for name, taken in self.phases.seconds().items() if name != REST}

    def text(self) -> str:
        """The phase that is under way, and what those before it took."""
        now = self.phases.name
        done = shown_phases({name: taken for name, taken in self.seconds().items() if name != now})
        doing = self.title if now == REST else f"{self.title}: {now}"
        return f"{doing} ({done})" if done else doing

    def last(self) -> str:
        """Return what all phases took."""
        return f"{self.title}: {shown_phases(self.seconds())}"


@contextmanager
def status_line(title: str) -> Iterator[StatusLine]:
    """Say what is under way in the block: a line on stderr in a terminal, an output in a notebook."""
    line, callback = StatusLine(title), _CALLBACK.get()
    if callback is None and not is_watched():
        yield line
        return

    def screen() -> Screen:
        if callback is not None:
            return _CallbackLine(callback)
        return NotebookOutput() if is_notebook() else _TerminalLine()

    with drawn(screen, line.text, line.last, PATIENCE):
        yield line


@contextmanager
def status_to(callback: StatusCallback) -> Iterator[None]:
    """Let `callback` show what is under way in the block, in place of a line of ours."""
    before = _CALLBACK.set(callback)
    try:
        yield
    finally:
        _CALLBACK.reset(before)


# -- where it is drawn -----------------------------------------------------------------------------


class Screen(Protocol):
    """A place where something that is under way is drawn, again and again."""

    def draw(self, text: str) -> None:
        """Draw it anew."""

    def end(self, text: str) -> None:
        """Draw it a last time, or remove it."""


@contextmanager
def drawn(
    screen: Callable[[], Screen], line: Callable[[], str], last: Callable[[], str], patience: float
) -> Iterator[None]:
    """Draw a line on a screen while the block runs, from the time on when it took `patience` seconds.

    A thread draws it, so that its time goes on while something long is computed. `last` is drawn at the end.
    """
    made, ended = [] if patience else [screen()], threading.Event()

    def draw() -> None:
        wait = patience
        while not ended.wait(wait):
            if not made:
                made.append(screen())
            made[0].draw(line())
            wait = REFRESH

    # A notebook knows by the context to which cell an output belongs.
    drawer = threading.Thread(target=contextvars.copy_context().run, args=[draw], daemon=True)
    drawer.start()
    try:
        yield
    finally:
        ended.set()
        drawer.join()
        if made:
            made[0].end(last())


class _CallbackLine:
    """Another's line."""

    def __init__(self, callback: StatusCallback) -> None:
        self.draw = callback

    def end(self, text: str) -> None:
        """The line is another's to end."""


class _TerminalLine:
    """A line of a terminal that is written over, and is gone at the end."""

    CLEAR = "\r\x1b[2K"

    def __init__(self) -> None:
        self._is_drawn = False

    def draw(self, text: str) -> None:
        if os.environ.get("TERM") != "dumb":
            self._is_drawn = True
            self._write(self.CLEAR + text[: shutil.get_terminal_size().columns - 1])

    def end(self, _: str) -> None:
        if self._is_drawn:
            self._write(self.CLEAR)

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a terminal that is gone is no reason to end the work
            if sys.stderr is not None:
                sys.stderr.write(text)
                sys.stderr.flush()


class NotebookOutput:
    """One output of a notebook's cell, replaced as the work goes on; its last state stays.

    It needs no widgets. `html` makes HTML of a text; without it the text is shown as it is.
    """

    def __init__(self, html: Callable[[str], str] | None = None) -> None:
        self._html, self._text = html, ""
        self._handle: Any = None

    def draw(self, text: str) -> None:
        """Draw it anew, where the text is another."""
        from IPython.display import display  # noqa: PLC0415  # there, where this is a notebook

        if text == self._text:
            return
        self._text = text
        if self._handle is None:
            self._handle = display(self, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(self)

    def end(self, text: str) -> None:
        """Leave the last text."""
        if self._handle is not None or self._html is not None:
            self.draw(text)

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str | None:
        return None if self._html is None else self._html(self._text)
