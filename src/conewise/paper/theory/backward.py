"""The backward pass: the paper's count of what a change touches in training, and the exact one.

`docs/backward-locality.md` says which is which, and why they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from conewise.errors import TheoryError
from conewise.paper import expect
from conewise.paper.expect import Weight, shown
from conewise.paper.theory.sweeps import Patch, full_weight, patches_of, world_costs
from conewise.paper.theory.weights import Amount, Demand, Scale, Weights, amount, total
from conewise.reactive.gradients import GRADIENT, may_pass, vjps_of
from conewise.reactive.graph import Graph, Site


def training_cone(graph: Graph, site: Site, loss: Site | None = None) -> frozenset[Site]:
    """V⁻ ∪ {s} ∪ V⁺, computed nodes only: what the paper counts as touched by a change at s in training.

    V⁻ is where the gradient depends on the local Jacobian *at* s, that is, on the rule of s; at s itself it
    does not. That is not the set of gradients that change (docs/backward-locality.md); for that, see
    `joint_cost`. With a `loss`, which s must reach, only what the loss depends on counts.
    """
    table, number = expect.graph(graph).table, graph.number(expect.site(site, "the site"))
    nodes = _touched(graph, number, _support(graph, [number], loss))
    return frozenset(graph.names(node for node in nodes if table.rules[node] is not None))


def training_cost(
    graph: Graph, sites: Iterable[Site], loss: Site | None = None, weights: Weights | None = None
) -> Weight:
    """Σ over `sites` of the weight of the training cone: the paper's count."""
    return _training_weight(graph, expect.sites(sites), loss, Scale(graph, weights)).weight("the cost")


def _training_weight(graph: Graph, sites: tuple[Site, ...], loss: Site | None, scale: Scale) -> Amount:
    numbers = graph.numbers(sites)
    support = _support(graph, numbers, loss)
    return sum((scale(_touched(graph, number, support)) for number in numbers), scale(()))


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
        if local is not None or expect.weight(terminal, "`terminal`"):
            raise TheoryError("`local` and `terminal` belong to a profile; a graph has all its nodes in it.")
        swept, scale = expect.sites(sites), Scale(profile, weights)
        if not swept:
            raise TheoryError("no sites are given, and a ratio needs at least one.")
        touched = _training_weight(profile, swept, loss, scale)
        if not touched:
            raise TheoryError("the training cones of these sites weigh nothing, so the ratio has no value.")
        return (len(swept) * full_weight(profile, loss, scale) / touched).ratio
    if sites is not None or loss is not None or weights is not None:
        raise TheoryError("`sites`, `loss` and `weights` belong to a graph; a profile is its own weights.")
    layers, end = expect.profile(profile), amount(terminal, "`terminal`")
    whole = len(layers) * (total(layers) + end)
    return (whole / (whole - total(layers) + total(_own(local, layers)))).ratio


def joint_cost(graph: Graph, sites: Iterable[Site], demand: Demand, weights: Weights | None = None) -> Weight:
    """The exact cost of a sweep under backpropagation, on a graph that holds its gradients as nodes.

    docs/backward-locality.md. `graph` is what `gradients(graph, loss, wrt)` made, `demand` the gradient
    sites (with the loss, if it is read). Gradients are ordinary nodes, so this is `sweep_cost`; each
    site must reach something that is demanded, else the question is a slip: TheoryError.
    """
    return _joint(graph, sites, demand, Scale(graph, weights))[0].weight("the cost")


def joint_ratio(
    graph: Graph, sites: Iterable[Site], demand: Demand, weights: Weights | None = None
) -> Fraction | float:
    """ρ under backpropagation, exact: a full forward and backward run per site over `joint_cost`."""
    spent, full = _joint(graph, sites, demand, Scale(graph, weights))
    if not spent:
        raise TheoryError("a sweep of these sites recomputes nothing, so its ratio has no value.")
    return (full / spent).ratio


def _joint(graph: Graph, sites: object, demand: Demand, scale: Scale) -> tuple[Amount, Amount]:
    """Return the cost of the sweep, and that of a full run for each site."""
    swept, targets = expect.sites(sites), expect.demand(demand)
    if targets is None:
        raise TheoryError("which gradients are demanded? Pass their sites.")
    support = graph.table.support(graph.numbers(targets), ())
    for site in swept:
        if graph.number(site) not in support:
            raise TheoryError(
                f"{site!r} reaches none of the {len(targets)} demanded sites, so a change there costs "
                "nothing and changes no gradient. Take it out of the sweep, or demand what it reaches."
            )
    costs = world_costs(graph, swept, targets, scale)
    return sum(costs, scale(())), len(swept) * full_weight(graph, targets, scale)


def dense_joint_ratio(forward: Weight, share: Weight = 1, *, stale: Weight = 1) -> Fraction | float:
    """ρ under backpropagation of a sweep that makes the same of every gradient stale: (1 + b) / (1/ρ + b·σ).

    docs/backward-locality.md#dense. `forward` is ρ of the forward pass, `share` is b, the weight of the
    backward pass over that of the forward pass, and `stale` is σ, the part of the backward pass that a change
    makes stale on average. 1, every gradient, where the loss is not linear in the output and all that is
    differentiated reaches it through the output alone: the backward pass begins by reading that. Above 1
    for every ρ > 1: 4/3 for ρ = 2, b = 1. With σ = 1/ρ the backward pass is as local as the forward one: ρ.
    """
    rho, b, part = (
        expect.number(forward, "the forward ratio"),
        amount(share, "`share`"),
        amount(stale, "`stale`"),
    )
    if rho < 1:
        raise TheoryError(f"the forward ratio is {shown(rho)}; no sweep costs more than full runs.")
    if part > 1:
        raise TheoryError(f"`stale` is {shown(part)}; it is a part of the backward pass, from 0 to 1.")
    return ((1 + b) / (1 / Amount.of(rho) + b * part)).ratio


def _support(graph: Graph, sites: Iterable[int], loss: Site | None) -> set[int] | None:
    if loss is None:
        return None
    support = graph.table.support([graph.number(expect.site(loss, "the loss"))], ())
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
        given = expect.items(local, "`local`", "for each layer, what is touched of it")
    else:
        given = [local] * len(layers)
    if len(given) != len(layers):
        raise TheoryError(f"`local` has {len(given)} entries for {len(layers)} layers; give one for each.")
    own = [expect.weight(part, f"`local` of layer {i}") for i, part in enumerate(given, 1)]
    for i, (part, layer) in enumerate(zip(own, layers, strict=True), 1):
        if not 0 < part <= layer:
            raise TheoryError(
                f"`local` of layer {i} is {shown(part)}, of a layer that weighs {shown(layer)}: what a "
                "change touches of its own layer is more than zero and at most the layer."
            )
    return own


# -- Reverse ---------------------------------------------------------------------------------------
# The reverse pass: how large it is, and how much of it a change makes stale, from the forward graph alone.
#
# A gradient is a sum over readers, and what flows along one edge is a product: it reads the gradient behind
# the edge, and the values that the reader's rule declares (`Vjp.reads`).


@dataclass(frozen=True, slots=True)
class ReverseCost:
    """The cost of a sweep that reads a loss and its gradients, in nodes.

    `forward` and `backward` are what full passes compute; `stale_forward` and `stale_backward` have, for each
    world, what is computed again.
    """

    forward: int
    backward: int
    stale_forward: tuple[int, ...]
    stale_backward: tuple[int, ...]

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """The share of the reverse pass that each world makes stale."""
        if not self.backward:
            raise TheoryError("the reverse pass has no nodes, so shares of it have no value.")
        return tuple(Fraction(stale, self.backward) for stale in self.stale_backward)

    @property
    def share(self) -> Fraction:
        """σ: the mean of the shares."""
        shares = self.shares
        if not shares:
            raise TheoryError("no sites are given, and a share needs at least one.")
        return sum(shares, Fraction(0)) / len(shares)

    @property
    def forward_ratio(self) -> Fraction:
        """ρ: a full forward pass for each world, over what of it is computed again."""
        return self._over(self.forward, sum(self.stale_forward))

    @property
    def ratio(self) -> Fraction:
        """ρ under backpropagation: full passes, forward and backward, over what is computed again."""
        return self._over(self.forward + self.backward, sum(self.stale_forward) + sum(self.stale_backward))

    def _over(self, full: int, spent: int) -> Fraction:
        if not spent:
            raise TheoryError("a sweep of these sites recomputes nothing, so its ratio has no value.")
        return Fraction(len(self.stale_forward) * full, spent)


def reverse_cost(graph: Graph, sites: Iterable[Patch], loss: Site, wrt: Site | Iterable[Site]) -> ReverseCost:
    """Count what patches at `sites`, one world each, make stale of the loss and its gradients by `wrt`.

    docs/backward-locality.md#counted-without-a-reverse-graph. The rules between `wrt` and the loss have
    `vjps`. With C = P ∪ cone(P), the values that a patch of P changes, the product along an edge (v, b) is
    stale iff it reads a value of C or the gradient at b is stale; a gradient is, iff a product into it is. No
    node is added to the graph: it is the count of the graph that `gradients(graph, loss, wrt)` makes.
    """
    whole = _Pass.of(graph, loss, wrt)
    worlds = [whole.stale(patch) for patch in patches_of(graph, sites)]
    needed = graph.table.support(whole.values, ())
    return ReverseCost(
        sum(graph.table.rules[node] is not None for node in needed),
        whole.size,
        tuple(forward for forward, _ in worlds),
        tuple(backward for _, backward in worlds),
    )


@dataclass(frozen=True, slots=True)
class _Product:
    """The gradient along one edge: the node whose gradient it reads, if it does, and the values."""

    behind: int | None
    values: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Pass:
    """The reverse pass of one loss: for each differentiated node, outputs first, the products into it.

    `values` are the loss and all that products read.
    """

    graph: Graph
    products: dict[int, list[_Product]]
    values: frozenset[int]

    @classmethod
    def of(cls, graph: Graph, loss: Site, wrt: Site | Iterable[Site]) -> _Pass:
        table = expect.graph(graph).table
        end = graph.number(expect.site(loss, "the loss"))
        by = graph.numbers(expect.sites(wrt, "`wrt`"))
        if not by:
            raise TheoryError("`wrt` is empty: name the sites by which the loss is differentiated.")
        order = _leading(graph, end)
        for site in by:
            if site not in order:
                raise TheoryError(
                    f"the loss {loss!r} has no gradient by {graph.name(site)!r}: no differentiable path "
                    "leads from there to it. Leave it out of `wrt`."
                )
        span, into = set(by), dict[int, list[_Product]]()
        for node in reversed(order):
            for index, site in enumerate(table.inputs[node]):
                if site in span and may_pass(table.rules[node], index):
                    span.add(node)
                    into.setdefault(site, []).append(_product(graph, node, index))
        # A product that does not read the gradient behind it wants nothing of it.
        wanted, stack = set(by), list(by)
        while stack:
            node = stack.pop()
            ahead = {way.behind for way in into.get(node, ()) if way.behind is not None} - wanted
            wanted |= ahead
            stack.extend(ahead)
        products = {node: into[node] for node in order if node in wanted and node != end}
        read = {value for ways in products.values() for way in ways for value in way.values}
        return cls(graph, products, frozenset({end, *read}))

    @property
    def size(self) -> int:
        """The products, and a sum for each gradient that has several."""
        return sum(len(ways) + (len(ways) > 1) for ways in self.products.values())

    def stale(self, patch: Sequence[int]) -> tuple[int, int]:
        """Count the nodes of the forward pass, and of the reverse pass, that a patch makes stale."""
        table = self.graph.table
        cone = table.cone(patch)
        changed = cone | set(patch)
        gradients: set[int] = set()
        backward = 0
        for node, ways in self.products.items():
            found = sum(way.behind in gradients or not changed.isdisjoint(way.values) for way in ways)
            if found:
                gradients.add(node)
                backward += found + (len(ways) > 1)
        forward = (cone - set(patch)) & table.support(self.values, set(patch))
        return len(forward), backward


def sites_with_gradients(graph: Graph, loss: Site) -> frozenset[Site]:
    """The sites from which a path leads to the loss that no rule refuses to differentiate."""
    return frozenset(graph.names(_leading(graph, graph.number(loss))))


def _leading(graph: Graph, loss: int) -> dict[int, None]:
    """The same by number, outputs first."""
    table = graph.table
    leading, found = {loss}, dict[int, None]()
    for node in reversed(table.sorted(table.support([loss], ()))):
        if node in leading:
            found[node] = None
            inputs = enumerate(table.inputs[node])
            leading.update(site for index, site in inputs if may_pass(table.rules[node], index))
    return found


def _product(graph: Graph, node: int, index: int) -> _Product:
    """The product along the edge from the input at `index`."""
    vjps, inputs = vjps_of(graph.table.rules[node]), graph.table.inputs[node]
    try:
        vjp = vjps[index] if vjps is not None else None
    except IndexError:
        vjp = None
    if vjp is None or any(isinstance(read, int) and read >= len(inputs) for read in vjp.reads):
        raise TheoryError(
            f"the rule of {graph.name(node)!r} does not say what its gradient by input {index} reads: it has "
            "no `vjps` that fit. Use a rule that has them, one of `conewise.ops`, say."
        )
    values = {inputs[read] if isinstance(read, int) else node for read in vjp.reads if read != GRADIENT}
    return _Product(node if GRADIENT in vjp.reads else None, frozenset(values))
