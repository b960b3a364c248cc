"""The cache folder: what is slow to make is made once, and is whole or absent.

An entry is a folder with a name that says all that it depends on. It is written under another name
and renamed when it is complete, so a crash, a full disk or two processes at once leave no broken
entry behind. Deleting the cache folder is always safe.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from conewise.errors import LoadError

# Written last into an entry: the size of each of its files.
RECORD = "complete.json"


def cache_folder() -> Path:
    """`$CONEWISE_CACHE`, or `$XDG_CACHE_HOME/conewise`, or `~/.cache/conewise`."""
    if own := os.environ.get("CONEWISE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "conewise"
    return Path.home() / ".cache" / "conewise"


def cached(key: str, make: Callable[[Path], None], progress: Callable[[str], None]) -> Path:
    """The entry `key`, made by `make(folder)` where it is not there yet or is damaged.

    Of several processes that want one entry at the same time, one makes it and the others wait.
    Whatever `make` raises passes through, and leaves no entry.
    """
    parent = cache_folder() / "models"
    entry = parent / key
    if is_whole(entry):
        return entry
    try:
        parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(parent / f"{key}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress("another process is converting this model: waiting for it")
            lock.acquire()
        try:
            if not is_whole(entry):
                _make(entry, make)
        finally:
            lock.release()
    except OSError as error:
        raise LoadError(
            f"the cache folder {parent} cannot be written: {error}. Make room there, or name another "
            "folder in the environment variable CONEWISE_CACHE."
        ) from error
    return entry


def _make(entry: Path, make: Callable[[Path], None]) -> None:
    """Make `entry`. The caller holds its lock, so whatever stands there is a dead process's."""
    partial = entry.with_name(entry.name + ".partial")
    for leftover in (partial, entry):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    try:
        make(partial)
        _seal(partial)
        partial.rename(entry)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _seal(folder: Path) -> None:
    """Write the record, and wait until all is on the disk: a rename must not arrive before its files."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / RECORD).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def is_whole(entry: Path) -> bool:
    """Whether `entry` has its record, and each file in it has the recorded size."""
    try:
        sizes = json.loads((entry / RECORD).read_text(encoding="utf-8"))
        return all((entry / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False
