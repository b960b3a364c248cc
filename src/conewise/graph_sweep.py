"""Sweeps of hand-built graphs: every site patched in a world of its own, planned by the theory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from conewise.arguments import checked
from conewise.errors import WorldError, describe
from conewise.paper.theory.sweeps import full_cost, sweep_costs
from conewise.reactive.graph import Graph, Site
from conewise.reactive.ledger import Kind
from conewise.reactive.world import World

Patch = Site | tuple[Site, ...]
"""What one world patches: a site, or several together."""


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The theoretical costs of a sweep over a graph: those of its worlds, and of one `full` run."""

    costs: Mapping[Patch, int]
    full: int
    ratio: Fraction | None

    @property
    def node_evaluations(self) -> int:
        """The number of node evaluations in all worlds, over a warm baseline."""
        return sum(self.costs.values())

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f", {float(self.ratio):.2f} times as many in full runs"
        return f"{len(self.costs)} worlds: {self.node_evaluations:,} evaluations of nodes{ratio}"


@dataclass(frozen=True, slots=True)
class GraphResult:
    """The demanded values, without patches (`base`) and in each world (`values`), and their cost.

    `ledger` counts the evaluations of all worlds; `plan` holds the predicted number.
    """

    base: Any
    values: Mapping[Patch, Any]
    ledger: Mapping[str, int]
    plan: GraphPlan

    def __getitem__(self, site: Patch) -> Any:
        """The demanded values, with the site patched."""
        return self.values[site]

    def __str__(self) -> str:
        return f"Result of {len(self.values)} worlds: {self.ledger['recomputed']:,} evaluations of nodes"


class GraphSweep:
    """A sweep over the sites of a graph that was built by hand; call `plan()` or `run()`."""

    def __init__(
        self, graph: Graph, sites: Iterable[Patch], demand: Site | tuple[Site, ...], value: Any, base: World
    ) -> None:
        """See `conewise.sweep`."""
        self.graph, self.demand, self.value, self.base = graph, demand, value, base
        self.sites: tuple[Patch, ...] = tuple(sites)
        for patch in self.sites:
            graph.numbers(patch)  # raises for a site that is not there

    def plan(self) -> GraphPlan:
        """Return the cost of each world, before anything is computed."""
        costs = sweep_costs(self.graph, self.sites, self.demand)
        full = int(full_cost(self.graph, self.demand))
        ratio = Fraction(full * len(self.sites), int(sum(costs))) if any(costs) else None
        return GraphPlan(dict(zip(self.sites, map(int, costs), strict=True)), full, ratio)

    def run(self) -> GraphResult:
        """Patch every site in a fork of the baseline, and demand the requested values there."""
        plan = self.plan()
        base = self.base.demand(self.demand)
        kinds: tuple[Kind, ...] = ("invalidated", "recomputed", "reused")
        counts: dict[str, int] = dict.fromkeys(kinds, 0)
        values: dict[Patch, Any] = {}
        for patch in self.sites:
            given = {site: self._value(site) for site in (patch if isinstance(patch, tuple) else (patch,))}
            with self.base.fork() as world, world.ledger.interval() as ledger:
                for site, value in given.items():
                    world.patch(site, value)
                values[patch] = world.demand(self.demand)
            for kind in kinds:
                counts[kind] += ledger.count(kind)
        return GraphResult(base, values, counts, plan)

    def _value(self, site: Site) -> Any:
        if isinstance(self.value, World):
            return self.value.demand(site)
        if isinstance(self.value, Mapping):
            if site not in self.value:
                raise WorldError(f"there is no value for {site!r}: give one for each site that is patched.")
            return self.value[site]
        if callable(self.value):
            return self.value(self.base.demand(site))
        return self.value

    def __repr__(self) -> str:
        return f"GraphSweep of {len(self.sites)} worlds over a graph of {len(self.graph)} nodes"


@checked
def sweep(
    graph: Graph,
    sites: Site | Iterable[Patch],
    demand: Site | tuple[Site, ...],
    *,
    value: Any,
    base: World | None = None,
) -> GraphSweep:
    """Patch each of `sites` of a graph in a world of its own, and demand the same values in each.

    An element of `sites` is one site, or a tuple of several that one world patches together. `value` is the
    replacement: a function of the present value, a mapping with a value for each site, another `World` whose
    values are used, or one value for all. `base` is the world without patches, with its inputs set.
    """
    world = World(graph) if base is None else base
    if world.graph is not graph:
        raise WorldError(f"the base is a world of another graph than {describe(graph)}.")
    return GraphSweep(graph, (sites,) if isinstance(sites, str) else sites, demand, value, world)
