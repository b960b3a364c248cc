"""Which writers' parts depend on what a reader sees."""

from __future__ import annotations

from conewise.edges.edge_facts import EdgeFacts
from conewise.edges.head_shares import HeadShares
from conewise.edges.stacked_values import StackedValues
from conewise.runs.captured import Captured
from conewise.structure.components.edge_graph import EdgeGraph


def moved_by(model: Captured, facts: EdgeFacts) -> tuple[tuple[int, ...], ...]:
    """For each reader, the numbers of the writers whose parts are others where it sees another stream.

    These are the head or the MLP that it is a part of. Where a norm lies behind the output projection, its
    scale is that of all heads, and all heads of the layer move together; where sums are normed, so does all
    that follows.
    """
    graph = EdgeGraph.of(facts.components)
    if not facts.parts.is_carried_unchanged:
        count = len(graph.writers)
        return tuple(tuple(range(min(fed), count)) if fed else () for fed in graph.fed)
    values = StackedValues(model.program)
    together: dict[int, tuple[int, ...]] = {}
    for heads in facts.components.heads:
        if not HeadShares(model.site_table, facts.components, heads, values).is_plain:
            together |= dict.fromkeys(heads.rows, tuple(heads.rows))
    return tuple(
        tuple(dict.fromkeys(moved for one in fed for moved in together.get(one, (one,)))) for fed in graph.fed
    )
