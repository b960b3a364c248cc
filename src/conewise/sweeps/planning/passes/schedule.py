"""A schedule: which nodes are computed in which worlds of a sweep, in order, before any of it is.

Sets of worlds are bit masks: bit i is world i. Worlds are numbered so that patches further down the
graph have higher numbers; the worlds in which a node is computed are then mostly the first few, and a
stack of them grows at its end as the pass descends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conewise.reactive.graph import Graph


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps inputs first: nodes with the worlds in which each is computed.

    `patched` has, for each patched node, the worlds that patch it, `whole` those of them that replace its
    whole value. A world that replaces a node's whole value does not compute it; one that replaces a part of
    it computes it only when another patch of the same world reaches it.
    """

    worlds: int
    steps: tuple[tuple[str, int], ...]
    patched: Mapping[str, int]
    targets: tuple[str, ...]
    whole: Mapping[str, int]

    @property
    def node_evaluations(self) -> int:
        """Σ over worlds of the nodes computed there: what a serial run computes, one by one."""
        return sum(worlds.bit_count() for _, worlds in self.steps)

    @property
    def launches(self) -> int:
        """How many nodes are computed in at least one world: what a wavefront launches."""
        return len(self.steps)

    @property
    def reached(self) -> int:
        """The worlds in which a target changes."""
        found = 0
        for _, worlds in self.steps:
            found |= worlds
        for target in self.targets:
            found |= self.patched.get(target, 0)
        return found

    def of(self, first: int, count: int) -> Schedule:
        """The part that concerns `count` worlds from `first` on, which is then world 0."""

        def cut(masks: Mapping[str, int]) -> dict[str, int]:
            return {node: found for node, mask in masks.items() if (found := mask >> first & all_of_them)}

        all_of_them = (1 << count) - 1
        steps = tuple((node, found) for node, mask in self.steps if (found := mask >> first & all_of_them))
        return Schedule(count, steps, cut(self.patched), self.targets, cut(self.whole))


def schedule(
    graph: Graph,
    patched: Mapping[str, int],
    whole: Mapping[str, int],
    worlds: int,
    targets: Sequence[str],
) -> Schedule:
    """The schedule of worlds that patch some nodes: masks by node, and those that replace the whole value.

    For each world the computed nodes are (cone(P) − P) ∩ support(targets, cut at P), where P are the nodes
    replaced whole, and the cone is that of all patched nodes.
    """
    table, numbers = graph.table, graph.numbers(targets)
    put = {graph.number(node): mask for node, mask in patched.items()}
    replaced = {graph.number(node): mask for node, mask in whole.items()}
    order = table.sorted(table.support(numbers, ()))
    changed: dict[int, int] = {}
    computed: dict[int, int] = {}
    for node in order:
        reached = 0
        for site in table.inputs[node]:
            reached |= changed.get(site, 0)
        reached &= ~replaced.get(node, 0)
        if reached:
            computed[node] = reached
        if reached or node in put:
            changed[node] = reached | put.get(node, 0)
    wanted: dict[int, int] = dict.fromkeys(numbers, (1 << worlds) - 1)
    for node in reversed(order):
        here = computed.get(node, 0) & wanted.get(node, 0)
        if here:
            computed[node] = here
            for site in table.inputs[node]:
                wanted[site] = wanted.get(site, 0) | here
        else:
            computed.pop(node, None)
    steps = tuple((graph.name(node), computed[node]) for node in order if node in computed)
    return Schedule(worlds, steps, dict(patched), tuple(targets), dict(whole))
