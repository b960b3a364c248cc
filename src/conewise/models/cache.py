"""The cache folder: what is slow to make is made once, and is whole or absent.

An entry is a folder with a name that says all that it depends on. It is written under another name
and renamed when it is complete, so a crash, a full disk or two processes at once leave no broken
entry behind. Every byte of it is checked when it is used: what a disk or a hand changed is made again.
Deleting the cache folder is always safe.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from conewise.capturing.foreign import brief
from conewise.errors import LoadError
from conewise.extras import needs
from conewise.reading import as_path, read_json

with needs("hf"):
    from filelock import FileLock, Timeout

# Written last into an entry: the checksum of each of its files.
RECORD = "complete.json"


def cache_folder() -> Path:
    """`$CONEWISE_CACHE`, or `$XDG_CACHE_HOME/conewise`, or `~/.cache/conewise`."""
    if own := os.environ.get("CONEWISE_CACHE"):
        return as_path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return as_path(shared) / "conewise"
    try:
        return Path.home() / ".cache" / "conewise"
    except RuntimeError:
        raise LoadError(
            "this user has no home folder, so there is none for the cache. Name one in the environment "
            "variable CONEWISE_CACHE."
        ) from None


def cached(key: str, make: Callable[[Path], None], progress: Callable[[str], None]) -> Path:
    """The entry `key`, made by `make(folder)` where it is not there yet or is damaged; `progress` says so.

    Of several processes that want one entry at the same time, one makes it and the others wait.
    Whatever `make` raises passes through, and leaves no entry.
    """
    parent = cache_folder() / "models"
    entry = parent / key
    if flaw(entry) is None:
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
            wrong = flaw(entry)
            if wrong is not None:
                if entry.exists():
                    progress(f"the model in the cache is damaged ({wrong}): it is made again")
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
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)
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
    checksums = {path.name: _checksum(path) for path in sorted(folder.iterdir())}
    (folder / RECORD).write_text(json.dumps({"sha256": checksums}, indent=1), encoding="utf-8")
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def flaw(entry: Path) -> str | None:
    """What is wrong with an entry, in words; None where it is whole.

    It is whole when it has its record, and in it just the files that the record lists, each with its
    checksum. All is read, which takes about a second for a gigabyte.
    """
    try:
        record = read_json(entry / RECORD)
        checksums = record["sha256"]
        if not isinstance(checksums, dict) or not checksums:
            return f"{RECORD} lists no files"
        held = {path.name for path in entry.iterdir() if not path.name.startswith(".")} - {RECORD}
        if held != set(checksums):
            return f"{min(held ^ set(checksums))} is missing, or was added"
        for name, checksum in checksums.items():
            if _checksum(entry / name) != checksum:
                return f"{name} does not have the checksum that it was written with"
    except OSError as error:
        return f"{Path(error.filename or RECORD).name} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{RECORD} cannot be understood: {brief(error)}"
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
