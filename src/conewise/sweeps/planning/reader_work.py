"""What the readers of edges compute before they are patched: their sites, once for each writer.

Between the entry of a reader and its site lie a norm and a projection, or a whole MLP. They are computed for
all writers together, in slices of so many that a slice takes no more than `SLICE`.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from conewise.locations.places import Writers
from conewise.reactive.graph import Graph
from conewise.sweeps.planning.passes.fill_tables import FillTable

SLICE = 64 << 20
"""What a slice of writers may take beside what it makes, in bytes; a single writer may take more."""


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
        """What computing them for so many writers takes, in bytes, beside what is kept."""
        return self.bytes * min(writers, self.at_once)


def reader_nodes(graph: Graph, entry: str, sites: Sequence[str]) -> tuple[str, ...]:
    """The nodes between an entry and sites of its readers, the sites included, in order."""
    table, start = graph.table, graph.number(entry)
    wanted = table.support(graph.numbers(sites), (start,)) & table.cone((start,))
    return tuple(graph.name(number) for number in sorted(wanted, key=table.labels.__getitem__))


def reader_work(graph: Graph, entry: str, site: str, bytes_of: Callable[[str], int]) -> ReaderWork:
    """What one writer's edge into a site takes; `bytes_of` says how large the value of a node is."""
    nodes = reader_nodes(graph, entry, (site,))
    return ReaderWork(nodes, sum(map(bytes_of, (entry, *nodes))))


@dataclass(frozen=True, slots=True)
class ReaderRead:
    """A node that readers compute for so many writers, and how often each operation is called for that."""

    node: str
    writers: int
    work: int
    calls: int


def read_in(fills: Sequence[FillTable], worlds: range) -> Iterator[ReaderRead]:
    """What readers compute in a pass over `worlds`.

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
