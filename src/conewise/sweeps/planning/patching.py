"""The cells of a sweep: which nodes they patch, and which nodes are computed in which worlds."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from conewise.anatomy.axes import View, resolved, selected
from conewise.anatomy.places import EdgePlace, Place, SourcedPlace, Writers
from conewise.anatomy.sites import Located
from conewise.errors import SweepError
from conewise.reactive.graph import Graph
from conewise.sweeps.planning.layout import Layout
from conewise.sweeps.planning.regions import RegionFinder
from conewise.sweeps.planning.schedule import Schedule, mask_of_members, schedule
from conewise.sweeps.planning.shapes import ShapeFacts
from conewise.sweeps.planning.spec import StandingEdit, first_position, only_length

Edits = tuple[StandingEdit, ...]


class Patching:
    """The nodes that cells patch, and the schedules that follow. Nothing here depends on a size.

    `cells` has the places that each world patches, `targets` are the nodes that metrics read. With
    `is_function`, a place is given a function of its value, and no value of its own. `edits` stand in the
    base.
    """

    def __init__(
        self,
        graph: Graph,
        cells: Sequence[Sequence[Place]],
        targets: tuple[str, ...],
        locate: Callable[[Place], Located],
        *,
        is_function: bool = False,
    ) -> None:
        self.graph, self.cells, self.targets, self.is_function = graph, len(cells), targets, is_function
        self.groups = place_groups(cells, locate)
        expect_swept(self.groups)
        self._again: dict[tuple[Edits, tuple[str, ...]], Edits] = {}
        self._schedules: dict[tuple[Edits, tuple[int, ...]], Schedule] = {}

    @cached_property
    def computed(self) -> tuple[str, ...]:
        """All nodes that a run computes for the targets."""
        graph, rules = self.graph, self.graph.table.rules
        support = graph.table.support(graph.numbers(self.targets), ())
        return tuple(graph.name(number) for number in support if rules[number] is not None)

    @cached_property
    def nodes_of_cells(self) -> list[tuple[str, ...]]:
        """The nodes that each cell patches."""
        found: list[tuple[str, ...]] = [()] * self.cells
        for group in self.groups:
            own = (group.node,)
            for cell in group.cells:
                found[cell] = found[cell] + own if found[cell] else own
        return found

    @cached_property
    def cells_by_nodes(self) -> dict[tuple[str, ...], list[int]]:
        """The cells that patch the same nodes: they compute the same."""
        found: dict[tuple[str, ...], list[int]] = {}
        for cell, nodes in enumerate(self.nodes_of_cells):
            found.setdefault(nodes, []).append(cell)
        return found

    @cached_property
    def edge_groups(self) -> dict[str, list[PlaceGroup]]:
        """The groups of places into which edges lead, by node."""
        found: dict[str, list[PlaceGroup]] = {}
        for group in self.groups:
            if group.writers is not None:
                found.setdefault(group.node, []).append(group)
        return found

    def made_again(self, edits: Edits, nodes: tuple[str, ...]) -> Edits:
        """Return the edits downstream of these nodes: a world that patches the nodes makes them again."""
        if not edits:
            return ()
        if (edits, nodes) not in self._again:
            cone = self.graph.table.cone(set(self.graph.numbers(nodes)))
            self._again[edits, nodes] = tuple(e for e in edits if self.graph.number(e.node) in cone)
        return self._again[edits, nodes]

    def edited(self, edits: Edits, world_of: Sequence[int]) -> dict[StandingEdit, list[int]]:
        """Return the worlds that make each edit again, given the world of each cell."""
        found: dict[StandingEdit, list[int]] = {}
        for nodes, cells in self.cells_by_nodes.items():
            for edit in self.made_again(edits, nodes):
                found.setdefault(edit, []).extend(world_of[cell] for cell in cells)
        return found

    def schedule(self, edits: Edits, world_of: Sequence[int]) -> Schedule:
        """Return which nodes are computed in which worlds, given the world of each cell; it is kept."""
        key = edits, tuple(world_of)
        if key in self._schedules:
            return self._schedules[key]
        patched: dict[str, list[int]] = {}
        whole: dict[str, list[int]] = {}
        for group in self.groups:
            worlds = [world_of[cell] for cell in group.cells]
            patched.setdefault(group.node, []).extend(worlds)
            is_function = self.is_function if group.sources is None else group.is_function
            if group.is_whole and not is_function:
                whole.setdefault(group.node, []).extend(worlds)
        for edit, worlds in self.edited(edits, world_of).items():
            patched.setdefault(edit.node, []).extend(worlds)
            if edit.covers:
                whole.setdefault(edit.node, []).extend(worlds)
        put, replaced = (
            {node: mask_of_members(worlds) for node, worlds in one.items()} for one in (patched, whole)
        )
        found = self._schedules[key] = schedule(self.graph, put, replaced, self.cells, self.targets)
        return found


def axis_lengths(located: Located, facts: ShapeFacts) -> dict[str, int]:
    """Return the lengths of the natural axes of a site, in runs of this shape."""
    shape = facts.costs.shape(located.node) or ()
    view = located.view if located.result is None else located.z_view
    lengths = dict(zip(view.axes, view.lengths_in(shape, facts.layout.sizes(1)), strict=True))
    if located.result is not None:
        width = (facts.costs.shape(located.result.projection.name) or (1,))[-1]
        return {axis: lengths.get(axis, width) for axis in located.view.axes}
    return lengths


def first_changes(
    groups: Sequence[PlaceGroup],
    numbers: Sequence[Sequence[tuple[int, ...]]],
    cells: int,
    finder: RegionFinder,
    layout: Layout,
    from_source: Mapping[str, int],
) -> tuple[int, ...]:
    """For each cell, the first position that it changes; 0 where nothing is known.

    `from_source` has the nodes whose values in the source differ from the base's from a position on only.
    """
    length = only_length(layout)
    found = [length] * cells
    for group, own in zip(groups, numbers, strict=True):
        if "pos" in group.axes and _shows_positions(group, finder):
            at = group.axes.index("pos")
            for cell, index in zip(group.cells, own, strict=True):
                found[cell] = min(found[cell], index[at])
            continue
        start = _start(group, length, finder, from_source)
        for cell in group.cells:
            found[cell] = min(found[cell], start)
    return tuple(found)


def _start(group: PlaceGroup, length: int, finder: RegionFinder, from_source: Mapping[str, int]) -> int:
    """The first position of a group that selects no single one."""
    if not finder.has_rows(group.node) or "pos" in group.axes:
        return 0
    part = group.place.part.get("pos")
    if part is None:
        if group.sources is not None:
            return 0  # what is not the source's differs from the base anywhere
        return from_source.get(group.node, 0)
    return first_position(part, length) if _shows_positions(group, finder) else 0


def _shows_positions(group: PlaceGroup, finder: RegionFinder) -> bool:
    view: View = group.located.site.view or group.located.view
    return finder.has_rows(group.node) and finder.shows_positions(group.node, view)


# -- fill tables: a few for each node, however many worlds -------

Fixed = tuple[tuple[str, tuple[str, tuple[Any, ...]]], ...]
"""The selection that all of a group share: axes, and the list or the slice as (start, stop, step)."""


@dataclass(frozen=True, slots=True)
class EdgeFill:
    """The edges that worlds patch: the `writers` of each, and `entry`, where their readers read.

    Each has one writer, or each has several at once.

    `work` is how many nodes are computed for one writer, `at_once` for how many writers they are at a time.
    `live` is what is computed anew between writer and reader.
    """

    as_row: ClassVar[bool] = True

    writers: tuple[Writers, ...]
    entry: str
    work: int
    at_once: int
    live: str = ""


@dataclass(frozen=True, slots=True)
class OwnFill:
    """The sources of worlds that have their own: the number of each, and how it is put in.

    `how` is that of their places: see `SourcedPlace`. Where it is no value and no shift, all have one source.
    """

    as_row: ClassVar[bool] = True

    sources: tuple[int, ...]
    how: str


@dataclass(frozen=True, slots=True)
class FillTable:
    """Parts of one site that `worlds` put in. `site` is its name, layer and stack.

    `axes` are those along which each world selects one number, `index` has these numbers, axis by axis.
    `fixed` is what all of them select besides. `ordinal` is which of its world's places it is: later ones
    are written over earlier ones. With `edit`, what is put in is not the intervention's, but the edit of that
    number that stands in the base, made again. With `edges`, each world puts in what the site is when its
    reader sees another part of one writer. With `own`, each has a source of its own.
    """

    node: str
    site: tuple[str, int | None, str]
    ordinal: int
    worlds: tuple[int, ...]
    axes: tuple[str, ...]
    index: tuple[tuple[int, ...], ...]
    fixed: Fixed
    edit: int | None = None
    edges: EdgeFill | None = None
    own: OwnFill | None = None

    @property
    def part(self) -> dict[str, Any]:
        """The selection that all worlds share, as it is written in a place."""
        return {axis: slice(*one[1]) if one[0] == "slice" else list(one[1]) for axis, one in self.fixed}

    @property
    def is_source(self) -> bool:
        """True if what is put in is the sweep's: no edit of the base, no edge, no source of a cell's own."""
        return self.edit is None and self.edges is None and self.own is None

    def of(self, first: int, count: int) -> FillTable | None:
        """The rows of `count` worlds from `first` on, which is then world 0; None where there are none."""
        begin, end = (bisect.bisect_left(self.worlds, world) for world in (first, first + count))
        if begin == end:
            return None
        edges, own = self.edges, self.own
        return replace(
            self,
            worlds=tuple([world - first for world in self.worlds[begin:end]]),
            index=tuple([along[begin:end] for along in self.index]),
            edges=None if edges is None else replace(edges, writers=edges.writers[begin:end]),
            own=None if own is None else replace(own, sources=own.sources[begin:end]),
        )


@dataclass(slots=True)
class PlaceGroup:
    """Places of one site that are selected alike, cell by cell. `located` is the site with the fixed part.

    `writers` has those of edges, cell by cell; None where the places are no edges' readers. `sources` has the
    numbers of sources, cell by cell, where cells have some of their own, and `how` says how they are put in.
    `largest` is how many numbers the largest of them has.
    """

    located: Located
    place: Place
    ordinal: int
    axes: tuple[str, ...]
    fixed: Fixed
    cells: list[int] = field(default_factory=list)
    index: list[tuple[int, ...]] = field(default_factory=list)
    writers: list[Writers] | None = None
    sources: list[int] | None = None
    how: str = ""
    largest: int = 0

    @property
    def is_function(self) -> bool:
        """True if what cells' own sources put in depends on what is there."""
        return self.how in {"shift", "function"}

    @property
    def node(self) -> str:
        """The node of the graph whose value the site is."""
        return self.located.node

    @property
    def is_whole(self) -> bool:
        """True if the places are the whole site."""
        return not self.axes and not self.fixed


def place_groups(cells: Sequence[Sequence[Place]], locate: Callable[[Place], Located]) -> list[PlaceGroup]:
    """All places of all cells, in groups. `cells` has the places of each."""
    groups: dict[tuple[Any, ...], PlaceGroup] = {}
    known: dict[int, _Selected] = {}  # many places share the mapping that says which part is meant
    for number, places in enumerate(cells):
        for ordinal, place in enumerate(places):
            part = known.get(id(place.part))
            if part is None:
                part = known[id(place.part)] = _Selected(place)
            live = (place.live, bool(place.also)) if isinstance(place, EdgePlace) else None
            source = _sourced(place) if isinstance(place, SourcedPlace) else None
            key = place.name, place.layer, place.stack, ordinal, part.axes, part.fixed, live, source
            group = groups.get(key)
            if group is None:
                group = groups[key] = PlaceGroup(locate(place), place, ordinal, part.axes, part.fixed)
                group.writers = None if live is None else []
                if isinstance(place, SourcedPlace):
                    group.sources, group.how = [], place.how
            group.cells.append(number)
            if group.writers is not None:
                group.writers.append(place.written_by)  # type: ignore[attr-defined]
            if group.sources is not None:
                group.sources.append(place.number)  # type: ignore[attr-defined]
                group.largest = max(group.largest, place.size)  # type: ignore[attr-defined]
            group.index.append(part.numbers)
    return list(groups.values())


def _sourced(place: SourcedPlace) -> tuple[str, int]:
    """Return the key that places of one group share: only values and shifts of several sources share one."""
    return place.how, -1 if place.how in {"value", "shift"} else place.number


class _Selected:
    """The selection of a place: one number along some axes, and what is fixed along others."""

    __slots__ = ("axes", "fixed", "numbers")

    def __init__(self, place: Place) -> None:
        single = [(axis, part) for axis, part in place.part.items() if type(part) is int]
        self.axes = tuple([axis for axis, _ in single])
        self.numbers = tuple([part for _, part in single])
        self.fixed: Fixed = tuple(
            [(axis, _plain(part)) for axis, part in place.part.items() if type(part) is not int]
        )


def _plain(part: Any) -> tuple[str, tuple[Any, ...]]:
    if isinstance(part, slice):
        return "slice", (part.start, part.stop, part.step)
    return "list", tuple(part)


def expect_swept(groups: Sequence[PlaceGroup]) -> None:
    """Raise SweepError for places that no node holds."""
    for group in groups:
        if group.located.result is not None:
            raise SweepError(
                f"{group.place} is computed from z and is no node of the graph: it cannot be swept. Sweep z: "
                "patching a head's z patches its result."
            )


def counted_from_front(group: PlaceGroup, lengths: Mapping[str, int]) -> list[tuple[int, ...]]:
    """The numbers of a group, none of them negative. Raises MissingSiteError for one outside of its axis."""
    axes = group.located.view.axes
    shape = [lengths[axis] for axis in axes]
    resolved(axes, {axis: group.place.part[axis] for axis, _ in group.fixed}, shape)
    columns = []
    for place, axis in enumerate(group.axes):
        along = [numbers[place] for numbers in group.index]
        size = lengths[axis]
        for number in (min(along), max(along)):
            if not -size <= number < size:
                resolved(axes, {axis: number}, shape)  # says what is wrong
        columns.append([number % size for number in along])
    return list(zip(*columns, strict=True)) if columns else [()] * len(group.cells)


def fill_tables(
    groups: Sequence[PlaceGroup],
    numbers: Sequence[Sequence[tuple[int, ...]]],
    world_of: Sequence[int],
    edge_fill: Callable[[PlaceGroup, tuple[Writers, ...]], EdgeFill],
) -> list[FillTable]:
    """The tables of all worlds: `numbers` has those of each group, `world_of` the world of each cell.

    `edge_fill` makes what is said of edges, given the writer of each world.
    """
    found = []
    for group, own in zip(groups, numbers, strict=True):
        beside: Sequence[Any] = group.sources or group.writers or [0] * len(group.cells)
        rows = sorted(zip((world_of[cell] for cell in group.cells), own, beside, strict=True))
        place, last = group.place, tuple([one for _, _, one in rows])
        found.append(
            FillTable(
                group.node,
                (place.name, place.layer, place.stack),
                group.ordinal,
                tuple([world for world, _, _ in rows]),
                group.axes,
                tuple(zip(*(index for _, index, _ in rows), strict=True)) if group.axes else (),
                group.fixed,
                edges=None if group.writers is None else edge_fill(group, last),
                own=None if group.sources is None else OwnFill(last, group.how),
            )
        )
    return found


def part_size(group: PlaceGroup, lengths: Mapping[str, int]) -> int:
    """Return the count of numbers in one place of a group."""
    size = 1
    for axis in group.located.view.axes:
        if axis not in group.axes:
            chosen = group.place.part.get(axis)
            size *= lengths[axis] if chosen is None else selected(chosen, lengths[axis])
    return size


# ------------------------------------------------------------------------------------------
# What the readers of edges compute before they are patched: their sites, once for each writer.
#
# Between the entry of a reader and its site lie a norm and a projection, or a whole MLP. They are computed
# for all writers together, in slices of so many that a slice takes no more than `SLICE`.

SLICE = 64 << 20
"""The bytes that a slice of writers may take beside what it makes; a single writer may take more."""


@dataclass(frozen=True, slots=True)
class ReaderWork:
    """The nodes that are computed for one writer, and the bytes that all their values take."""

    nodes: tuple[str, ...]
    bytes: int

    @property
    def at_once(self) -> int:
        """For how many writers they are computed together."""
        return max(1, SLICE // max(1, self.bytes))

    def taken(self, writers: int) -> int:
        """Return the bytes that computing them for so many writers takes, beside what is kept."""
        return self.bytes * min(writers, self.at_once)


def reader_work(graph: Graph, entry: str, site: str, bytes_of: Callable[[str], int]) -> ReaderWork:
    """Return the work of one writer's edge into a site; `bytes_of` gives the bytes of a node's value."""
    table, start = graph.table, graph.number(entry)
    between = table.support(graph.numbers((site,)), (start,)) & table.cone((start,))
    nodes = tuple(graph.name(number) for number in sorted(between, key=table.labels.__getitem__))
    return ReaderWork(nodes, sum(map(bytes_of, (entry, *nodes))))


@dataclass(frozen=True, slots=True)
class ReaderRead:
    """A node that readers compute for so many writers, and how often each operation is called for that."""

    node: str
    writers: int
    work: int
    calls: int


def read_in(fills: Sequence[FillTable], worlds: range) -> Iterator[ReaderRead]:
    """Yield what readers compute in a pass over `worlds`.

    A node of which several sites are patched for the same writers is computed once for all of them.
    """
    last: tuple[str, tuple[Writers, ...]] | None = None
    for table in sorted((one for one in fills if one.edges is not None), key=lambda one: one.ordinal):
        assert table.edges is not None
        begin, end = (bisect.bisect_left(table.worlds, at) for at in (worlds.start, worlds.stop))
        writers = tuple(sorted(set(table.edges.writers[begin:end])))
        if writers and (table.node, writers) != last:
            last = table.node, writers
            yield ReaderRead(
                table.node, len(writers), table.edges.work, -(-len(writers) // table.edges.at_once)
            )
