"""Running commands: in a process of their own as people do, or in this one where that is all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from typer.testing import CliRunner

from conewise.cli.app import app
from conewise.cli.schemas import schema_of
from tests.cli import forks

COMMAND = [sys.executable, "-m", "conewise.cli"]
CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
PAIR = ("--clean", CLEAN, "--corrupted", CORRUPTED, "--answer", "Mary", "--wrong", "John")


def environment(**more: str) -> dict[str, str]:
    """One thread, so that two processes of one sweep round alike, and no look at the hub."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, without a terminal."""
    return subprocess.run(
        [*COMMAND, *words], cwd=cwd, env=environment(), capture_output=True, text=True, check=False
    )


def forked(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The same, where it does not matter who imported torch."""
    return forks.run(words, cwd or Path.cwd(), environment())


class Done:
    """A command that was run in this process."""

    def __init__(self, *words: str) -> None:
        done = CliRunner().invoke(app, list(words), env={"HF_HUB_OFFLINE": "1"})
        self.code, self.out, self.err = done.exit_code, done.stdout, done.stderr

    def json(self, command: str) -> dict[str, Any]:
        """What it printed, which must be as the command's schema says."""
        assert self.code == 0, self.err
        return valid(command, self.out)


def valid(command: str, text: str) -> dict[str, Any]:
    """A JSON object that is as the command's schema says, and has nothing around it."""
    assert text.startswith("{")
    told: dict[str, Any] = json.loads(text)
    jsonschema.Draft202012Validator(schema(command)).validate(told)
    return told


@cache
def schema(command: str) -> Any:
    return schema_of(command)


def refused(*words: str) -> str:
    """What a command says that cannot be done as asked: one message, exit code 2, nothing on stdout."""
    done = Done(*words)
    assert done.code == 2, (done.out, done.err)
    assert done.out == ""
    assert "Traceback" not in done.err
    (_, _, message) = done.err.partition("error: ")
    assert message, done.err
    return message
