"""The cells of a sweep: which nodes they patch, and which nodes are computed in which worlds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from conewise.anatomy.places import Place
from conewise.anatomy.sites import Located
from conewise.reactive.graph import Graph
from conewise.sweeps.planning.fill_tables import PlaceGroup, expect_swept, place_groups
from conewise.sweeps.planning.schedule import Schedule, mask_of_members, schedule
from conewise.sweeps.planning.shape_facts import ShapeFacts
from conewise.sweeps.planning.spec import StandingEdit

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
