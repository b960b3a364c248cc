"""The backward pass: the paper's count of what a change touches in training, and the exact one.

`docs/backward-locality.md` says which is which, and why they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from conewise.errors import TheoryError
from conewise.graph.graph import Graph, Site
from conewise.theory.sweeps import full_weight, world_costs
from conewise.theory.weights import (
    Demand,
    Exact,
    Scale,
    Weight,
    Weights,
    answer,
    answer_ratio,
    any_float,
    exact,
    expect_demand,
    expect_graph,
    expect_items,
    expect_number,
    expect_profile,
    expect_site,
    expect_sites,
    expect_weight,
    ratio,
    shown,
    total,
)


def training_cone(graph: Graph, site: Site, loss: Site | None = None) -> frozenset[Site]:
    """V⁻ ∪ {s} ∪ V⁺, computed nodes only: what the paper counts as touched by a change at s in training.

    V⁻ is where the gradient depends on the local Jacobian *at* s, that is, on the rule of s; at s itself it
    does not. That is not the set of gradients that change (docs/backward-locality.md); for that, see
    `joint_cost`. With a `loss`, which s must reach, only what the loss depends on counts.
    """
    table, number = expect_graph(graph).table, graph.number(expect_site(site, "the site"))
    nodes = _touched(graph, number, _support(graph, [number], loss))
    return frozenset(graph.names(node for node in nodes if table.rules[node] is not None))


def training_cost(
    graph: Graph, sites: Iterable[Site], loss: Site | None = None, weights: Weights | None = None
) -> Weight:
    """Σ over `sites` of the weight of the training cone: the paper's count."""
    scale = Scale(graph, weights)
    return answer(_training_weight(graph, expect_sites(sites), loss, scale), scale.is_float, "the cost")


def _training_weight(graph: Graph, sites: tuple[Site, ...], loss: Site | None, scale: Scale) -> Exact:
    numbers = graph.numbers(sites)
    support = _support(graph, numbers, loss)
    return total(scale(_touched(graph, number, support)) for number in numbers)


def training_ratio(
    profile: Graph | Iterable[Weight],
    sites: Iterable[Site] | None = None,
    loss: Site | None = None,
    *,
    local: Weight | Iterable[Weight] | None = None,
    terminal: Weight = 0,
    weights: Weights | None = None,
) -> Fraction | float:
    """ρ_train by the paper's count: |sites| · N / Σ |V⁻ ∪ {s} ∪ V⁺|; never below 1.

    docs/theory.md#training. For a profile w_1..w_L, with one site per layer that has a path to or from every
    node of every other layer, and of whose own layer the weight `local` is touched (one number, or one
    per layer; None: all of it):

        ρ_train = L · N / Σ_i (N − w_i + c_i),   1 ≤ ρ_train < L/(L−1) for L ≥ 2

    where N counts `terminal` too. The layers of E5 weigh 2·w − 1, of which `local` is w. That no edge
    passes a layer by is not enough for such paths: on a graph, pass the graph.
    """
    if isinstance(profile, Graph):
        if sites is None:
            raise TheoryError(
                "which sites of the graph are swept? Pass them: `training_ratio(graph, sites)`."
            )
        if local is not None or expect_weight(terminal, "`terminal`"):
            raise TheoryError("`local` and `terminal` belong to a profile; a graph has all its nodes in it.")
        swept, scale = expect_sites(sites), Scale(profile, weights)
        if not swept:
            raise TheoryError("no sites are given, and a ratio needs at least one.")
        touched = _training_weight(profile, swept, loss, scale)
        if touched == 0:
            raise TheoryError("the training cones of these sites weigh nothing, so the ratio has no value.")
        full = full_weight(profile, loss, scale)
        return answer_ratio(ratio(len(swept) * full, touched), scale.is_float)
    if sites is not None or loss is not None or weights is not None:
        raise TheoryError("`sites`, `loss` and `weights` belong to a graph; a profile is its own weights.")
    layers = expect_profile(profile)
    end = expect_weight(terminal, "`terminal`")
    own = _own(local, layers)
    whole, L = total([*layers, end]), len(layers)
    touched = L * whole - total(layers) + total(own)
    return answer_ratio(ratio(L * whole, touched), any_float([*layers, end, *own]))


def joint_cost(graph: Graph, sites: Iterable[Site], demand: Demand, weights: Weights | None = None) -> Weight:
    """The exact cost of a sweep under backpropagation, on a graph that holds its gradients as nodes.

    docs/backward-locality.md. `graph` is what `gradients(graph, loss, wrt)` made, `demand` the gradient
    sites (with the loss, if it is read). Gradients are ordinary nodes, so this is `sweep_cost`; each
    site must reach something that is demanded, else the question is a slip: TheoryError.
    """
    scale = Scale(graph, weights)
    swept, targets = expect_sites(sites), _expect_targets(graph, demand)
    return answer(_joint_weight(graph, swept, targets, scale), scale.is_float, "the cost")


def joint_ratio(
    graph: Graph, sites: Iterable[Site], demand: Demand, weights: Weights | None = None
) -> Fraction | float:
    """ρ under backpropagation, exact: a full forward and backward run per site over `joint_cost`."""
    scale = Scale(graph, weights)
    swept, targets = expect_sites(sites), _expect_targets(graph, demand)
    spent = _joint_weight(graph, swept, targets, scale)
    if spent == 0:
        raise TheoryError("a sweep of these sites recomputes nothing, so its ratio has no value.")
    return answer_ratio(ratio(len(swept) * full_weight(graph, targets, scale), spent), scale.is_float)


def _expect_targets(graph: Graph, demand: Demand) -> tuple[Site, ...]:
    targets = expect_demand(demand)
    if targets is None:
        raise TheoryError("which gradients are demanded? Pass their sites.")
    graph.numbers(targets)
    return targets


def _joint_weight(graph: Graph, sites: tuple[Site, ...], targets: tuple[Site, ...], scale: Scale) -> Exact:
    support = graph.table.support(graph.numbers(targets), ())
    for site in sites:
        if graph.number(site) not in support:
            raise TheoryError(
                f"{site!r} reaches none of the {len(targets)} demanded sites, so a change there costs "
                "nothing and changes no gradient. Take it out of the sweep, or demand what it reaches."
            )
    return total(world_costs(graph, sites, targets, scale))


def dense_joint_ratio(forward: Weight, share: Weight = 1, *, stale: Weight = 1) -> Fraction | float:
    """ρ under backpropagation of a sweep that makes the same of every gradient stale: (1 + b) / (1/ρ + b·σ).

    docs/backward-locality.md#dense. `forward` is ρ of the forward pass, `share` is b, the weight of the
    backward pass over that of the forward pass, and `stale` is σ, the part of the backward pass that a change
    makes stale on average. 1, every gradient, where the loss is not linear in the output and all that is
    differentiated reaches it through the output alone: the backward pass begins by reading that. Above 1
    for every ρ > 1: 4/3 for ρ = 2, b = 1. With σ = 1/ρ the backward pass is as local as the forward one: ρ.
    """
    rho, b = expect_number(forward, "the forward ratio"), expect_weight(share, "`share`")
    part = expect_weight(stale, "`stale`")
    if rho < 1:
        raise TheoryError(f"the forward ratio is {shown(rho)}; no sweep costs more than full runs.")
    if part > 1:
        raise TheoryError(f"`stale` is {shown(part)}; it is a part of the backward pass, from 0 to 1.")
    joint = ratio(1 + exact(b), ratio(1, exact(rho)) + exact(b) * exact(part))
    return answer_ratio(joint, any_float([rho, b, part]))


def _support(graph: Graph, sites: Iterable[int], loss: Site | None) -> set[int] | None:
    if loss is None:
        return None
    support = graph.table.support([graph.number(expect_site(loss, "the loss"))], ())
    for site in sites:
        if site not in support:
            raise TheoryError(
                f"the loss {loss!r} is not reached from {graph.name(site)!r}: a change there has no "
                f"gradient. The loss depends on {len(support)} sites; list them with "
                f"`graph.support({loss!r})`."
            )
    return support


def _touched(graph: Graph, site: int, support: set[int] | None) -> set[int]:
    table = graph.table
    nodes = table.upstream([site]) | {site} | table.cone([site])
    return nodes if support is None else nodes & support


def _own(local: Weight | Iterable[Weight] | None, layers: Sequence[Weight]) -> Sequence[Weight]:
    """c_i: what is touched of the site's own layer."""
    if local is None:
        return layers
    if isinstance(local, Iterable):
        given = expect_items(local, "`local`", "for each layer, what is touched of it")
    else:
        given = [local] * len(layers)
    if len(given) != len(layers):
        raise TheoryError(f"`local` has {len(given)} entries for {len(layers)} layers; give one for each.")
    own = [expect_weight(part, f"`local` of layer {i}") for i, part in enumerate(given, 1)]
    for i, (part, layer) in enumerate(zip(own, layers, strict=True), 1):
        if not 0 < part <= layer:
            raise TheoryError(
                f"`local` of layer {i} is {shown(part)}, of a layer that weighs {shown(layer)}: what a "
                "change touches of its own layer is more than zero and at most the layer."
            )
    return own
