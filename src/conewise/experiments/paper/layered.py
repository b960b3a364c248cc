"""The layered graphs of the paper's E4 and E5, built for real: a chain of layers, and layers with width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from conewise.graph.graph import Graph, Site
from conewise.graph.table import Rule

Profile = Literal["output-heavy", "input-heavy"]
PROFILES: tuple[Profile, ...] = ("output-heavy", "input-heavy")


@dataclass(frozen=True, slots=True)
class Layered:
    """A graph of layers, the site that is patched in each, and the node that is demanded."""

    graph: Graph
    sites: tuple[Site, ...]
    output: Site

    @property
    def size(self) -> int:
        """N: how many nodes one full run computes, the terminal one included."""
        return len(self.graph) - len(self.graph.sources)


def relu(x: float) -> float:
    """The paper's unary op."""
    return x if x > 0.0 else 0.0  # noqa: FURB136  # a call less, ten million times


def mean(x: float, y: float) -> float:
    """A fold of two branches that keeps numbers in range however long the chain."""
    return (x + y) / 2


def profile_weights(layers: int, q: float, profile: Profile, total: int = 4000) -> list[int]:
    """w_j = max(1, round(total · p_j / Σp)), p_j = j^q or (L+1−j)^q, rounded half to even."""
    powers = [float(j) ** q for j in range(1, layers + 1)]
    if profile == "input-heavy":
        powers.reverse()
    scale = total / sum(powers)
    return [max(1, round(scale * power)) for power in powers]


def sequential(weights: Sequence[int]) -> Layered:
    """One chain of unary nodes: layer j has w_j of them, its last is its site; then a terminal node."""
    graph = Graph()
    last, sites = graph.source("x", 1.0), []
    for layer, weight in enumerate(weights, start=1):
        for step in range(weight):
            last = graph.node(f"layer{layer}.{step}", relu, [last])
        sites.append(last)
    return Layered(graph, tuple(sites), graph.node("output", relu, [last]))


def branched(weights: Sequence[int], unary: Rule = relu, fold: Rule = mean, x: Any = 1.0) -> Layered:
    """Layer j is w_j parallel branches of the previous aggregate, folded one by one; then a terminal node.

    The site of a layer is its first branch: the other branches are neither above nor below it.
    """
    graph = Graph()
    last, sites = graph.source("x", x), []
    for layer, weight in enumerate(weights, start=1):
        branches = [graph.node(f"layer{layer}.branch{b}", unary, [last]) for b in range(weight)]
        sites.append(branches[0])
        last = branches[0]
        for step, branch in enumerate(branches[1:], start=1):
            last = graph.node(f"layer{layer}.fold{step}", fold, [last, branch])
    return Layered(graph, tuple(sites), graph.node("output", unary, [last]))
