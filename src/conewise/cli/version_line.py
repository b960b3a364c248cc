"""The line of `conewise --version`: the version, and in a checkout of conewise its commit."""

import os
import subprocess
import tomllib
from pathlib import Path

from conewise.version import __version__

ROOT = Path(__file__).parents[3]
"""The root of the repository, where this runs from a checkout."""

SECONDS = 5.0
"""The limit of git: a version is asked for when something is wrong, and must not hang too."""


def version_line(root: Path | None = None) -> str:
    """`conewise 0.1.0`; from a checkout at `root` `conewise 0.1.0 (commit 1a2b3c4, with changes)`."""
    found = commit(ROOT if root is None else root)
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
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text("utf-8")).get("project")
    except (OSError, ValueError):
        return False
    return isinstance(project, dict) and project.get("name") == "conewise"
