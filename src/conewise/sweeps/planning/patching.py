"""What the cells of a sweep patch: which nodes, in which worlds, and how much of each they put in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from conewise.anatomy.places import EdgePlace, Place, Writers
from conewise.anatomy.sites import Located
from conewise.reactive.graph import Graph
from conewise.sweeps.planning.fill_tables import (
    EdgeFill,
    FillTable,
    PlaceGroup,
    ReaderWork,
    counted_from_front,
    expect_swept,
    fill_tables,
    part_size,
    place_groups,
    reader_work,
)
from conewise.sweeps.planning.schedule import Schedule, mask_of_members, schedule
from conewise.sweeps.planning.shape_facts import ShapeFacts
from conewise.sweeps.planning.spec import StandingEdit

Worlds = tuple[int, ...]


class SpecFacts:
    """The facts of one spec: `cells` has the places that each world patches, `targets` are what is read.

    Which nodes are computed in which worlds depends on no size: schedules are kept by the edits that stand in
    the base, and the world of each cell.
    """

    def __init__(
        self,
        graph: Graph,
        cells: Sequence[Sequence[Place]],
        targets: tuple[str, ...],
        locate: Callable[[Place], Located],
    ) -> None:
        self.graph, self.targets = graph, targets
        self.groups: list[PlaceGroup] = place_groups(cells, locate)
        expect_swept(self.groups)
        self._schedules: dict[tuple[tuple[StandingEdit, ...], Worlds], Schedule] = {}

    def schedule(
        self, edits: tuple[StandingEdit, ...], worlds: Worlds, make: Callable[[], Schedule]
    ) -> Schedule:
        """The schedule that is kept, or a new one."""
        key = edits, worlds
        if key not in self._schedules:
            self._schedules[key] = make()
        return self._schedules[key]

    @cached_property
    def computed(self) -> tuple[str, ...]:
        """All nodes that a run computes for the targets."""
        graph, rules = self.graph, self.graph.table.rules
        support = graph.table.support(graph.numbers(self.targets), ())
        return tuple(graph.name(number) for number in support if rules[number] is not None)


class Patching:
    """What `cells` cells patch in runs of one shape. `groups` are their places, `edits` stand in the base.

    With `is_function`, a place is given a function of its value, and no value of its own.
    """

    def __init__(
        self,
        graph: Graph,
        facts: ShapeFacts,
        groups: Sequence[PlaceGroup],
        cells: int,
        edits: tuple[StandingEdit, ...],
        *,
        is_function: bool,
        writers: int = 0,
    ) -> None:
        self.graph, self.facts, self.groups, self.cells = graph, facts, groups, cells
        self.writers = writers
        self.edits, self.is_function = edits, is_function
        self._again: dict[tuple[str, ...], tuple[StandingEdit, ...]] = {}
        self._reader_work: dict[str, ReaderWork] = {}

    @cached_property
    def lengths(self) -> list[dict[str, int]]:
        """The lengths of the natural axes of each group's site."""
        return [axis_lengths(group.located, self.facts) for group in self.groups]

    @cached_property
    def numbers(self) -> list[list[tuple[int, ...]]]:
        """What each place of each group selects, counted from the front."""
        return [counted_from_front(g, lengths) for g, lengths in zip(self.groups, self.lengths, strict=True)]

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

    def made_again(self, nodes: tuple[str, ...]) -> tuple[StandingEdit, ...]:
        """Those of the base's own edits that lie downstream of these nodes: a world makes them again."""
        if not self.edits:
            return ()
        if nodes not in self._again:
            cone = self.graph.table.cone(set(self.graph.numbers(nodes)))
            self._again[nodes] = tuple(e for e in self.edits if self.graph.number(e.node) in cone)
        return self._again[nodes]

    def schedule(self, world_of: Sequence[int], targets: tuple[str, ...]) -> Schedule:
        """Which nodes are computed in which worlds, given the world of each cell."""
        patched: dict[str, list[int]] = {}
        whole: dict[str, list[int]] = {}
        for group in self.groups:
            worlds = [world_of[cell] for cell in group.cells]
            patched.setdefault(group.node, []).extend(worlds)
            if group.is_whole and not self._is_function(group):
                whole.setdefault(group.node, []).extend(worlds)
        for nodes, cells in self.cells_by_nodes.items():
            for edit in self.made_again(nodes):
                worlds = [world_of[cell] for cell in cells]
                patched.setdefault(edit.node, []).extend(worlds)
                if edit.covers:
                    whole.setdefault(edit.node, []).extend(worlds)
        put, replaced = (
            {node: mask_of_members(worlds) for node, worlds in one.items()} for one in (patched, whole)
        )
        return schedule(self.graph, put, replaced, self.cells, targets)

    def _is_function(self, group: PlaceGroup) -> bool:
        """Whether what is put into a group depends on what is there."""
        return self.is_function if group.sources is None else group.is_function

    def tables(self, world_of: Sequence[int]) -> tuple[FillTable, ...]:
        """What worlds put where: their own, then the edits of the base that they make again."""
        edited: dict[StandingEdit, list[int]] = {}
        for nodes, cells in self.cells_by_nodes.items():
            for edit in self.made_again(nodes):
                edited.setdefault(edit, []).extend(world_of[cell] for cell in cells)
        again = [
            FillTable(edit.node, edit.site, -1, tuple(sorted(own)), edit=edit.number)
            for edit, own in sorted(edited.items(), key=lambda item: item[0].number)
        ]
        return (*fill_tables(self.groups, self.numbers, world_of, self._edge_fill), *again)

    def _edge_fill(self, group: PlaceGroup, writers: tuple[Writers, ...]) -> EdgeFill:
        work = self.reader_work(group.node)
        assert isinstance(group.place, EdgePlace)
        return EdgeFill(writers, group.place.entry, len(work.nodes), work.at_once, group.place.live)

    # -- how much ------------------------------------------------------------------------------

    def held(self, nodes: Iterable[str], of_source: bool) -> int:
        """Bytes of what is put into nodes and is no run's: values of cells' own, one row for each source.

        With `of_source`, those of the sweep's source too: one value for each site.
        """
        wanted, taken = set(nodes), 0
        stacks: set[tuple[Any, ...]] = set()  # sites that are given the same sources share one
        for group, lengths in zip(self.groups, self.lengths, strict=True):
            if group.node not in wanted or group.sources is None:
                continue
            item = self.facts.costs.itemsize(group.node)
            if group.how in {"value", "shift"}:
                size, sources = min(group.largest, part_size(group, lengths)), frozenset(group.sources)
                stack = sources, len(group.located.part_axes), size, item
                taken += len(sources) * size * item if stack not in stacks else 0
                stacks.add(stack)
            elif group.how == "whole":
                taken += math.prod(lengths.values()) * item
        return taken + (sum(map(self.whole, wanted)) if of_source else 0)

    def part(self, node: str) -> int:
        """Bytes of the part that a world puts into a node, the largest one."""
        return self._bytes[0].get(node, 0)

    def whole(self, node: str) -> int:
        """Bytes of a whole value of a site of a node that is put into, the largest one."""
        return self._bytes[1].get(node, 0)

    # -- edges -----------------------------------------------------------------------------------

    @cached_property
    def edge_groups(self) -> dict[str, list[PlaceGroup]]:
        """The groups of places into which edges lead, by node."""
        found: dict[str, list[PlaceGroup]] = {}
        for group in self.groups:
            if group.writers is not None:
                found.setdefault(group.node, []).append(group)
        return found

    def reader_work(self, node: str) -> ReaderWork:
        """What is computed for one writer's edge into a node."""
        if node not in self._reader_work:
            place = self.edge_groups[node][0].place
            assert isinstance(place, EdgePlace)
            size = self.facts.costs.bytes_of_copy
            self._reader_work[node] = reader_work(self.graph, place.entry, node, size)
        return self._reader_work[node]

    def of_edges(self, node: str, worlds: int) -> int:
        """Bytes of what edges make of a node, for all writers of so many worlds; 0 where there are none."""
        if node not in self.edge_groups:
            return 0
        writers = min(worlds, self._writers[node])
        return writers * self.facts.costs.bytes_of_copy(node) + self.reader_work(node).taken(writers)

    @cached_property
    def _writers(self) -> dict[str, int]:
        """How many writers have edges into a node."""
        return {
            node: max(len(set(group.writers or ())) for group in groups)
            for node, groups in self.edge_groups.items()
        }

    @cached_property
    def parts(self) -> int:
        """Bytes of parts while edges are put in: those of all writers, what replaces them, and both apart.

        Where streams are summed up anew, parts of half precision have a copy in single.
        """
        places = [group.place for groups in self.edge_groups.values() for group in groups]
        entries = {place.entry for place in places if isinstance(place, EdgePlace)}
        costs = self.facts.costs
        copies = {entry: 3 if costs.itemsize(entry) >= 4 else 5 for entry in entries}
        return max((self.writers * copies[one] * costs.bytes_of_copy(one) for one in entries), default=0)

    @cached_property
    def _bytes(self) -> tuple[dict[str, int], dict[str, int]]:
        parts: dict[str, int] = {}
        wholes: dict[str, int] = {}
        for group, lengths in zip(self.groups, self.lengths, strict=True):
            item = self.facts.costs.itemsize(group.node)
            # What is added to is gathered beside what is added.
            copies = 2 if group.how == "shift" else 1
            parts[group.node] = max(parts.get(group.node, 0), copies * part_size(group, lengths) * item)
            if group.sources is not None:
                continue
            wholes[group.node] = max(wholes.get(group.node, 0), math.prod(lengths.values()) * item)
        return parts, wholes


def axis_lengths(located: Located, facts: ShapeFacts) -> dict[str, int]:
    """The lengths of the natural axes of a site, in runs of this shape."""
    shape = facts.costs.shape(located.node) or ()
    view = located.view if located.result is None else located.z_view
    lengths = dict(zip(view.axes, view.lengths_in(shape, facts.layout.sizes(1)), strict=True))
    if located.result is not None:
        width = (facts.costs.shape(located.result.projection.name) or (1,))[-1]
        return {axis: lengths.get(axis, width) for axis in located.view.axes}
    return lengths


def turned(order: Sequence[int]) -> list[int]:
    """The place of each number in an order: the world of each cell, given the cell of each world."""
    places = [0] * len(order)
    for place, number in enumerate(order):
        places[number] = place
    return places
