"""The file of a search: the decisions so far, so that a search that was cut off goes on."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from conewise.circuits.circuit_data import Decision
from conewise.errors import Argument, CircuitError
from conewise.files import Format, as_path, expect_file, read_json, write_whole
from conewise.sweeps.storage.provenance import differences
from conewise.sweeps.storage.result_data import decoded

FORMAT = Format("conewise search", 1)


class SearchFile:
    """Decisions in a file, written whole each time. `search` is all that they depend on, in plain values."""

    def __init__(self, path: Path, search: Mapping[str, Any], decisions: Sequence[Decision] = ()) -> None:
        self.path, self.search, self.decisions = path, search, tuple(decisions)

    @classmethod
    @contextmanager
    def opened(
        cls, out: str | Path | None, resume: bool, search: Callable[[], Mapping[str, Any]]
    ) -> Iterator[SearchFile]:
        """The file of a new search, or with `resume` of one that goes on; one that is not there is begun.

        No other search can use it meanwhile. Raises CircuitError where one does, or where the file cannot be
        written, or is damaged or of another search, and FormatError for one of a newer version.
        """
        if out is None:
            raise CircuitError(
                Argument("resume", True),
                " without ",
                Argument("out"),
                ": say in which file the search was kept.",
            )
        path, own = as_path(out), search()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            expect_file(path)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise CircuitError(f"the search cannot be kept in {path}: {why}. Name another file.") from None
        with _locked(path):
            if not path.exists():
                yield cls(path, own)
                return
            if not resume:
                raise CircuitError(
                    f"{path} is there already. Go on with the search that it is of with ",
                    Argument("resume", True),
                    ", or name another file.",
                )
            yield cls(path, own, _read(path, own))

    def write(self, log: Sequence[Decision]) -> None:
        """Keep these decisions. Raises CircuitError where that cannot be."""
        rows = [(one.edge, one.kept, one.change) for one in log]
        body = {"search": self.search, "decisions": rows}
        found = {**FORMAT.header(), **body, "sha256": _checksum(body)}
        try:
            write_whole(self.path, json.dumps(found).encode())
        except OSError as error:
            raise CircuitError(
                f"the search cannot be kept in {self.path}: {error.strerror or error}."
            ) from None

    @contextmanager
    def keeping(self, log: Sequence[Decision]) -> Iterator[None]:
        """Keep what is in the log at the end, however that comes. What is known already is not lost."""
        try:
            yield
        except BaseException as error:
            if len(log) > len(self.decisions):
                self.write(log)
            count = max(len(log), len(self.decisions))
            error.add_note(f"{count:,} decisions are kept in {self.path}; resume=True goes on.")
            raise
        self.write(log)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other searches off a file, in this process and in others, until the end or until the process dies.

    The lock is SQLite's, as that of a sweep's store. It is on an empty file beside it, since each write puts
    a new file in place of the old one.
    """
    target = Path(os.path.realpath(path))
    beside = target.parent / f".conewise-{hashlib.sha256(target.name.encode()).hexdigest()[:16]}.lock"
    while True:
        try:
            connection = sqlite3.connect(beside, timeout=0, isolation_level=None)
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                raise CircuitError(
                    f"another search is using {path}. Wait until it has ended, or name another file with ",
                    Argument("out"),
                    ".",
                ) from None
            raise CircuitError(
                f"the search cannot be kept in {path}: {beside} cannot be locked: {error}."
            ) from None
        if beside.exists():
            break
        connection.close()  # Its last holder removed the file in between: this lock is on nothing.
    try:
        yield
    finally:
        with suppress(OSError):  # some systems remove no file that is open
            beside.unlink()
        connection.close()


def _read(path: Path, search: Mapping[str, Any]) -> list[Decision]:
    try:
        found = FORMAT.expect(read_json(path), str(path))
        body = {name: found.get(name) for name in ("search", "decisions")}
        if found.get("sha256") != _checksum(body):
            raise ValueError("it does not have the checksum that it was written with")
        rows = decoded(body["decisions"], tuple[tuple[str, bool, Any], ...], "decisions")
        if not all(isinstance(change, float | int) for _, _, change in rows):  # it may be infinite
            raise ValueError("its decisions are not (edge, kept, change)")
        of = decoded(body["search"], dict[str, Any], "search")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CircuitError(
            f"the search in {path} cannot be read: {why}. It was left as it is. Put a sound copy in its "
            "place, or begin again in another file."
        ) from None
    now = json.loads(json.dumps(search))
    if "machine" not in of:  # files of 0.1.0 do not say on what they were made
        now = {name: value for name, value in now.items() if name in of}
    other = differences(of, now)
    if other:
        lines = "\n".join(f"  {line}" for line in other)
        raise CircuitError(
            f"the search in {path} is another one. What differs, in the file and now:\n{lines}\n"
            "It was left as it is. Search as it was, or begin again in another file."
        )
    return [Decision(edge, kept, float(change)) for edge, kept, change in rows]


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
