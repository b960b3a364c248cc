"""The graph: named sites, what each reads, and the rule that computes it.

Structure lives here and is shared by every world over the graph; values live in worlds.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, Protocol

from conewise.arguments import checked, expect, has_items
from conewise.errors import (
    ArityError,
    BlockError,
    CycleError,
    DuplicateSiteError,
    GraphError,
    InUseError,
    UnknownEdgeError,
    UnknownSiteError,
)
from conewise.reactive.journal import Journal, truncate
from conewise.reactive.table import Rule, Table


@dataclass(frozen=True, slots=True)
class BlockNode:
    """One node of a block. `inputs` are indices: -1 is the block's input, 0.. are earlier nodes.

    A node without a rule is a source that is included in the block with its value.
    """

    name: str
    rule: Callable[..., Any] | None
    inputs: tuple[int, ...]
    value: Any = None
    param: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """A function of one value as a list of nodes, inputs first; `output` is the index of its value."""

    nodes: tuple[BlockNode, ...]
    output: int

    @property
    def size(self) -> int:
        """The number h of computed nodes that a graft of this block adds."""
        return sum(node.rule is not None for node in self.nodes)


@dataclass(frozen=True, slots=True, eq=False)
class Graft:
    """A block that was inserted into a graph. `graph.remove(graft)` removes it.

    `sites` are the new computed nodes, inputs first; `rerouted` the readers that now read `output`.
    """

    name: str
    at: str
    rerouted: tuple[str, ...]
    sites: tuple[str, ...]
    sources: tuple[str, ...]
    output: str


Site = str
Edge = tuple[Site, Site]


class Mark:
    """Stands where a value is not, and is none that anybody could give."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


MISSING: Final = Mark("MISSING")
"""Stands where a source has no value; a value of its own kind, so that None can be one."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the graph: a rule applied to the values at `inputs`, or a source without a rule."""

    site: Site
    rule: Rule | None
    inputs: tuple[Site, ...]
    param: bool


@dataclass(frozen=True, slots=True)
class StructureChange:
    """A change of structure, by node number, as the worlds over the graph hear of it.

    `seeds`: nodes whose rule or inputs are new, fresh nodes included; `removed`: nodes that are
    gone; `cut`: the edges (input, reader) that are no more; `joined`: those that a redefinition adds.
    """

    action: str
    seeds: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    cut: tuple[tuple[int, int], ...] = ()
    joined: tuple[tuple[int, int], ...] = ()


class Observer(Protocol):
    """Something that must agree to a change of structure before it, and hear of it after."""

    def approve(self, change: StructureChange) -> None:
        """Raise to refuse. Nothing has been changed yet."""

    def follow(self, change: StructureChange) -> None:
        """The change has been made."""


class Graph:
    """A finite DAG of sources and computed nodes, whose topological order is maintained under changes.

    The cost of a change is local: a graft costs its new nodes and the readers it reroutes, a redefinition the
    part of the order that its new inputs invalidate. No change costs the graph's size. Each change is atomic
    even if interrupted, and is applied to all worlds or to none.
    """

    def __init__(self) -> None:
        self.journal: Final = Journal()
        self.table: Final = Table(self.journal)
        self._numbers: dict[Site, int] = {}
        self._names: list[Site] = []
        self._defaults: dict[int, Any] = {}
        self._params: set[int] = set()
        self.valueless: Final[set[int]] = set()
        self._worlds: weakref.WeakSet[Any] = weakref.WeakSet()
        self._guards: list[Observer] = []
        self.changes = 0
        """The number of changes to the structure after it was built: redefinitions, grafts, removals."""

    # -- build -------------------------------------------------------------------------------

    def source(self, name: Site, value: Any = MISSING, *, param: bool = False) -> Site:
        """Add a leaf: an input, or a parameter. `value` is its default in every world."""
        self._expect_new(name, "graph.source")
        if not isinstance(param, bool):
            raise GraphError(f"param is True or False, and not {param!r}.")
        self.journal.make(self._add, name, None, (), value, param)
        return name

    def node(self, name: Site, rule: Rule, inputs: Sequence[Site]) -> Site:
        """Add a computed node: `rule` applied to the values at `inputs`, in that order."""
        self._expect_new(name, "graph.node")
        self.journal.make(self._add, name, rule, self._expect_rule(name, rule, inputs))
        return name

    def add_source(self, name: Site, value: Any) -> Site:
        """`source` as a part of a change that is being made."""
        self._add(name, None, (), value)
        return name

    def add_node(self, name: Site, rule: Rule, inputs: Sequence[Site]) -> Site:
        """`node` as a part of a change that is being made."""
        self._add(name, rule, self._expect_rule(name, rule, inputs))
        return name

    def _add(
        self,
        name: Site,
        rule: Rule | None,
        inputs: tuple[int, ...],
        value: Any = MISSING,
        param: bool = False,
    ) -> None:
        # One entry for all of it: building a graph should not pay for what it hardly ever needs.
        table, number = self.table, len(self._names)
        self.journal.note((self._retract, number, name, inputs, table.order.end))
        table.append(rule, inputs)
        self._numbers[name] = number
        self._names.append(name)
        if rule is None:
            self._hold(number, value, param)

    def _retract(self, number: int, name: Site, inputs: tuple[int, ...], end: tuple[int, int]) -> None:
        self.table.retract(number, inputs, end)
        self._unname(number, name)
        self._forget(number)

    def _name(self, number: int, name: Site) -> None:
        self.journal.note((self._unname, number, name))
        self._numbers[name] = number
        self._names.append(name)

    def _unname(self, number: int, name: Site) -> None:
        self._numbers.pop(name, None)
        truncate(self._names, number)

    def _keep(self, source: int, value: Any, param: bool) -> None:
        self.journal.note((self._forget, source))
        self._hold(source, value, param)

    def _hold(self, source: int, value: Any, param: bool) -> None:
        self._defaults[source] = value
        if value is MISSING:
            self.valueless.add(source)
        if param:
            self._params.add(source)

    def _forget(self, source: int) -> None:
        self._defaults.pop(source, None)
        self.valueless.discard(source)
        self._params.discard(source)

    # -- read --------------------------------------------------------------------------------

    def __len__(self) -> int:
        self.journal.recover()
        return len(self._numbers)

    def __contains__(self, site: object) -> bool:
        self.journal.recover()
        return site in self._numbers

    def __iter__(self) -> Iterator[Node]:
        """The nodes, sources included, inputs first."""
        self.journal.recover()
        return (self._node(number) for number in self.table.order)

    def __getitem__(self, site: Site) -> Node:
        return self._node(self.number(site))

    def __repr__(self) -> str:
        edges = sum(len(set(self.table.inputs[number])) for number in self._numbers.values())
        sources = len(self._defaults)
        return (
            f"Graph({len(self) - sources} computed nodes, {sources} sources "
            f"of which {len(self._params)} parameters, {edges} edges)"
        )

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every site, inputs first."""
        self.journal.recover()
        return self.names(self.table.order)

    @property
    def computed(self) -> tuple[Site, ...]:
        """The sites that have a rule, inputs first."""
        self.journal.recover()
        return self.names(n for n in self.table.order if self.table.rules[n] is not None)

    @property
    def sources(self) -> tuple[Site, ...]:
        """The sites without a rule: inputs and parameters."""
        self.journal.recover()
        return self.names(n for n in self.table.order if self.table.rules[n] is None)

    @property
    def params(self) -> frozenset[Site]:
        """The sources that are marked as parameters."""
        self.journal.recover()
        return frozenset(self.names(self._params))

    @property
    def edges(self) -> Iterator[Edge]:
        """Every pair (input, reader), once each."""
        self.journal.recover()
        for reader in self.table.order:
            for site in dict.fromkeys(self.table.inputs[reader]):
                yield self._names[site], self._names[reader]

    def is_source(self, site: Site) -> bool:
        """True if `site` has a value instead of a rule."""
        return self.table.rules[self.number(site)] is None

    def rule(self, site: Site) -> Rule:
        """The rule at a computed site."""
        rule = self.table.rules[self.number(site)]
        if rule is None:
            raise GraphError(f"{site!r} is a source: it has a value, not a rule. Change it with `world.set`.")
        return rule

    def default(self, source: int) -> Any:
        """The value of a source, by number, in a world that sets no other; `MISSING` if it has none."""
        return self._defaults.get(source, MISSING)

    def inputs(self, site: Site) -> tuple[Site, ...]:
        """Return the inputs of `site`, in the order of its rule's arguments."""
        return self.names(self.table.inputs[self.number(site)])

    def consumers(self, site: Site) -> tuple[Site, ...]:
        """The sites that read `site`, each once."""
        return self.names(self.table.consumers[self.number(site)])

    def cone(self, sites: Site | Iterable[Site]) -> tuple[Site, ...]:
        """Return V⁺: the sites reached by a path of one edge or more, inputs first. O(cone)."""
        return self.names(self.table.sorted(self.table.cone(self.numbers(sites))))

    def upstream(self, sites: Site | Iterable[Site]) -> tuple[Site, ...]:
        """Return V⁻: the sites from which a path of one edge or more leads to this site, inputs first."""
        return self.names(self.table.sorted(self.table.upstream(self.numbers(sites))))

    def support(self, sites: Site | Iterable[Site], cut: Site | Iterable[Site] = ()) -> tuple[Site, ...]:
        """Return all sites that a demand of `sites` depends on, themselves included, stopping at `cut`."""
        cut_numbers = set(self.numbers(cut))
        return self.names(self.table.sorted(self.table.support(self.numbers(sites), cut_numbers)))

    # -- names and numbers ---------------------------------------------------------------------

    def number(self, site: Site) -> int:
        """The number under which the table knows `site`."""
        if self.journal.doing is not None:
            self.journal.recover()
        return self._number(site)

    def _number(self, site: Site) -> int:
        """`number` in the middle of a change."""
        try:
            return self._numbers[site]
        except (KeyError, TypeError):
            raise UnknownSiteError(site, self._numbers) from None

    def numbers(self, sites: Site | Iterable[Site]) -> list[int]:
        """The numbers of one site, or of several."""
        self.journal.recover()
        if isinstance(sites, str):
            return [self._number(sites)]
        if type(sites) is not tuple and not has_items(sites):
            raise GraphError(f"expected a site's name, or several of them, and {sites!r} is neither.")
        return [self._number(site) for site in sites]

    def edge(self, edge: Edge) -> tuple[int, int]:
        """The node numbers of an edge (input, reader). Raises GraphError if there is none."""
        given: object = edge
        if not isinstance(given, tuple) or len(given) != 2:
            raise GraphError(f"an edge is a pair (input, reader), and {edge!r} is not one.")
        site, reader = self.number(edge[0]), self.number(edge[1])
        if site not in self.table.inputs[reader]:
            raise UnknownEdgeError(edge[1], edge[0], self.inputs(edge[1]), self.consumers(edge[0])[:6])
        return site, reader

    def name(self, number: int) -> Site:
        """Return the name of a number; names of removed nodes are kept for the ledger."""
        return self._names[number]

    def names(self, numbers: Iterable[int]) -> tuple[Site, ...]:
        """Return the names of several numbers."""
        return tuple(map(self._names.__getitem__, numbers))

    # -- change ------------------------------------------------------------------------------

    def redefine(self, site: Site, rule: Rule | None = None, inputs: Sequence[Site] | None = None) -> None:
        """Set another rule of `site`, other inputs, or both. Invalidates `site` and its cone."""
        number = self.number(site)
        self.journal.expect_idle("graph.redefine")
        current, old = self.rule(site), self.table.inputs[number]
        rule = current if rule is None else rule
        new = self._expect_rule(site, rule, self.names(old) if inputs is None else inputs)
        path = self.table.path_if_cyclic(number, new) if new != old else None
        if path is not None:
            raise CycleError(self.names([*path, number]))
        cut = tuple((gone, number) for gone in dict.fromkeys(old) if gone not in new)
        joined = tuple((fresh, number) for fresh in dict.fromkeys(new) if fresh not in old)
        change = StructureChange(f"redefining {site!r}", seeds=(number,), cut=cut, joined=joined)
        self._approve(change)
        self.journal.make(self._redefine, change, number, rule, new)

    def _redefine(self, change: StructureChange, number: int, rule: Rule, inputs: tuple[int, ...]) -> None:
        self.journal.replace(self.table.rules, number, rule)
        if inputs != self.table.inputs[number]:
            self.table.rewire(number, inputs)
        self._announce(change)

    def graft(self, edge: Edge, block: Block, *, name: str | None = None) -> Graft:
        """Insert `block` on one edge (u, w): w reads the block's output, all other readers still read u.

        Invalidates {w} and the cone of w, and nothing else: u's other readers see no change.
        """
        site, reader = self.edge(edge)
        name = expect("name", name, "str | None")
        return self._graft(site, (reader,), block, name or f"{edge[0]}->{edge[1]}")

    def graft_after(self, site: Site, block: Block, *, name: str | None = None) -> Graft:
        """Insert `block` after a site: all of its present readers read the block's output instead."""
        number = self.number(site)
        name = expect("name", name, "str | None")
        return self._graft(number, tuple(self.table.consumers[number]), block, name or f"{site}->*")

    def _graft(self, at: int, readers: tuple[int, ...], block: Block, name: str) -> Graft:
        self.journal.expect_idle("graph.graft")
        if not isinstance(block, Block):
            raise BlockError(f"a graft takes a block, and {block!r} is none. Make one with `chain(f, g)`.")
        name = self._fresh_name(name, block)
        cut = tuple((at, reader) for reader in readers)
        self._approve(StructureChange(f"grafting {name!r}", cut=cut))
        return self.journal.make(self._put_in, at, readers, block, name)

    def _put_in(self, at: int, readers: tuple[int, ...], block: Block, name: str) -> Graft:
        def wiring(nodes: list[int]) -> Iterator[tuple[int, ...]]:
            for inner in block.nodes:
                yield tuple(at if index < 0 else nodes[index] for index in inner.inputs)

        table = self.table
        # Right before the one reader, or right after the site: either way the order stays true.
        anchor = table.order.before(readers[0]) if len(readers) == 1 else at
        nodes = table.insert_after(anchor, [inner.rule for inner in block.nodes], wiring)
        for node, inner in zip(nodes, block.nodes, strict=True):
            self._name(node, f"{name}.{inner.name}")
            if inner.rule is None:
                self._keep(node, inner.value, inner.param)
        output = nodes[block.output]
        for reader in readers:
            table.reroute(reader, at, output)
        fresh = tuple(node for node in nodes if table.rules[node] is not None)
        cut = tuple((at, reader) for reader in readers)
        self._announce(StructureChange(f"grafting {name!r}", seeds=(*fresh, *readers), cut=cut))
        return Graft(
            name,
            at=self._names[at],
            rerouted=self.names(readers),
            sites=self.names(fresh),
            sources=self.names(node for node in nodes if table.rules[node] is None),
            output=self._names[output],
        )

    @checked
    def remove(self, graft: Graft) -> None:
        """Remove a graft: readers of its output read the block's input again."""
        self.journal.expect_idle("graph.remove")
        gone = [site for site in (*graft.sites, *graft.sources) if site not in self._numbers]
        if gone:
            raise GraphError(
                f"the graft {graft.name!r} is not in this graph (any more): no site {gone[0]!r}."
            )
        table = self.table
        block = self.numbers((*graft.sites, *graft.sources))
        inside, output = set(block), self.number(graft.output)
        for node in block:
            outside = [reader for reader in table.consumers[node] if reader not in inside]
            if node != output and outside:
                raise InUseError(
                    f"{self._names[outside[0]]!r} reads {self._names[node]!r}, which is inside the graft "
                    f"{graft.name!r}. Remove that reader, or the graft it belongs to, first."
                )
        entries = {site for node in block for site in table.inputs[node] if site not in inside}
        if len(entries) != 1:
            raise InUseError(
                f"the graft {graft.name!r} now reads {', '.join(self.names(sorted(entries))) or 'nothing'}; "
                "a block that was rewired to other inputs than its one cannot be taken out."
            )
        (at,) = entries
        readers = tuple(reader for reader in table.consumers[output] if reader not in inside)
        cut = tuple((output, reader) for reader in readers)
        change = StructureChange(f"removing {graft.name!r}", seeds=readers, removed=tuple(block), cut=cut)
        self._approve(change)
        self.journal.make(self._take_out, change, output, at)

    def _take_out(self, change: StructureChange, output: int, at: int) -> None:
        for reader in change.seeds:
            self.table.reroute(reader, output, at)
        self._delete(change.removed)
        self._announce(change)

    def discard(self, sites: Iterable[Site]) -> None:
        """Remove computed nodes or sources that no other node reads, together."""
        self.journal.expect_idle("graph.discard")
        change = self.removal(self.numbers(sites))
        self.journal.make(self.take_away, change)

    def removal(self, numbers: Sequence[int], *, by: Observer | None = None) -> StructureChange:
        """The change that removes these nodes together, approved by all but `by`. Changes nothing yet."""
        inside = set(numbers)
        for number in numbers:
            for reader in self.table.consumers[number]:
                if reader not in inside:
                    raise InUseError(
                        f"{self._names[reader]!r} reads {self._names[number]!r}: a site can be removed "
                        "when nothing reads it. Remove the reader too, or let it read something else."
                    )
        change = StructureChange(f"removing {len(numbers)} sites", removed=tuple(numbers))
        self._approve(change, but=by)
        return change

    def take_away(self, change: StructureChange) -> None:
        """Make a `removal`, as a part of a change that is being made."""
        self._delete(change.removed)
        self._announce(change)

    def _delete(self, numbers: Sequence[int]) -> None:
        self.table.delete(numbers)
        journal = self.journal
        for number in numbers:
            journal.pop(self._numbers, self._names[number])
            if number in self._defaults:
                journal.note((self._hold, number, self._defaults[number], number in self._params))
                self._forget(number)

    # -- observers -----------------------------------------------------------------------------

    def attach(self, world: Observer) -> None:
        """Notify `world` of every change of structure, as long as another reference keeps it alive."""
        self._worlds.add(world)

    @property
    def guards(self) -> tuple[Observer, ...]:
        """The observers, besides the worlds, that are called before every change of structure."""
        return tuple(self._guards)

    def guard(self, guard: Observer) -> None:
        """Call `guard` before every change of structure, until `unguard`."""
        self.journal.assign(self, "_guards", [*self._guards, guard])

    def unguard(self, guard: Observer) -> None:
        """Stop calling `guard` before changes of structure."""
        self.journal.assign(self, "_guards", [each for each in self._guards if each is not guard])

    def _approve(self, change: StructureChange, but: Observer | None = None) -> None:
        for observer in itertools.chain(self._guards, self._worlds):
            if observer is not but:
                observer.approve(change)

    def _announce(self, change: StructureChange) -> None:
        self.changes += 1
        for observer in itertools.chain(self._guards, self._worlds):
            observer.follow(change)

    # -- what must hold ------------------------------------------------------------------------

    def check(self) -> None:
        """Assert the invariants of the graph and of its table."""
        self.journal.recover()
        self.table.check()
        alive = set(self.table.order)
        assert alive == set(self._numbers.values()), "names and living nodes differ"
        for site, number in self._numbers.items():
            assert self._names[number] == site, f"{site!r} is misnamed"
        sources = {number for number in alive if self.table.rules[number] is None}
        assert sources == set(self._defaults), "sources and their defaults differ"
        assert self._params <= sources, "a parameter is computed"

    def _node(self, number: int) -> Node:
        table = self.table
        return Node(
            self._names[number],
            table.rules[number],
            self.names(table.inputs[number]),
            number in self._params,
        )

    def _fresh_name(self, name: str, block: Block) -> str:
        candidates = itertools.chain((name,), (f"{name}#{count}" for count in itertools.count(2)))
        return next(
            free
            for free in candidates
            if not any(f"{free}.{inner.name}" in self._numbers for inner in block.nodes)
        )

    def _expect_new(self, name: Site, action: str) -> None:
        if self.journal.doing is not None:
            self.journal.expect_idle(action)
        given: object = name
        if not isinstance(given, str) or not given:
            raise GraphError(f"a site's name is a string that is not empty, and {name!r} is not one.")
        if name in self._numbers:
            raise DuplicateSiteError(name)

    def _expect_rule(self, site: Site, rule: Rule, inputs: Sequence[Site]) -> tuple[int, ...]:
        if isinstance(inputs, str):
            raise GraphError(
                f"the inputs of {site!r} are the string {inputs!r}; write the list [{inputs!r}]."
            )
        if not isinstance(inputs, Iterable):
            raise GraphError(f"the inputs of {site!r} are a list of sites, and {inputs!r} is none.")
        if not callable(rule):
            raise GraphError(
                f"the rule of {site!r} is {rule!r}, which cannot be called. A rule is a function of the "
                f"input values; for a fixed value use `graph.source({site!r}, value)`."
            )
        try:
            known = self._numbers
            numbers = tuple([known[read] for read in inputs])
        except (KeyError, TypeError):
            numbers = tuple(self._number(read) for read in inputs)  # Says which of them is unknown.
        minimum, maximum = arity(rule)
        if not minimum <= len(numbers) <= maximum:
            if minimum == maximum:
                takes = str(minimum)
            else:
                takes = f"{minimum} or more" if maximum == _ANY else f"{minimum} to {maximum}"
            raise ArityError(site, f"{takes} input{'s' if takes != '1' else ''}", inputs)
        return numbers


_ANY = 1 << 30
_TAKES_VARIADIC = 0x04


def arity(rule: Callable[..., Any]) -> tuple[int, int]:
    """Return the minimum and maximum number of inputs of a rule that declares it; a plain function does.

    Only what costs nothing is read: a full `inspect.signature` would dominate building a graph.
    """
    if type(rule) is FunctionType:
        code = rule.__code__
        maximum = _ANY if code.co_flags & _TAKES_VARIADIC else code.co_argcount
        return code.co_argcount - len(rule.__defaults__ or ()), maximum
    declared = getattr(rule, "arity", None)
    if isinstance(declared, int):
        return declared, declared
    return 0, _ANY


def cone_sizes(graph: Graph, sites: Iterable[Site] | None = None) -> dict[Site, int]:
    """|V⁺| of every site (or of `sites`), exactly."""
    names = graph.sites if sites is None else tuple(sites)
    numbered = dict(zip(graph.numbers(names), names, strict=True))
    sizes = {node: cone.bit_count() for node, cone in _cones(graph) if node in numbered}
    return {site: sizes[node] for node, site in numbered.items()}


def _cones(graph: Graph) -> Iterator[tuple[int, int]]:
    """Every node with its cone as a bit set, the last node of the order first.

    The cone of a node is the union of its readers' cones and of the readers themselves. Bit k is
    the k-th computed node from the end, so a bit set is only as long as what can still lie
    downstream; and a cone is forgotten as soon as the last input of its node has been visited.
    """
    table = graph.table
    cones: dict[int, int] = {}
    bits = 0
    waiting: dict[int, int] = {}
    for node in reversed(list(table.order)):
        cone = 0
        for reader in table.consumers[node]:
            cone |= cones[reader]
            waiting[reader] -= 1
            if not waiting[reader]:
                del cones[reader], waiting[reader]
        yield node, cone
        if table.rules[node] is not None:
            inputs = len(set(table.inputs[node]))
            if inputs:
                # Kept with the node itself in it: that is what its inputs need.
                cones[node], waiting[node] = cone | 1 << bits, inputs
            bits += 1


def chain(*rules: Callable[[Any], Any]) -> Block:
    """Return the block that applies `rules` one after the other."""
    if not rules:
        raise BlockError("chain() got no rule; a block needs at least one: `chain(lambda v: v)`.")
    for index, rule in enumerate(rules):
        if not callable(rule):
            raise BlockError(
                f"chain() takes functions of one value; argument {index} is {rule!r}. "
                "For a block with branches, build a Graph and use `block(graph)`."
            )
    nodes = tuple(BlockNode(str(index), rule, (index - 1,)) for index, rule in enumerate(rules))
    return Block(nodes, output=len(nodes) - 1)


@checked
def block(graph: Graph, entry: str | None = None, output: str | None = None) -> Block:
    """Return the block that computes the same as `graph`, as a function of its one free source.

    `entry` can be omitted if exactly one source is not a parameter, `output` if exactly one computed node has
    no reader. All other sources are included with their values. Every node must lead to the output, and the
    output must depend on the input.
    """
    free = [site for site in graph.sources if site not in graph.params]
    if entry is None:
        if len(free) != 1:
            raise BlockError(
                f"a block has one input, and this graph has {len(free)} sources that are not parameters"
                f"{': ' + ', '.join(free) if free else ''}. Name the one: `block(graph, entry=...)`."
            )
        entry = free[0]
    if not graph.is_source(entry):
        raise BlockError(f"the input of a block is a source, and {entry!r} is computed.")
    ends = [site for site in graph.computed if not graph.consumers(site)]
    if output is None:
        if len(ends) != 1:
            found = ", ".join(ends[:6]) if ends else "none: no node is computed"
            raise BlockError(
                f"a block has one output, and this graph has {len(ends)} ({found}). Join them, or "
                "build a graph that ends in one node."
            )
        output = ends[0]
    dangling = [site for site in ends if site != output]
    if dangling or graph.is_source(output) or graph.consumers(output):
        raise BlockError(
            f"{output!r} cannot be the one output of this block: a block's output is its one computed "
            f"node that no node reads, and here those are {', '.join(ends) or 'none'}."
        )
    if output not in graph.cone(entry):
        raise BlockError(f"the output {output!r} of this block does not depend on its input {entry!r}.")
    inside = [site for site in graph.sites if site != entry]
    index = {entry: -1} | {site: number for number, site in enumerate(inside)}
    nodes = tuple(
        BlockNode(
            site,
            None if graph.is_source(site) else graph.rule(site),
            tuple(index[read] for read in graph.inputs(site)),
            graph.default(graph.number(site)),
            site in graph.params,
        )
        for site in inside
    )
    return Block(nodes, output=index[output])
