"""What the laws share: warm worlds, and reading them without computing anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import conewise as cw
from tests.laws.scenes import Scene, fresh_value


def warm(scene: Scene, *, cutoff: bool = False) -> cw.World:
    """A world over the scene in which every site holds a value, with an empty ledger."""
    world = cw.World(scene.graph(), cutoff=cutoff)
    world.demand(world.graph.sites)
    world.ledger.clear()
    return world


def patch_values(world: cw.World, sites: Iterable[str]) -> dict[str, Any]:
    """Patch each of `sites` with a value of its own; returns them."""
    values = {site: fresh_value() for site in sites}
    for site, value in values.items():
        world.patch(site, value)
    return values


def stale_sites(world: cw.World) -> set[str]:
    """The sites that a demand would have to compute."""
    return {site for site in world.graph.sites if world.is_stale(site)}


def values_at_hand(world: cw.World) -> dict[str, Any]:
    """The values that are there, without computing any."""
    return {site: world.demand(site) for site in world.graph.sites if not world.is_stale(site)}


def from_scratch(graph: cw.Graph, patches: dict[str, Any], sites: Iterable[str]) -> tuple[Any, ...]:
    """What `sites` come to when everything is recomputed under value patches."""
    known: dict[str, Any] = dict(patches)
    for node in graph:
        if node.site not in known:
            known[node.site] = (
                graph.default(graph.number(node.site))
                if node.rule is None
                else node.rule(*(known[read] for read in node.inputs))
            )
    return tuple(known[site] for site in sites)


def owned(fork: cw.World) -> set[str]:
    """The sites of which a fork holds an entry of its own: its memory."""
    return set(fork.graph.names(fork._state.own))


@contextmanager
def nothing_computed(*worlds: cw.World) -> Iterator[None]:
    """Assert that the block computes nothing in any of `worlds`."""
    before = [world.ledger.count("recomputed") for world in worlds]
    yield
    assert [world.ledger.count("recomputed") for world in worlds] == before
