"""The state of a world, by node number: its values, its changes, and the wave that keeps them true.

`World` gives it names, errors and a ledger.
"""

from __future__ import annotations

import itertools
import weakref
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from operator import setitem
from typing import Any

from conewise.reactive.changes import (
    INVALID,
    NO_CHANGE,
    OWN,
    SHARED,
    Definition,
    Fixed,
    NodeChange,
    Overlay,
    Store,
    definition,
    effective,
)
from conewise.reactive.demand import Inputs, Memo, Rules, Same
from conewise.reactive.graph import MISSING, Graph
from conewise.reactive.journal import truncate
from conewise.reactive.ledger import Kind
from conewise.reactive.table import Rule

Emit = Callable[[Kind, Sequence[int]], None]
Key = tuple[int, int]
"""A node, and the place of the patch among its patches."""


@dataclass(slots=True)
class Displaced:
    """The values that one wave overwrote, SHARED where a fork owned none: its seeds, then node by node."""

    seeds: dict[int, Any] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)

    def put_back(self, values: Store) -> None:
        """Put it back."""
        # Broken off between two lines, `states` may be one longer: its last entry is not overwritten yet.
        _overwrite(values, zip(self.nodes, self.states, strict=False))
        _overwrite(values, self.seeds.items())


@dataclass(slots=True)
class Frame:
    """The values that one patch displaced and, with a cutoff, memos."""

    key: Key
    displaced: Displaced = field(default_factory=Displaced)
    memos: dict[int, Memo | None] = field(default_factory=dict)


class State:
    """Values over a graph, as a list (a root) or as an overlay on the parent's (a fork).

    Invariants, asserted by `check()`:
      1. what a valid node reads is valid (through this world's changes, in this world's view; not
         where the root is partial, whose own values are final for that reason);
      2. a fork owns exactly the nodes that are defined otherwise than in its parent, and those that
         read one it owns; so a fork that changed nothing owns nothing.
    What a change overwrites is noted in the graph's journal before: a change is made inside of
    `journal.make`, and happens whole or not at all.
    """

    def __init__(self, graph: Graph, parent: State | None, same: Same | None, emit: Emit) -> None:
        self.graph = graph
        self.journal = graph.journal
        self.parent = parent
        self.same = same
        # Weak, for a world holds its state: a dropped fork is gone at once, and does not wait for the
        # garbage collector while it still follows changes, or refuses them.
        self._emit = weakref.WeakMethod(emit)
        self.values: Store = [] if parent is None else Overlay(parent.values)
        self.changes: dict[int, NodeChange] = {}
        self._definitions: dict[int, Definition] = {}
        self.frames: list[Frame] = []
        self.memos: MutableMapping[int, Memo] = {}
        if parent is not None and same is not None:
            self.memos = ChainMap({}, *_maps(parent.memos))
        self.is_closed = False
        self.is_partial = False
        self._known = 0 if parent is None else len(graph.table)
        self._forks: weakref.WeakSet[State] | None = None
        if parent is not None:
            if parent._forks is None:
                parent._forks = weakref.WeakSet()
            parent._forks.add(self)

    # -- the family --------------------------------------------------------------------------

    @property
    def own(self) -> Overlay:
        """The entries of a fork's own."""
        assert type(self.values) is Overlay, "a root owns everything"
        return self.values

    def forks(self) -> list[State]:
        """The forks of this state that are still in use."""
        return list(self._forks) if self._forks else []

    def family(self) -> Iterator[State]:
        """This state and all forks below it, parents first."""
        stack = [self]
        while stack:
            state = stack.pop()
            yield state
            stack.extend(state.forks())

    def lineage(self) -> Iterator[State]:
        """This state, its parent, and so on to the root."""
        state: State | None = self
        while state is not None:
            yield state
            state = state.parent

    def close(self) -> None:
        """Drop the values of this state and of its forks."""
        for state in list(self.family()):
            self.journal.assign(state, "is_closed", True)
            for name in ("changes", "_definitions", "memos"):
                self.journal.assign(state, name, {})
            for name in ("frames", "values"):
                self.journal.assign(state, name, [])
        if self.parent is not None and self.parent._forks is not None:
            self.journal.note((self.parent._forks.add, self))
            self.parent._forks.discard(self)

    def emit(self, kind: Kind, nodes: Sequence[int]) -> None:
        """Let the world report what happened."""
        emit = self._emit()
        if emit is not None:
            emit(kind, nodes)

    def sync(self) -> None:
        """Take in the nodes that the graph gained at its end since the last call."""
        if self._known == len(self.graph.table):
            return
        for state in reversed(list(self.lineage())):
            state._take_in()

    def _take_in(self) -> None:
        """Outside of a change too: what is interrupted here goes on from there the next time."""
        table, values = self.graph.table, self.values
        self.journal.note((self._let_out, self._known, len(table)))
        if type(values) is Overlay:
            for node in range(self._known, len(table)) if values else ():
                if any(site in values for site in self.effective(node)[1]):
                    values[node] = INVALID
        else:
            assert type(values) is list
            for node in range(len(values), len(table)):
                value = self.graph.default(node) if table.rules[node] is None else MISSING
                values.append(INVALID if value is MISSING else value)
        self._known = len(table)

    def _let_out(self, known: int, count: int) -> None:
        """Undo `_take_in`."""
        self._known = known
        if type(self.values) is list:
            truncate(self.values, known)
        else:
            for node in range(known, count):
                self.own.pop(node, None)

    def hold(self, values: Mapping[int, Any]) -> None:
        """Take `values` for computed, whether or not what they read is there; see `World.partial`."""
        assert type(self.values) is list, "only a root holds values that it did not compute"
        self.is_partial = True
        for node, value in values.items():
            self.values[node] = value

    def take(self, values: Mapping[int, Any]) -> None:
        """Take `values` for computed, with all that they read."""
        assert type(self.values) is list, "only a root takes values that were computed elsewhere"
        for node, value in values.items():
            self.values[node] = value

    # -- changes of nodes --------------------------------------------------------------------

    def set_change(self, node: int, change: NodeChange) -> None:
        """Make `change` this world's own change of `node`."""
        if change.is_empty:
            self.journal.pop(self.changes, node)
        else:
            self.journal.put(self.changes, node, change)

    def inherited(self, node: int) -> NodeChange:
        """The changes of `node` by the ancestors, merged; the nearest one's wins."""
        return NO_CHANGE if self.parent is None else self.parent.merged(node)

    def merged(self, node: int) -> NodeChange:
        """The changes of `node` by this world and its ancestors, merged; the nearest one's wins."""
        merged, state = NO_CHANGE, self
        while True:
            change = state.changes.get(node)
            if change is not None:
                merged = change if merged is NO_CHANGE else merged.over(change)
            if state.parent is None:
                return merged
            state = state.parent

    def changed_nodes(self) -> Collection[int]:
        """The nodes at which this world or an ancestor has changed something."""
        if self.parent is None:
            return self.changes
        changed = [state.changes for state in self.lineage() if state.changes]
        if len(changed) <= 1:
            return changed[0] if changed else ()
        return ChainMap(*changed)

    def effective(self, node: int) -> tuple[Rule | None, tuple[int, ...], Any]:
        """The rule, the inputs and the known value (or `MISSING`) of a node in this world."""
        table = self.graph.table
        return effective(self.merged(node), table.rules[node], table.inputs[node], self.graph.default(node))

    def rules_and_inputs(self) -> tuple[Rules, Inputs]:
        """The graph's own, or an overlay where a world of this lineage has others for computed nodes."""
        table = self.graph.table
        changed = [
            node
            for state in self.lineage()
            for node, change in state.changes.items()
            if any(at != OWN or not isinstance(patch, Fixed) for at, patch in change.patches.items())
        ]
        if not changed:
            return table.rules, table.inputs
        rules, inputs = Overlay(table.rules), Overlay(table.inputs)
        for node in changed:
            if node not in rules:
                rules[node], inputs[node], _ = self.effective(node)
        return rules, inputs

    # -- mutations ---------------------------------------------------------------------------

    def patch(self, node: int, change: NodeChange, key: Key, is_new: bool) -> list[int]:
        """Change `node` so that the patch `key` is part of it. Returns the nodes that lost a value.

        A new patch keeps what it displaces. A patch put over itself keeps nothing: the frame it made at
        first, if that is still the last, holds what was there before it. If it is not, no frame can be
        trusted any more.
        """
        frame: Frame | None = None
        if is_new:
            frame = Frame(key)
            self.journal.append(self.frames, frame)
        elif not self.frames or self.frames[-1].key != key:
            self._drop_frames()
        self.set_change(node, change)
        return self._disturb(node, frame)

    def restore(self, node: int, change: NodeChange, key: Key, reveals_native: bool) -> list[int]:
        """Change `node` so that the patch `key` is no part of it. Returns the nodes that lost a value.

        If it was the last change made, what it displaced comes back; else its cone is invalid.
        """
        self.set_change(node, change)
        back: Frame | None = None
        if not reveals_native or not self.frames or self.frames[-1].key != key:
            self._drop_frames()
        else:
            back = self.frames[-1]
            last = len(self.frames) - 1
            self.journal.note((setitem, self.frames, slice(last, None), [back]))
            self.frames.pop()
        lost = self._disturb(node, back=back)
        return [gone for gone in lost if self.values[gone] is INVALID]

    def set_source(self, node: int, change: NodeChange) -> list[int]:
        """Change a source so that it has another value. Returns the nodes that lost a value."""
        self.set_change(node, change)
        self._drop_frames()
        return self._disturb(node)

    def _disturb(self, node: int, frame: Frame | None = None, back: Frame | None = None) -> list[int]:
        """This world's own change of `node` is another now: invalidate what depends on it.

        Returns the nodes that lost a value. `frame` keeps what was displaced; what `back` has kept is
        put back. Forks follow.
        """
        live, hidden = ([node], []) if self._is_redefined(node) else ([], [node])
        lost, fallen = self._wave(live, live, frame)
        if back is not None:
            displaced = back.displaced
            self._note_values(itertools.chain(displaced.seeds, displaced.nodes))
            displaced.put_back(self.values)
            if self.same is not None:
                self._overwrite_memos(back.memos)
        self._let_forks_follow(live, hidden, fallen)
        return lost

    def follow(self, seeds: Sequence[int], removed: Sequence[int]) -> None:
        """The graph's rules or inputs at `seeds` are others now, and `removed` are no more."""
        for state in self.family():
            state._take_in()
            for node in removed:
                if type(state.values) is Overlay:
                    self.journal.pop(state.values, node)
                else:
                    self.journal.replace(state.values, node, INVALID)
                self.journal.pop(_maps(state.memos)[0], node)
        self._let_forks_follow(*self._follow_once(seeds, (), ()))

    def commit(self) -> list[int]:
        """Hand this fork's changes and values to its parent. Returns what became invalid there."""
        parent, journal = self.parent, self.journal
        assert parent is not None
        own, changed = dict(self.own), list(self.changes)
        seeds, hidden = [n for n in changed if n in own], [n for n in changed if n not in own]
        lost = [n for n, v in own.items() if v is INVALID and parent.values[n] is not INVALID]
        for node, change in self.changes.items():
            merged = change.over(parent.changes.get(node, NO_CHANGE))
            parent.set_change(node, merged.without_native() if parent.parent is None else merged)
            parent._is_redefined(node)
        parent._note_values(own)
        _overwrite(parent.values, own.items())
        if parent.parent is not None:
            parent._release(changed)
        if self.same is not None:
            mine = _maps(self.memos)[0]
            parent._overwrite_memos(mine)
            journal.note((mine.update, dict(mine)))
            mine.clear()
        journal.note((self.own.update, own))
        self.own.clear()
        journal.assign(self, "changes", {})
        journal.assign(self, "_definitions", {})
        self._drop_frames()
        parent._drop_frames()
        parent._let_forks_follow(seeds, hidden, list(own), but=self)
        return [node for node in lost if parent.values[node] is INVALID]

    def _note_values(self, nodes: Iterable[int]) -> None:
        """Write down what these nodes hold, before it is overwritten."""
        values, held = self.values, Displaced()
        if type(values) is Overlay:
            held.seeds = {node: values.get(node, SHARED) for node in nodes}
        else:
            held.seeds = {node: values[node] for node in nodes}
        self.journal.note((held.put_back, values))

    def _overwrite_memos(self, memos: Mapping[int, Memo | None]) -> None:
        mine = _maps(self.memos)[0]
        self.journal.note((_put_memos, mine, {node: mine.get(node) for node in memos}))
        _put_memos(mine, memos)

    # -- the wave ----------------------------------------------------------------------------

    def _let_forks_follow(
        self,
        seeds: Sequence[int],
        hidden: Sequence[int],
        fallen: Sequence[int],
        but: State | None = None,
    ) -> None:
        """Carry a change down the family. A stack, not recursion: forks may nest deeply."""
        stack = [(fork, seeds, hidden, fallen) for fork in self.forks() if fork is not but]
        while stack:
            state, *change = stack.pop()
            below = state._follow_once(*change)
            stack.extend((fork, *below) for fork in state.forks())

    def _follow_once(
        self, seeds: Sequence[int], hidden: Sequence[int], fallen: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Follow a change above this world; returns it as this world's own forks have to see it.

        `seeds` have changed in the view from above; `hidden` ones have too, but not as the worlds
        between see them. `fallen` became invalid there. Where this world has changes of its own, they may
        win; or they may bring to light what was hidden by an ancestor's.

        A node whose definition stays may still be `ceded`, if the parent has the same now, or `taken`, if
        it no longer has. A ceded node's value is handed up, and what reads it stays. A taken one has a
        value only where it is given: what this world shared went with the change above.
        """
        self._drop_frames()
        if self.parent is not None and not self.changes:
            return seeds, hidden, fallen
        live: list[int] = []
        masked: list[int] = []
        for nodes, unchanged in ((seeds, live), (hidden, masked)):
            for node in nodes:
                if node not in self.changes:
                    unchanged.append(node)
                else:
                    (live if self._is_redefined(node) else masked).append(node)
        taken, ceded = list[int](), list[int]()
        if self.parent is not None:
            for node in masked:
                if (node in self.own) != self._must_own(node):
                    (ceded if node in self.own else taken).append(node)
            fallen = [node for node in fallen if node not in self.own]
        given = {node for node in taken if self.effective(node)[2] is not MISSING}
        lost, here = self._wave([*live, *taken], [*live, *taken, *fallen], None, given)
        if ceded:
            self._release(ceded)
        self.emit("invalidated", self.computed(lost))
        return live, masked, [*fallen, *(node for node in taken if node not in given), *here]

    def _is_redefined(self, node: int) -> bool:
        """True if the definition of `node` is not the last one. This world changes it, or did until now."""
        new, old = self._definition(node), self._definitions.get(node)
        if old is None:
            old = self._definition(node, self.inherited(node))
        if node in self.changes:
            self.journal.put(self._definitions, node, new)
        else:
            self.journal.pop(self._definitions, node)
        return not _is_same_definition(old, new)

    def _definition(self, node: int, merged: NodeChange | None = None) -> Definition:
        """The definition of `node` in this world, or under other changes, `merged`."""
        table = self.graph.table
        return definition(
            self.merged(node) if merged is None else merged, table.rules[node], table.inputs[node]
        )

    def _differs(self, node: int) -> bool:
        """True if `node` is defined otherwise than in the parent."""
        if node not in self.changes or self.parent is None:
            return False
        return not _is_same_definition(self._definition(node), self.parent._definition(node))

    def _wave(
        self,
        seeds: Sequence[int],
        front: Sequence[int],
        frame: Frame | None,
        steady: Collection[int] = (),
    ) -> tuple[list[int], list[int]]:
        """Settle `seeds`, then invalidate through the readers of `front`.

        The wave stops at nodes that are invalid already, since all behind them is too, and at
        nodes that do not read what changed. Of what reads a `steady` node, which has the value that it had,
        it takes what was shared and no more. Returns what lost a value that could be seen before,
        and all that it made invalid.
        """
        values, consumers, changed = self.values, self.graph.table.consumers, self.changed_nodes()
        own = values if type(values) is Overlay else None
        # The journal takes it back with what it overwrites; a frame keeps the same, and for longer.
        displaced = Displaced() if frame is None else frame.displaced
        memos = None if frame is None or self.same is None else frame.memos
        self.journal.note((displaced.put_back, values))
        lost: list[int] = []
        for node in self.graph.table.sorted(seeds):
            was_visible = values[node] is not INVALID
            if node not in displaced.seeds:
                displaced.seeds[node] = values[node] if own is None else own.get(node, SHARED)
                if memos is not None:
                    self._keep_memo(node, memos)
            self._settle(node)
            if was_visible and values[node] is INVALID:
                lost.append(node)
        fallen, states = displaced.nodes, displaced.states
        for site in itertools.chain(front, fallen):  # grows while it is read
            is_owned = own is None or site in own
            for reader in consumers[site]:
                state = values[reader] if own is None else own.get(reader, SHARED)
                if state is INVALID or (state is SHARED and not is_owned):
                    continue
                if changed and reader in changed and site not in self.effective(reader)[1]:
                    continue
                if steady and state is not SHARED and site in steady:
                    continue
                if memos is not None and reader not in memos:
                    self._keep_memo(reader, memos)
                states.append(state)
                fallen.append(reader)
                values[reader] = INVALID
        if own is None:
            lost += fallen
        else:
            below, taken = own.below, list[int]()
            for node, state in zip(fallen, states, strict=True):
                (taken if state is SHARED else lost).append(node)
            lost += [node for node in taken if below[node] is not INVALID]
            self._release(seeds)
        return lost, fallen

    def _release(self, seeds: Iterable[int]) -> None:
        """Share again what this fork owned on account of `seeds`, and has no reason to own any more.

        A value that is dropped here means the same above: if it is not there yet, it is handed up.
        """
        own, consumers = self.own, self.graph.table.consumers
        stack = [node for node in seeds if not self._must_own(node)]
        for node in self.graph.table.sorted(stack):
            self._share(node)
        while stack:
            for reader in consumers[stack.pop()]:
                if reader in own and not self._must_own(reader):
                    self._share(reader)
                    stack.append(reader)

    def _must_own(self, node: int) -> bool:
        return self._differs(node) or any(site in self.own for site in self.effective(node)[1])

    def _share(self, node: int) -> None:
        if node not in self.own:
            return
        value = self.journal.pop(self.own, node)
        if value is not INVALID and self.own.below[node] is INVALID:
            store = self.own.below
            while type(store) is Overlay and node not in store:
                store = store.below
            self.journal.replace(store, node, value)

    def _settle(self, node: int) -> None:
        """Store the value that a changed node now has, or mark it invalid, or share it again."""
        values = self.values
        value = self.effective(node)[2]
        if type(values) is Overlay and not self._must_own(node):
            values.pop(node, None)
        elif value is MISSING:
            values[node] = INVALID
        else:
            if self.same is not None:
                memo, old = self.memos.get(node), values[node]
                old = memo[2] if old is INVALID and memo is not None else old
                value = old if old is not INVALID and self.same(old, value) else value
            values[node] = value

    def _drop_frames(self) -> None:
        if self.frames:
            self.journal.assign(self, "frames", [])

    def _keep_memo(self, node: int, memos: dict[int, Memo | None]) -> None:
        memos[node] = _maps(self.memos)[0].get(node)

    # -- what must hold ----------------------------------------------------------------------

    def computed(self, nodes: Iterable[int]) -> list[int]:
        """Those of `nodes` that have a rule here. A source has one only where a function patches it."""
        rules = self.graph.table.rules
        changed = self.changed_nodes()
        return [
            node
            for node in nodes
            if rules[node] is not None or (node in changed and self.effective(node)[0] is not None)
        ]

    def check(self) -> None:
        """Assert the invariants."""
        self.sync()
        values, name = self.values, self.graph.name
        own = values if type(values) is Overlay else None
        is_partial = any(state.is_partial for state in self.lineage())
        for node in self.graph.table.order:
            _, inputs, value = self.effective(node)
            if value is not MISSING:
                assert values[node] is not INVALID, f"{name(node)} is given, yet invalid"
            elif values[node] is not INVALID and not is_partial:
                for site in inputs:
                    assert values[site] is not INVALID, (
                        f"{name(node)} is valid, its input {name(site)} is not"
                    )
            if own is not None:
                is_owned, must_own = node in own, self._must_own(node)
                assert is_owned or not must_own, f"{name(node)} is other than in the parent, but shared"
                assert must_own or not is_owned, f"{name(node)} is as in the parent, but owned"


def _is_same_definition(one: Definition, other: Definition) -> bool:
    if len(one) != len(other):
        return False
    return all(
        own is part or (type(own) is tuple and own == part) for own, part in zip(one, other, strict=True)
    )


def _overwrite(values: Store, states: Iterable[tuple[int, Any]]) -> None:
    """Write `states` to `values`; a fork shares what is SHARED."""
    own = values if type(values) is Overlay else None
    for node, value in states:
        if own is not None and value is SHARED:
            own.pop(node, None)
        else:
            values[node] = value


def _put_memos(memos: MutableMapping[int, Memo], saved: Mapping[int, Memo | None]) -> None:
    for node, memo in saved.items():
        if memo is None:
            memos.pop(node, None)
        else:
            memos[node] = memo


def _maps(memos: MutableMapping[int, Memo]) -> list[MutableMapping[int, Memo]]:
    return memos.maps if isinstance(memos, ChainMap) else [memos]
