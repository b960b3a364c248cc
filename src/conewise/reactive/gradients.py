"""Gradients: the reverse pass of a loss as ordinary nodes of the same graph.

Invalidation, demand and counting of the backward pass are then those of any other node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from conewise.errors import GradientError
from conewise.reactive.graph import Graph, Site
from conewise.reactive.reverse import ReversePass


def gradients(graph: Graph, loss: Site, wrt: Site | Iterable[Site]) -> Gradients:
    """Add the gradients of `loss` with respect to one or several sites, as nodes of `graph`.

        grads = gradients(graph, "loss", ["w", "h"])
        world.demand(grads["w"])

    Each gradient node reads exactly what its op declares in `vjps`, so a change invalidates the
    gradients that read something changed, and no others. Only paths between `wrt` and the loss are
    differentiated; inputs that an op marks as not differentiable end a path. The gradient of h is
    the site `d(loss)/d(h)`; where several readers contribute to it, it is the sum of sites
    `d(loss)/d(h)@reader`. What an earlier call for the same loss has added is used again.

    **The loss** is a single number. The seed `d(loss)/d(loss)` is a source of the value 1.0; for a
    loss of another shape, `world.set(grads.seed, array)` makes the gradients those of the sum of
    loss · array. A Python 1.0 takes on the dtype of what it meets, so float32 stays float32.

    **In a world with patches** the reverse pass is that of the graph's own rules, evaluated at the
    world's values. So the gradients upstream of a site whose value, or rule, is patched are those
    of the site's own rule, as if the patched value had come from it: an op whose gradient reads its
    output reads the patch. A patched edge is seen by its one reader and not by the gradient nodes;
    patch the edges into those as well where that is meant. To differentiate another rule,
    redefine it in the graph.

    **Later changes of structure**: gradients are built for the graph as it is. A graft or a
    redefinition that would make one wrong is refused with a `GradientError`: call `remove()`, change
    the graph, and call `gradients` again. Changes elsewhere are free.
    """
    _expect_graph(graph)
    if not isinstance(wrt, Iterable):
        raise GradientError(f"`wrt` is a site, or several: `gradients(graph, {loss!r}, ['w'])`, not {wrt!r}.")
    sites = tuple(dict.fromkeys((wrt,) if isinstance(wrt, str) else wrt))
    number, numbers = graph.number(loss), graph.numbers(sites)
    if not sites:
        raise GradientError(f"`wrt` is empty. Name one or more sites: `gradients(graph, {loss!r}, ['w'])`.")
    built = (guard for guard in graph.guards if isinstance(guard, ReversePass) and guard.loss == number)
    reverse = next(built, None) or ReversePass(graph, number)
    grads = Gradients(reverse, sites)
    reverse.extend(grads, numbers)
    return grads


def _expect_graph(graph: object) -> None:
    if not isinstance(graph, Graph):
        raise GradientError(
            f"`gradients` adds nodes to a Graph, and a {type(graph).__name__} is none. Give the graph that "
            "you built of `conewise.ops`. The operations of a captured model are torch's own: for their "
            "gradients, run its module and call `torch.autograd.grad`."
        )


class Gradients(Mapping[Site, Site]):
    """The name of the gradient of `loss` at each of the sites that were asked for.

    Made by `gradients`. Its nodes stay in the graph until `remove()`.
    """

    def __init__(self, reverse: ReversePass, wrt: tuple[Site, ...]) -> None:
        self._reverse = reverse
        self._graph = reverse.graph
        self._wrt = wrt
        self.loss = reverse.graph.name(reverse.loss)

    def __getitem__(self, site: Site) -> Site:
        reverse = self._present()
        if site not in self._wrt:
            raise KeyError(
                f"no gradient with respect to {site!r} was asked for; these were: {', '.join(self._wrt)}. "
                f"Ask with `gradients(graph, {self.loss!r}, [{site!r}])`."
            )
        return reverse.gradient[self._graph.number(site)]

    def __iter__(self) -> Iterator[Site]:
        return iter(self._wrt)

    def __len__(self) -> int:
        return len(self._wrt)

    # Two mappings with equal entries are not one thing: each has its own hold on the nodes.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def seed(self) -> Site:
        """The source that stands for d loss / d loss."""
        reverse = self._present()
        return reverse.gradient[reverse.loss]

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every node that these gradients consist of, inputs first; the seed is one of them."""
        return self._present().added(self)

    def remove(self) -> None:
        """Take the nodes out of the graph, but for those that other gradients of this loss use."""
        self._present().release(self)

    @property
    def _is_removed(self) -> bool:
        return not self._reverse.serves(self)

    def _present(self) -> ReversePass:
        if self._is_removed:
            raise GradientError(
                f"these gradients of {self.loss!r} were removed. Build them again with "
                f"`gradients(graph, {self.loss!r}, {list(self._wrt)!r})`."
            )
        return self._reverse

    def __repr__(self) -> str:
        if self._is_removed:
            return f"Gradients(of {self.loss!r}, removed)"
        return f"Gradients(of {self.loss!r} with respect to {', '.join(self._wrt)}; {len(self.sites)} nodes)"
