"""Selectors: many places at once, as people write them; and cells: the places that one world patches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeGuard

from conewise.anatomy.components import Edges
from conewise.anatomy.places import (
    EdgePlace,
    Place,
    PlaceLike,
    Places,
    as_numbers,
    as_place,
    as_written,
    component,
    read_name,
)
from conewise.anatomy.sites import WHERE
from conewise.arguments import checked, expect, has_items
from conewise.errors import EdgeError, SiteError, SweepError, describe

Choice = int | str | Sequence[int]

AXES = (
    *("layer", "head", "kv_head", "expert", "pos", "query_pos", "key_pos"),
    *("channel", "state", "neuron", "latent", "d", "batch"),
)
"""The axes that can be spread out, in the order in which results show them.

`d` are the features of the residual stream or of a head. Sites of modules have `dim1`, `dim2`, ... besides.
"""

POSITIONS = frozenset({"pos", "query_pos", "key_pos"})
"""Axes whose numbers mean something else in prompts of another length, but where they count from the end."""

FEATURES = ("d_model", "d_head")
"""Names that sites have for the axis that people write as `d`."""


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


class _Summand:
    """A part of what is swept, to which others can be added."""

    __slots__ = ()

    def __add__(self, other: SelectorLike) -> Selectors:
        return Selectors((*as_selectors(self).parts, *as_selectors(other).parts))

    def __radd__(self, other: SelectorLike) -> Selectors:
        return as_selectors(other) + self


@dataclass(frozen=True, slots=True)
class Selector(_Summand):
    """All places of one kind that `choices` allow; an axis that is not named is not cut."""

    name: str
    stack: str
    choices: Mapping[str, Choice]

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


class Sources(Mapping[str, Any]):
    """Sources by label that lie along an axis of a sweep: `cw.add(vector, scale=[0.5, 1, 2])`."""

    def __init__(self, sources: Mapping[str, Any], axis: str) -> None:
        self.axis, self._sources = axis, MappingProxyType(dict(sources))

    def __getitem__(self, label: str) -> Any:
        """The source with that label."""
        return self._sources[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __repr__(self) -> str:
        return f"{len(self)} sources by {self.axis}: {', '.join(self)}"


class SourceAt:
    """A function that gives the source of a place, called once for each; `found` is what it gave."""

    def __init__(self, function: Callable[[Place], Any] | None, found: Mapping[Place, Any]) -> None:
        self._function, self.found = function, dict(found)

    def __call__(self, place: Place) -> Any:
        """The source of a place."""
        if place not in self.found and self._function is not None:
            self.found[place] = self._function(place)
        source = self.found.get(place)
        if source is None:
            raise SweepError(f"source_at gave None for {place}: give a tensor, a run, or an intervention.")
        return source


@dataclass(frozen=True, slots=True, eq=False)
class SourcedCells(_Summand):
    """A world for each of several sources, by label, at places or at each cell of a selector.

    With `at`, each cell of a selector has the source that the function gives for its place, and there is no
    axis besides the selector's.
    """

    of: Selector | tuple[Place, ...]
    sources: Mapping[str, Any]
    axis: str = "label"
    at: SourceAt | None = None

    def __repr__(self) -> str:
        of = repr(self.of) if isinstance(self.of, Selector) else " + ".join(map(str, self.of))
        if self.at is not None:
            return f"cells({of}, source_at=...)"
        return f"cells({of}, {len(self.sources)} sources by {self.axis})"


@dataclass(frozen=True, slots=True, eq=False)
class Pairs(_Summand):
    """A world for each pair of the cells that `of` stands for; with `singles`, one for each of them too."""

    of: Selectors
    singles: bool = False

    def __repr__(self) -> str:
        return f"pairs({self.of!r}{', singles=True' if self.singles else ''})"


Group = tuple[Place | SourcedCell, ...]
"""The places that one world patches, with the sweep's source, and others with their own."""

Part = Selector | SourcedCells | Pairs | Edges | tuple[Group, ...]
"""A part of what stands for cells: a selector, sources at places, pairs, edges, or cells that were listed."""


@dataclass(frozen=True, slots=True)
class Selectors(_Summand):
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
    """Select places of one kind: `sites("z", layer=":", head=":")`.

    `sites("resid_pre", layer="4:8", pos=-1)` selects the last position in four layers. The name can include
    choices: `sites("z[layer=2, head=:]")`. `sites("z.*", head=":")` is short for `sites("z", layer=":",
    head=":")`, and so is `sites("blocks.*.attn.hook_z", head=":")`. `sites("model.layers.*.mlp")` selects a
    module of every layer.

    Each of layer, head, kv_head, expert, pos, query_pos, key_pos, channel, state, neuron, latent, d and batch
    (and dim1, dim2, ... of a module's site) is a number, a list of numbers, a range, or a slice, which can be
    a string: ":" is all, "2:5" is 2, 3, 4. An axis with a plain number is dropped from the result. Selectors
    can be added: `sites(...) + sites(...)`.
    """
    name, layers = _every_layer(name)
    if layers and "layer" not in choices:
        choices = {**choices, "layer": ":"}
    kind, own = read_name(name)
    stack = own.pop("stack", stack)
    if twice := sorted(own.keys() & choices.keys()):
        raise SiteError(f"{name!r} says {twice[0]} already: say it once.")
    name, choices = kind, {**own, **choices}
    # Features, and the numbered axes of a module's site: not every kind of model has them.
    known = (*AXES, *FEATURES)
    unknown = [axis for axis in choices if axis not in known and not re.fullmatch("dim[0-9]+", axis)]
    if unknown:
        raise SiteError(f"no axis {unknown[0]!r}: a selector chooses along {', '.join(AXES)}.")
    plain = {"d" if axis in FEATURES else axis: _as_choice(axis, choice) for axis, choice in choices.items()}
    if len(plain) < len(choices):
        raise SiteError(f"{', '.join(choices)} name an axis twice: `d` is d_model, or d_head.")
    ordered = sorted(plain, key=lambda axis: AXES.index(axis) if axis in AXES else len(AXES))
    return Selector(name, stack, MappingProxyType({axis: plain[axis] for axis in ordered}))


_HOOKS = re.compile(r"blocks\.\*\.(?:attn\.|mlp\.)?hook_(\w+)")


def _every_layer(name: str) -> tuple[str, bool]:
    """A name without what stands for every layer in it, and whether it had that.

    "z" of "z.*" and of "blocks.*.attn.hook_z", "z[layer=:, head=:]" of "L*H*"; a module's path keeps its "*".
    """
    if hooks := _HOOKS.fullmatch(name):
        return hooks[1], True
    if (head := component(name)) is not None and "*" in name:
        return f"z[layer={head[0]}, head={head[1]}]".replace("*", ":"), False
    if (kind := name.removesuffix(".*")) in WHERE or kind.startswith("cross_"):
        return kind, kind != name
    return name, name.count("*") == 1 and "[" not in name


def _as_choice(axis: str, choice: object) -> Choice:
    """A choice as a plain number, a string or a tuple of numbers, whatever kind of number was given."""
    if isinstance(choice, str):
        return ":" if choice.strip() == "*" else choice
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
    """Read what people write for `sites=`: a selector, a sum, a place, a list of places and sets of places.

    With sources of their own, too: cells, or families of them; and pairs.
    """
    if isinstance(given, Selectors):
        return given
    if isinstance(given, Edges):
        if not len(given):
            raise SiteError("a sweep over no edges: choose at least one.")
        return Selectors((given,))
    if isinstance(given, (*_ALONE, SourcedCell, Places)) or is_place(given):
        given = (given,)
    if not isinstance(given, Iterable) or isinstance(given, bytes) or hasattr(given, "dtype"):
        raise SiteError(f"{describe(given)} is no place, no selector, and no list of them.")
    parts: list[Selector | SourcedCells | Pairs | list[Group]] = []
    for item in given:
        if isinstance(item, _ALONE) or _is_selector(item):
            parts.append(sites(item) if isinstance(item, str) else item)
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
    if not isinstance(item, Iterable) or isinstance(item, bytes | range) or hasattr(item, "dtype"):
        raise SiteError(f"{describe(item)} is no place, and no set of places that are patched together.")
    parts = [one if isinstance(one, Places) else (one,) for one in item]
    places = tuple(
        one if isinstance(one, SourcedCell) else as_place(one) for together in parts for one in together
    )
    if not places:
        raise SiteError("a set of no places: a world of a sweep patches at least one.")
    # A set has no order of its own, and a sweep has to have the same one each time.
    return tuple(sorted(places, key=str)) if isinstance(item, Set) else places


def _is_selector(item: object) -> TypeGuard[str]:
    """True for a name that chooses several layers or parts by a slice, "z[layer=2, head=:]"."""
    return isinstance(item, str) and any(isinstance(one, str) for one in read_name(item)[1].values())


def is_place(item: object) -> bool:
    """True if this is one place, as people write it."""
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
        """Return what stands along an axis, by its number: labels where it has some, else numbers."""
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


COLUMNS = frozenset(
    {"site", "kind", "metric", "value", "base", "source", "effect", "normalised", "prompt", "method"}
)
"""Names that a result's table has for other things, so that no axis can have them."""


@checked
def cell(place: PlaceLike | Iterable[PlaceLike], *, source: Any, label: str = "") -> SourcedCell:
    """Create one world of a sweep with its own source: `cw.cell(place, source=cw.add(v, 2.0))`.

    `place` is a site, or several that are patched together. `source` is any source of a sweep (a run, an
    intervention, "zero", "mean", a function of the value), or a tensor or a number. A tensor has the shape of
    the part that it replaces, or of its last axes, and is then broadcast over the others. `label` is its name
    in results; by default it is named after its source.
    """
    if source is None:
        raise SweepError("cw.cell without a source: a place alone, in the list, has the sweep's own source.")
    return SourcedCell(_places(place), source, _label(label))


@checked
def cells(
    place: PlaceLike | Iterable[PlaceLike] | Selector,
    *,
    sources: Mapping[Any, Any] | None = None,
    axis: str = "label",
    source_at: Callable[[Place], Any] | None = None,
) -> SourcedCells:
    """Create one world for each source at a site: `cw.cells(place, sources={"2×": cw.add(v, 2.0)})`.

    The result has an axis for the sources, with their labels, named `axis`. If a selector is given instead of
    a site, the selector's axes come first. See `cell` for the kinds of sources.

    With `source_at` in place of `sources`, the function returns the source of each place of a selector, and
    the result has the selector's own axes: `cw.cells(cw.sites("z", layer=":", head=":"), source_at=lambda
    place: cw.add(v[place.layer]))`.
    """
    if (sources is None) == (source_at is None):
        raise SweepError("cw.cells takes `sources`, by label, or `source_at`, a function of a place: one.")
    if sources is None:
        if not isinstance(place, Selector):
            raise SweepError(
                f"source_at gives a source for each place of a selector, and {describe(place)} is none: "
                "write `cw.sites(...)`, or `cw.cell(place, source=...)` for one place."
            )
        return SourcedCells(place, MappingProxyType({}), at=SourceAt(source_at, {}))
    if isinstance(sources, Sources) and axis == "label":
        axis = sources.axis
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


def with_sources(given: Selectors, sources: Sources) -> Selectors:
    """Each cell of selectors with each of the sources. Raises SweepError for cells that have their own."""
    parts: list[Part] = []
    for part in given.parts:
        groups = part if isinstance(part, tuple) else ()
        if isinstance(part, Selector):
            parts.append(cells(part, sources=sources))
            continue
        places = [[one for one in group if isinstance(one, Place)] for group in groups]
        if not groups or any(len(own) < len(group) for own, group in zip(places, groups, strict=True)):
            raise SweepError(
                f"{sources!r} are an axis of selectors and places, and {part!r} is neither. Give the sweep "
                "one source, or each cell its own."
            )
        parts += [cells(own, sources=sources) for own in places]
    return Selectors(tuple(parts), given.from_end)


@checked
def pairs(sites: SelectorLike, *, singles: bool = False) -> Pairs:
    """Patch every pair of cells, each in its own world: `cw.pairs(cw.sites("z", layer=1, head=":"))`.

    The pairs are unordered, and no cell is paired with itself. With `singles` there is also a world
    for each cell alone, which `result.interactions()` needs.
    """
    of = as_selectors(sites)
    if any(isinstance(part, Pairs) for part in of.parts):
        raise SiteError("pairs of pairs are worlds with up to four places: write them as a list of lists.")
    if any(isinstance(part, Edges) for part in of.parts):
        raise SiteError(
            "pairs are of sites. Sets of edges are lists in a list: [['a0.h1->m2', 'm1->m2'], ...]."
        )
    return Pairs(of, singles)


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
    expect("label", label, "str")
    return label


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
    """True if the places of one world are an edge, or edges from one writer into several readers."""
    edges = [place for place in places if isinstance(place, EdgePlace)]
    return len(edges) == len(places) and len({edge.written_by for edge in edges}) == 1 and not edges[0].also
