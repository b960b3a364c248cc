"""Selectors: many places at once, as people write them; and cells: the places that one world patches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType

from conewise.errors import SiteError
from conewise.locations.edges import Edges
from conewise.locations.places import Place, PlaceLike, as_numbers, as_place, as_written

Choice = int | str | Sequence[int]

AXES = ("layer", "head", "kv_head", "pos", "neuron", "latent")
"""The axes that can be spread out, in the order in which results show them."""


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


@dataclass(frozen=True, slots=True)
class Selectors:
    """A sum of selectors: the cells of the first, then those of the second, and so on."""

    parts: tuple[Selector | Edges | tuple[tuple[Place, ...], ...], ...]

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
    Selector | Selectors | Edges | PlaceLike | Iterable["Selector | PlaceLike | Iterable[PlaceLike]"]
)


def sites(name: str, *, stack: str = "", **choices: Choice) -> Selector:
    """Places of one kind: `sites("z", layer=":", head=":")`, `sites("resid_pre", layer="4:8", pos=-1)`.

    Each of layer, head, kv_head, pos, neuron and latent is a number, a list of numbers, or a slice as a
    string: ":" is all, "2:5" is 2, 3, 4. Selectors add up: `sites(...) + sites(...)`.
    """
    unknown = [axis for axis in choices if axis not in AXES]
    if unknown:
        raise SiteError(f"no axis {unknown[0]!r}: a selector chooses along {', '.join(AXES)}.")
    ordered = {axis: _as_choice(axis, choices[axis]) for axis in AXES if axis in choices}
    return Selector(name, stack, MappingProxyType(ordered))


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


def as_selectors(given: SelectorLike) -> Selectors:
    """What people may write for `sites=`: a selector, a sum, a place, a list of places and sets of places."""
    if isinstance(given, Selectors):
        return given
    if isinstance(given, Selector):
        return Selectors((given,))
    if isinstance(given, Edges):
        if not len(given):
            raise SiteError("a sweep over no edges: choose at least one.")
        return Selectors((given,))
    if is_place(given):
        return Selectors((((as_place(given),),),))
    if not isinstance(given, Iterable):
        raise SiteError(f"{given!r} is no place, no selector, and no list of them.")
    parts: list[Selector | list[tuple[Place, ...]]] = []
    for item in given:
        if isinstance(item, Selector):
            parts.append(item)
            continue
        if not parts or isinstance(parts[-1], Selector):
            parts.append([])
        parts[-1].append(_as_group(item))  # type: ignore[union-attr]
    if not parts:
        raise SiteError("a sweep over no sites: give at least one place or selector.")
    return Selectors(tuple(part if isinstance(part, Selector) else tuple(part) for part in parts))


def _as_group(item: object) -> tuple[Place, ...]:
    """The places that one world patches: one, or several together."""
    if is_place(item):
        return (as_place(item),)
    if not isinstance(item, Iterable):
        raise SiteError(f"{item!r} is no place, and no set of places that are patched together.")
    places = tuple(as_place(place) for place in item)
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
    """A selector spread out in a model: its cells, and the axes along which they lie."""

    name: str
    axes: tuple[str, ...]
    coordinates: tuple[tuple[int, ...], ...]
    cells: tuple[Cell, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The natural shape of the results."""
        return tuple(len(along) for along in self.coordinates)

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.shape)) or "1"
        return f"Spread of {self.name} over {shape} cells ({', '.join(self.axes)})"


def chosen(choice: Choice, length: int, axis: str, where: object) -> list[int]:
    """The indices that a choice stands for, all of them from 0 up; `where` is what a message is about."""
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
