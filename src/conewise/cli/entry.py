"""The installed command: one way in, and one way out with a code that other tools know.

Imports next to nothing, so that Ctrl-C is met from the first moment on.
"""

import os
import sys

from conewise.cli import FAILURE, IOERR, OK, SIGINT, SIGPIPE, SOFTWARE, USAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from conewise.cli.streams import Stdout


def main(words: list[str] | None = None) -> "NoReturn":
    """Run the command with these words, or with those that were typed, and end the process.

    Whatever happens, the code is one of those that `conewise --help` lists, and without `--debug` there is no
    traceback.
    """
    try:
        import signal

        from conewise.cli.streams import open_streams

        code = _ended(words, open_streams())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # What is left to do takes no time.
    except KeyboardInterrupt:
        code = SIGINT
        _say("interrupted")
    if code == SIGINT:
        # At once: an interpreter that saw an interruption may end itself by that signal, whoever caught it.
        os._exit(code)
    sys.exit(code)


def _ended(words: list[str] | None, stdout: "Stdout") -> int:
    """Run the command; returns its code."""
    from conewise.cli.streams import UnwrittenError

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
    from conewise.cli.streams import UnwrittenError
    from conewise.errors import MissingPackageError
    from conewise.extras import expect

    try:
        # Before anything runs: a sweep of hours would end without a page, for the want of what draws it.
        expect("cli")
        from conewise.cli.app import app

        app(words, prog_name="conewise")
    except MissingPackageError as error:
        if (sys.argv[1:] if words is None else words) == ["--version"]:  # needs no parser
            from conewise.cli.version_line import version_line

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
