"""Gradients: the reverse pass of a loss as ordinary nodes of the same graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from conewise.arguments import has_items
from conewise.errors import GradientError, nearest_names
from conewise.reactive.graph import Graph, Site, StructureChange, arity

Read = Literal["gradient", "output"] | int

GRADIENT: Final = "gradient"
"""Read the gradient of the loss at the rule's output."""

OUTPUT: Final = "output"
"""Read the value that the rule computed. The value of input k is read as the number k."""


@dataclass(frozen=True, slots=True)
class Vjp:
    """The gradient of the loss at one input of a rule, as `function` of the values that `reads` lists.

    The gradient becomes an ordinary node with exactly these inputs. So `reads` decides what
    invalidates it: whatever is listed without need makes it stale without need, and what the
    function takes from anywhere else makes it wrong.
    """

    function: Callable[..., Any]
    reads: tuple[Read, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", tuple(self.reads))
        for read in self.reads:
            if read not in (GRADIENT, OUTPUT) and not (type(read) is int and read >= 0):
                raise GradientError(
                    f"a vector-Jacobian product cannot read {read!r}. It reads GRADIENT, OUTPUT, or the "
                    "number of an input, from 0."
                )
        minimum, maximum = arity(self.function)
        if not minimum <= len(self.reads) <= maximum:
            raise GradientError(
                f"this vector-Jacobian product reads {len(self.reads)} values "
                f"({', '.join(map(str, self.reads))}), and its function does not take that many. "
                "List one read for each argument, in order."
            )


class Vjps(Protocol):
    """One `Vjp` for each input, or None where the rule is not differentiable in that input.

    A tuple will do. A rule of any number of inputs answers for each index that it is asked about.
    """

    def __getitem__(self, index: int, /) -> Vjp | None:
        """The vector-Jacobian product of the input at `index`."""


def vjps_of(rule: object) -> Vjps | None:
    """Return the vector-Jacobian products of a rule, if it has any."""
    vjps: Vjps | None = getattr(rule, "vjps", None)
    return vjps


def may_pass(rule: object, index: int) -> bool:
    """True if a gradient passes to the input at `index`, as far as the rule says."""
    vjps = vjps_of(rule)
    try:
        return vjps is None or vjps[index] is not None
    except IndexError:
        return True


SEED = 1.0
"""d loss / d loss. A Python float, so that it takes on the dtype of whatever it multiplies."""


def total(*contributions: Any) -> Any:
    """The sum of the gradients that reach one site by several ways."""
    first, *rest = contributions
    for contribution in rest:
        first = first + contribution
    return first


class ReversePass:
    """The gradients of one loss by forward site, as nodes of the graph that it guards.

    Invariant: where a forward node has a gradient, so has every differentiable reader of it that
    leads to the loss. So the gradient of a site does not depend on what else was asked for.
    """

    def __init__(self, graph: Graph, loss: int) -> None:
        self.graph = graph
        self.loss = loss
        self.gradient: dict[int, Site] = {}
        self._added: dict[int, list[Site]] = {}
        self._through: dict[int, tuple[int, ...]] = {}
        self._own: set[int] = set()
        self._differentiated: set[int] = set()
        self._wrt: set[int] = set()
        self._spans: dict[object, tuple[frozenset[int], frozenset[int]]] = {}

    # -- what is differentiated ----------------------------------------------------------------

    def span(self, wrt: Sequence[int]) -> frozenset[int]:
        """The nodes on a differentiable path from `wrt` to the loss, both ends included.

        Raises where no such path exists for one of `wrt`, or where one leads through a rule that
        cannot be differentiated. Changes nothing.
        """
        table, leading = self.graph.table, self._leading_to_loss()
        for site in wrt:
            if site not in leading:
                self._refuse_unreached(site)
        span, stack = set(wrt), list(wrt)
        while stack:
            site = stack.pop()
            for reader in table.consumers[site]:
                if reader in leading and reader not in span and self._passes(site, reader):
                    span.add(reader)
                    stack.append(reader)
        for node in table.sorted(span):
            for index, site in enumerate(table.inputs[node]):
                if site in span:
                    self._expect_vjp(node, index)
        return frozenset(span)

    def _leading_to_loss(self) -> set[int]:
        leading, stack = {self.loss}, [self.loss]
        while stack:
            node = stack.pop()
            for index, site in enumerate(self.graph.table.inputs[node]):
                if site not in leading and may_pass(self.graph.table.rules[node], index):
                    leading.add(site)
                    stack.append(site)
        return leading

    def _passes(self, site: int, reader: int) -> bool:
        table = self.graph.table
        inputs = enumerate(table.inputs[reader])
        return any(read == site and may_pass(table.rules[reader], index) for index, read in inputs)

    # -- build ---------------------------------------------------------------------------------

    def extend(self, user: object, wrt: Sequence[int]) -> None:
        """Add the gradients that `user` needs for `wrt` and that are not there yet; all or none."""
        self.graph.journal.expect_idle("gradients")
        self.graph.journal.make(self._extend, user, wrt, self.span(wrt))

    def _extend(self, user: object, wrt: Sequence[int], span: frozenset[int]) -> None:
        for node in reversed(self.graph.table.sorted(span)):
            if node not in self.gradient:
                self._add(node, span)
        if not self._spans:
            self.graph.guard(self)
        self.graph.journal.put(self._spans, user, (span, frozenset(wrt)))
        self._protect()

    def _add(self, node: int, span: Collection[int]) -> None:
        graph, table = self.graph, self.graph.table
        name = f"d({graph.name(self.loss)})/d({graph.name(node)})"
        if node == self.loss:
            self._keep(node, [graph.add_source(self._free(name), SEED)], ())
            return
        ways = [
            (reader, index, vjp)
            for reader in table.sorted(reader for reader in table.consumers[node] if reader in span)
            for index, site in enumerate(table.inputs[reader])
            if site == node and (vjp := self._vjp(reader, index)) is not None
        ]
        if len(ways) == 1:
            reader, _, vjp = ways[0]
            added = [graph.add_node(self._free(name), vjp.function, self._reads(reader, vjp))]
        else:
            added = []
            for reader, index, vjp in ways:
                is_twice = table.inputs[reader].count(node) > 1
                way = f"{name}@{graph.name(reader)}" + (f"[{index}]" if is_twice else "")
                added.append(graph.add_node(self._free(way), vjp.function, self._reads(reader, vjp)))
            added.append(graph.add_node(self._free(name), total, added))
        self._keep(node, added, tuple(reader for reader, _, _ in ways))

    def _keep(self, node: int, added: list[Site], through: tuple[int, ...]) -> None:
        put = self.graph.journal.put
        put(self.gradient, node, added[-1])
        put(self._added, node, added)
        put(self._through, node, through)

    def _vjp(self, node: int, index: int) -> Vjp | None:
        vjps = vjps_of(self.graph.table.rules[node])
        assert vjps is not None, "span() has checked it"
        return vjps[index]

    def _reads(self, node: int, vjp: Vjp) -> list[Site]:
        special = {GRADIENT: self.gradient[node], OUTPUT: self.graph.name(node)}
        inputs = self.graph.names(self.graph.table.inputs[node])
        return [inputs[read] if isinstance(read, int) else special[read] for read in vjp.reads]

    def _free(self, name: Site) -> Site:
        """`name`, or the first of name#2, name#3, ... that no site has."""
        names = itertools.chain((name,), (f"{name}#{count}" for count in itertools.count(2)))
        return next(free for free in names if free not in self.graph)

    # -- remove --------------------------------------------------------------------------------

    def serves(self, user: object) -> bool:
        """True if `user` has asked for gradients, and has not released them."""
        return user in self._spans

    def added(self, user: object) -> tuple[Site, ...]:
        """The nodes that `user` needs, inputs first."""
        nodes = (site for node in self._spans[user][0] for site in self._added[node])
        return self.graph.names(self.graph.table.sorted(self.graph.numbers(nodes)))

    def release(self, user: object) -> None:
        """Take out the nodes that only `user` needs; raises, and changes nothing, where others read them."""
        kept: set[int] = set().union(*(span for other, (span, _) in self._spans.items() if other is not user))
        gone = self._spans[user][0] - kept
        self.graph.journal.expect_idle("grads.remove")
        added = self.graph.numbers(site for node in gone for site in self._added[node])
        removal = self.graph.removal(added, by=self)
        self.graph.journal.make(self._release, user, gone, removal)

    def _release(self, user: object, gone: frozenset[int], removal: StructureChange) -> None:
        journal = self.graph.journal
        journal.pop(self._spans, user)
        for node in gone:
            for known in (self.gradient, self._added, self._through):
                journal.pop(known, node)
        self.graph.take_away(removal)
        self._protect()
        if not self._spans:
            self.graph.unguard(self)

    # -- guard ---------------------------------------------------------------------------------

    def approve(self, change: StructureChange) -> None:
        """Refuse what would make a gradient wrong: a change of what was differentiated, or a new path."""
        for node in self._touched(change):
            if node in self._own:
                self._refuse(change, f"it would change {self.graph.name(node)!r}, a node of the reverse pass")
            if node in self._differentiated:
                self._refuse(change, f"it would change {self.graph.name(node)!r}, which they differentiate")
        for node in change.removed:
            if node in self.gradient:
                self._refuse(change, f"it would take away {self.graph.name(node)!r}, which has a gradient")
        for node in change.seeds:
            self._expect_no_new_path(change, node)

    def _protect(self) -> None:
        """Know by number what may not change, so that approving a change costs what that touches."""
        assign, chain = self.graph.journal.assign, itertools.chain.from_iterable
        assign(self, "_own", set(self.graph.numbers(chain(self._added.values()))))
        assign(self, "_differentiated", set(chain(self._through.values())))
        assign(self, "_wrt", set().union(*(wrt for _, wrt in self._spans.values())))

    def follow(self, change: StructureChange) -> None:
        """Nothing to do: what was approved leaves the reverse pass as it is."""

    @staticmethod
    def _touched(change: StructureChange) -> Iterator[int]:
        # A graft announces itself by the edges it will cut: its readers are what it changes.
        yield from change.seeds
        yield from change.removed
        yield from (reader for _, reader in change.cut)

    def _expect_no_new_path(self, change: StructureChange, node: int) -> None:
        """A redefined node that leads to the loss may not come to depend on what is differentiated by."""
        cut = {site for site, reader in change.cut if reader == node}
        reads = {site for site in self.graph.table.inputs[node] if site not in cut}
        reads |= {site for site, reader in change.joined if reader == node}
        for site in self.graph.table.sorted(reads):
            if self._depends_on_wrt(site) and node in self._leading_to_loss():
                self._refuse(
                    change,
                    f"{self.graph.name(node)!r} would read {self.graph.name(site)!r}, a new path from what "
                    "they are taken with respect to",
                )

    def _depends_on_wrt(self, node: int) -> bool:
        """True if a differentiable path leads here from one of `wrt`; looks no higher than those stand."""
        table, labels = self.graph.table, self.graph.table.labels
        limit = min(labels[site] for site in self._wrt)
        seen, stack = {node}, [node]
        while stack:
            at = stack.pop()
            if at in self._wrt:
                return True
            for index, site in enumerate(table.inputs[at]):
                if site not in seen and labels[site] >= limit and may_pass(table.rules[at], index):
                    seen.add(site)
                    stack.append(site)
        return False

    # -- refusals --------------------------------------------------------------------------------

    def _refuse(self, change: StructureChange, reason: str) -> None:
        raise GradientError(
            f"{change.action} would make the gradients of {self.graph.name(self.loss)!r} wrong: {reason}. "
            "Take them out with `grads.remove()`, make the change, then call `gradients` again. (A change "
            "of values, in a world, needs none of this.)"
        )

    def _refuse_unreached(self, site: int) -> None:
        graph, table = self.graph, self.graph.table
        loss, name = graph.name(self.loss), graph.name(site)
        if self.loss in table.cone([site]):
            raise GradientError(
                f"no gradient of {loss!r} with respect to {name!r}: every path between them leads through an "
                "input that its rule does not differentiate (its `vjps` are None there), such as integer "
                "indices or targets. Ask for the gradient of a site behind that input."
            )
        near = nearest_names(name, graph.names(self._leading_to_loss()))
        raise GradientError(
            f"no gradient of {loss!r} with respect to {name!r}: {loss!r} does not depend on it. `wrt` lists "
            f"the loss itself or sites upstream of it{'; nearest: ' + ', '.join(near) if near else ''}. "
            f"All of them: `graph.upstream({loss!r})`."
        )

    def _expect_vjp(self, node: int, index: int) -> None:
        """The node's rule can be differentiated by the input at `index`, or says that it has no gradient."""
        graph, rule = self.graph, self.graph.table.rules[node]
        site, inputs = graph.name(node), graph.inputs(graph.name(node))
        vjps = vjps_of(rule)
        if vjps is None:
            raise GradientError(
                f"{site!r} stands between what `gradients` was asked for and the loss, and its rule "
                f"{_described(rule)} has no `vjps`: it cannot be differentiated. Use a rule that has them: "
                "one of `conewise.ops`, or `ops.Op(name, function, vjps)` with one "
                "`ops.Vjp(function, reads)` for each input."
            )
        try:
            vjp = vjps[index]
        except IndexError:
            raise GradientError(
                f"the rule {_described(rule)} of {site!r} has no entry in its `vjps` for input {index} "
                f"({inputs[index]!r}): it reads {len(inputs)} inputs. Give one for each, or None where it is "
                "not differentiable."
            ) from None
        wrong = [read for read in vjp.reads if isinstance(read, int) and read >= len(inputs)] if vjp else []
        if wrong:
            raise GradientError(
                f"the rule {_described(rule)} of {site!r} has a vector-Jacobian product that reads input "
                f"{wrong[0]}, and the node has {len(inputs)}: {', '.join(inputs)}. Inputs are counted from 0."
            )


def _described(rule: object) -> str:
    return str(getattr(rule, "__qualname__", None) or repr(rule))


def gradients(graph: Graph, loss: Site, wrt: Site | Iterable[Site]) -> Gradients:
    """Add the gradients of `loss` with respect to one or several sites, as nodes of `graph`.

        grads = gradients(graph, "loss", ["w", "h"])
        world.demand(grads["w"])

    Each gradient node reads exactly the values that its op declares in `vjps`, so a change invalidates the
    gradients that read a changed value, and no others. Only paths between `wrt` and the loss are
    differentiated; inputs that an op marks as not differentiable end a path. The gradient of h is the site
    `d(loss)/d(h)`; if several readers contribute to it, it is the sum of sites `d(loss)/d(h)@reader`. Nodes
    that an earlier call for the same loss added are reused.

    **The loss** is a single number. The seed `d(loss)/d(loss)` is a source of the value 1.0; for a loss of
    another shape, `world.set(grads.seed, array)` makes the gradients those of the sum of loss · array. A
    Python 1.0 takes the dtype of the other operand, so float32 stays float32.

    **In a world with patches** the reverse pass is that of the graph's own rules, evaluated at the world's
    values. So the gradients upstream of a site with a patched value or rule are those of the site's own rule,
    as if it had produced the patched value: an op whose gradient reads its output reads the patch. Only the
    reader of a patched edge sees the patch, and the gradient nodes do not; patch the edges into those as well
    if needed. To differentiate another rule, redefine it in the graph.

    **Later changes of structure**: gradients are built for the present graph. A graft or a redefinition that
    would make one wrong raises a `GradientError`: call `remove()`, change the graph, and call `gradients`
    again. Changes elsewhere are allowed.
    """
    given: object = graph
    if not isinstance(given, Graph):
        raise GradientError(
            f"`gradients` adds nodes to a Graph, and a {type(given).__name__} is none. Give the graph that "
            "you built of `conewise.ops`. The operations of a captured model are torch's own: for their "
            "gradients, run its module and call `torch.autograd.grad`."
        )
    if not has_items(wrt):
        raise GradientError(f"`wrt` is a site, or several: `gradients(graph, {loss!r}, ['w'])`, not {wrt!r}.")
    sites = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    number, numbers = graph.number(loss), list(dict.fromkeys(graph.numbers(sites)))
    sites = tuple(dict.fromkeys(sites))
    if not sites:
        raise GradientError(f"`wrt` is empty. Name one or more sites: `gradients(graph, {loss!r}, ['w'])`.")
    built = (guard for guard in graph.guards if isinstance(guard, ReversePass) and guard.loss == number)
    reverse = next(built, None) or ReversePass(graph, number)
    grads = Gradients(reverse, sites)
    reverse.extend(grads, numbers)
    return grads


class Gradients(Mapping[Site, Site]):
    """The name of the gradient of `loss` at each of the requested sites.

    Created by `gradients`. Its nodes stay in the graph until `remove()`.
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
        """Remove the nodes from the graph, except those that other gradients of this loss use."""
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
