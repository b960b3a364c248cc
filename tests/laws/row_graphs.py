"""Graphs of a few nodes over a few positions, and the graphs in which every row of a node is a node."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

import conewise as cw
from conewise.paper.theory.parts import Rows
from tests.laws.scenes import Mix


@dataclass(frozen=True)
class RowGraph:
    """Which nodes read which, by number, and of which inputs other rows; what is patched and demanded."""

    reads: tuple[tuple[int, ...], ...]
    mixes: tuple[frozenset[int], ...]
    positions: int
    patch: tuple[int, int]
    demand: tuple[int, ...]
    rows: Rows
    causal: bool

    def graph(self) -> cw.Graph:
        graph = cw.Graph()
        graph.source("0", 1)
        for node, reads in enumerate(self.reads, 1):
            graph.node(str(node), Mix(), list(map(str, reads)))
        return graph

    def named(self) -> dict[str, list[str]]:
        """What `row_costs` takes as `mixes`."""
        return {str(node): sorted(map(str, mixed)) for node, mixed in enumerate(self.mixes, 1) if mixed}

    def bill(self) -> int:
        """What the engine computes for the patch, on the graph of rows."""
        graph, positions = cw.Graph(), range(self.positions)
        for t in positions:
            graph.source(f"0.{t}", t)
        for node, (reads, mixed) in enumerate(zip(self.reads, self.mixes, strict=True), 1):
            for t in positions:
                seen = range(t + 1) if self.causal else positions
                inputs = [f"{read}.{u}" for read in reads for u in (seen if read in mixed else (t,))]
                graph.node(f"{node}.{t}", Mix(), inputs)
        ends = positions if self.rows == "all" else [self.positions - 1]
        demand = tuple(f"{node}.{t}" for node in self.demand for t in ends)
        base = cw.World(graph)
        base.demand(demand)
        with base.fork() as fork:
            fork.patch(f"{self.patch[0]}.{self.patch[1]}", -7)
            with fork.ledger.interval() as ledger:
                fork.demand(demand)
        return len(ledger.recomputed)


@st.composite
def row_graphs(draw: st.DrawFn) -> RowGraph:
    """Up to seven nodes, each of which reads some before it, and of some of these other rows."""
    reads, mixes = [], []
    for node in range(1, draw(st.integers(2, 8))):
        some = st.lists(st.integers(max(0, node - 4), node - 1), min_size=1, max_size=3, unique=True)
        read = draw(some)
        reads.append(tuple(read))
        mixes.append(frozenset(draw(st.sets(st.sampled_from(read))) if draw(st.booleans()) else ()))
    nodes, positions = st.integers(0, len(reads)), draw(st.integers(1, 4))
    return RowGraph(
        tuple(reads),
        tuple(mixes),
        positions,
        (draw(nodes), draw(st.integers(0, positions - 1))),
        tuple(draw(st.sets(st.integers(1, len(reads)), min_size=1, max_size=2)) | {len(reads)}),
        draw(st.sampled_from(["all", "last"])),
        draw(st.booleans()),
    )
