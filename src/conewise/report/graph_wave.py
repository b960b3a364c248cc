"""Waves: what one patch does to a small graph, as the engine reported it while it happened.

Nothing here is worked out from the graph: the order of invalidation, of recomputation, and what was read as
it was, are the events of a real world.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from conewise.errors import GraphError
from conewise.reactive.graph import Graph, Site
from conewise.reactive.world import Event, World

MOST = 400
"""More nodes than this cannot be told apart in a drawing; a model is folded by layer instead."""

LONGEST = 24
"""How many characters of a value are shown."""


@dataclass(frozen=True, slots=True)
class Wave:
    """One patch, one demand: the events in their order, and what the sites' values looked like.

    `invalidated`, `recomputed` and `reused` are the sites of the ledger. `planned` is what the demand
    decided to compute before it did. `before` and `after` are values in words, `after` for what changed.
    `restored` is how many nodes the baseline had to compute for the same demand afterwards: none.
    """

    site: Site
    invalidated: tuple[Site, ...]
    planned: tuple[Site, ...]
    recomputed: tuple[Site, ...]
    reused: tuple[Site, ...]
    after: Mapping[Site, str]
    restored: int


@dataclass(frozen=True)
class GraphWave:
    """The waves of several patches through one small graph, each in a fork of the same baseline.

    `full_evaluations` is how many nodes the targets need from nothing.
    """

    nodes: tuple[Site, ...]
    sources: frozenset[Site]
    inputs: Mapping[Site, tuple[Site, ...]]
    targets: tuple[Site, ...]
    before: Mapping[Site, str]
    full_evaluations: int
    waves: tuple[Wave, ...] = field(default=())

    @classmethod
    def record(
        cls, graph: Graph | World, patches: Mapping[Site, Any], targets: Site | Iterable[Site]
    ) -> GraphWave:
        """Patch each site in a fork of its own, demand the targets there, and keep what the engine reports.

        `graph` may be a world: then it is the baseline, with what is patched in it. A callable patch is a
        function of what would have stood there.
        """
        base = graph if isinstance(graph, World) else World(graph)
        graph = base.graph
        if len(graph) > MOST:
            raise GraphError(
                f"this graph has {len(graph)} nodes, and a drawing shows up to {MOST}. Fold a captured "
                "model by layer: `fold(model, sites)`."
            )
        wanted = (targets,) if isinstance(targets, str) else tuple(targets)
        base.demand(wanted)
        known = [site for site in graph.sites if not base.is_stale(site)]
        return cls(
            nodes=graph.sites,
            sources=frozenset(graph.sources),
            inputs=MappingProxyType({site: graph.inputs(site) for site in graph.sites}),
            targets=wanted,
            before=MappingProxyType({site: value_text(base[site]) for site in known}),
            full_evaluations=sum(not graph.is_source(site) for site in graph.support(wanted)),
            waves=tuple(_wave(base, site, value, wanted) for site, value in patches.items()),
        )


def _wave(base: World, site: Site, value: Any, targets: tuple[Site, ...]) -> Wave:
    events: list[Event] = []
    with base.fork() as world:
        world.listen(events.append)
        world.patch(site, value)
        planned = world.plan(targets).sites
        world.demand(targets)
        sites = {
            kind: tuple(site for event in events if event.kind == kind for site in event.sites)
            for kind in ("invalidated", "recomputed", "reused")
        }
        changed = dict.fromkeys((site, *sites["recomputed"]))
        after = {name: value_text(world[name]) for name in changed if not world.is_stale(name)}
    with base.ledger.interval() as again:
        base.demand(targets)
    return Wave(
        site, planned=planned, after=MappingProxyType(after), restored=again.count("recomputed"), **sites
    )


def value_text(value: Any) -> str:
    """A value in a few characters: a number as it is, an array by its shape and its length as a vector."""
    try:
        shape = getattr(value, "shape", None)
        if shape is not None and len(shape):
            return f"{'×'.join(map(str, shape))}, norm {float((value * value).sum()) ** 0.5:.4g}"
        text = f"{float(value):.4g}" if hasattr(value, "__float__") else repr(value)
    except Exception:  # noqa: BLE001 - a value that cannot be shown is no reason not to draw the others
        return type(value).__name__
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
