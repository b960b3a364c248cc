"""The graph of components as names: which writers each reader reads, which writers each reader is a part of.

It has no nodes of a program and no values, so a circuit carries it: a file of a circuit can be drawn,
compared and pruned without the model. An edge has a number: readers in order, and for each the writers that
it reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from conewise.anatomy.components import Components
from conewise.anatomy.places import component_name
from conewise.errors import CircuitError, nearest

ARROW = "->"


@dataclass(frozen=True, slots=True)
class GraphWriter:
    """A writer into the stream: the input, a head, an MLP."""

    name: str
    layer: int | None = None
    head: int | None = None


@dataclass(frozen=True, slots=True)
class GraphReader:
    """A reader of what the first `writers` wrote into the stream: q, k or v of a head, an MLP, the logits."""

    name: str
    slot: str
    writers: int
    layer: int | None = None
    head: int | None = None


@dataclass(frozen=True)
class EdgeGraph:
    """Writers and readers in order of computation; a reader reads a prefix of the writers.

    `width` is that of the stream (d_model), where it is known.
    """

    writers: tuple[GraphWriter, ...]
    readers: tuple[GraphReader, ...]
    width: int | None = None

    def __post_init__(self) -> None:
        for components in (self.writers, self.readers):
            seen: set[str] = set()
            for one in components:
                if one.name in seen:
                    raise CircuitError(f"two components have the name {one.name!r}; names are unique.")
                seen.add(one.name)
        for reader in self.readers:
            if not 0 <= reader.writers <= len(self.writers):
                raise CircuitError(
                    f"{reader.name} reads {reader.writers} writers, where there are {len(self.writers)}."
                )

    @classmethod
    def of(cls, components: Components | EdgeGraph, width: int | None = None) -> EdgeGraph:
        """The graph of a model's components; a graph of edges is returned as it is."""
        if isinstance(components, EdgeGraph):
            return components
        return cls(
            tuple(GraphWriter(one.name, one.layer, one.head) for one in components.writers),
            tuple(
                GraphReader(one.name, one.slot, one.writers, one.layer, one.head)
                for one in components.readers
            ),
            width,
        )

    # -- edges by number and by name -----------------------------------------------------------------

    @cached_property
    def starts(self) -> np.ndarray:
        """The number of each reader's first edge; behind them, how many edges there are."""
        return np.concatenate([[0], np.cumsum([reader.writers for reader in self.readers], dtype=np.int64)])

    @property
    def count(self) -> int:
        """The number of edges."""
        return int(self.starts[-1])

    @cached_property
    def there(self) -> np.ndarray:
        """[reader, writer], True where the one reads the other."""
        found: np.ndarray = np.arange(len(self.writers)) < np.diff(self.starts)[:, None]
        return found

    def all_but(self, numbers: np.ndarray) -> np.ndarray:
        """[reader, writer], True for every edge but those of these numbers."""
        found = self.there.copy()
        found[self.edge_readers[numbers], self.edge_writers[numbers]] = False
        return found

    @cached_property
    def edges(self) -> tuple[str, ...]:
        """The names of all edges, by number."""
        return tuple(
            f"{writer.name}{ARROW}{reader.name}"
            for reader in self.readers
            for writer in self.writers[: reader.writers]
        )

    @cached_property
    def edge_readers(self) -> np.ndarray:
        """The number of each edge's reader."""
        return np.repeat(np.arange(len(self.readers)), np.diff(self.starts))

    @cached_property
    def edge_writers(self) -> np.ndarray:
        """The number of each edge's writer."""
        found: np.ndarray = np.arange(self.count) - np.repeat(self.starts[:-1], np.diff(self.starts))
        return found

    def number(self, edge: str) -> int:
        """The number of an edge by its name. Raises CircuitError, which says what is near."""
        if not isinstance(edge, str):
            raise CircuitError(f"an edge is named by a text such as 'a0.h1{ARROW}m2', not by {edge!r}.")
        writer, arrow, reader = edge.partition(ARROW)
        at, to = self._writers.get(writer), self._readers.get(reader)
        if arrow and (at is None or to is None):
            writer, reader = component_name(writer), component_name(reader)
            at, to = self._writers.get(writer), self._readers.get(reader)
        if not arrow or at is None or to is None or at >= self.readers[to].writers:
            raise CircuitError(self._why_not(edge))
        return int(self.starts[to]) + at

    def numbers(self, edges: Iterable[str]) -> np.ndarray:
        """The numbers of edges by their names, each once, in order."""
        if isinstance(edges, str) or not isinstance(edges, Iterable):
            raise CircuitError(f"edges are a list of names, [{self.edges[0]!r}, ...], not {edges!r}.")
        return np.asarray(sorted({self.number(edge) for edge in edges}), dtype=np.int64)

    def names(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """The names of edges, in the order of their numbers."""
        return tuple(self.edges[number] for number in sorted(map(int, numbers)))

    def split(self, edge: str) -> tuple[GraphWriter, GraphReader]:
        """The two ends of an edge."""
        number = self.number(edge)
        return self.writers[self.edge_writers[number]], self.readers[self.edge_readers[number]]

    def _why_not(self, edge: str) -> str:
        writer, arrow, reader = edge.partition(ARROW)
        counts = f"{len(self.writers)} writers, {len(self.readers)} readers and {self.count:,} edges"
        here = f"in this graph of {counts}"
        if not arrow:
            return f"{edge!r} is no edge {here}: an edge is written 'a0.h1->m2', writer, arrow, reader."
        if writer not in self._writers:
            return f"no edge {edge!r} {here}: no writer {writer!r}.{nearest(writer, self._writers)}"
        if reader.partition("@")[0] in self._readers and "@" in reader:
            return f"{edge!r} is an edge at one position, and this graph has edges at all positions."
        if reader not in self._readers:
            return f"no edge {edge!r} {here}: no reader {reader!r}.{nearest(reader, self._readers)}"
        reads = self.readers[self._readers[reader]].writers
        last = f", the last of them {self.writers[reads - 1].name}" if reads else ""
        return (
            f"no edge {edge!r} {here}: {reader} reads what was written before it, {reads} writers{last}; "
            f"{writer} writes later."
        )

    # -- what a reader is a part of ------------------------------------------------------------------

    @cached_property
    def fed(self) -> tuple[tuple[int, ...], ...]:
        """For each reader, the numbers of the writers that are computed from it; none for the logits.

        That is the head or the MLP that it is a part of. Keys and values of grouped queries are a part of all
        heads of their group.
        """
        return tuple(self._fed(reader) for reader in self.readers)

    @cached_property
    def feeding(self) -> tuple[tuple[int, ...], ...]:
        """For each writer, the numbers of the readers that it is computed from; none for the input."""
        found: list[list[int]] = [[] for _ in self.writers]
        for number, writers in enumerate(self.fed):
            for writer in writers:
                found[writer].append(number)
        return tuple(map(tuple, found))

    def _fed(self, reader: GraphReader) -> tuple[int, ...]:
        own = self._writers.get(reader.name.partition("<")[0])
        if own is not None:
            return (own,)
        if reader.slot not in ("k", "v"):
            return ()
        heads = [
            number
            for number, writer in enumerate(self.writers)
            if writer.layer == reader.layer and writer.head is not None
        ]
        groups = [one.head for one in self.readers if (one.layer, one.slot) == (reader.layer, reader.slot)]
        size = len(heads) // len(groups)
        at = groups.index(reader.head)
        return tuple(heads[at * size : (at + 1) * size])

    @cached_property
    def _writers(self) -> dict[str, int]:
        return {writer.name: number for number, writer in enumerate(self.writers)}

    @cached_property
    def _readers(self) -> dict[str, int]:
        return {reader.name: number for number, reader in enumerate(self.readers)}

    def is_writer(self, name: str) -> bool:
        """True if a writer has that name."""
        return name in self._writers

    def writer_number(self, name: str) -> int:
        """The number of a writer by its name. Raises CircuitError, which says what is near."""
        if name not in self._writers:
            raise CircuitError(
                f"no writer {name!r} in this graph of {len(self.writers)}.{nearest(name, self._writers)}"
            )
        return self._writers[name]

    def __repr__(self) -> str:
        return (
            f"EdgeGraph of {len(self.writers)} writers, {len(self.readers)} readers and {self.count:,} edges"
        )
