"""Edges and paths between components, as tables that can be swept."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from conewise.anatomy.components import Components, Reader, Writer
from conewise.anatomy.places import EdgePlace, Index, as_numbers, component_name, edge_name
from conewise.arguments import has_items
from conewise.errors import EdgeError, nearest
from conewise.extras import needs

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 8
"""The number of edges of a table that are printed."""


@dataclass(frozen=True, eq=False, repr=False)
class Edges:
    """Edges, each with the names of its writer and of its reader; `places` say where they are patched.

    They are a selector: `model.sweep(edges, ...)` has one world for each. `edges["a0.h1->m2"]` is one of
    them, `edges[:100]` are some, `edges.select(writer="a0.*", reader="*<k>")` those with such names.
    """

    places: tuple[EdgePlace, ...]
    writers: tuple[str, ...]
    readers: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the edges, in order: those into earlier readers come first."""
        return tuple([place.edge for place in self.places])

    @cached_property
    def entries(self) -> frozenset[str]:
        """The values of the stream that their readers read."""
        return frozenset({place.entry for place in self.places})

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, chosen: int | slice | str | Sequence[str]) -> Edges:
        """Some of the edges: by number, by a slice, by a name or a list of names."""
        if isinstance(chosen, int):
            if isinstance(chosen, bool) or not -len(self) <= chosen < len(self):
                raise EdgeError(f"no edge {chosen!r}: there are {len(self)}, from 0.")
            return self._picked([range(len(self))[chosen]])
        if isinstance(chosen, slice) and chosen.step != 0:
            return self._picked(range(len(self))[chosen])
        if not has_items(chosen):
            raise EdgeError(
                f"edges are chosen by a number, a slice, a name or a list of names, not by {chosen!r}."
            )
        numbers = {name: number for number, name in enumerate(self.names)}
        wanted = [chosen] if isinstance(chosen, str) else list(chosen)
        wanted = [edge_name(str(one)) if one not in numbers else one for one in wanted]
        for name in wanted:
            if name not in numbers:
                raise EdgeError(f"no edge {name!r} among these {len(self)}.{nearest(str(name), numbers)}")
        return self._picked([numbers[name] for name in wanted])

    def __add__(self, other: object) -> Edges:
        """These edges, and those of `other` that are not among them."""
        if not isinstance(other, Edges):
            return NotImplemented
        known = set(self.places)
        new = other._picked([number for number, place in enumerate(other.places) if place not in known])
        return Edges(self.places + new.places, self.writers + new.writers, self.readers + new.readers)

    def select(self, *, writer: str = "*", reader: str = "*") -> Edges:
        """The edges whose writer and reader have names like these; * is anything: "a0.*", "*<q>", "m?"."""
        for given in (writer, reader):
            if not isinstance(given, str):
                raise EdgeError(f"a component is named by a text such as 'a0.*' or 'm1', not by {given!r}.")
        writer, reader = component_name(writer), component_name(reader)
        pairs = zip(self.writers, self.readers, strict=True)
        found = [
            number
            for number, (one, other) in enumerate(pairs)
            if fnmatch.fnmatchcase(one, writer) and fnmatch.fnmatchcase(other, reader)
        ]
        if not found:
            raise EdgeError(f"no edge from {writer!r} to {reader!r} among these {len(self)}.")
        return self._picked(found)

    def _picked(self, numbers: Sequence[int]) -> Edges:
        return Edges(
            tuple([self.places[number] for number in numbers]),
            tuple([self.writers[number] for number in numbers]),
            tuple([self.readers[number] for number in numbers]),
        )

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each edge: its name, its writer, its reader, the site that is patched."""
        with needs("tables"):
            import pandas as pd  # noqa: PLC0415

        sites = [place.name for place in self.places]
        layers = pd.array([place.layer for place in self.places], dtype="Int64")
        columns: dict[str, Any] = {"edge": list(self.names), "writer": list(self.writers)}
        return pd.DataFrame({**columns, "reader": list(self.readers), "site": sites, "layer": layers})

    def __repr__(self) -> str:
        writers, readers = len(set(self.writers)), len(set(self.readers))
        return f"{len(self):,} edges from {writers} writers to {readers} readers"

    def __str__(self) -> str:
        names = list(self.names)
        shown = names if len(names) <= SHOWN else [*names[: SHOWN // 2], "...", *names[-SHOWN // 2 :]]
        return "\n".join([repr(self), *(f"  {name}" for name in shown)])


def as_positions(pos: object) -> tuple[int, ...]:
    """Positions as plain numbers. Raises EdgeError for what are none."""
    try:
        found = as_numbers(pos)
    except TypeError:
        raise EdgeError(
            f"pos is a number or a list of numbers, as in range(5), and {pos!r} is neither."
        ) from None
    numbers = (found,) if isinstance(found, int) else found
    if not numbers or len(set(numbers)) < len(numbers):
        raise EdgeError(f"pos has to name one position or several different ones, not {pos!r}.")
    return numbers


def part_of(reader: Reader) -> Mapping[str, Index]:
    """The part of a reader's site that is the reader: its head, or all."""
    is_all = reader.axis is None or reader.head is None
    return MappingProxyType({} if is_all else {reader.axis: reader.head})  # type: ignore[dict-item]


def edge_place(
    writer: Writer, reader: Reader, part: Mapping[str, Index], end: str = "", live: str = ""
) -> EdgePlace:
    """The place of an edge; `end` is what its name has behind those of writer and reader."""
    name = f"{writer.name}->{reader.name}{end}"
    return EdgePlace(*reader.site, part, name, writer.number, reader.entry, live)


def edges_of(components: Components, pos: Sequence[int] | None = None) -> Edges:
    """All edges between components, reader by reader; with `pos`, one for each of these positions."""
    places: list[EdgePlace] = []
    writers: list[str] = []
    readers: list[str] = []
    for reader in components.readers:
        part = part_of(reader)
        parts: list[tuple[str, Mapping[str, Index]]] = [("", part)]
        if pos is not None:
            parts = [(f"@{one}", MappingProxyType({**part, "pos": one})) for one in pos]
        for writer in components.writers[: reader.writers]:
            for end, own in parts:
                places.append(edge_place(writer, reader, own, end))
                writers.append(writer.name)
                readers.append(reader.name)
    return Edges(tuple(places), tuple(writers), tuple(readers))


FREEZE = {"all": "", "attention": "mlps", "none": "all"}
"""The components that are live between sender and receiver, by what is frozen."""

Senders = str | Iterable[str]
Receivers = str | Iterable[str | Iterable[str]]


def paths_of(
    components: Components, senders: Senders, receivers: Receivers, freeze: str
) -> list[tuple[EdgePlace, ...]]:
    """The places of each pair of a sender and a receiver behind it; receivers may be sets, patched together.

    Names may hold `*`. A receiver without a slot, `a9.h6`, stands for all slots that the head has. Raises
    EdgeError where nothing has such a name, or no sender stands before a receiver.
    """
    if freeze not in FREEZE:
        raise EdgeError(
            f"freeze={freeze!r} is none of 'all' (the direct path alone), 'attention' (MLPs between are "
            "live) and 'none' (all between are live)."
        )
    live = FREEZE[freeze]
    known = {one.name: one for one in components.writers}
    names = (name for one in _several(senders, "senders") for name in _matching(one, known, "sender"))
    writers = [known[name] for name in dict.fromkeys(names)]
    found: list[tuple[EdgePlace, ...]] = []
    for group in _receivers(components, receivers):
        for writer in writers:
            behind = [reader for reader in group if writer.number < reader.writers]
            if behind:
                via = f" via {live}" if live else ""
                path = (edge_place(writer, reader, part_of(reader), via, live) for reader in behind)
                found.append(tuple(path))
    if not found:
        raise EdgeError("no path: none of the receivers reads what one of the senders has written.")
    return found


def _receivers(components: Components, given: Receivers) -> list[tuple[Reader, ...]]:
    known = {one.name: one for one in components.readers}
    found: list[tuple[Reader, ...]] = []
    for one in _several(given, "receivers"):
        if isinstance(one, str):
            found += [(known[name],) for name in _matching(one, known, "receiver")]
            continue
        members = dict.fromkeys(
            name for each in _several(one, "receivers") for name in _matching(each, known, "receiver")
        )
        if not members:
            raise EdgeError("a set of no receivers: a world patches at least one.")
        found.append(tuple(known[name] for name in members))
    return list(dict.fromkeys(found))


def _several(given: Any, what: str) -> list[Any]:
    """Return what was given for senders or receivers as a list."""
    if not has_items(given) or isinstance(given, range):  # which may be endless
        raise EdgeError(f"{what} are a name such as 'a0.h1', which may hold `*`, or a list, not {given!r}.")
    return [given] if isinstance(given, str) else list(given)


def _matching(given: object, known: Iterable[str], what: str) -> list[str]:
    """The names that are meant by one that may hold `*`, or may lack its slot."""
    names = list(known)
    if not isinstance(given, str):
        raise EdgeError(f"a {what} is named by a text such as {names[-1]!r}, not by {given!r}.")
    given = component_name(given)
    found = [name for name in names if fnmatch.fnmatchcase(name, given)]
    found = found or [name for name in names if fnmatch.fnmatchcase(name, f"{given}<*>")]
    if not found:
        near = nearest(given, names, cutoff=0.4)
        raise EdgeError(f"no {what} {given!r} among the {len(names)} of this model.{near}")
    return found
