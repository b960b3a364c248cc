"""The Pythons that the package names, and where each is found on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def named() -> list[str]:
    """The versions that `pyproject.toml` promises, as "3.11"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: 3."
    return [one.removeprefix(prefix[:-2]) for one in project["classifiers"] if one.startswith(prefix)]


def interpreter(version: str) -> Path | None:
    """The Python of that version: one on the path, else the newest that pyenv has, else None."""
    command = f"python{version}"
    found = _executable(command, None)
    if found is None and shutil.which("pyenv"):
        listed = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True, check=False)
        patches = [
            line.strip() for line in listed.stdout.splitlines() if line.strip().startswith(f"{version}.")
        ]
        for one in sorted(patches, key=_numbers, reverse=True):
            found = found or _executable(command, one)
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _executable(command: str, pyenv_version: str | None) -> Path | None:
    """Where a command's Python lies, if it runs: pyenv has commands for versions that are not active too."""
    where = shutil.which(command)
    if where is None:
        return None
    chosen = {} if pyenv_version is None else {"PYENV_VERSION": pyenv_version}
    asked = subprocess.run(
        [where, "-c", "import sys, venv, ensurepip; print(sys.executable)"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **chosen},
    )
    return Path(asked.stdout.strip()) if asked.returncode == 0 else None
