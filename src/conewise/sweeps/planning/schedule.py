"""A schedule: which nodes are computed in which worlds of a sweep, in order, before any of it is.

Sets of worlds are bit masks: bit i is world i. Worlds are numbered so that patches further down the
graph have higher numbers; the worlds in which a node is computed are then mostly the first few, and a
stack of them grows at its end as the pass descends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conewise.graph.graph import Graph


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps inputs first: node numbers with the worlds in which each is computed.

    `patched` has, for each patched node, the worlds that patch it. A world that replaces a node's whole
    value does not compute it; one that replaces a part of it computes it only when another patch of the
    same world reaches it.
    """

    worlds: int
    steps: tuple[tuple[int, int], ...]
    patched: Mapping[int, int]
    targets: tuple[int, ...]

    @property
    def node_evaluations(self) -> int:
        """Σ over worlds of the nodes computed there: what a serial run computes, one by one."""
        return sum(worlds.bit_count() for _, worlds in self.steps)

    @property
    def launches(self) -> int:
        """How many nodes are computed in at least one world: what a wavefront launches."""
        return len(self.steps)

    def of(self, chunk: int) -> Schedule:
        """The part of the schedule that concerns the worlds of the mask `chunk`."""
        steps = tuple((node, worlds & chunk) for node, worlds in self.steps if worlds & chunk)
        patched = {node: worlds & chunk for node, worlds in self.patched.items() if worlds & chunk}
        return Schedule(chunk.bit_count(), steps, patched, self.targets)


def schedule(graph: Graph, worlds: Sequence[Mapping[int, bool]], targets: Sequence[int]) -> Schedule:
    """The schedule of worlds that each patch some nodes (number: whether its whole value is replaced).

    For each world the computed nodes are (cone(P) − P) ∩ support(targets, cut at P), where P are the nodes
    replaced whole, and the cone is that of all patched nodes.
    """
    table = graph.table
    whole: dict[int, int] = {}
    patched: dict[int, int] = {}
    for place, patches in enumerate(worlds):
        for node, is_whole in patches.items():
            patched[node] = patched.get(node, 0) | 1 << place
            if is_whole:
                whole[node] = whole.get(node, 0) | 1 << place
    order = table.sorted(table.support(targets, ()))
    changed: dict[int, int] = {}
    computed: dict[int, int] = {}
    for node in order:
        reached = 0
        for site in table.inputs[node]:
            reached |= changed.get(site, 0)
        reached &= ~whole.get(node, 0)
        if reached:
            computed[node] = reached
        if reached or node in patched:
            changed[node] = reached | patched.get(node, 0)
    wanted: dict[int, int] = dict.fromkeys(targets, (1 << len(worlds)) - 1)
    for node in reversed(order):
        here = computed.get(node, 0) & wanted.get(node, 0)
        if here:
            computed[node] = here
            for site in table.inputs[node]:
                wanted[site] = wanted.get(site, 0) | here
        else:
            computed.pop(node, None)
    steps = tuple((node, computed[node]) for node in order if node in computed)
    return Schedule(len(worlds), steps, patched, tuple(targets))
