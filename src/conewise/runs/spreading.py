"""Spreading: the cells that selectors stand for, in runs of one shape or of several."""

from __future__ import annotations

import itertools
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from conewise.anatomy.components import Edges, edge_place, part_of
from conewise.anatomy.places import EdgePlace, Place, Places, SourcedPlace, as_place
from conewise.anatomy.selectors import (
    AXES,
    FEATURES,
    POSITIONS,
    Cell,
    Choice,
    Group,
    Pairs,
    Part,
    Selector,
    Selectors,
    SourcedCell,
    SourcedCells,
    Spread,
    chosen,
    has_one_writer,
    is_place,
    joined,
    sites,
)
from conewise.anatomy.sites import Located
from conewise.circuits.replaced_parts import edge_facts
from conewise.errors import EdgeError, SiteError, SweepError
from conewise.runs.captured import Captured

Lengths = Callable[[Located], Mapping[str, int]]
"""The lengths of the natural axes of a site."""

Along = dict[str, tuple[int, ...]]
"""The numbers that are chosen along each axis."""


Sourcing = Callable[[Place, Any, str], SourcedPlace]
"""Gives the place with a source of its own and a label; an empty one stands for what the source is called."""

KEPT = 64
"""The number of spreadings of a model that are kept. They lie with it."""
_SPREADINGS = "_spreadings"


@dataclass(frozen=True, slots=True)
class Spreading:
    """Selectors spread out: their cells one after another, the places of each, and what they are called.

    A cell's own places are as they were written; of a module that is called several times, `places` has every
    call.
    """

    spreads: tuple[Spread, ...]
    cells: tuple[Cell, ...]
    places: tuple[tuple[Place, ...], ...]
    names: tuple[str, ...]


def with_named(sites: Any, model: Captured) -> Any:
    """Return what was given for `sites`, with an edge for each name of one, and edges for tables of some."""
    if isinstance(sites, str):
        return _named(sites, model)
    is_whole = is_place(sites) or isinstance(
        sites, Selectors | Selector | Edges | Places | range
    )  # a range may be endless
    if is_whole or not isinstance(sites, Iterable) or hasattr(sites, "dtype"):
        return sites
    cones: dict[str, frozenset[str]] = {}
    return [_item(item, model, cones) for item in sites]


def selector_of(name: str, model: Captured) -> Selector:
    """All places of a name, every layer and head unless it chooses some of them itself."""
    found = sites(name)
    layers = model.sites.layers(found.name, found.stack)
    if not layers:
        return found
    axes = model.locate(Place(found.name, layers[0], found.stack)).view.axes
    usual: dict[str, Choice] = {axis: ":" for axis in ("head", "kv_head") if axis in axes}
    return sites(found.name, stack=found.stack, **{"layer": ":", **usual, **found.choices})


def _named(one: Any, model: Captured) -> Any:
    """The edge of a name, `a0.h1->a3.h2<q>` or at one position `a0.h1->a3.h2<q>@7`; all else as it is.

    A kind, and a name with "*" for every layer, stand for all their places.
    """
    if not isinstance(one, str):
        return one
    if "->" not in one:
        return selector_of(one, model) if "*" in one or one in model.sites.kinds else one
    whole, at, pos = one.partition("@")
    writer, reader = edge_facts(model).components.edge(whole)
    part = dict(part_of(reader))
    if at:
        if not re.fullmatch(r"-?[0-9]+", pos.strip()):
            raise EdgeError(f"{one!r} names no edge: a position is a number, as in 'a0.h1->m3@7'.")
        part["pos"] = int(pos)
    return edge_place(writer, reader, part, f"{at}{pos.strip()}")


def _item(item: Any, model: Captured, cones: dict[str, frozenset[str]]) -> Any:
    """One world's places, or a selector. `cones` are those that were looked at so far."""
    if isinstance(item, str):
        return _named(item, model)
    if isinstance(item, Edges):
        item = item.places
    elif not isinstance(item, list | tuple | set | frozenset) or not any(
        isinstance(one, Edges | EdgePlace) or (isinstance(one, str) and "->" in one) for one in item
    ):
        return item
    own = next((one for one in item if isinstance(one, SourcedCell)), None)
    if own is not None:
        raise EdgeError(
            f"{own!r} has a source of its own, and stands in one world with an edge: give each one."
        )
    parts = (_named(one, model) for one in item)
    found = [place for one in parts for place in (one.places if isinstance(one, Edges) else (one,))]
    if len(found) > 1:
        _expect_apart(found, model, cones)
    # A set has no order of its own, and a sweep has to have the same one each time.
    return sorted(found, key=str) if isinstance(item, set | frozenset) else found


def _expect_apart(places: Sequence[Any], model: Captured, cones: dict[str, frozenset[str]]) -> None:
    """Raise EdgeError where the reader of an edge would hide what is patched before it.

    A reader is patched with what it would be in the base.
    """
    every = model.each_call([as_place(place) for place in places])
    edges = [place for place in every if isinstance(place, EdgePlace)]
    # The logits are of no stack: they are read behind the layers of whichever there are.
    for stack in {edge.stack for edge in edges if edge.layer is not None}:
        wiring = edge_facts(model, stack).components.wiring
        for place, edge in itertools.product(every, edges):
            node = model.locate(place).node
            if node not in cones:
                cones[node] = wiring.cone(node)
            is_there = edge.entry == node and not isinstance(place, EdgePlace)
            if is_there or edge.entry in cones[node]:
                raise EdgeError(
                    f"{place} and {edge} cannot be patched in one world: {edge.edge.partition('->')[2]} is "
                    "patched with what it would be in the base, and would hide what the other changes. Give "
                    "each a world of its own; or remove edges for good, every reader live, by evaluating the "
                    "circuit of all others."
                )


def spread(
    selectors: Selectors, model: Captured, lengths: Sequence[Lengths], sourcing: Sourcing | None = None
) -> Spreading:
    """The cells of each selector, for runs of one shape or of several. An empty choice is an error.

    Along an axis that is longer in some of the runs, a number that counts from the end counts from the end of
    each, and a slice has to mean the same in all of them.

    Cells are kept with the model by what was selected and what that stands for, so that another pair of
    prompts makes none. `sourcing` numbers sources of their own; without it they are refused.
    """
    for part in selectors.parts:
        if isinstance(part, Edges):
            _expect_own(part, model)
    found = _Spreading(model, lengths, sourcing, selectors.from_end)
    along = [found.along(part) if isinstance(part, Selector) else None for part in selectors.parts]
    key = _key(selectors, along)
    if key is None:
        return _joined(model, tuple(found.part(part, number) for number, part in enumerate(selectors.parts)))
    kept: OrderedDict[Hashable, Spreading] = vars(model).setdefault(_SPREADINGS, OrderedDict())
    if key not in kept:
        kept[key] = _joined(
            model, tuple(found.part(part, number) for number, part in enumerate(selectors.parts))
        )
        while len(kept) > KEPT:
            kept.popitem(last=False)
    return kept[key]


def _joined(model: Captured, spreads: tuple[Spread, ...]) -> Spreading:
    cells = tuple(cell for part in spreads for cell in part.cells)
    places = tuple(model.each_call(cell.places) for cell in cells)
    return Spreading(spreads, cells, places, tuple(cell.name for cell in cells))


def _key(selectors: Selectors, along: Sequence[Along | None]) -> Hashable:
    """Return what cells depend on; None where places were listed one by one, or have sources of their own."""
    parts: list[Hashable] = []
    for part, found in zip(selectors.parts, along, strict=True):
        if isinstance(part, Edges):
            parts.append(part)
            continue
        if not isinstance(part, Selector) or found is None:
            return None
        parts.append((part.name, part.stack, tuple(found.items()), _open_axes(part, found)))
    return tuple(parts)


class _Spreading:
    """Spreads parts of a sum of selectors."""

    def __init__(
        self, model: Captured, lengths: Sequence[Lengths], sourcing: Sourcing | None, from_end: bool
    ) -> None:
        self._model, self._lengths, self._sourcing, self._from_end = model, lengths, sourcing, from_end

    def along(self, selector: Selector) -> Along:
        """The numbers along each axis that a selector chooses."""
        return _chosen_along(selector, self._model, self._lengths, self._from_end)

    def part(self, part: Part, number: int) -> Spread:
        """The cells of one part."""
        if isinstance(part, Selector):
            return _spread_selector(part, number, self.along(part))
        if isinstance(part, Edges):
            return _spread_edges(part, number)
        if isinstance(part, SourcedCells):
            return self._sources(part, number)
        if isinstance(part, Pairs):
            return self._pairs(part, number)
        return self._list(part, number)

    def _list(self, groups: tuple[Group, ...], selector: int) -> Spread:
        """Cells that were listed one by one."""
        if not any(isinstance(one, SourcedCell) for group in groups for one in group):
            return _spread_list(groups, selector)  # type: ignore[arg-type]
        found = tuple(tuple(self._places(group)) for group in groups)
        names = [" + ".join(map(str, places)) for places in found]
        is_one_place = len({tuple(map(_bare, places)) for places in found}) == 1
        labels = [_labels(places) for places in found] if is_one_place else names
        twice, count = Counter(names).most_common(1)[0]
        if count > 1:
            raise SweepError(
                f"{count} cells are called {twice!r}; give each its own label: `cw.cell(..., label=...)`."
            )
        cells = tuple(
            Cell(places, selector, MappingProxyType(_coordinates(places[0]) if len(places) == 1 else {}))
            for places in found
        )
        coordinates = (tuple(range(len(cells))),)
        return Spread("cells", ("label",), coordinates, cells, MappingProxyType({"label": tuple(labels)}))

    def _places(self, group: Group) -> Iterable[Place]:
        for one in group:
            if isinstance(one, SourcedCell):
                yield from (self._sourced(place, one.source, one.label) for place in one.places)
            else:
                yield one

    def _sourced(self, place: Place, source: Any, label: str) -> SourcedPlace:
        if self._sourcing is None:
            raise SiteError(f"{place} has a source of its own here, which sweeps alone put in.")
        return self._sourcing(place, source, label)

    def _sources(self, part: SourcedCells, selector: int) -> Spread:
        """A world for each source at each cell of a selector, or at places."""
        if isinstance(part.of, Selector):
            of = self.part(part.of, selector)
        else:
            at = _coordinates(part.of[0]) if len(part.of) == 1 else {}
            name = "+".join(dict.fromkeys(place.name for place in part.of))
            of = Spread(name, (), (), (Cell(part.of, selector, MappingProxyType(at)),))
        cells = []
        if part.at is not None:
            for cell in of.cells:
                (place,) = cell.places
                cells.append(Cell((self._sourced(place, part.at(place), ""),), selector, cell.at))
            return Spread(of.name, of.axes, of.coordinates, tuple(cells))
        for cell in of.cells:
            for number, (label, source) in enumerate(part.sources.items()):
                places = tuple([self._sourced(place, source, label) for place in cell.places])
                cells.append(Cell(places, selector, MappingProxyType({**cell.at, part.axis: number})))
        coordinates = (*of.coordinates, tuple(range(len(part.sources))))
        labels = MappingProxyType({part.axis: tuple(part.sources)})
        return Spread(of.name, (*of.axes, part.axis), coordinates, tuple(cells), labels)

    def _pairs(self, part: Pairs, selector: int) -> Spread:
        """A world for each pair of cells, in order."""
        spreads = [self.part(one, selector) for one in part.of.parts]
        single = [cell for one in spreads for cell in one.cells]
        if len(single) < 2:
            raise SiteError(f"{part!r}: there is one cell, and a pair has two.")
        names = tuple(cell.name for cell in single)
        places = [frozenset(map(self._hole, self._model.each_call(cell.places))) for cell in single]
        cells = []
        for first, one in enumerate(single):
            if part.singles:
                cells.append(Cell(one.places, selector))
            for second in range(first + 1, len(single)):
                both = places[first] & places[second]
                if both:
                    raise SiteError(
                        f"{names[first]} and {names[second]} patch the same place, so that one would hide "
                        "the other in their pair. Choose places that differ."
                    )
                cells.append(Cell(one.places + single[second].places, selector))
        name = f"pairs of {'+'.join(dict.fromkeys(one.name for one in spreads))}"
        labels = MappingProxyType({"pair": tuple([cell.name for cell in cells])})
        return Spread(name, ("pair",), (tuple(range(len(cells))),), tuple(cells), labels, names)

    def _hole(self, place: Place) -> tuple[str, Place]:
        """Return what a place is, whatever name it goes by."""
        return self._model.locate(place).node, Place("", part=place.part)


def _bare(place: Place) -> Place:
    return Place(place.name, place.layer, place.stack, place.part)


def _labels(places: Sequence[Place]) -> str:
    """Return what the sources at places are called, each once."""
    named = [place.label if isinstance(place, SourcedPlace) else "source" for place in places]
    return " + ".join(dict.fromkeys(named))


def _spread_list(places: tuple[tuple[Place, ...], ...], selector: int) -> Spread:
    groups = tuple(map(joined, places))
    cells = tuple(
        Cell(group, selector, MappingProxyType(_coordinates(group[0]) if len(group) == 1 else {}))
        for group in groups
    )
    is_paths = all(has_one_writer(group) for group in groups)
    name, axis = ("paths", "edge") if is_paths else ("sites", "site")
    return Spread(name, (axis,), (tuple(range(len(cells))),), cells)


def _expect_own(edges: Edges, model: Captured) -> None:
    """Raise EdgeError where edges are of another model."""
    known = model.program.record_of
    inputs = {leaf.name for leaf in model.program.inputs}
    for entry in edges.entries:
        if entry not in known and entry not in inputs:
            raise EdgeError(
                f"these edges are of another model: {model.name} has no value {entry!r}. Take them from "
                "`model.edges()` of the model that is swept."
            )


def _spread_edges(edges: Edges, selector: int) -> Spread:
    # Edges into one reader are at the same coordinates, and share them.
    at: dict[int, MappingProxyType[str, int]] = {}
    for place in edges.places:
        if id(place.part) not in at:
            at[id(place.part)] = MappingProxyType(_coordinates(place))
    cells = tuple([Cell((place,), selector, at[id(place.part)]) for place in edges.places])
    return Spread("edges", ("edge",), (tuple(range(len(cells))),), cells)


def _coordinates(place: Place) -> dict[str, int]:
    known = (*AXES, *FEATURES)
    found = {axis: index for axis, index in place.part.items() if axis in known and isinstance(index, int)}
    return ({"layer": place.layer} if place.layer is not None else {}) | found


def _chosen_along(selector: Selector, model: Captured, shapes: Sequence[Lengths], from_end: bool) -> Along:
    """The numbers along each axis that a selector chooses, layers first."""
    table = model.sites
    choices = dict(selector.choices)
    layers: Sequence[int | None] = (None,)
    along: dict[str, tuple[int, ...]] = {}
    if "layer" in choices:
        known = _numbered(selector.name, model) or table.layers(selector.name, selector.stack)
        if not known and "*" in selector.name:
            raise SiteError(
                f"no site matches {selector.name!r}: '*' is the number of a layer, as in 'z.*' and in the "
                "path of a module, 'model.layers.*.mlp'. `model.sites` lists the names."
            )
        if not known:
            model.locate(_place(selector, 0, MappingProxyType({})))  # says why there is none
        choice = choices.pop("layer")
        picked = chosen(choice, max(known) + 1, "layer", selector)
        missing = [layer for layer in picked if layer not in known]
        if isinstance(choice, str) and len(missing) < len(picked):
            picked = [layer for layer in picked if layer in known]  # a slice is of the layers that have it
        elif missing:
            model.locate(_place(selector, missing[0], MappingProxyType({})))
        layers = picked
        along["layer"] = tuple(picked)
    first = _place(selector, layers[0], MappingProxyType({}))
    found, *others = map(model.locate, model.each_call([first]))
    lengths = _lengths(found, shapes)
    for other in others:
        lengths = {axis: own for axis, own in _lengths(other, shapes).items() if lengths.get(axis) == own}
    _expect_alike(selector, model, layers, found, choices)
    for written, choice in choices.items():
        features = next((one for one in FEATURES if one in lengths), written)
        axis = features if written == "d" else written
        if axis not in lengths:
            raise SiteError(
                f"{selector}: this site has no axis {axis!r}; its axes are {', '.join(found.view.axes)}."
                if not others
                else f"{selector}: not all calls of this module have an axis {axis!r} of one length. Choose "
                f"in one call, `sites({found.site.name!r}, ...)`."
            )
        along[axis] = _chosen(choice, lengths[axis], axis, selector, from_end and axis in POSITIONS)
    return along


def _expect_alike(
    selector: Selector,
    model: Captured,
    layers: Sequence[int | None],
    first: Located,
    choices: Mapping[str, Choice],
) -> None:
    """Raise SiteError where a slice does not mean the same in all layers, as heads were removed in some."""
    asked = [axis for axis, choice in choices.items() if isinstance(choice, str)]
    own = _fixed(model, first)
    for layer in layers[1:] if asked else ():
        there = _fixed(model, model.locate(_place(selector, layer, MappingProxyType({}))))
        for axis in asked:
            if axis in own and own[axis] != there.get(axis, own[axis]):
                raise SiteError(
                    f"{selector}: layer {layers[0]} has {own[axis]} along {axis}, and layer {layer} has "
                    f"{there[axis]}, so that {axis}={choices[axis]} does not mean the same in both. Sweep a "
                    f"list: `[cw.sites({selector.name!r}, layer=0, {axis}=':'), ...]`."
                )


def _fixed(model: Captured, found: Located) -> dict[str, int]:
    """The lengths of the axes of a site that are the same in every run."""
    shape = model.program.shapes.get(found.node) or ()
    alone = {
        packed[0]: size for packed, size in zip(found.view.packing, shape, strict=False) if len(packed) == 1
    }
    known = {**alone, **found.view.lengths}
    return {axis: length for axis, length in known.items() if isinstance(length, int)}


def _lengths(found: Located, shapes: Sequence[Lengths]) -> dict[str, tuple[int, ...]]:
    """The lengths of each axis of a site, one for each shape that runs have."""
    every = [lengths_of(found) for lengths_of in shapes]
    return {axis: tuple([lengths[axis] for lengths in every]) for axis in every[0]}


def _chosen(
    choice: Choice, lengths: Sequence[int], axis: str, selector: Selector, from_end: bool
) -> tuple[int, ...]:
    """The numbers that a choice stands for, the same along an axis of any of these lengths."""
    picked = {length: chosen(choice, length, axis, selector) for length in dict.fromkeys(lengths)}
    front = {tuple(numbers) for numbers in picked.values()}
    end = {tuple([number - length for number in numbers]) for length, numbers in picked.items()}
    alike = [found.pop() for found in ([end] if from_end else [front, end]) if len(found) == 1]
    if alike:
        return alike[0]
    if not isinstance(choice, str) and not from_end:
        return (choice,) if isinstance(choice, int) else tuple(choice)
    raise SiteError(
        f"{selector}: the batches have lengths {', '.join(map(str, picked))} along {axis}, so that "
        f"{axis}={choice} does not mean the same in all of them. Count from the end ({axis}=-1 is the last "
        "of each), sweep batches of one length, or leave it out."
    )


def _spread_selector(selector: Selector, number: int, along: Along) -> Spread:
    cells = []
    for point in itertools.product(*along.values()):
        at = dict(zip(along, point, strict=True))
        layer = at.get("layer")
        part = {axis: index for axis, index in at.items() if axis != "layer"}
        place = _place(selector, layer, MappingProxyType(part))
        cells.append(Cell((place,), number, MappingProxyType(at)))
    open_axes = _open_axes(selector, along)
    return Spread(selector.name, open_axes, tuple(along[axis] for axis in open_axes), tuple(cells))


def _place(selector: Selector, layer: int | None, part: Mapping[str, Any]) -> Place:
    """A place of a selector; of a module's path, "*" is the layer."""
    if "*" in selector.name:
        return Place(selector.name.replace("*", str(layer)), None, selector.stack, part)
    return Place(selector.name, layer, selector.stack, part)


def _numbered(name: str, model: Captured) -> tuple[int, ...]:
    """The numbers that "*" stands for in the names of sites, "model.layers.*.mlp"."""
    pattern = re.compile(re.escape(name).replace(r"\*", "([0-9]+)", 1))
    found = (pattern.fullmatch(site.name) for site in model.sites) if name.count("*") == 1 else ()
    return tuple(sorted({int(match[1]) for match in found if match}))


def _open_axes(selector: Selector, along: Along) -> tuple[str, ...]:
    """The axes along which a selector chooses, and not one plain number."""
    chose = zip(along, selector.choices.values(), strict=True)
    return tuple(axis for axis, choice in chose if not isinstance(choice, int))
