"""What the engine did, read off its ledger: the cost of a patch in a fork of a warm world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conewise.engine.world import World
from conewise.graph.graph import Graph, Site

Demand = Site | tuple[Site, ...]


@dataclass(frozen=True, slots=True)
class Cost:
    """Nodes that one change invalidated, nodes that the demand after it recomputed, and its answer."""

    invalidated: int
    recomputed: int
    value: Any


def warm(graph: Graph, output: Demand) -> World:
    """A world that has answered `output` once, whose ledger keeps tallies only."""
    world = World(graph, keep_sites=False)
    world.demand(output)
    return world


def patch_cost(base: World, site: Site, value: Any, output: Demand) -> Cost:
    """Fork a warm world, patch one site, demand the output, drop the fork."""
    with base.fork() as world:
        world.patch(site, value)
        answer = world.demand(output)
        ledger = world.ledger
        return Cost(ledger.count("invalidated"), ledger.count("recomputed"), answer)


def patch_wave(base: World, site: Site, value: Any) -> int:
    """How many nodes a patch invalidates; nothing is computed."""
    with base.fork() as world:
        world.patch(site, value)
        return world.ledger.count("invalidated")


def shifted(base: World, site: str) -> Any:
    """A value for a patch: the site's own, each position holding its neighbour's."""
    value = base.demand(site)
    return value[[*range(1, len(value)), 0]]
