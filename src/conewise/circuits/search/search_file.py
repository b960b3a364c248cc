"""The file of a search: the decisions so far, so that a search that was cut off goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conewise.circuits.circuit.decision import Decision
from conewise.errors import Argument, CircuitError
from conewise.files import expect_file, write_whole
from conewise.reading import as_path, read_json

FORMAT, VERSION = "conewise search", 1


class SearchFile:
    """Decisions in a file, written whole each time. `identity` is all that they depend on."""

    def __init__(self, path: Path, identity: str, decisions: Sequence[Decision] = ()) -> None:
        self.path, self.identity, self.decisions = path, identity, tuple(decisions)

    @classmethod
    def opened(cls, out: str | Path | None, resume: bool, identity: Callable[[], str]) -> SearchFile:
        """The file of a new search, or with `resume` of one that goes on; one that is not there is begun.

        Raises CircuitError where it cannot be written, or is of another search.
        """
        if out is None:
            raise CircuitError(
                Argument("resume", True),
                " without ",
                Argument("out"),
                ": say in which file the search was kept.",
            )
        path, own = as_path(out), identity()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            expect_file(path)
            is_there = path.exists()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise CircuitError(f"the search cannot be kept in {path}: {why}. Name another file.") from None
        if not is_there:
            return cls(path, own)
        if not resume:
            raise CircuitError(
                f"{path} is there already. Go on with the search that it is of with ",
                Argument("resume", True),
                ", or name another file.",
            )
        return cls(path, own, _read(path, own))

    def write(self, log: Sequence[Decision]) -> None:
        """Keep these decisions. Raises CircuitError where that cannot be."""
        rows = [(one.edge, one.kept, one.change) for one in log]
        found = {"format": FORMAT, "version": VERSION, "identity": self.identity, "decisions": rows}
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


def _read(path: Path, identity: str) -> list[Decision]:
    try:
        found: Any = read_json(path)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError("it is no file of a search")
        if found.get("version") != VERSION:
            raise ValueError(f"it is of version {found.get('version')!r}, and {VERSION} can be read")
        rows = found["decisions"]
        decisions = [Decision(edge, kept, float(change)) for edge, kept, change in rows]
        if not all(isinstance(row[0], str) and isinstance(row[1], bool) for row in rows):
            raise ValueError("its decisions are not (edge, kept, change)")
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = getattr(error, "strerror", None) or error
        raise CircuitError(
            f"the search in {path} cannot be read: {why}. Begin again in another file."
        ) from None
    if found.get("identity") != identity:
        raise CircuitError(
            f"the search in {path} is another one: other weights, inputs, metric, threshold or options. "
            "Begin again in another file."
        )
    return decisions
