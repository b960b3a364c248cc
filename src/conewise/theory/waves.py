"""Waves: what invalidation touches, node by node and edge by edge; and what a demand looks at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from conewise.errors import TheoryError
from conewise.graph.graph import Graph, Site
from conewise.theory.sweeps import Patch, stale
from conewise.theory.weights import Demand, expect_graph, expect_site, expect_sites


@dataclass(frozen=True, slots=True)
class Touched:
    """How many nodes are looked at, and how many edges are followed from them, each once."""

    nodes: int
    edges: int

    @property
    def total(self) -> int:
        """Nodes and edges together: what the time is proportional to."""
        return self.nodes + self.edges


def wave_size(graph: Graph, site: Site, already: Iterable[Site] = ()) -> Touched:
    """What the wave of a change at `site` touches in a world in which the sites `already` are stale.

    docs/theory.md#waves. The nodes are s itself and cone(s) less what is stale already, be it by a change or
    because it was never computed; the edges are all that leave these nodes, each once. (In a fork, only
    what its own changes have made stale ends a wave.) Where nothing is stale:

        nodes = 1 + |V⁺|,   edges = |E⁺| + d(s) ≤ |E⁺| + |V⁺|

    where E⁺ are the edges inside of the cone and d(s) the readers of s. All that depends on a stale
    site must be stale too, as it is in every world in which no value is given: TheoryError.
    """
    table = expect_graph(graph).table
    stopped = set(graph.numbers(expect_sites(already, "the list of stale sites")))
    valid = table.cone(stopped) - stopped
    if valid:
        raise TheoryError(
            f"{graph.name(min(valid))!r} depends on a site of `already`, and is not in it: what reads a "
            "stale site is stale. List the cones too."
        )
    seed = graph.number(expect_site(site, "the site"))
    nodes = {seed} | (table.cone([seed]) - stopped)
    return Touched(len(nodes), sum(len(table.consumers[node]) for node in nodes))


def demand_size(graph: Graph, patch: Patch, demand: Demand = None) -> Touched:
    """What a demand looks at after values were given at `patch`: the stale nodes, and the edges into them.

    docs/theory.md#waves. Nothing of it depends on the size of the graph: a node that is neither stale,
    nor read by one that is, nor demanded, nor patched, is not looked at. A site that a node reads twice
    counts as two edges.
    """
    nodes = expect_graph(graph).numbers(stale(graph, patch, demand))
    return Touched(len(nodes), sum(len(graph.table.inputs[node]) for node in nodes))
