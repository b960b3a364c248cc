"""Selectors: many places at once, as people write them; and cells: the places that one world patches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from conewise.arguments import checked
from conewise.errors import SiteError, describe
from conewise.locations.edges import Edges
from conewise.locations.places import Place, PlaceLike, Places, as_numbers, as_place, as_written

Choice = int | str | Sequence[int]

AXES = ("layer", "head", "kv_head", "pos", "query_pos", "key_pos", "neuron", "latent", "d", "batch")
"""The axes that can be spread out, in the order in which results show them.

`d` are the features of the residual stream or of a head. Sites of modules have `dim1`, `dim2`, ... besides.
"""

POSITIONS = frozenset({"pos", "query_pos", "key_pos"})
"""Axes whose numbers mean something else in prompts of another length, but where they count from the end."""

FEATURES = ("d_model", "d_head")
"""What a site calls the axis that people write as `d`."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One world of a sweep: the places that it patches, and where it stands in its selector."""

    places: tuple[Place, ...]
    selector: int
    at: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def name(self) -> str:
        """The places, in words."""
        return " + ".join(map(str, self.places))

    @property
    def kind(self) -> str:
        """The kind of its site, or of its sites."""
        return "+".join(dict.fromkeys(place.name for place in self.places))

    def __repr__(self) -> str:
        return f"Cell({self.name})"


@dataclass(frozen=True, slots=True)
class Selector:
    """All places of one kind that `choices` allow; an axis that is not named is not cut."""

    name: str
    stack: str
    choices: Mapping[str, Choice]

    def __add__(self, other: SelectorLike) -> Selectors:
        return Selectors((self,)) + other

    def __radd__(self, other: SelectorLike) -> Selectors:
        return as_selectors(other) + self

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(f'{axis}={choice}' for axis, choice in self.choices.items())}]"

    def __repr__(self) -> str:
        return as_written("sites", self.name, {"stack": self.stack or None, **self.choices})


@dataclass(frozen=True, slots=True, eq=False)
class SourcedCell:
    """Places that one world patches with a source of their own. `label` is what it is called, or empty."""

    places: tuple[Place, ...]
    source: Any
    label: str = ""

    def __repr__(self) -> str:
        named = f", label={self.label!r}" if self.label else ""
        return f"cell({' + '.join(map(str, self.places))}{named})"


@dataclass(frozen=True, slots=True, eq=False)
class SourcedCells:
    """A world for each of several sources, by label, at places or at each cell of a selector."""

    of: Selector | tuple[Place, ...]
    sources: Mapping[str, Any]
    axis: str = "label"

    def __add__(self, other: SelectorLike) -> Selectors:
        return Selectors((self,)) + other

    def __radd__(self, other: SelectorLike) -> Selectors:
        return as_selectors(other) + self

    def __repr__(self) -> str:
        of = repr(self.of) if isinstance(self.of, Selector) else " + ".join(map(str, self.of))
        return f"cells({of}, {len(self.sources)} sources by {self.axis})"


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """A world for each pair of the cells that `of` stands for; with `singles`, one for each of them too."""

    of: Selectors
    singles: bool = False

    def __add__(self, other: SelectorLike) -> Selectors:
        return Selectors((self,)) + other

    def __radd__(self, other: SelectorLike) -> Selectors:
        return as_selectors(other) + self

    def __repr__(self) -> str:
        return f"pairs({self.of!r}{', singles=True' if self.singles else ''})"


Group = tuple[Place | SourcedCell, ...]
"""What one world patches: places with the sweep's source, and others with their own."""

Part = Selector | SourcedCells | Pairs | Edges | tuple[Group, ...]
"""What stands for cells: a selector, sources at places, pairs, edges, or cells that were listed."""


@dataclass(frozen=True, slots=True)
class Selectors:
    """A sum of selectors: the cells of the first, then those of the second, and so on.

    With `from_end`, the positions of cells are counted from the end: -1 is the last.
    """

    parts: tuple[Part, ...]
    from_end: bool = False

    def __repr__(self) -> str:
        return " + ".join(
            f"[{len(part)} cells by name]"
            if isinstance(part, tuple)
            else f"[{part!r}]"
            if isinstance(part, Edges)
            else repr(part)
            for part in self.parts
        )

    def __add__(self, other: SelectorLike) -> Selectors:
        return Selectors((*self.parts, *as_selectors(other).parts))

    def __radd__(self, other: SelectorLike) -> Selectors:
        return as_selectors(other) + self


SelectorLike = (
    Selector
    | Selectors
    | SourcedCell
    | SourcedCells
    | Pairs
    | Edges
    | PlaceLike
    | Iterable[
        "Selector | SourcedCell | SourcedCells | Pairs | PlaceLike | Iterable[PlaceLike | SourcedCell]"
    ]
)


@checked
def sites(name: str, *, stack: str = "", **choices: Choice | slice | range) -> Selector:
    """Places of one kind: `sites("z", layer=":", head=":")`, `sites("resid_pre", layer="4:8", pos=-1)`.

    Each of layer, head, kv_head, pos, query_pos, key_pos, neuron, latent, d and batch (and dim1, dim2, ... of
    a module's site) is a number, a list of numbers, a range, or a slice, which may be a string: ":" is all,
    "2:5" is 2, 3, 4. Along an axis with a plain number lies no axis of the result. Selectors add up:
    `sites(...) + sites(...)`.
    """
    unknown = [axis for axis in choices if axis not in AXES and not _is_axis(axis)]
    if unknown:
        raise SiteError(f"no axis {unknown[0]!r}: a selector chooses along {', '.join(AXES)}.")
    plain = {_axis(axis): _as_choice(axis, choice) for axis, choice in choices.items()}
    if len(plain) < len(choices):
        raise SiteError(f"{', '.join(choices)} name an axis twice: `d` is d_model, or d_head.")
    ordered = sorted(plain, key=lambda axis: AXES.index(axis) if axis in AXES else len(AXES))
    return Selector(name, stack, MappingProxyType({axis: plain[axis] for axis in ordered}))


def _is_axis(axis: str) -> bool:
    """Whether some site may have an axis of this name that not every kind of model has."""
    return axis in FEATURES or re.fullmatch("dim[0-9]+", axis) is not None


def _axis(axis: str) -> str:
    return "d" if axis in FEATURES else axis


def _as_choice(axis: str, choice: object) -> Choice:
    """A choice as a plain number, a string or a tuple of numbers, whatever kind of number was given."""
    if isinstance(choice, str):
        return choice
    if isinstance(choice, slice):
        bounds = (choice.start, choice.stop, choice.step)
        return ":".join("" if bound is None else str(bound) for bound in bounds)
    try:
        return as_numbers(choice)
    except TypeError:
        raise SiteError(
            f"{axis}={choice!r} is no choice. Write a number, a list, or a slice like ':' or '2:5'."
        ) from None


def as_selectors(given: SelectorLike | Any) -> Selectors:
    """What people may write for `sites=`: a selector, a sum, a place, a list of places and sets of places.

    With sources of their own, too: cells, or families of them; and pairs.
    """
    if isinstance(given, Selectors):
        return given
    if isinstance(given, _ALONE):
        return Selectors((given,))
    if isinstance(given, Edges):
        if not len(given):
            raise SiteError("a sweep over no edges: choose at least one.")
        return Selectors((given,))
    if is_place(given):
        return Selectors((((as_place(given),),),))
    if isinstance(given, SourcedCell):
        return Selectors((((given,),),))
    if isinstance(given, Places):
        return Selectors(((tuple(given),),))
    if not isinstance(given, Iterable) or isinstance(given, bytes) or hasattr(given, "dtype"):
        raise SiteError(f"{describe(given)} is no place, no selector, and no list of them.")
    parts: list[Selector | SourcedCells | Pairs | list[Group]] = []
    for item in given:
        if isinstance(item, _ALONE):
            parts.append(item)
            continue
        if not parts or not isinstance(parts[-1], list):
            parts.append([])
        parts[-1].append(_as_group(item))  # type: ignore[union-attr]
    if not parts:
        raise SiteError("a sweep over no sites: give at least one place or selector.")
    return Selectors(tuple(tuple(part) if isinstance(part, list) else part for part in parts))


_ALONE = (Selector, SourcedCells, Pairs)


def _as_group(item: object) -> Group:
    """The places that one world patches: one, or several together."""
    if isinstance(item, SourcedCell):
        return (item,)
    if is_place(item):
        return (as_place(item),)
    if not isinstance(item, Iterable) or isinstance(item, bytes) or hasattr(item, "dtype"):
        raise SiteError(f"{describe(item)} is no place, and no set of places that are patched together.")
    parts = [one if isinstance(one, Places) else (one,) for one in item]
    places = tuple(
        one if isinstance(one, SourcedCell) else as_place(one) for together in parts for one in together
    )
    if not places:
        raise SiteError("a set of no places: a world of a sweep patches at least one.")
    # A set has no order of its own, and a sweep has to have the same one each time.
    return tuple(sorted(places, key=str)) if isinstance(item, Set) else places


def is_place(item: object) -> bool:
    """Whether this is one place, as people write it."""
    return isinstance(item, Place | str) or (
        isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], int)
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """A selector spread out in a model: its cells, and the axes along which they lie.

    `labels` are those along axes that have names in place of numbers. Of pairs, `ends` are the names of the
    single cells: the pairs come in order, (0, 1), (0, 2), ..., (1, 2), ...; with singles, (0, 0), (0, 1), ...
    """

    name: str
    axes: tuple[str, ...]
    coordinates: tuple[tuple[int, ...], ...]
    cells: tuple[Cell, ...]
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    ends: tuple[str, ...] = ()

    def pairs(self) -> list[tuple[int, int]]:
        """The two single cells of each cell, by number; twice the same one where it stands alone."""
        count = len(self.ends)
        alone = 0 if len(self.cells) == count * (count + 1) // 2 else 1
        return [(one, other) for one in range(count) for other in range(one + alone, count)]

    def labels_of(self, axis: int) -> list[str]:
        """What stands along an axis, by its number: labels where it has some, else numbers."""
        named = self.labels.get(self.axes[axis])
        return list(named) if named is not None else [str(number) for number in self.coordinates[axis]]

    @property
    def shape(self) -> tuple[int, ...]:
        """The natural shape of the results."""
        return tuple(len(along) for along in self.coordinates)

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.shape)) or "1"
        return f"Spread of {self.name} over {shape} cells ({', '.join(self.axes)})"


def chosen(choice: Choice, length: int, axis: str, where: object) -> list[int]:
    """The indices that a choice stands for, all of them from 0 up; `where` is what a message is about."""
    choice = _as_choice(axis, choice)
    if isinstance(choice, int):
        picked = [choice]
    elif isinstance(choice, str):
        try:
            bounds = [int(bound) if bound.strip() else None for bound in choice.split(":")]
            picked = list(range(length))[slice(*bounds)] if len(bounds) > 1 else [int(choice)]
        except (ValueError, TypeError):
            raise SiteError(
                f"{where}: {axis}={choice!r} is no choice. Write a number, a list, or a slice like "
                "':' or '2:5'."
            ) from None
    else:
        picked = list(choice)
    outside = [index for index in picked if not -length <= index < length]
    if outside:
        raise SiteError(f"{where}: {axis} {outside[0]} is out of range; there are {length}, from 0.")
    if not picked:
        raise SiteError(f"{where}: {axis}={choice!r} chooses nothing; there are {length}, from 0.")
    places = [index % length for index in picked]
    if len(set(places)) < len(places):
        raise SiteError(f"{where}: {axis}={choice!r} names an entry twice.")
    return places
