"""A world: the values over a graph. A fork shares its parent's values and owns what its changes touch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, overload

from conewise.arguments import checked
from conewise.errors import (
    BusyError,
    ClosedWorldError,
    InUseError,
    NotPatchedError,
    NoValueError,
    OpError,
    WorldError,
)
from conewise.reactive.changes import (
    INVALID,
    NATIVE,
    NO_CHANGE,
    OWN,
    Fixed,
    NewRule,
    NodeChange,
    Patch,
    Transformed,
)
from conewise.reactive.demand import (
    Inputs,
    Lend,
    Plan,
    RuleFailedError,
    Rules,
    Same,
    Steps,
    bitwise_same,
    compute,
    compute_with_cutoff,
    gather,
)
from conewise.reactive.graph import Edge, Graph, Site, StructureChange
from conewise.reactive.ledger import Kind, Ledger
from conewise.reactive.state import State
from conewise.reactive.table import Rule


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened to `nodes` of `world`: one mutation's wave, or one demand's work.

    invalidated: valid before the mutation, invalid after it, in the order of the wave.
    recomputed:  computed, in the order of computation; each node once a demand.
    reused:      computed earlier and read as it was, by this demand.
    cut_off:     invalid, yet not computed: what it reads turned out to be the same.
    """

    kind: Kind
    world: World
    nodes: Sequence[int]

    @property
    def sites(self) -> tuple[Site, ...]:
        """The names of the nodes."""
        return self.world.graph.names(self.nodes)


Listener = Callable[[Event], None]


def _patch_of(value: Any) -> Patch:
    return Transformed(value) if callable(value) else Fixed(value)


class World:
    """The values over a graph, computed when they are demanded.

    A fork is a live view of its parent: it reads from the parent whatever its own changes do not affect,
    including later changes of the parent; if both change a site, the fork's own change applies. A change is
    atomic, even if it is interrupted. `reactive/README.md` describes the algorithm.
    """

    @checked
    def __init__(self, graph: Graph, *, cutoff: bool | Same = False, keep_sites: bool = True) -> None:
        """The baseline world of `graph`; nothing is computed before the first demand.

        `cutoff`: stop where a recomputed value is the same (True: bit for bit; or a function
        `same(old, new)`). Off by default, so that the counts of the theorems hold.
        `keep_sites=False`: the ledger keeps tallies only.
        """
        same = bitwise_same if cutoff is True else cutoff or None
        self._begin(graph, None, same, keep_sites)
        graph.attach(self)
        self._state.sync()

    def _begin(self, graph: Graph, parent: World | None, same: Same | None, keep_sites: bool) -> None:
        self.graph = graph
        self.ledger = Ledger(graph, keep_sites=keep_sites)
        self._parent: World | None = parent
        self._keep_sites = keep_sites
        self._listeners: list[Listener] = []
        self.lend: Lend | None = None
        """In a fork: what rules get in place of a value that was there before they were called."""
        self._state: State = State(graph, None if parent is None else parent._state, same, self._record)

    @classmethod
    @checked
    def partial(cls, graph: Graph, values: Mapping[Site, Any]) -> World:
        """Create a baseline world that holds only `values`, which must equal what it would compute itself.

        The rest is computed when it is demanded. Such a world is final: it refuses mutations of its own,
        since it no longer knows all dependencies. Its forks accept mutations.
        """
        world = cls(graph)
        world._state.hold({graph.number(site): value for site, value in values.items()})
        return world

    def _take(self, values: Mapping[int, Any]) -> None:
        """Take `values` for computed now: those of all that was not, which must be what it would compute."""
        self._ready("world._take")
        self._state.take(values)
        self._emit("recomputed", list(values))

    def _computed(self, nodes: Iterable[int]) -> dict[Site, Any]:
        """The values that were computed of these nodes, by name; nothing is computed for it."""
        rules, values = self.graph.table.rules, self._state.values
        own = [node for node in sorted(nodes) if rules[node] is not None and values[node] is not INVALID]
        return {self.graph.name(node): values[node] for node in own}

    # -- forks -------------------------------------------------------------------------------

    def fork(self) -> World:
        """Return a world that shares every value with this one. Use it in a `with` block, or drop it."""
        self._ready("world.fork")
        fork = World.__new__(World)
        fork._begin(self.graph, self, self._state.same, self._keep_sites)
        return fork

    def commit(self) -> None:
        """Apply this fork's changes to its parent; computed values are moved, nothing is recomputed.

        Afterwards the fork shares everything with its parent again, and can still be used.
        """
        self._ready("world.commit")
        if self._parent is None:
            raise WorldError("this world is no fork: it has no parent to commit its changes to.")
        self._parent._ready_to_change("world.commit")
        self.graph.journal.make(self._commit, self._parent)

    def _commit(self, parent: World) -> None:
        parent._record("invalidated", self._state.computed(self._state.commit()))

    def close(self) -> None:
        """Drop this world and its forks. Its values are released; nothing else changes."""
        self.graph.journal.expect_idle("world.close")
        self.graph.journal.make(self._state.close)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- mutations ---------------------------------------------------------------------------

    def patch(self, site: Site, value: Any) -> None:
        """Replace the site's value by `value`, or by a function of the unpatched value.

        A value: the site is given and reads nothing; its cone is invalid. A callable: the site is
        `value(own)`, computed on demand; the site and its cone are invalid. (For a value that is itself
        callable, patch with `lambda _: value`.)
        """
        self._patch(self.graph.number(site), OWN, _patch_of(value), "world.patch")

    def patch_rule(self, site: Site, rule: Rule) -> None:
        """Compute the site by another rule from the same inputs, in this world only."""
        if self.graph.is_source(site):
            raise WorldError(f"{site!r} is a source: it has no rule. Use `world.set` or `world.patch`.")
        if not callable(rule):
            raise WorldError(f"the rule for {site!r} is {rule!r}, which cannot be called.")
        self._patch(self.graph.number(site), OWN, NewRule(rule), "world.patch_rule")

    def patch_edge(self, edge: Edge, value: Any) -> None:
        """Replace one input of one reader by `value`, or by a function of the real value.

        Other readers of that input still read the real value.
        """
        site, reader = self.graph.edge(edge)
        self._patch(reader, site, _patch_of(value), "world.patch_edge")

    def _patch(self, node: int, place: int, patch: Patch, action: str) -> None:
        self._ready_to_change(action)
        change = self._state.changes.get(node, NO_CHANGE)
        new = NodeChange(change.patches | {place: patch}, change.given)
        self._make(self._state.patch, node, new, (node, place), place not in change.patches)

    def restore(self, site: Site) -> None:
        """Remove the patch at a site.

        If nothing else changed since the patch, all values cached before it are restored and nothing is
        recomputed; this also holds for several patches that are removed in the reverse order. In a fork, a
        patch of the parent is removed for this fork only.
        """
        self._restore(self.graph.number(site), OWN, "world.restore", repr(site))

    def restore_edge(self, edge: Edge) -> None:
        """Remove the patch of one input of a reader; see `restore`."""
        site, reader = self.graph.edge(edge)
        self._restore(reader, site, "world.restore_edge", f"the edge {edge[0]!r} -> {edge[1]!r}")

    def _restore(self, node: int, place: int, action: str, name: str) -> None:
        self._ready_to_change(action)
        state = self._state
        change = state.changes.get(node, NO_CHANGE)
        inherited = state.inherited(node).patches.get(place, NATIVE)
        if change.patches.get(place, inherited) is NATIVE:
            raise NotPatchedError(name, self.patched)
        patches = {at: patch for at, patch in change.patches.items() if at != place}
        if inherited is not NATIVE:
            patches[place] = NATIVE
        new = NodeChange(patches, change.given)
        self._make(state.restore, node, new, (node, place), inherited is NATIVE)

    def set(self, site: Site, value: Any) -> None:
        """Set a source's value in this world. Invalidates its cone."""
        node = self.graph.number(site)
        self._ready_to_change("world.set")
        if self.graph.table.rules[node] is not None:
            raise WorldError(
                f"{site!r} is computed, so it cannot be set. Put a value in its place with "
                f"`world.patch({site!r}, value)`, or change its rule with `graph.redefine`."
            )
        state = self._state
        change = state.changes.get(node, NO_CHANGE)
        new = NodeChange(change.patches, Fixed(value))
        self._make(state.set_source, node, new)

    def _make(self, change: Callable[..., list[int]], *args: Any) -> None:
        """Make a change that returns which nodes lost a value, whole or not at all."""
        self.graph.journal.make(self._made, change, *args)

    def _made(self, change: Callable[..., list[int]], *args: Any) -> None:
        self._record("invalidated", self._state.computed(change(*args)))

    @property
    def patched(self) -> tuple[str, ...]:
        """The patches and set sources of this world itself: sites, then edges as 'input -> reader'."""
        self.graph.journal.recover()
        name, changes = self.graph.name, self._state.changes
        sites = [name(n) for n, s in changes.items() if OWN in s.patches or s.given is not None]
        edges = [f"{name(at)} -> {name(n)}" for n, s in changes.items() for at in s.patches if at != OWN]
        return (*sites, *edges)

    # -- demand ------------------------------------------------------------------------------

    @overload
    def demand(self, sites: Site) -> Any: ...
    @overload
    def demand(self, sites: Iterable[Site]) -> tuple[Any, ...]: ...
    def demand(self, sites: Site | Iterable[Site]) -> Any:
        """Return the value at a site, or the values at several; computes the invalid values they need.

        On a world without patches that had answered this demand before the sites P were given values, this
        computes exactly (cone(P) − P) ∩ support(sites, cut at P), each node once.
        """
        targets = self.graph.numbers(sites)
        self._ready("world.demand")
        self.graph.journal.make(self._answer, targets, during="demand")
        values = self._state.values
        return values[targets[0]] if isinstance(sites, str) else tuple(values[node] for node in targets)

    def _answer(self, targets: Sequence[int]) -> None:
        """Compute what `targets` need. Each value is there or not: no interruption leaves a wrong one."""
        for world, steps, rules, inputs in self._gather(targets):
            world._compute(steps, rules, inputs)

    def __getitem__(self, site: Site) -> Any:
        return self.demand(site)

    def plan(self, sites: Site | Iterable[Site]) -> Plan:
        """Return the sites that `demand(sites)` would compute, in order, without computing any of them."""
        targets = self.graph.numbers(sites)
        self._ready("world.plan")
        work = self._gather(targets)
        names = self.graph.names
        own = [steps.nodes for world, steps, *_ in work if world is self]
        return Plan(
            sites=tuple(site for _, steps, *_ in work for site in names(steps.nodes)),
            own=names(own[0]) if own else (),
        )

    def is_stale(self, site: Site) -> bool:
        """True if the next demand of `site` has to compute it."""
        node = self.graph.number(site)
        self._ready("world.is_stale")
        return self._state.values[node] is INVALID

    def _gather(self, targets: Sequence[int]) -> list[tuple[World, Steps, Rules, Inputs]]:
        """The steps of this world and of those above it, and what they call; the topmost world's first."""
        work: list[tuple[World, Steps, Rules, Inputs]] = []
        world: World | None = self
        while world is not None and targets:
            state = world._state
            if world is not self and world._parent is not None and not state.own:
                world = world._parent  # It owns nothing, so it has nothing to compute.
                continue
            rules, inputs = state.rules_and_inputs()
            steps = gather(targets, state.values, inputs, self.graph.table.labels)
            work.append((world, steps, rules, inputs))
            world, targets = world._parent, steps.above
        for _, steps, rules, _ in work if self.graph.valueless else ():
            for node in steps.nodes:
                if rules[node] is None:
                    raise NoValueError(self.graph.name(node))
        return work[::-1]

    def _compute(self, steps: Steps, rules: Rules, inputs: Inputs) -> None:
        """Compute `steps`, and report what was done, also when a rule raises midway."""
        state = self._state
        cut_off: set[int] = set()
        done: Sequence[int] = steps.nodes
        try:
            if state.same is None:
                compute(steps, state.values, rules, inputs, self.lend)
            else:
                compute_with_cutoff(
                    steps.nodes, state.values, rules, inputs, state.memos, state.same, cut_off
                )
        except RuleFailedError as failed:
            if isinstance(failed.__cause__, BusyError):
                raise failed.__cause__ from None
            cause, name = failed.__cause__, self.graph.name
            assert isinstance(cause, Exception)
            reads = [(name(site), state.values[site]) for site in inputs[failed.node]]
            raise OpError(name(failed.node), reads, cause) from cause
        finally:
            if steps.nodes and state.values[steps.nodes[-1]] is INVALID:
                done = [node for node in steps.nodes if state.values[node] is not INVALID]
            if cut_off:
                self._emit("cut_off", [node for node in done if node in cut_off])
                done = [node for node in done if node not in cut_off]
            self._emit("recomputed", done)
            self._emit("reused", state.computed(steps.reused))

    # -- listeners ---------------------------------------------------------------------------

    @checked
    def listen(self, listener: Listener) -> None:
        """Call `listener` with every event of this world and of its forks."""
        self._listeners.append(listener)

    def unlisten(self, listener: Listener) -> None:
        """Stop calling `listener`."""
        self._listeners.remove(listener)

    def _record(self, kind: Kind, nodes: Sequence[int]) -> None:
        """Take note of what a change does, as a part of it; listeners hear of it when it is made."""
        if nodes:
            journal = self.graph.journal
            self.ledger.record(kind, nodes, journal)
            journal.afterwards(self._notify, kind, nodes)

    def _emit(self, kind: Kind, nodes: Sequence[int]) -> None:
        """Take note of what a demand does, and report it at once."""
        if nodes:
            self.ledger.record(kind, nodes)
            self._notify(kind, nodes)

    def _notify(self, kind: Kind, nodes: Sequence[int]) -> None:
        world: World | None = self
        while world is not None:
            for listener in world._listeners:
                listener(Event(kind, self, nodes))
            world = world._parent

    def approve(self, change: StructureChange) -> None:
        """Refuse a change of the graph that would remove a patched site of a world."""
        if self._state.is_closed:
            return
        name = self.graph.name
        if self._state.is_partial:
            raise InUseError(
                f"{change.action}: a world that holds only part of its values stands over this graph, and "
                "could not follow. Make the change first, or drop that world."
            )
        for state in self._state.family():
            for node in change.removed:
                if node in state.changes:
                    raise InUseError(
                        f"{change.action} would take away {name(node)!r}, which is patched in a world. "
                        "Restore it there, or close that world, first."
                    )
            for site, reader in change.cut:
                if reader in state.changes and site in state.changes[reader].patches:
                    raise InUseError(
                        f"{change.action} would take away the edge {name(site)!r} -> {name(reader)!r}, "
                        "which is patched in a world. Restore it there, or close that world, first."
                    )

    def follow(self, change: StructureChange) -> None:
        """Update this world and its forks after a change of the graph."""
        if not self._state.is_closed:
            self._state.follow(change.seeds, change.removed)

    # -- what must hold ----------------------------------------------------------------------

    def check(self) -> None:
        """Assert the invariants of this world and of its forks."""
        self.graph.journal.recover()
        for state in self._state.family():
            state.check()

    def _ready(self, action: str) -> None:
        if self._state.is_closed:
            raise ClosedWorldError
        if self.graph.journal.doing is not None:
            self.graph.journal.expect_idle(action)
        self._state.sync()

    def _ready_to_change(self, action: str) -> None:
        self._ready(action)
        if self._state.is_partial:
            raise WorldError(
                f"{action}: this world holds only part of its values, so it cannot be changed itself. "
                "Change a fork of it: `with world.fork() as fork: ...`."
            )

    def __repr__(self) -> str:
        state = self._state
        if state.is_closed:
            return "World(closed)"
        kind = "root" if self._parent is None else f"fork that owns {len(state.own)} values"
        return f"World({kind}, {len(state.changes)} sites changed, over {self.graph!r})"
