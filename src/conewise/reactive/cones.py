"""The sizes of all cones of a graph at once: one pass of bit sets instead of one search per node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from conewise.reactive.graph import Graph, Site


def cone_sizes(graph: Graph, sites: Iterable[Site] | None = None) -> dict[Site, int]:
    """|V⁺| of every site (or of `sites`), exactly."""
    numbered = _numbered(graph, sites)
    sizes = {node: cone.bit_count() for node, cone in _cones(graph) if node in numbered}
    return {site: sizes[node] for node, site in numbered.items()}


def _numbered(graph: Graph, sites: Iterable[Site] | None) -> dict[int, Site]:
    names = graph.sites if sites is None else tuple(sites)
    return dict(zip(graph.numbers(names), names, strict=True))


def _cones(graph: Graph) -> Iterator[tuple[int, int]]:
    """Every node with its cone as a bit set, the last node of the order first.

    The cone of a node is the union of its readers' cones and of the readers themselves. Bit k is
    the k-th computed node from the end, so a bit set is only as long as what can still lie
    downstream; and a cone is forgotten as soon as the last input of its node has been visited.
    """
    table = graph.table
    cones: dict[int, int] = {}
    bits = 0
    waiting: dict[int, int] = {}
    for node in reversed(list(table.order)):
        cone = 0
        for reader in table.consumers[node]:
            cone |= cones[reader]
            waiting[reader] -= 1
            if not waiting[reader]:
                del cones[reader], waiting[reader]
        yield node, cone
        if table.rules[node] is not None:
            inputs = len(set(table.inputs[node]))
            if inputs:
                # Kept with the node itself in it: that is what its inputs need.
                cones[node], waiting[node] = cone | 1 << bits, inputs
            bits += 1
