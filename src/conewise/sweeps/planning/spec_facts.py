"""What holds for a spec whatever the shape of the runs: its places in groups, and its schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from conewise.locations.located import Located
from conewise.locations.places import Place
from conewise.reactive.graph import Graph
from conewise.sweeps.planning.fill_tables import PlaceGroup, expect_swept, place_groups
from conewise.sweeps.planning.schedule import Schedule
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
