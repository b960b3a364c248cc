"""The streams that a command writes to: stdout, which reports failures, and stderr."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any


class UnwrittenError(Exception):
    """The output cannot be written. No OSError, for others would take it for one of their own."""

    def __init__(self, cause: OSError) -> None:
        why = "stdout is closed" if cause.errno == errno.EBADF else cause.strerror or str(cause)
        super().__init__(f"the output cannot be written: {why}.")
        self.is_unread = cause.errno == errno.EPIPE


class Stdout(io.TextIOWrapper):
    """Stdout: it raises UnwrittenError, and remembers it, where it cannot be written."""

    error: UnwrittenError | None = None

    def write(self, text: str) -> int:
        """As a text stream does."""
        try:
            return super().write(text)
        except OSError as cause:
            raise self._failed(cause) from None

    def flush(self) -> None:
        """As a text stream does."""
        try:
            super().flush()
        except OSError as cause:
            raise self._failed(cause) from None

    def _failed(self, cause: OSError) -> UnwrittenError:
        _nowhere(self.fileno())  # What is still held must not fail again when the interpreter ends.
        self.error = self.error or UnwrittenError(cause)
        return self.error


class Stderr(io.TextIOWrapper):
    """Stderr: what cannot be written is dropped, for a message is no reason to end a run."""

    def write(self, text: str) -> int:
        """As a text stream does."""
        try:
            return super().write(text)
        except OSError:
            _nowhere(self.fileno())
            return len(text)

    def flush(self) -> None:
        """As a text stream does."""
        try:
            super().flush()
        except OSError:
            _nowhere(self.fileno())


def open_streams() -> Stdout:
    """Give the process a stdin, a stdout and a stderr that a command can rely on; returns stdout."""
    # A descriptor that is closed is the next one to be opened: a store would be what stdout writes to.
    # Reading alone: a stdout that is closed cannot be written, and says so. Nobody misses a stderr.
    for number, way in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            _nowhere(number, way)
    stdout = Stdout(**_like(sys.stdout, 1))
    sys.stdout, sys.stderr = stdout, Stderr(**_like(sys.stderr, 2))
    return stdout


def _like(stream: Any, number: int) -> dict[str, Any]:
    """Return how to make a stream like another, or where there is none, with escapes for what it lacks."""
    if stream is None:
        return {
            "buffer": io.BufferedWriter(io.FileIO(number, "w", closefd=False)),
            "encoding": "utf-8",
            "errors": "backslashreplace",
        }
    return {
        "buffer": stream.buffer,
        "encoding": stream.encoding,
        "errors": "backslashreplace",
        "line_buffering": stream.line_buffering,
    }


def _nowhere(number: int, way: int = os.O_WRONLY) -> None:
    """Let a descriptor lead nowhere."""
    opened = os.open(os.devnull, way)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
