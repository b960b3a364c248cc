"""The installed command: one way in, and one way out with a code that other tools know.

Imports next to nothing, so that Ctrl-C is met from the first moment on. Here are also the streams that a
command writes to, and the line of `conewise --version`.
"""

from __future__ import annotations

import errno
import io
import os
import sys

from conewise.cli import FAILURE, IOERR, OK, SIGINT, SIGPIPE, SOFTWARE, USAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any, NoReturn


def main(words: list[str] | None = None) -> NoReturn:
    """Run the command with these words, or with those that were typed, and end the process.

    Whatever happens, the code is one of those that `conewise --help` lists, and without `--debug` there is no
    traceback.
    """
    try:
        import signal

        code = _ended(words, open_streams())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # What is left to do takes no time.
    except KeyboardInterrupt:
        code = SIGINT
        _say("interrupted")
    if code == SIGINT:
        # At once: an interpreter that saw an interruption may end itself by that signal, whoever caught it.
        os._exit(code)
    sys.exit(code)


def _ended(words: list[str] | None, stdout: Stdout) -> int:
    """Run the command; returns its code."""
    try:
        code = _run(words)
        stdout.flush()
    except UnwrittenError:
        code = IOERR
    if stdout.error is not None:  # Others may have caught it.
        if stdout.error.is_unread:
            return SIGPIPE
        _say(f"error: {stdout.error}")
        return IOERR
    return code


def _run(words: list[str] | None) -> int:
    from conewise.errors import MissingPackageError
    from conewise.extras import expect

    try:
        # Before anything runs: a sweep of hours would end without a page, for the want of what draws it.
        expect("cli")
        from conewise.cli.app import app

        app(words, prog_name="conewise")
    except MissingPackageError as error:
        if (sys.argv[1:] if words is None else words) == ["--version"]:  # needs no parser
            print(version_line())
            return OK
        _say(f"error: {error}")
        return USAGE
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else OK if end.code is None else FAILURE
    except UnwrittenError:
        raise
    except Exception as error:  # noqa: BLE001 - before or after a command, and so without its way to fail
        if os.environ.get("CONEWISE_DEBUG") or "--debug" in (words or sys.argv):
            import traceback

            traceback.print_exc()
        _say(f"error inside conewise: {type(error).__name__}: {error}")
        return SOFTWARE
    return OK


def _say(line: str) -> None:
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


# -- the streams -----------------------------------------------------------------------------------


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


# -- the version -----------------------------------------------------------------------------------

ROOT: Path | None = None
"""The root of the repository, where it is not the one that this file lies in."""

SECONDS = 5.0
"""The limit of git: a version is asked for when something is wrong, and must not hang too."""


def version_line(root: Path | None = None) -> str:
    """`conewise 0.1.0`; from a checkout at `root` `conewise 0.1.0 (commit 1a2b3c4, with changes)`."""
    from pathlib import Path

    from conewise.version import __version__

    found = commit(root or ROOT or Path(__file__).parents[3])
    if found is None:
        return f"conewise {__version__}"
    head, _, dirty = found.partition("-")
    return f"conewise {__version__} (commit {head}{', with changes' if dirty else ''})"


def commit(root: Path) -> str | None:
    """The commit that is checked out at `root`, with `-dirty` behind it where tracked files were changed.

    None where `root` is no checkout of conewise (an install, unpacked sources, another project's repository),
    and where git is missing or does not answer.
    """
    if not (root / ".git").exists() or not _is_ours(root):
        return None
    # Sources that were unpacked into a repository and are not in it are not of its commit.
    if _git(root, "ls-files", "--error-unmatch", "pyproject.toml") is None:
        return None
    return _git(root, "describe", "--always", "--dirty", "--exclude=*")


def _git(root: Path, *words: str) -> str | None:
    """Return the output of git; None where it is missing, fails, says nothing or does not answer."""
    import subprocess

    # In a hook of any repository git sets variables that would lead it there.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _is_ours(root: Path) -> bool:
    import tomllib

    try:
        project = tomllib.loads((root / "pyproject.toml").read_text("utf-8")).get("project")
    except (OSError, ValueError):
        return False
    return isinstance(project, dict) and project.get("name") == "conewise"
