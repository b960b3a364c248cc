"""The ledger: what was invalidated, recomputed, reused and cut off, as events in the order they came.

The engine counts nothing; whoever wants a number listens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from conewise.errors import SitesNotKeptError
from conewise.reactive.graph import Graph, Site
from conewise.reactive.journal import Journal

Kind = Literal["invalidated", "recomputed", "reused", "cut_off"]


class Ledger:
    """The events of one world since the last `clear()`, readable as lists of sites.

    Values that a fork's demand computes outside of the fork's own cone belong to its parent, and are recorded
    in the parent's ledger. `keep_sites=False` keeps only the tallies, for long-lived worlds.
    """

    def __init__(self, graph: Graph, *, keep_sites: bool = True) -> None:
        self._graph = graph
        self._events: list[tuple[Kind, Sequence[int]]] = []
        self._tally: dict[Kind, int] = dict.fromkeys(("invalidated", "recomputed", "reused", "cut_off"), 0)
        self._keep_sites = keep_sites
        self._spans: list[Ledger] = []

    def record(self, kind: Kind, nodes: Sequence[int], journal: Journal | None = None) -> None:
        """Record an event; an event that is a part of a change is removed when the change is undone."""
        if journal is not None:
            journal.note((self._go_back, kind, self._tally[kind], len(self._events)))
        self._tally[kind] += len(nodes)
        if self._keep_sites:
            self._events.append((kind, nodes))
        for span in self._spans:
            span.record(kind, nodes, journal)

    def _go_back(self, kind: Kind, tally: int, events: int) -> None:
        self._tally[kind] = tally
        del self._events[events:]

    def clear(self) -> None:
        """Remove all events."""
        self._events.clear()
        for kind in self._tally:
            self._tally[kind] = 0

    @property
    def invalidated(self) -> list[Site]:
        """Sites that lost their value, in order; a site that lost it twice is listed twice."""
        return self._sites("invalidated")

    @property
    def recomputed(self) -> list[Site]:
        """Sites that were computed, in order."""
        return self._sites("recomputed")

    @property
    def reused(self) -> list[Site]:
        """Computed sites whose cached value a demand read; once per demand."""
        return self._sites("reused")

    @property
    def cut_off(self) -> list[Site]:
        """Sites that a cutoff did not recompute."""
        return self._sites("cut_off")

    def count(self, kind: Kind) -> int:
        """Return the number of these events, even if the sites are not kept."""
        return self._tally[kind]

    @contextmanager
    def interval(self) -> Iterator[Ledger]:
        """Return a separate ledger of the events inside the `with` block; this ledger continues to record."""
        span = Ledger(self._graph, keep_sites=self._keep_sites)
        try:
            self._spans.append(span)
            yield span
        finally:
            if span in self._spans:
                self._spans.remove(span)

    def _sites(self, kind: Kind) -> list[Site]:
        if not self._keep_sites:
            raise SitesNotKeptError(
                f"this ledger keeps tallies only: ask `ledger.count({kind!r})`, or make the world with "
                "`World(graph, keep_sites=True)`."
            )
        name = self._graph.name
        return [name(node) for event, nodes in self._events if event == kind for node in nodes]

    def __repr__(self) -> str:
        return "Ledger(" + ", ".join(f"{count} {kind}" for kind, count in self._tally.items()) + ")"
