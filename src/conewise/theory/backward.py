"""The backward pass: the paper's count of what a change touches in training, and the exact one.

`docs/backward-locality.md` says which is which, and why they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from conewise.errors import TheoryError
from conewise.graph.graph import Graph, Site
from conewise.theory.sweeps import full_cost, sweep_cost
from conewise.theory.weights import (
    Demand,
    Scale,
    Weight,
    Weights,
    expect_number,
    expect_profile,
    expect_weight,
    ratio,
    total,
    wanted,
)


def training_cone(graph: Graph, site: Site, loss: Site | None = None) -> frozenset[Site]:
    """V⁻ ∪ {s} ∪ V⁺, computed nodes only: what the paper counts as touched by a change at s in training.

    V⁻ ∪ {s} is where the gradient depends on the local Jacobian *at* s. It is not the set of gradients
    that change (docs/backward-locality.md); for that, see `joint_cost`. With a `loss`, which s must
    reach, only what the loss depends on counts.
    """
    table = graph.table
    nodes = _touched(graph, graph.number(site), _support(graph, [site], loss))
    return frozenset(graph.names(node for node in nodes if table.rules[node] is not None))


def training_cost(
    graph: Graph, sites: Iterable[Site], loss: Site | None = None, weights: Weights | None = None
) -> Weight:
    """Σ over `sites` of the weight of the training cone: the paper's count."""
    sites = (sites,) if isinstance(sites, str) else tuple(sites)
    scale, support = Scale(graph, weights), _support(graph, sites, loss)
    return total(scale(_touched(graph, number, support)) for number in graph.numbers(sites))


def training_ratio(
    profile: Graph | Iterable[Weight],
    sites: Iterable[Site] | None = None,
    loss: Site | None = None,
    *,
    local: Weight | Sequence[Weight] | None = None,
    terminal: Weight = 0,
    weights: Weights | None = None,
) -> Fraction | float:
    """ρ_train by the paper's count: |sites| · N / Σ |V⁻ ∪ {s} ∪ V⁺|.

    docs/theory.md#training. For a profile w_1..w_L without a way around a layer, with one site per layer,
    of whose own layer the weight `local` is touched (one number, or one per layer; None: all of it):

        ρ_train = L · N / Σ_i (N − w_i + c_i),   1 ≤ ρ_train < L/(L−1)

    where N counts `terminal` too. The layers of E5 weigh 2·w − 1, of which `local` is w.
    """
    if isinstance(profile, Graph):
        if sites is None:
            raise TheoryError(
                "which sites of the graph are swept? Pass them: `training_ratio(graph, sites)`."
            )
        if local is not None or terminal:
            raise TheoryError("`local` and `terminal` belong to a profile; a graph has all its nodes in it.")
        swept = (sites,) if isinstance(sites, str) else tuple(sites)
        if not swept:
            raise TheoryError("no sites are given, and a ratio needs at least one.")
        touched = training_cost(profile, swept, loss, weights)
        if touched == 0:
            raise TheoryError("the training cones of these sites weigh nothing, so the ratio has no value.")
        return ratio(len(swept) * full_cost(profile, loss, weights), touched)
    if sites is not None or loss is not None or weights is not None:
        raise TheoryError("`sites`, `loss` and `weights` belong to a graph; a profile is its own weights.")
    layers = expect_profile(profile)
    whole = total([*layers, expect_weight(terminal, "`terminal`")])
    own = _own(local, layers)
    touched = total(whole - layer + part for layer, part in zip(layers, own, strict=True))
    return ratio(len(layers) * whole, touched)


def joint_cost(graph: Graph, sites: Iterable[Site], demand: Demand, weights: Weights | None = None) -> Weight:
    """The exact cost of a sweep under backpropagation, on a graph that holds its gradients as nodes.

    docs/backward-locality.md. `graph` is what `gradients(graph, loss, wrt)` made, `demand` the gradient
    sites (with the loss, if it is read). Gradients are ordinary nodes, so this is `sweep_cost`; each
    site must reach something that is demanded, else the question is a slip: TheoryError.
    """
    sites = (sites,) if isinstance(sites, str) else tuple(sites)
    if demand is None:
        raise TheoryError("which gradients are demanded? Pass their sites.")
    targets = graph.numbers(demand)
    support = graph.table.support(targets, ())
    for site in sites:
        number = graph.number(site)
        if number not in support:
            raise TheoryError(
                f"{site!r} reaches none of the {len(targets)} demanded sites, so a change there costs "
                "nothing and changes no gradient. Take it out of the sweep, or demand what it reaches."
            )
    return sweep_cost(graph, sites, graph.names(targets), weights)


def joint_ratio(
    graph: Graph, sites: Iterable[Site], demand: Demand, weights: Weights | None = None
) -> Fraction | float:
    """ρ under backpropagation, exact: a full forward and backward run per site over `joint_cost`."""
    sites = (sites,) if isinstance(sites, str) else tuple(sites)
    demand = (demand,) if isinstance(demand, str) else None if demand is None else tuple(demand)
    spent = joint_cost(graph, sites, demand, weights)
    if spent == 0:
        raise TheoryError("a sweep of these sites recomputes nothing, so its ratio has no value.")
    return ratio(len(sites) * full_cost(graph, demand, weights), spent)


def dense_joint_ratio(forward: Weight, share: Weight = 1) -> Fraction | float:
    """ρ under backpropagation when every change alters every gradient: (1 + b) / (1/ρ + b).

    docs/backward-locality.md#dense. `forward` is ρ of the forward pass, `share` is b, the weight of the
    backward pass over that of the forward pass. A loss that is not linear makes a network dense: the
    seed of the backward pass reads the changed output. Above 1 for every ρ > 1: 4/3 for ρ = 2, b = 1.
    """
    forward, share = expect_number(forward, "the forward ratio"), expect_weight(share, "`share`")
    if forward < 1:
        raise TheoryError(f"the forward ratio is {forward}; no sweep costs more than full runs.")
    return ratio(1 + share, ratio(1, forward) + share)


def _support(graph: Graph, sites: Iterable[Site], loss: Site | None) -> set[int] | None:
    support = wanted(graph, loss)
    if support is not None:
        for site in sites:
            if graph.number(site) not in support:
                raise TheoryError(
                    f"the loss {loss!r} is not reached from {site!r}: a change there has no gradient. The "
                    f"loss depends on {len(support)} sites; list them with `graph.support({loss!r})`."
                )
    return support


def _touched(graph: Graph, site: int, support: set[int] | None) -> set[int]:
    table = graph.table
    nodes = table.upstream([site]) | {site} | table.cone([site])
    return nodes if support is None else nodes & support


def _own(local: Weight | Sequence[Weight] | None, layers: Sequence[Weight]) -> Sequence[Weight]:
    """c_i: what is touched of the site's own layer."""
    if local is None:
        return layers
    own = list(local) if isinstance(local, Sequence) else [local] * len(layers)
    if len(own) != len(layers):
        raise TheoryError(f"`local` has {len(own)} entries for {len(layers)} layers; give one for each.")
    own = [expect_weight(part, f"`local` of layer {i}") for i, part in enumerate(own, 1)]
    for i, (part, layer) in enumerate(zip(own, layers, strict=True), 1):
        if not 0 < part <= layer:
            raise TheoryError(
                f"`local` of layer {i} is {part}, of a layer that weighs {layer}: what a change touches of "
                "its own layer is more than zero and at most the layer."
            )
    return own
