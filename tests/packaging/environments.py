"""Empty environments, and what is run in them: away from the sources of this checkout."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.packaging.interpreters import ROOT

MINUTES = 60.0


class Environment:
    """A virtual environment that was just made, and an empty folder in which its commands run."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.folder, self.work = folder, folder / "work"
        expect([str(python), "-m", "venv", str(folder / "venv")], cwd=folder.parent, minutes=2)
        self.bin = folder / "venv" / "bin"
        self.work.mkdir()

    def install(self, *what: str) -> None:
        """Install with pip, at the tested versions. What pip says of a registry stands in the error."""
        how = ("--disable-pip-version-check", "--no-input", "--progress-bar=off", "--no-compile")
        constraints = str(ROOT / "constraints.txt")
        self.run("python", "-m", "pip", "install", *how, "-c", constraints, *what, minutes=15)

    def run(self, command: str, *words: str, minutes: float = 8) -> str:
        """What a command of the environment prints. One that fails is an AssertionError with what it said."""
        return expect([str(self.bin / command), *words], cwd=self.work, minutes=minutes)

    def fails(self, command: str, *words: str) -> tuple[int, str]:
        """The exit code of a command that is to fail, and all that it says."""
        done = _done([str(self.bin / command), *words], self.work, 8)
        assert done.returncode != 0, done.stdout
        return done.returncode, done.stdout


def expect(words: list[str], *, cwd: Path, minutes: float) -> str:
    """What a command prints, both streams; where it fails, an AssertionError shows the end of it."""
    done = _done(words, cwd, minutes)
    said = "\n".join(done.stdout.splitlines()[-60:])
    assert done.returncode == 0, f"{' '.join(words)} ended with {done.returncode}:\n{said}"
    return done.stdout


def _done(words: list[str], cwd: Path, minutes: float) -> subprocess.CompletedProcess[str]:
    # What points Python or conewise elsewhere stays outside.
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "CONEWISE_", "VIRTUAL_ENV", "COV_"))
    }
    return subprocess.run(
        words,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=minutes * MINUTES,
        env={**ours, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "110"},
    )
