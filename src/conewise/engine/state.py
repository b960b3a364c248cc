"""The state of a world, by node number: its values, its changes, and the wave that keeps them true.

`World` gives it names, errors and a ledger.
"""

from __future__ import annotations

import itertools
import weakref
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conewise.engine.demand import Inputs, Memo, Rules, Same
from conewise.engine.ledger import Kind
from conewise.engine.standing import Fixed, Standing, View, effective, view
from conewise.engine.store import INVALID, PENDING, SHARED, Overlay, Store
from conewise.graph.graph import MISSING, Graph
from conewise.graph.table import Rule

Emit = Callable[[Kind, Sequence[int]], None]
Key = int | tuple[int, int]


@dataclass(slots=True)
class Frame:
    """What one patch displaced: values by node (SHARED where a fork owned none), and their memos."""

    key: Key
    values: dict[int, Any] = field(default_factory=dict)
    memos: dict[int, Memo | None] = field(default_factory=dict)


class State:
    """Values over a graph, as a list (a root) or as an overlay on the parent's (a fork).

    Invariants, asserted by `check()`:
      1. what a valid node reads is valid (through this world's changes, in this world's view; not
         where the root is partial, whose own values are final for that reason);
      2. a fork owns exactly the nodes at which something else stands than in its parent, and those
         that read one it owns; so a fork that changed nothing owns nothing;
      3. no node is PENDING.
    """

    def __init__(self, graph: Graph, parent: State | None, same: Same | None, emit: Emit) -> None:
        self.graph = graph
        self.parent = parent
        self.same = same
        # Weak, for a world holds its state: a dropped fork is gone at once, and does not wait for the
        # garbage collector while it still follows changes, or refuses them.
        self._emit = weakref.WeakMethod(emit)
        self.values: Store = [] if parent is None else Overlay(parent.values)
        self.standings: dict[int, Standing] = {}
        self._views: dict[int, View] = {}
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
            state.is_closed = True
            state.standings, state._views = {}, {}
            state.frames, state.memos, state.values = [], {}, []
        if self.parent is not None and self.parent._forks is not None:
            self.parent._forks.discard(self)

    def emit(self, kind: Kind, nodes: Sequence[int]) -> None:
        """Let the world tell what happened."""
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
        table, values = self.graph.table, self.values
        fresh = range(self._known, len(table))
        self._known = len(table)
        if type(values) is Overlay:
            for node in fresh if values else ():
                if any(site in values for site in self.effective(node)[1]):
                    values[node] = INVALID
            return
        assert type(values) is list
        for node in fresh:
            value = self.graph.default(node) if table.rules[node] is None else MISSING
            values.append(INVALID if value is MISSING else value)

    def hold(self, values: Mapping[int, Any]) -> None:
        """Take `values` for computed, whether or not what they read is there; see `World.partial`."""
        assert type(self.values) is list, "only a root holds values that it did not compute"
        self.is_partial = True
        for node, value in values.items():
            self.values[node] = value

    # -- what stands where -------------------------------------------------------------------

    def stand(self, node: int, standing: Standing) -> None:
        """Let `standing` be this world's own changes at `node`."""
        if standing.is_empty:
            self.standings.pop(node, None)
        else:
            self.standings[node] = standing

    def inherited(self, node: int) -> Standing:
        """What the ancestors let stand at `node`, the nearest one's first."""
        merged = Standing()
        if self.parent is not None:
            for state in self.parent.lineage():
                if node in state.standings:
                    merged = merged.over(state.standings[node])
        return merged

    def marked(self) -> Collection[int]:
        """The nodes at which this world or an ancestor has changed something."""
        changed = [state.standings for state in self.lineage() if state.standings]
        if len(changed) <= 1:
            return changed[0] if changed else ()
        return ChainMap(*changed)

    def effective(self, node: int) -> tuple[Rule | None, tuple[int, ...], Any]:
        """The rule, the inputs and the known value (or `MISSING`) of a node in this world."""
        table = self.graph.table
        standings = [s.standings[node] for s in self.lineage() if node in s.standings]
        return effective(standings, table.rules[node], table.inputs[node], self.graph.default(node))

    def rules_and_inputs(self) -> tuple[Rules, Inputs]:
        """The graph's own, or an overlay where a world of this lineage has others for computed nodes."""
        table = self.graph.table
        rules, inputs = Overlay(table.rules), Overlay(table.inputs)
        for state in self.lineage():
            for node, standing in state.standings.items():
                if (standing.edges or not isinstance(standing.body, Fixed | None)) and node not in rules:
                    rules[node], inputs[node], _ = self.effective(node)
        return (rules, inputs) if rules else (table.rules, table.inputs)

    # -- the wave ----------------------------------------------------------------------------

    def disturb(self, seeds: Sequence[int], frame: Frame | None = None) -> list[int]:
        """This world's own changes at `seeds` are others now: invalidate what depends on them.

        Returns the nodes that lost a value. `frame` keeps what was displaced. Forks follow.
        """
        live, hidden = self._split(seeds, ())
        lost, fallen = self._wave(live, live, frame)
        self._let_forks_follow(live, hidden, fallen)
        return lost

    def follow(self, seeds: Sequence[int], removed: Sequence[int]) -> None:
        """The graph's rules or inputs at `seeds` are others now, and `removed` are no more."""
        for state in self.family():
            state._take_in()
            for node in removed:
                if type(state.values) is Overlay:
                    state.values.pop(node, None)
                else:
                    state.values[node] = INVALID
                state.memos.pop(node, None)
        self._follow(seeds, (), ())

    def commit(self) -> list[int]:
        """Hand this fork's changes and values to its parent. Returns what became invalid there."""
        parent = self.parent
        assert parent is not None
        own, seeds = dict(self.own), list(self.standings)
        lost = [n for n, v in own.items() if v is INVALID and parent.values[n] is not INVALID]
        for node, standing in self.standings.items():
            merged = standing.over(parent.standings.get(node, Standing()))
            parent.stand(node, merged.without_native() if parent.parent is None else merged)
            parent._view_anew(node)
        for node, value in own.items():
            parent.values[node] = value
        if parent.parent is not None:
            parent._release(seeds)
        if self.same is not None:
            parent.memos.update(_maps(self.memos)[0])
            _maps(self.memos)[0].clear()
        self.own.clear()
        self.standings.clear()
        self._views.clear()
        self.frames.clear()
        parent.frames.clear()
        parent._let_forks_follow(seeds, (), list(own), but=self)
        return lost

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

    def _follow(self, seeds: Sequence[int], hidden: Sequence[int], fallen: Sequence[int]) -> None:
        self._let_forks_follow(*self._follow_once(seeds, hidden, fallen))

    def _follow_once(
        self, seeds: Sequence[int], hidden: Sequence[int], fallen: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Follow a change above this world; returns it as this world's own forks have to see it.

        `seeds` have changed in the view from above; `hidden` ones have too, but not as the worlds
        between see them. `fallen` became invalid there.
        """
        self.frames.clear()
        if self.parent is not None and not self.standings:
            return seeds, hidden, fallen
        live, hidden = self._split(seeds, hidden)
        if self.parent is not None:
            fallen = [node for node in fallen if node not in self.own]
        lost, here = self._wave(live, [*live, *fallen], None)
        self.emit("invalidated", self.computed(lost))
        return live, hidden, [*fallen, *here]

    def _split(self, seeds: Sequence[int], hidden: Sequence[int]) -> tuple[list[int], list[int]]:
        """Which of these nodes, changed here or above, are others in this world's eyes; and the rest.

        Where this world has no changes of its own, it sees what its parent sees. Where it has, its
        own may win; or they may bring to light what was hidden by an ancestor's.
        """
        live: list[int] = []
        masked: list[int] = []
        for nodes, unchanged in ((seeds, live), (hidden, masked)):
            for node in nodes:
                if self._view_anew(node):
                    live.append(node)
                elif node in self.standings:
                    masked.append(node)
                else:
                    unchanged.append(node)
        return live, masked

    def _view_anew(self, node: int) -> bool:
        """Whether this world has changes at `node` and they look other than when last looked at."""
        if node not in self.standings:
            return self._views.pop(node, None) is not None
        old, new = self._views.get(node), self._view(node)
        self._views[node] = new
        if old is None or not _is_same_view(old, new):
            return True
        return type(self.values) is Overlay and (node in self.values) != self._must_own(node)

    def _view(self, node: int) -> View:
        """What stands at `node` in this world's eyes, as parts to be compared by identity."""
        table = self.graph.table
        merged = self.standings.get(node, Standing()).over(self.inherited(node))
        return view(merged, table.rules[node], table.inputs[node])

    def _differs(self, node: int) -> bool:
        """Whether something else stands at `node` than in the parent."""
        if node not in self.standings or self.parent is None:
            return False
        return not _is_same_view(self._view(node), self.parent._view(node))

    def _wave(
        self, seeds: Sequence[int], front: Sequence[int], frame: Frame | None
    ) -> tuple[list[int], list[int]]:
        """Settle `seeds`, then invalidate through the readers of `front`.

        The wave stops at nodes that are invalid already, since all behind them is too, and at
        nodes that do not read what changed. Returns what lost a value that could be seen before,
        and all that it made invalid.
        """
        values, consumers, marked = self.values, self.graph.table.consumers, self.marked()
        own = values if type(values) is Overlay else None
        saved = None if frame is None else frame.values
        lost: list[int] = []
        for node in self.graph.table.sorted(seeds):
            was_visible = values[node] is not INVALID
            if frame is not None:
                self._displace(node, frame)
            self._settle(node)
            if was_visible and values[node] is INVALID:
                lost.append(node)
        fallen: list[int] = []
        taken: list[int] = []
        for site in itertools.chain(front, fallen):  # grows while it is read
            is_owned = own is None or site in own
            for reader in consumers[site]:
                state = values[reader] if own is None else own.get(reader, SHARED)
                if state is INVALID or (state is SHARED and not is_owned):
                    continue
                if marked and reader in marked and site not in self.effective(reader)[1]:
                    continue
                if saved is not None and reader not in saved:
                    saved[reader] = state
                    if self.same is not None:
                        self._keep_memo(reader, frame)
                if state is SHARED:
                    taken.append(reader)
                else:
                    lost.append(reader)
                values[reader] = INVALID
                fallen.append(reader)
        if own is not None:
            below = own.below
            lost += [node for node in taken if below[node] is not INVALID]
        if own is not None:
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
        value = self.own.pop(node, INVALID)
        if value is not INVALID and self.own.below[node] is INVALID:
            store = self.own.below
            while type(store) is Overlay and node not in store:
                store = store.below
            store[node] = value

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

    # -- taking a patch back -----------------------------------------------------------------

    def frame(self, key: Key, *, is_new: bool) -> Frame | None:
        """Where the patch `key` keeps what it displaces.

        A patch put over itself keeps nothing: the frame it made at first, if that is still the
        last, holds what was there before it. If it is not, no frame can be trusted any more.
        """
        if is_new:
            self.frames.append(Frame(key))
            return self.frames[-1]
        if not self.frames or self.frames[-1].key != key:
            self.frames.clear()
        return None

    def undo(self, key: Key, node: int, *, reveals_native: bool) -> list[int]:
        """The patch `key` at `node` was taken away. Returns the nodes that lost a value.

        If it was the last change made, what it displaced comes back; else its cone is invalid.
        """
        if not reveals_native or not self.frames or self.frames[-1].key != key:
            self.frames.clear()
            lost = self.disturb([node])
            return [gone for gone in lost if self.values[gone] is INVALID]
        frame = self.frames.pop()
        lost = self.disturb([node])
        for place, value in frame.values.items():
            if value is SHARED:
                self.own.pop(place, None)
            else:
                self.values[place] = value
        for place, memo in frame.memos.items():
            if memo is None:
                _maps(self.memos)[0].pop(place, None)
            else:
                self.memos[place] = memo
        return [gone for gone in lost if self.values[gone] is INVALID]

    def _displace(self, node: int, frame: Frame) -> None:
        if node not in frame.values:
            values = self.values
            frame.values[node] = values.get(node, SHARED) if type(values) is Overlay else values[node]
            if self.same is not None:
                self._keep_memo(node, frame)

    def _keep_memo(self, node: int, frame: Frame | None) -> None:
        if frame is not None:
            frame.memos[node] = _maps(self.memos)[0].get(node)

    # -- what must hold ----------------------------------------------------------------------

    def computed(self, nodes: Iterable[int]) -> list[int]:
        """Those of `nodes` that have a rule here. A source has one only where a function patches it."""
        rules = self.graph.table.rules
        marked = self.marked()
        return [
            node
            for node in nodes
            if rules[node] is not None or (node in marked and self.effective(node)[0] is not None)
        ]

    def check(self) -> None:
        """Assert the invariants."""
        self.sync()
        values, name = self.values, self.graph.name
        own = values if type(values) is Overlay else None
        is_partial = any(state.is_partial for state in self.lineage())
        for node in self.graph.table.order:
            _, inputs, value = self.effective(node)
            assert values[node] is not PENDING, f"{name(node)} is pending"
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


def _is_same_view(one: View, other: View) -> bool:
    return len(one) == len(other) and all(map(_is_same_part, one, other))


def _is_same_part(one: object, other: object) -> bool:
    return one is other or (type(one) is tuple and one == other)


def _maps(memos: MutableMapping[int, Memo]) -> list[MutableMapping[int, Memo]]:
    return memos.maps if isinstance(memos, ChainMap) else [memos]
