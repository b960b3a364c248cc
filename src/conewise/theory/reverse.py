"""The reverse pass: how large it is, and how much of it a change makes stale, from the forward graph alone.

A gradient is a sum over readers, and what flows along one edge is a product: it reads the gradient behind the
edge, and the values that the reader's rule declares (`Vjp.reads`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from conewise.errors import TheoryError
from conewise.graph.graph import Graph, Site
from conewise.graph.vjp import GRADIENT, vjps_of
from conewise.theory.sweeps import Patch, patches_of
from conewise.theory.weights import expect_graph, expect_site, expect_sites


@dataclass(frozen=True, slots=True)
class ReverseCost:
    """What a sweep costs that reads a loss and its gradients, in nodes.

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
    """What patches at `sites`, one world each, make stale of the loss and of its gradients by `wrt`.

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
    """What flows along one edge: the node whose gradient it reads, if it does, and the values."""

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
        table = expect_graph(graph).table
        end = graph.number(expect_site(loss, "the loss"))
        by = graph.numbers(expect_sites(wrt, "`wrt`"))
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
                if site in span and _may_pass(table.rules[node], index):
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
        """How many nodes of the forward pass, and of the reverse pass, a patch makes stale."""
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
            leading.update(site for index, site in inputs if _may_pass(table.rules[node], index))
    return found


def _may_pass(rule: object, index: int) -> bool:
    """Whether a gradient passes to the input at `index`, as far as the rule says."""
    vjps = vjps_of(rule)
    try:
        return vjps is None or vjps[index] is not None
    except IndexError:
        return True


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
