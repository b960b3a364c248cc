"""Sets of edges: those that people name among the places of a sweep, and those of one world together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conewise.errors import EdgeError
from conewise.locations.edges import Edges, place_of
from conewise.locations.located import Located
from conewise.locations.places import EdgePlace, Place, Places, as_place
from conewise.locations.selectors import Selector, Selectors, SourcedCell, is_place
from conewise.structure.components.components import Components


@dataclass(frozen=True, slots=True)
class _Model:
    """What is asked of the model that is swept. `cones` are those that were looked at so far."""

    components: Callable[[str], Components]
    locate: Callable[[Place], Located]
    each_call: Callable[[Sequence[Place]], Sequence[Place]]
    cones: dict[str, frozenset[str]] = field(default_factory=dict)


def with_named(
    sites: Any,
    components: Callable[[str], Components],
    locate: Callable[[Place], Located],
    each_call: Callable[[Sequence[Place]], Sequence[Place]],
) -> Any:
    """What was given for `sites`, with an edge for each name of one, and single edges for tables of some.

    `components` gives those of a stack, `locate` the node that a place is a part of, `each_call` the places
    that the path of a module means.
    """
    model = _Model(components, locate, each_call)
    if isinstance(sites, str):
        return _named(sites, model)
    if (
        is_place(sites)
        or isinstance(sites, Selectors | Selector | Edges | Places)
        or not isinstance(sites, Iterable)
        or hasattr(sites, "dtype")
    ):
        return sites
    return [_item(item, model) for item in sites]


def _named(one: Any, model: _Model) -> Any:
    return _edge(one, model.components("")) if isinstance(one, str) and "->" in one else one


def _item(item: Any, model: _Model) -> Any:
    """One world's places, or a selector."""
    if isinstance(item, str):
        return _named(item, model)
    if isinstance(item, Edges):
        item = item.places
    elif not isinstance(item, list | tuple | set | frozenset) or not any(map(_is_edge, item)):
        return item
    own = next((one for one in item if isinstance(one, SourcedCell)), None)
    if own is not None:
        raise EdgeError(
            f"{own!r} has a source of its own, and stands in one world with an edge: give each one."
        )
    found = [part for one in item for part in _parts(_named(one, model))]
    if len(found) > 1:
        _expect_apart(found, model)
    # A set has no order of its own, and a sweep has to have the same one each time.
    return sorted(found, key=str) if isinstance(item, set | frozenset) else found


def _is_edge(one: object) -> bool:
    return isinstance(one, Edges | EdgePlace) or (isinstance(one, str) and "->" in one)


def _parts(found: Any) -> Sequence[Any]:
    return found.places if isinstance(found, Edges) else (found,)


def _expect_apart(places: Sequence[Any], model: _Model) -> None:
    """Raise EdgeError where the reader of an edge would hide what is patched before it.

    A reader is patched with what it would be in the base.
    """
    every = model.each_call([as_place(place) for place in places])
    edges = [place for place in every if isinstance(place, EdgePlace)]
    # The logits are of no stack: they are read behind the layers of whichever there are.
    for stack in {edge.stack for edge in edges if edge.layer is not None}:
        wiring = model.components(stack).wiring
        for place, edge in itertools.product(every, edges):
            node = model.locate(place).node
            if node not in model.cones:
                model.cones[node] = wiring.cone(node)
            is_there = edge.entry == node and not isinstance(place, EdgePlace)
            if is_there or edge.entry in model.cones[node]:
                raise EdgeError(
                    f"{place} and {edge} cannot be patched in one world: {edge.edge.partition('->')[2]} is "
                    "patched with what it would be in the base, and would hide what the other changes. Give "
                    "each a world of its own; or remove edges for good, every reader live, by evaluating the "
                    "circuit of all others."
                )


def _edge(name: str, components: Components) -> EdgePlace:
    """The edge of that name, `a0.h1->a3.h2<q>` or at one position `a0.h1->a3.h2<q>@7`."""
    whole, at, pos = name.partition("@")
    writer, reader = components.edge(whole)
    place = place_of(reader)
    part = dict(place.part)
    if at:
        if not re.fullmatch(r"-?[0-9]+", pos.strip()):
            raise EdgeError(f"{name!r} names no edge: a position is a number, as in 'a0.h1->m3@7'.")
        part["pos"] = int(pos)
    shown = f"{writer.name}->{reader.name}{at}{pos.strip()}"
    return EdgePlace(place.name, place.layer, place.stack, part, shown, writer.number, reader.entry)


def joined(places: tuple[Place, ...]) -> tuple[Place, ...]:
    """The places of one world, several edges into one reader as one place.

    That reader sees the stream with another part of each of their writers. Raises EdgeError where they cannot
    be patched together.
    """
    readers: dict[Any, list[EdgePlace]] = {}
    for place in places:
        if isinstance(place, EdgePlace):
            readers.setdefault(_reader(place), []).append(place)
    if all(len(own) == 1 for own in readers.values()):
        return places
    ones = {edge: one for own in readers.values() for one, edges in _by_position(own) for edge in edges}
    return tuple(dict.fromkeys(ones[place] if isinstance(place, EdgePlace) else place for place in places))


def _reader(place: EdgePlace) -> tuple[Any, ...]:
    part = sorted((axis, str(index)) for axis, index in place.part.items() if axis != "pos")
    return place.name, place.layer, place.stack, *part


def _by_position(edges: Sequence[EdgePlace]) -> Iterator[tuple[EdgePlace, list[EdgePlace]]]:
    """Edges into one reader: for each position one place, and the edges that it stands for."""
    at: dict[Any, list[EdgePlace]] = {}
    for edge in edges:
        at.setdefault(edge.part.get("pos"), []).append(edge)
    names = " and ".join(map(str, edges))
    if len({None if pos is None else pos < 0 for pos in at}) > 1:
        raise EdgeError(
            f"{names} lead into one reader at positions that may be the same: name the positions of each, "
            "counted from the front."
        )
    for own in at.values():
        if len(own) > 1 and any(edge.live for edge in own):
            raise EdgeError(
                f"{names} lead through live components into one receiver, which can be patched for one of "
                "them at a time: give each a world of its own."
            )
        if len({edge.writer for edge in own}) < len(own):
            raise EdgeError(f"{names} are patched together, and one of them is named twice.")
        first, *others = sorted(own, key=lambda edge: edge.writer)
        also = tuple(edge.writer for edge in others)
        name = " + ".join(edge.edge for edge in (first, *others))
        yield replace(first, edge=name, also=also), own


def has_one_writer(places: Sequence[Place]) -> bool:
    """Whether the places of one world are an edge, or edges from one writer into several readers."""
    edges = [place for place in places if isinstance(place, EdgePlace)]
    return len(edges) == len(places) and len({edge.written_by for edge in edges}) == 1 and not edges[0].also
