"""Spreading: the cells that selectors stand for, in runs of one shape."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from conewise.errors import EdgeError, SiteError
from conewise.locations.edge_sets import has_one_writer, joined
from conewise.locations.edges import Edges
from conewise.locations.located import Located
from conewise.locations.places import Place
from conewise.locations.selectors import AXES, Cell, Selector, Selectors, Spread, chosen
from conewise.runs.captured import Captured

Lengths = Callable[[Located], Mapping[str, int]]
"""The lengths of the natural axes of a site."""

Along = dict[str, tuple[int, ...]]
"""The numbers that are chosen along each axis."""


KEPT = 64
"""How many spreadings of a model are kept. They lie with it."""
_SPREADINGS = "_spreadings"


@dataclass(frozen=True, slots=True)
class Spreading:
    """Selectors spread out: their cells one after another, the places of each, and what they are called."""

    spreads: tuple[Spread, ...]
    cells: tuple[Cell, ...]
    places: tuple[tuple[Place, ...], ...]
    names: tuple[str, ...]


def spread(selectors: Selectors, model: Captured, lengths: Lengths) -> Spreading:
    """The cells of each selector, for runs of one shape. An empty choice is an error.

    Cells are kept with the model by what was selected and what that stands for, so that another pair of
    prompts makes none.
    """
    for part in selectors.parts:
        if isinstance(part, Edges):
            _expect_own(part, model)
    along = [
        _chosen_along(part, model, lengths) if isinstance(part, Selector) else None
        for part in selectors.parts
    ]
    key = _key(selectors, along)
    if key is None:
        return _spread(selectors, along)
    kept: OrderedDict[Hashable, Spreading] = vars(model).setdefault(_SPREADINGS, OrderedDict())
    if key not in kept:
        kept[key] = _spread(selectors, along)
        while len(kept) > KEPT:
            kept.popitem(last=False)
    return kept[key]


def _key(selectors: Selectors, along: Sequence[Along | None]) -> Hashable:
    """What cells depend on; None where places were listed one by one."""
    parts: list[Hashable] = []
    for part, found in zip(selectors.parts, along, strict=True):
        if isinstance(part, Edges):
            parts.append(part)
            continue
        if not isinstance(part, Selector) or found is None:
            return None
        is_open = tuple(not isinstance(part.choices[axis], int) for axis in found)
        parts.append((part.name, part.stack, tuple(found.items()), is_open))
    return tuple(parts)


def _spread(selectors: Selectors, along: Sequence[Along | None]) -> Spreading:
    spreads = tuple(
        _spread_selector(part, number, found or {})
        if isinstance(part, Selector)
        else _spread_edges(part, number)
        if isinstance(part, Edges)
        else _spread_list(part, number)
        for number, (part, found) in enumerate(zip(selectors.parts, along, strict=True))
    )
    cells = tuple(cell for part in spreads for cell in part.cells)
    return Spreading(spreads, cells, tuple(cell.places for cell in cells), tuple(cell.name for cell in cells))


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
    for entry in {place.entry for place in edges.places}:
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
    found = {axis: index for axis, index in place.part.items() if axis in AXES and isinstance(index, int)}
    return ({"layer": place.layer} if place.layer is not None else {}) | found


def _chosen_along(selector: Selector, model: Captured, lengths_of: Lengths) -> Along:
    """The numbers along each axis that a selector chooses, layers first."""
    table = model.sites
    choices = dict(selector.choices)
    layers: Sequence[int | None] = (None,)
    along: dict[str, tuple[int, ...]] = {}
    if "layer" in choices:
        known = table.layers(selector.name, selector.stack)
        if not known:
            model.locate(Place(selector.name, 0, selector.stack))  # says why there is none
        choice = choices.pop("layer")
        picked = chosen(choice, max(known) + 1, "layer", selector)
        missing = [layer for layer in picked if layer not in known]
        if isinstance(choice, str) and len(missing) < len(picked):
            picked = [layer for layer in picked if layer in known]  # a slice is of the layers that have it
        elif missing:
            model.locate(Place(selector.name, missing[0], selector.stack))
        layers = picked
        along["layer"] = tuple(picked)
    first = Place(selector.name, layers[0], selector.stack)
    found = model.locate(first)
    lengths = lengths_of(found)
    for axis, choice in choices.items():
        if axis not in lengths:
            raise SiteError(
                f"{selector}: this site has no axis {axis!r}; its axes are {', '.join(found.view.axes)}."
            )
        along[axis] = tuple(chosen(choice, lengths[axis], axis, selector))
    return along


def _spread_selector(selector: Selector, number: int, along: Along) -> Spread:
    cells = []
    for point in itertools.product(*along.values()):
        at = dict(zip(along, point, strict=True))
        layer = at.get("layer")
        part = {axis: index for axis, index in at.items() if axis != "layer"}
        place = Place(selector.name, layer, selector.stack, MappingProxyType(part))
        cells.append(Cell((place,), number, MappingProxyType(at)))
    open_axes = [axis for axis in along if not isinstance(selector.choices[axis], int)]
    return Spread(selector.name, tuple(open_axes), tuple(along[axis] for axis in open_axes), tuple(cells))
