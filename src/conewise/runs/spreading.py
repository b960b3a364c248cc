"""Spreading: the cells that selectors stand for, in runs of one shape."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from conewise.errors import SiteError
from conewise.locations.located import Located
from conewise.locations.places import Place
from conewise.locations.selectors import AXES, Cell, Selector, Selectors, Spread, chosen
from conewise.runs.captured import Captured

Lengths = Callable[[Located], Mapping[str, int]]
"""The lengths of the natural axes of a site."""


def spread(selectors: Selectors, model: Captured, lengths: Lengths) -> tuple[Spread, ...]:
    """The cells of each selector, for runs of one shape. An empty choice is an error."""
    return tuple(
        _spread_selector(part, place, model, lengths)
        if isinstance(part, Selector)
        else _spread_list(part, place)
        for place, part in enumerate(selectors.parts)
    )


def _spread_list(places: tuple[tuple[Place, ...], ...], selector: int) -> Spread:
    cells = tuple(
        Cell(group, selector, MappingProxyType(_coordinates(group[0]) if len(group) == 1 else {}))
        for group in places
    )
    return Spread("sites", ("site",), (tuple(range(len(cells))),), cells)


def _coordinates(place: Place) -> dict[str, int]:
    found = {axis: index for axis, index in place.part.items() if axis in AXES and isinstance(index, int)}
    return ({"layer": place.layer} if place.layer is not None else {}) | found


def _spread_selector(selector: Selector, number: int, model: Captured, lengths_of: Lengths) -> Spread:
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
    cells = []
    for point in itertools.product(*along.values()):
        at = dict(zip(along, point, strict=True))
        layer = at.get("layer")
        part = {axis: index for axis, index in at.items() if axis != "layer"}
        place = Place(selector.name, layer, selector.stack, MappingProxyType(part))
        cells.append(Cell((place,), number, MappingProxyType(at)))
    open_axes = [axis for axis in along if not isinstance(selector.choices[axis], int)]
    return Spread(selector.name, tuple(open_axes), tuple(along[axis] for axis in open_axes), tuple(cells))
