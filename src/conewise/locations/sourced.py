"""Cells with sources of their own, and pairs of cells, as people write them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from conewise.arguments import checked, has_items
from conewise.errors import SiteError, SweepError, describe
from conewise.locations.edges import Edges
from conewise.locations.places import EdgePlace, Place, PlaceLike, as_place
from conewise.locations.selectors import (
    AXES,
    Pairs,
    Selector,
    SelectorLike,
    SourcedCell,
    SourcedCells,
    as_selectors,
    is_place,
)

COLUMNS = frozenset(
    {"site", "kind", "metric", "value", "base", "source", "effect", "normalised", "prompt", "method"}
)
"""Names that a result's table has for other things, so that no axis can have them."""


@checked
def cell(place: PlaceLike | Iterable[PlaceLike], *, source: Any, label: str = "") -> SourcedCell:
    """One world of a sweep with a source of its own: `cw.cell(place, source=cw.add(v, 2.0))`.

    `place` is a place, or several that are patched together. `source` is what a sweep takes as its own (a
    run, an intervention, "zero", "mean", a function of what is there), a tensor, or a number. A tensor has
    the shape of the part that it replaces, or of the last axes of it, and is the same for all before.
    `label` is what results call it; else it is called by what the source is.
    """
    if source is None:
        raise SweepError("cw.cell without a source: a place alone, in the list, has the sweep's own source.")
    return SourcedCell(_places(place), source, _label(label))


@checked
def cells(
    place: PlaceLike | Iterable[PlaceLike] | Selector, *, sources: Mapping[Any, Any], axis: str = "label"
) -> SourcedCells:
    """A world for each of several sources at one place: `cw.cells(place, sources={"2×": cw.add(v, 2.0)})`.

    The result has one axis for them, with their labels; with a selector in place of a place, the selector's
    axes come before it. `axis` is what that axis is called. See `cell` for what a source can be.
    """
    if not isinstance(sources, Mapping):
        raise SweepError(
            f"sources are given by label, as in {{'2×': cw.add(v, 2.0)}}, and {describe(sources)} has no "
            "labels."
        )
    if not sources:
        raise SweepError("cw.cells without sources: give at least one, by label.")
    labels = [str(label) for label in sources]
    twice, count = Counter(labels).most_common(1)[0]
    if count > 1:
        raise SweepError(f"{count} sources have the label {twice!r}; give each its own.")
    for label, source in zip(labels, sources.values(), strict=True):
        _label(label)
        if source is None:
            raise SweepError(f"the source {label!r} is None: give a tensor, a run, or an intervention.")
    if not str(axis).isidentifier() or axis in AXES or axis in COLUMNS:
        raise SweepError(
            f"axis={axis!r} cannot be what the axis of the sources is called: it is a name such as "
            "'coefficient', and none that results have for something else."
        )
    of = place if isinstance(place, Selector) else _places(place)
    return SourcedCells(of, MappingProxyType(dict(zip(labels, sources.values(), strict=True))), axis)


@checked
def pairs(sites: SelectorLike, *, singles: bool = False) -> Pairs:
    """A world for each pair of cells, two places changed: `cw.pairs(cw.sites("z", layer=1, head=":"))`.

    The pairs are unordered, and no cell is paired with itself. With `singles` there is a world for each
    cell alone besides, in the same pass: `result.interactions()` needs them.
    """
    of = as_selectors(sites)
    if any(isinstance(part, Pairs) for part in of.parts):
        raise SiteError("pairs of pairs are worlds with up to four places: write them as a list of lists.")
    if any(isinstance(part, Edges) for part in of.parts):
        raise SiteError(
            "pairs are of sites. Sets of edges are lists in a list: [['a0.h1->m2', 'm1->m2'], ...]."
        )
    return Pairs(of, bool(singles))


def _places(given: PlaceLike | Iterable[PlaceLike]) -> tuple[Place, ...]:
    """One place or several, none of them an edge, which has what its writer puts out."""
    if isinstance(given, Selector):
        raise SiteError(f"{given!r} is a selector, and a cell has one place. Use `cw.cells` with it.")
    if is_place(given):
        places: tuple[Place, ...] = (as_place(given),)
    elif has_items(given):
        places = tuple(as_place(one) for one in given)
    else:
        places = (as_place(given),)  # says what is wrong
    if not places:
        raise SiteError("a cell of no places: it patches at least one.")
    for place in places:
        if isinstance(place, EdgePlace) or "->" in place.name:
            raise SweepError(
                f"{place} is an edge, and edges have the sweep's source: give it to `model.sweep` as "
                "`source`, and the edge as it is."
            )
    return places


def _label(label: object) -> str:
    if not isinstance(label, str) or (label and not label.strip()) or "\n" in label:
        raise SweepError(f"a label is a short text on one line, not {label!r}.")
    return label
