"""Paths: from senders to receivers, with what lies between frozen or live, as places that worlds patch."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable
from typing import Any

from conewise.arguments import has_items
from conewise.errors import EdgeError
from conewise.locations.edges import place_of
from conewise.locations.places import EdgePlace
from conewise.structure.components.components import Components, Reader, Writer

FREEZE = {"all": "", "attention": "mlps", "none": "all"}
"""What is frozen between sender and receiver, and what is live then."""

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
    writers = _senders(components, senders)
    found: list[tuple[EdgePlace, ...]] = []
    for group in _receivers(components, receivers):
        for writer in writers:
            behind = [reader for reader in group if writer.number < reader.writers]
            if behind:
                found.append(tuple(_path(writer, reader, live) for reader in behind))
    if not found:
        raise EdgeError("no path: none of the receivers reads what one of the senders has written.")
    return found


def _path(writer: Writer, reader: Reader, live: str) -> EdgePlace:
    place = place_of(reader)
    via = f" via {live}" if live else ""
    name = f"{writer.name}->{reader.name}{via}"
    return EdgePlace(
        place.name, place.layer, place.stack, place.part, name, writer.number, reader.entry, live
    )


def _senders(components: Components, given: Senders) -> list[Writer]:
    names = _several(given, "senders")
    known = {one.name: one for one in components.writers}
    return list(dict.fromkeys(known[name] for one in names for name in _matching(one, known, "sender")))


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
    """What was given for senders or receivers, as a list."""
    if not has_items(given):
        raise EdgeError(f"{what} are a name such as 'a0.h1', which may hold `*`, or a list, not {given!r}.")
    return [given] if isinstance(given, str) else list(given)


def _matching(given: object, known: Iterable[str], what: str) -> list[str]:
    """The names that are meant by one that may hold `*`, or may lack its slot."""
    names = list(known)
    if not isinstance(given, str):
        raise EdgeError(f"a {what} is named by a text such as {names[-1]!r}, not by {given!r}.")
    found = [name for name in names if fnmatch.fnmatchcase(name, given)]
    found = found or [name for name in names if fnmatch.fnmatchcase(name, f"{given}<*>")]
    if not found:
        near = difflib.get_close_matches(given, names, n=3, cutoff=0.4)
        nearest = f" Nearest: {', '.join(near)}." if near else ""
        raise EdgeError(f"no {what} {given!r} among the {len(names)} of this model.{nearest}")
    return found
