"""Forward and reverse passes: scalars through smooth ops, some inputs of which have no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

import conewise as cw
from conewise.paper import ops
from conewise.reactive.gradients import gradients

INDEXED = ops.Op("indexed", lambda value, index: value * index, (ops.mul.vjps[0], None))
"""A product that has no gradient by its second input, as by indices."""
OPS = (ops.tanh, ops.gelu, ops.add, ops.mul, ops.mul, ops.scale(factor=2.0), ops.mse, INDEXED)


@dataclass(frozen=True)
class ReverseScene:
    """The wiring of a graph that ends in a loss, the sites by which it is differentiated, and patches."""

    nodes: tuple[tuple[str, ops.Op, tuple[str, ...]], ...]
    wrt: tuple[str, ...]
    patches: tuple[tuple[str, ...], ...]

    def graph(self) -> cw.Graph:
        graph = cw.Graph()
        for number in range(3):
            graph.source(f"x{number}", 0.25 + number / 8)
        for site, op, inputs in self.nodes:
            graph.node(site, op, inputs)
        return graph

    def bills(self) -> tuple[tuple[int, int], list[tuple[int, int]]]:
        """What the engine computes of both passes, fully and for each patch: forward nodes and others."""
        graph = self.graph()
        forward = set(graph.sites)
        grads = gradients(graph, "loss", self.wrt)
        demand = ("loss", *grads.values())
        base = cw.World(graph)
        found = []
        with base.ledger.interval() as ledger:
            base.demand(demand)
        full = _split(ledger.recomputed, forward)
        for patch in self.patches:
            with base.fork() as fork:
                for number, site in enumerate(patch):
                    fork.patch(site, 0.375 + number / 16)
                with fork.ledger.interval() as ledger:
                    fork.demand(demand)
                found.append(_split(ledger.recomputed, forward))
        return full, found


def _split(computed: Sequence[str], forward: set[str]) -> tuple[int, int]:
    ahead = sum(site in forward for site in computed)
    return ahead, len(computed) - ahead


@st.composite
def reverse_scenes(draw: st.DrawFn, *, patched_together: int = 2) -> ReverseScene:
    """Chains with joints and skips; the loss adds or multiplies what nothing else reads."""
    sites, nodes = ["x0", "x1", "x2"], []
    for number in range(draw(st.integers(1, 8))):
        op = draw(st.sampled_from(OPS))
        inputs = tuple(draw(st.sampled_from(sites[-4:])) for _ in range(op.arity or 1))
        nodes.append((f"n{number}", op, inputs))
        sites.append(f"n{number}")
    read = {site for _, _, inputs in nodes for site in inputs}
    ends = tuple(site for site, _, _ in nodes if site not in read)
    nodes.append(("loss", ops.mul if len(ends) == 2 and draw(st.booleans()) else ops.total, ends))
    graph = ReverseScene(tuple(nodes), (), ()).graph()
    leading = _leading(graph)
    wrt = draw(st.lists(st.sampled_from(leading), min_size=1, max_size=3, unique=True))
    site = st.sampled_from([*sites, "loss"])
    patch = st.lists(site, min_size=1, max_size=patched_together, unique=True).map(tuple)
    return ReverseScene(tuple(nodes), tuple(wrt), tuple(draw(st.lists(patch, min_size=1, max_size=4))))


def _leading(graph: cw.Graph) -> list[str]:
    """The sites from which a path of differentiable inputs leads to the loss."""
    found = {"loss"}
    for node in reversed(list(graph)):
        if node.site in found and not graph.is_source(node.site):
            ends = node.inputs[:1] if node.rule is INDEXED else node.inputs
            found.update(ends)
    return [site for site in graph.sites if site in found]
