"""The folder of a job: its finished chunks, so that it can be cut off at any moment and go on.

A store is one SQLite file, `job.sqlite`, beside a readable copy of its manifest, `job.json`; those of
conewise 0.1.0, `sweep.sqlite` and `sweep.json`, go on under these names. A chunk is committed when it is
computed, with full synchronisation: what was committed survives the death of the process, and a power cut as
far as the disk keeps its promises. What was being written is rolled back when the store is next opened. The
file is locked for as long as a run has it open.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conewise.errors import Argument, ConewiseError, SweepError
from conewise.files import Format, as_path, is_there, parse_json, write_whole
from conewise.jobs.digests import machine
from conewise.program.tensors import Tensor
from conewise.sweeps.planning.plan import as_json
from conewise.sweeps.planning.spec import StoredCut
from conewise.sweeps.storage.codec import decoded, packed, unpacked
from conewise.sweeps.storage.provenance import differences

FILE, MANIFEST = "job.sqlite", "job.json"
OLD_FILE, OLD_MANIFEST = "sweep.sqlite", "sweep.json"
"""The names of 0.1.0."""
FORMAT = Format("conewise store", 2, oldest=2)
MARK = 0x434F4E45
"""The mark that says in a SQLite header that the file is ours: "CONE"."""

SMALLEST = 512
"""Bytes of the smallest SQLite database."""

_FOREIGN = "does not have the checksum it was stored with: it is damaged, or from another run"
_CHUNKS = "SELECT batch, piece, shape, numbers, checksum FROM chunks"

_TABLES = (
    "CREATE TABLE manifest (body TEXT NOT NULL, checksum TEXT NOT NULL)",
    "CREATE TABLE plans (batch INTEGER PRIMARY KEY, body TEXT NOT NULL, checksum TEXT NOT NULL)",
    """CREATE TABLE chunks (batch INTEGER NOT NULL, piece INTEGER NOT NULL, shape TEXT NOT NULL,
    numbers BLOB NOT NULL, checksum TEXT NOT NULL, PRIMARY KEY (batch, piece))""",
)


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """The plan of a batch as it is stored: its cut, and the metrics of its runs with all their bits."""

    evaluator: str
    max_memory: int | None
    chunks: tuple[int, ...]
    base: tuple[str, ...]
    source: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """The names that every stored manifest has."""

    cells: int
    sweep: dict[str, Any]
    order: str
    machine: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """A job as its store has to know it: what identifies it, how much there is, on which device.

    `order` gives the names of the cells by world. Both that and `provenance` are asked for where a run is
    stored, and not otherwise. `kind` and `unit` are what the job and its cells are called; errors are of the
    kind `error`.
    """

    cells: int
    batches: int
    provenance: Callable[[], dict[str, Any]]
    order: Callable[[], Sequence[str]]
    device: Any
    kind: str = "sweep"
    unit: str = "cells"
    error: type[ConewiseError] = SweepError


class Recorder:
    """The store of a run; this one is of a run that is not stored. `keeps`: it keeps what it is given."""

    keeps = False

    def cut(self, batch: int, evaluator: str) -> StoredCut | None:
        """Return the cut of a batch that was begun before. An evaluator that contradicts it is refused."""
        del batch, evaluator
        return None

    def begin(
        self, batch: int, cut: StoredCut, max_memory: int | None, base: Tensor, source: Tensor | None
    ) -> None:
        """Keep the cut of a batch and its runs' own metrics; of one begun before, compare the metrics."""

    def get(self, batch: int, piece: int, worlds: int) -> Tensor | None:
        """Return a finished chunk as [world, metric, prompt]; None where it is not finished."""
        del batch, piece, worlds
        return None

    def put(self, batch: int, piece: int, rows: Tensor) -> None:
        """Keep a finished chunk."""

    def pieces(self, batch: int) -> list[Tensor]:
        """Return all chunks of a batch, in order."""
        del batch
        return []


@contextmanager
def recorder(request: Request, out: str | Path | None, resume: bool) -> Iterator[Recorder]:
    """Have the recorder of one run of a job. A run that is cut off says where it can go on."""
    if out is None:
        if resume:
            raise request.error(
                Argument("resume", True),
                " without ",
                Argument("out"),
                ": say in which folder the run was stored.",
            )
        yield Recorder()
        return
    store = Store(request, as_path(out), resume=resume)
    try:
        yield store
    except request.error:
        raise
    except BaseException as error:
        error.add_note("".join(map(str, store.how_to_go_on())))
        raise
    finally:
        store.close()


class Store(Recorder):
    """The recorder of a run that is stored in `folder`.

    It is made for a new run in a folder that holds none, or with `resume` for one that goes on. Raises
    the error of the request, and changes nothing, when the folder holds a run that cannot go on as this one.
    """

    keeps = True

    def __init__(self, request: Request, folder: Path, *, resume: bool) -> None:
        self.folder, self.request, self._error = folder, request, request.error
        is_old = any(os.path.lexists(folder / name) for name in (OLD_FILE, OLD_MANIFEST))
        self.path, self.manifest = (
            folder / name for name in ((OLD_FILE, OLD_MANIFEST) if is_old else (FILE, MANIFEST))
        )
        self.cells, self.stored = request.cells * request.batches, 0
        self._worlds = request.cells
        self._shapes: dict[int, tuple[int, ...]] = {}
        manifest = manifest_of(request)
        self._identity = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._error(
                f"{folder} cannot be a folder for a {request.kind}'s store: {error.strerror}."
            ) from None
        self._expect_not_empty()
        self._connection = self._locked()
        try:
            found = self._found()
            if found is None:
                self._create(manifest)
                found = manifest
            else:
                self._expect_same(found, manifest, resume)
            self._write_manifest(found)
        except BaseException:
            self.close()
            raise

    # -- opening -----------------------------------------------------------------------------

    def _rows(self, query: str, *given: object) -> list[Any]:
        """Return the rows that a query finds."""
        try:
            return self._connection.execute(query, given).fetchall()
        except sqlite3.Error as error:
            raise self._refused(error) from None

    def _elsewhere(self, *said: str | Argument) -> ConewiseError:
        """Return an error that ends by asking for another folder."""
        return self._error(*said, Argument("out"), ".")

    def _expect_not_empty(self) -> None:
        """Refuse what SQLite would take for an empty database, and write to."""
        if self.path.is_symlink() and not self.path.exists():
            raise self._elsewhere(
                f"{self.path} is a link that leads nowhere, and it is not followed: remove it, or give "
                "another folder with "
            )
        if self.path.exists() and not self.path.is_file():
            raise self._not_ours()
        # The size is looked at from outside: a file that is opened and closed loses the locks of its process.
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size == 0 and self.manifest.exists():
            raise self._damaged(f"it is missing or empty, and {self.manifest.name} beside it tells of a run")
        if 0 < size < SMALLEST:
            raise self._not_ours()

    def _locked(self) -> sqlite3.Connection:
        """A connection that has the file for itself, until it is closed or the process dies."""
        try:
            connection = sqlite3.connect(self.path, timeout=0.2, isolation_level=None)
        except sqlite3.Error as error:
            raise self._error(f"{self.path} cannot be opened: {error}.") from None
        try:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            connection.close()
            raise self._refused(error) from None
        return connection

    def _refused(self, error: sqlite3.Error) -> ConewiseError:
        code = getattr(error, "sqlite_errorname", "")
        if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return self._elsewhere(
                f"another run is using the store in {self.folder}. Wait until it has ended, or give this one "
                "another folder with "
            )
        if code == "SQLITE_NOTADB":
            return self._not_ours()
        if code.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
            return self._elsewhere(f"{self.path} cannot be written: {error}. Give a folder of your own with ")
        if code.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
            return self._error(
                f"nothing more can be stored in {self.folder}: {error}. Make room on that disk, then go on. ",
                *self.how_to_go_on(),
            )
        return self._damaged(str(error))

    def _not_ours(self) -> ConewiseError:
        return self._elsewhere(
            f"{self.path} is not a {self.request.kind}'s store, or its first page is damaged. It was left as "
            "it is; give another folder with "
        )

    def _damaged(self, what: str) -> ConewiseError:
        return self._error(
            f"the store {self.path} is damaged: {what}. It was left as it is. Put a sound copy in its "
            "place, or start again in another folder."
        )

    def _found(self) -> dict[str, Any] | None:
        """The manifest of the run that is stored here, all of it checked; None where there is none."""
        try:
            ((mark,),) = self._connection.execute("PRAGMA application_id")
            ((version,),) = self._connection.execute("PRAGMA user_version")
            ((tables,),) = self._connection.execute("SELECT count(*) FROM sqlite_master")
            if not mark and not tables:
                return None
            if mark != MARK:
                raise self._not_ours()
            FORMAT.expect_version(version, str(self.path))
            return self._checked()
        except sqlite3.Error as error:
            raise self._refused(error) from None
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise self._damaged(f"something in it cannot be read ({error})") from None

    def _checked(self) -> dict[str, Any]:
        """The manifest, after every page and every checksum was looked at."""
        query = self._connection.execute
        ((verdict,), *_) = query("PRAGMA integrity_check")
        if verdict != "ok":
            raise self._damaged(str(verdict).splitlines()[0])
        rows = list(query("SELECT body, checksum FROM manifest LIMIT 2"))
        if len(rows) != 1 or _checksum("manifest", rows[0][0]) != rows[0][1]:
            raise self._damaged("its manifest does not have the checksum it was stored with")
        self._identity = rows[0][1]
        for batch, body, checksum in query("SELECT batch, body, checksum FROM plans"):
            if self._bound("plan", batch, body) != checksum:
                raise self._damaged(f"the plan of batch {batch} {_FOREIGN}")
        for row in query(_CHUNKS):
            self.stored += self._chunk(*row).shape[0]
        found: dict[str, Any] = parse_json(rows[0][0])
        decoded(found, StoredManifest, "its manifest")
        return found

    def _chunk(self, batch: int, piece: int, shape: str, numbers: bytes, checksum: str) -> Tensor:
        if self._bound("chunk", batch, piece, shape, numbers) != checksum:
            raise self._damaged(f"chunk {piece} of batch {batch} {_FOREIGN}")
        sizes = decoded(parse_json(shape), tuple[int, int, int], "the shape of a chunk")
        if min(sizes) < 0:
            raise ValueError(f"a chunk of shape {sizes}")
        return unpacked(numbers, sizes)

    def _bound(self, *parts: object) -> str:
        """A checksum that holds in this store alone: a row that was stored in another does not have it."""
        return _checksum(self._identity, *parts)

    def _create(self, manifest: dict[str, Any]) -> None:
        body = as_json(manifest)
        self._identity = _checksum("manifest", body)
        try:
            # A rollback journal, not a write-ahead log: nothing but this one file has to be kept or copied,
            # and it works in network folders. EXTRA: a commit is on the disk, directory entry included.
            self._connection.execute("PRAGMA journal_mode = DELETE")
            self._connection.execute("PRAGMA synchronous = EXTRA")
            self._connection.execute("BEGIN EXCLUSIVE")
            for table in _TABLES:
                self._connection.execute(table)
            self._connection.execute(f"PRAGMA application_id = {MARK}")
            self._connection.execute(f"PRAGMA user_version = {FORMAT.version}")
            self._connection.execute("INSERT INTO manifest VALUES (?, ?)", (body, self._identity))
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._refused(error) from None

    def _expect_same(self, stored: dict[str, Any], manifest: dict[str, Any], resume: bool) -> None:
        if not resume:
            raise self._elsewhere(
                f"{self.folder} holds a run already, with {self.stored} of {stored['cells']} "
                f"{self.request.unit} done; it was left as it is. Go on with it with ",
                Argument("resume", True),
                ", or give another folder with ",
            )
        found = differences(_compared(stored), json.loads(as_json(_compared(manifest))))
        if any(line.startswith("sites") for line in found):
            found = [line for line in found if not line.startswith("order of worlds")]  # follows from them
        if found:
            kind = self.request.kind
            lines = "\n".join(f"  {line}" for line in found)
            raise self._elsewhere(
                f"the run in {self.folder} cannot go on as this {kind}, because its numbers would "
                f"not be those of one run. What differs, in the store and now:\n{lines}\n"
                f"The store was left as it is. Make the {kind} as it was, or give another folder with "
            )
        self._connection.execute("PRAGMA synchronous = EXTRA")

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        """A copy of the manifest for people to read; the store itself does not need it."""
        path = self.manifest
        if path.exists():
            return
        try:
            write_whole(path, (json.dumps(manifest, indent=2, default=str) + "\n").encode())
        except OSError as error:
            raise self._error(f"{path} cannot be written: {error.strerror}. ", *self.how_to_go_on()) from None

    # -- the recorder ------------------------------------------------------------------------

    def cut(self, batch: int, evaluator: str) -> StoredCut | None:
        """See `Recorder`."""
        body = self._plan(batch)
        if body is None:
            return None
        if evaluator not in {"auto", body.evaluator}:
            raise self._elsewhere(
                f"the run in {self.folder} was begun with ",
                Argument("evaluator", body.evaluator),
                f", so it cannot go on with {evaluator!r}. Leave ",
                Argument("evaluator"),
                " out, or give another folder with ",
            )
        return StoredCut(body.evaluator, body.chunks)

    def begin(
        self, batch: int, cut: StoredCut, max_memory: int | None, base: Tensor, source: Tensor | None
    ) -> None:
        """See `Recorder`."""
        runs = {"base": _exact(base), "source": None if source is None else _exact(source)}
        if self._shapes.setdefault(batch, tuple(base.shape)) != tuple(base.shape):
            raise self._damaged(f"a chunk of batch {batch} has other metrics or prompts than the run")
        stored = self._plan(batch)
        if stored is None:
            body = as_json(
                {"evaluator": cut.evaluator, "max_memory": max_memory, "chunks": cut.chunks, **runs}
            )
            self._insert("plans", batch, body, self._bound("plan", batch, body))
            return
        for (name, now), then in zip(runs.items(), (stored.base, stored.source), strict=True):
            if then != now:
                raise self._error(
                    f"the {name} run of batch {batch} has the metrics {_shown(now)} now, and had "
                    f"{_shown(then)} when the run in {self.folder} was begun: something that is not "
                    "in its manifest changed (a function's data, the machine). Start again in another folder."
                )

    def get(self, batch: int, piece: int, worlds: int) -> Tensor | None:
        """See `Recorder`."""
        found = self._rows(f"{_CHUNKS} WHERE batch = ? AND piece = ?", batch, piece)
        if not found:
            return None
        rows = self._chunk(*found[0])
        if rows.shape[0] != worlds:
            raise self._damaged(f"chunk {piece} of batch {batch} has {rows.shape[0]} worlds, not {worlds}")
        if rows.shape[1:] != self._shapes.setdefault(batch, tuple(rows.shape[1:])):
            raise self._damaged(f"chunk {piece} of batch {batch} has other metrics or prompts than the run")
        return rows

    def put(self, batch: int, piece: int, rows: Tensor) -> None:
        """See `Recorder`."""
        shape, numbers = json.dumps(list(rows.shape)), packed(rows)
        checksum = self._bound("chunk", batch, piece, shape, numbers)
        self._insert("chunks", batch, piece, shape, numbers, checksum)
        self.stored += rows.shape[0]

    def pieces(self, batch: int) -> list[Tensor]:
        """See `Recorder`."""
        rows = self._rows(f"{_CHUNKS} WHERE batch = ? ORDER BY piece", batch)
        if [row[1] for row in rows] != list(range(len(rows))):
            raise self._damaged(f"chunks of batch {batch} are missing")
        return [self._chunk(*row) for row in rows]

    def how_to_go_on(self) -> tuple[str | Argument, ...]:
        """Return what is stored, and how a run goes on with it."""
        done = f"{self.stored} of {self.cells} {self.request.unit}"
        return (
            f"{done} are stored in {self.folder}; the same run with ",
            Argument("resume", True),
            " goes on from there.",
        )

    def close(self) -> None:
        """Give the file free. What was not committed is rolled back."""
        with suppress(sqlite3.Error):
            self._connection.close()

    def _plan(self, batch: int) -> StoredPlan | None:
        rows = self._rows("SELECT body FROM plans WHERE batch = ?", batch)
        if not rows:
            return None
        try:
            plan: StoredPlan = decoded(parse_json(rows[0][0]), StoredPlan, "the plan")
            for metric in (*plan.base, *(plan.source or ())):
                float.fromhex(metric)
        except (ValueError, OverflowError) as error:
            raise self._damaged(f"the plan of batch {batch} cannot be read ({error})") from None
        is_cut = min(plan.chunks, default=0) > 0 and sum(plan.chunks) == self._worlds
        if plan.evaluator not in {"serial", "wavefront", "gradients", "texts"} or not is_cut:
            raise self._damaged(f"the plan of batch {batch} is not one of {self._worlds} worlds")
        return plan

    def _insert(self, table: str, *values: object) -> None:
        """Store one row in a transaction of its own: all of it is stored, or nothing is."""
        self._rows(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", *values)


def manifest_of(request: Request) -> dict[str, Any]:
    """All that a stored run depends on, and when and with what it was begun."""
    return {
        **FORMAT.header(),
        "cells": request.cells * request.batches,
        "job": request.kind,
        "sweep": request.provenance(),
        "order": hashlib.sha256("\n".join(request.order()).encode()).hexdigest(),
        "machine": machine(request.device),
        "begun_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": secrets.token_hex(16),
    }


def _compared(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal for a run to go on. Manifests of 0.1.0 do not name the kind of the job."""
    kind = manifest.get("job", "attribution" if "attribution" in manifest["sweep"] else "sweep")
    return {
        "job": kind,
        **manifest["sweep"],
        "order of worlds": manifest["order"],
        "machine": manifest["machine"],
    }


def is_store(folder: Path) -> bool:
    """True if a folder holds the store of a job."""
    return any(is_there(folder / name, Path.is_file) for name in (FILE, OLD_FILE))


def _checksum(*parts: object) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(f"{len(data)}:".encode() + data)
    return digest.hexdigest()


def _exact(metrics: Tensor) -> tuple[str, ...]:
    """Every number with all its bits."""
    return tuple(number.hex() for number in metrics.flatten().tolist())


def _shown(metrics: Sequence[str] | None) -> str:
    if metrics is None:
        return "none"
    shown = ", ".join(repr(float.fromhex(number)) for number in metrics[:4])
    return f"{shown}, ..." if len(metrics) > 4 else shown
