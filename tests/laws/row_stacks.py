"""Stacks of a few layers and positions."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from conewise.paper.experiments.positions import chained, mixed_rows
from conewise.paper.theory import RowStack
from conewise.reactive.graph import Graph


@st.composite
def row_stacks(draw: st.DrawFn) -> RowStack:
    """Causal ones and others, with and without queries of their own."""
    return RowStack(
        layers=draw(st.integers(1, 5)),
        positions=draw(st.integers(1, 4)),
        keys=draw(st.integers(1, 3)),
        queries=draw(st.integers(0, 2)),
        mixed=draw(st.integers(1, 3)),
        terminal=draw(st.integers(1, 2)),
        causal=draw(st.booleans()),
    )


def node_graph(stack: RowStack) -> tuple[Graph, dict[str, list[str]]]:
    """Build the graph of whole nodes; returns the mixes for `row_costs`, too. A site is its layer's number.

    The demanded node is "end".
    """
    graph, mixes = Graph(), dict[str, list[str]]()
    stream = graph.source("x", 1)
    for layer in range(stack.layers):
        at = f"layer{layer}."
        key = chained(graph, f"{at}key", stream, stack.keys)
        query = chained(graph, f"{at}query", stream, stack.queries)
        mixed: Sequence[str] = list(dict.fromkeys([stream, query, key]))
        names = [*(f"{at}mixed.{step}" for step in range(1, stack.mixed)), str(layer)]
        mixes[names[0]] = [key]
        for name in names:
            mixed = [graph.node(name, mixed_rows, mixed)]
        (stream,) = mixed
    chained(graph, "end", stream, stack.terminal - 1)
    graph.node("end", mixed_rows, [f"end.{stack.terminal - 2}" if stack.terminal > 1 else stream])
    return graph, mixes
