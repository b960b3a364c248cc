"""Streams that are closed, full, gone or ASCII, and Ctrl-C before a command began: a code, no traceback."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cli.commands import COMMAND, environment

FULL = "/dev/full"


def shell(line: str, **more: str) -> tuple[int, str, str]:
    """A line of a shell in which `conewise` is the command: exit code, stdout, stderr."""
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; conewise() {{ {" ".join(COMMAND)} "$@"; }}; {line}'],
        env=environment(**more),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", ["schema plan", "--help"])
def test_a_stdout_that_is_closed_or_full_is_exit_code_74(words: str) -> None:
    code, out, err = shell(f"conewise {words} >&-")
    assert (code, out, err) == (74, "", "error: the output cannot be written: stdout is closed.\n")
    code, out, err = shell(f"conewise {words} > {FULL}")
    assert (code, out, err) == (74, "", "error: the output cannot be written: No space left on device.\n")


def test_nothing_is_said_where_all_is_closed() -> None:
    assert shell("conewise schema plan <&- >&- 2>&-") == (74, "", "")


@pytest.mark.parametrize("way", ["2>&-", f"2> {FULL}", "2> >(exit)"])
def test_what_cannot_be_said_on_stderr_is_not_said_on_stdout(way: str) -> None:
    assert shell(f"conewise report nowhere --json {way}") == (2, "", "")
    assert shell(f"conewise nonsense {way}")[:2] == (2, "")


def test_a_run_does_not_end_for_want_of_a_stderr() -> None:
    code, out, err = shell(f"conewise reproduce e7 --json 2> {FULL}")
    assert (code, err) == (0, "")
    assert list(json.loads(out)) == ["e7"]


@pytest.mark.parametrize(
    "locale",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
)
def test_an_ascii_stdout_gets_escapes(locale: dict[str, str]) -> None:
    code, out, err = shell("conewise reproduce e7; conewise reproduce e7 --json", **locale)
    assert code == 0, err
    assert out.isascii()
    table, bracket, rest = out.partition("{")
    assert "predicted" in table
    told = json.loads(bracket + rest)
    assert not json.dumps(told, ensure_ascii=False).isascii()


def test_a_reader_that_goes_is_exit_code_141() -> None:
    code, out, err = shell("conewise --help | true; echo ${PIPESTATUS[0]}")
    assert (code, err) == (0, "")
    assert out in {"141\n", "0\n"}  # the reader may go before or after all of it is in the pipe
    code, out, err = shell("(sleep 0.1; conewise schema sweep; echo $? >&2) | true")
    assert err == "141\n"


INTERRUPTED = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from conewise.cli.entry import main
main(["schema", "plan"])
"""


@pytest.mark.parametrize(
    "name",
    [
        "conewise.cli.streams",
        "conewise.cli.app",
        "typer",
        "conewise.cli.sweeping",
        "conewise.errors",
    ],
)
def test_ctrl_c_while_the_command_is_imported_is_exit_code_130(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(name=name)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_the_command_is_there_before_anything_large_is_imported() -> None:
    """What is imported before `main` is called, nobody can catch: Ctrl-C would show where it was."""
    code = "import sys; old = set(sys.modules); import conewise.cli.entry; print(*set(sys.modules) - old)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == {
        "conewise",
        "conewise.cli",
        "conewise.cli.entry",
        "conewise.version",
    }
