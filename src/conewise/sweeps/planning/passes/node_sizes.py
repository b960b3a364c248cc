"""Bytes of one world's values in one pass, where the memory of a pass is added up."""

from __future__ import annotations

from collections.abc import Callable

from conewise.program.precision import SPLIT
from conewise.sweeps.planning.shapes.costs import Costs
from conewise.sweeps.planning.shapes.regions import Regions
from conewise.sweeps.planning.shapes.shape_facts import ShapeFacts
from conewise.sweeps.planning.shapes.splitting import Splitting


class NodeSizes:
    """Bytes of one world's values; see `memory.Sizes`.

    `patched` are the nodes that worlds put something into, `put` says how many bytes of a node that are,
    `of_edges` how many edges make of one.
    `splitting` is for products in parts, where these were asked for.
    """

    def __init__(
        self,
        facts: ShapeFacts,
        costs: Costs,
        regions: Regions,
        patched: frozenset[str],
        put: Callable[[str], int],
        of_edges: Callable[[str, int], int],
        is_causal: Callable[[str], bool],
        splitting: Splitting | None = None,
    ) -> None:
        self._costs, self._regions, self._patched = costs, regions, patched
        self._put, self._is_causal, self._splitting = put, is_causal, splitting
        self._of_edges = of_edges
        self._layout, self._space = facts.memory_layout, facts.workspace(costs)
        self._shape = facts.layout

    def value(self, node: str, rows: int | None) -> int:
        """Of the value itself."""
        return self._costs.bytes_of_copy(node, rows=rows)

    def repeated(self, node: str, rows: int | None) -> int:
        """Of a copy of the baseline's value; none where it is repeated without one."""
        return self._costs.bytes_of_repeating(node, rows=rows)

    def workspace(self, node: str, rows: int | None) -> int:
        """Of what computing it takes beside its value."""
        taken = self._space.each(node, rows, self._is_causal)
        for read in self._layout.copies(node, self._patched):
            taken += self._costs.bytes_of_copy(read, rows=self._regions.wanted(node, read))
        return taken

    def scratch(self, node: str, rows: int | None, kernel: str, worlds: int) -> int:
        """Of what computing it in one of several ways takes beside its value, for all worlds together."""
        if kernel == SPLIT:
            assert self._splitting is not None
            return self._splitting.scratch(node, rows, worlds)
        return self._space.fixed(node, rows, self._is_causal)

    def part(self, node: str) -> int:
        """Of the part of it that a world puts in."""
        return self._put(node)

    def of_edges(self, node: str, worlds: int) -> int:
        """Of what edges make of it in so many worlds, for all writers together."""
        return self._of_edges(node, worlds)

    def alias(self, node: str) -> str | None:
        """The node whose memory its value shares."""
        return self._layout.aliases.get(node)

    def is_scattered(self, node: str, rows: int | None, count: int) -> bool:
        """Whether the last `rows` positions of `count` worlds are copied."""
        positions = self._shape.pos_dim.get(node)
        is_flat = positions is not None and positions == self._shape.batch_dim.get(node)
        return is_flat and rows is not None and rows > 1 and count * self._shape.batch > 1
