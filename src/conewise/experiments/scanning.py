"""An instrument: which nodes of a graph are looked at, and which edges are followed, while something runs.

It stands between the engine and the graph's table and counts; neither knows of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from conewise.graph.graph import Graph
from conewise.theory.waves import Touched


@dataclass(slots=True)
class Walk:
    """How often each node, by number, was looked at, and how many edges were followed from there."""

    nodes: Counter[int] = field(default_factory=Counter)
    edges: int = 0

    @property
    def touched(self) -> Touched:
        """Nodes looked at and edges followed, each as often as that was done."""
        return Touched(self.nodes.total(), self.edges)

    def clear(self) -> None:
        """Forget everything."""
        self.nodes.clear()
        self.edges = 0


@dataclass(frozen=True, slots=True)
class Scan:
    """What was walked: from nodes to their readers, and from nodes to what they read."""

    down: Walk = field(default_factory=Walk)
    up: Walk = field(default_factory=Walk)

    def clear(self) -> None:
        """Forget everything."""
        self.down.clear()
        self.up.clear()


@contextmanager
def scanning(graph: Graph) -> Iterator[Scan]:
    """Count every look at the graph's wiring inside the `with` block; its structure must not change there."""
    table, scan = graph.table, Scan()
    consumers, inputs = table.consumers, table.inputs
    try:
        table.consumers, table.inputs = _Counted(consumers, scan.down), _Counted(inputs, scan.up)
        yield scan
    finally:
        table.consumers, table.inputs = consumers, inputs


class _Counted(list[Any]):
    """A list of neighbours that counts who is looked up, and each neighbour that is then read."""

    def __init__(self, neighbours: list[Any], walk: Walk) -> None:
        super().__init__(_Neighbours(found, walk) for found in neighbours)
        self._walk = walk

    def __getitem__(self, node: Any) -> Any:
        self._walk.nodes[node] += 1
        return super().__getitem__(node)


class _Neighbours(tuple[int, ...]):  # noqa: SLOT001  # a tuple's subclass can have none that hold something
    """The neighbours of a node, in order and equal to them; reading them is counted."""

    _walk: Walk

    def __new__(cls, found: Iterable[int], walk: Walk) -> _Neighbours:
        made = super().__new__(cls, found)
        made._walk = walk
        return made

    def __iter__(self) -> Iterator[int]:
        for site in super().__iter__():
            self._walk.edges += 1
            yield site

    def __getitem__(self, index: Any) -> Any:
        self._walk.edges += 1
        return super().__getitem__(index)
