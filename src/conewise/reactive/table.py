"""A graph by number: parallel lists indexed by node number, kept in topological order.

`Graph` gives it names and errors; the engine reads it directly. Numbers are never used twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from conewise.reactive.journal import Journal, truncate

# Labels are floats because CPython sorts those fastest. Appended nodes stand GAP apart, so about
# thirty insertions at one point find room by halving before any label has to move.
GAP = float(1 << 20)
ROOMY = 64.0


class Order:
    """The nodes 0, 1, 2, ... in an order that the owner keeps topological.

    Invariant: following `_next` from `_head` visits each member once, with strictly growing labels.
    What is overwritten is noted in the journal before. `append` notes nothing: `retract` undoes it.
    """

    __slots__ = ("_head", "_journal", "_next", "_prev", "_size", "_tail", "labels")

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.labels: list[float] = []
        self._next: list[int] = []
        self._prev: list[int] = []
        self._head = self._tail = -1
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        node = self._head
        while node >= 0:
            yield node
            node = self._next[node]

    def append(self) -> int:
        """Add the next unused number at the end, and return it."""
        node, last = len(self.labels), self._tail
        self.labels.append(self.labels[last] + GAP if last >= 0 else 0.0)
        self._next.append(-1)
        self._prev.append(last)
        if last >= 0:
            self._next[last] = node
        else:
            self._head = node
        self._tail = node
        self._size += 1
        return node

    @property
    def end(self) -> tuple[int, int]:
        """The last node, or -1, and how many there are: what `retract` goes back to."""
        return self._tail, self._size

    def retract(self, node: int, end: tuple[int, int]) -> None:
        """Undo `append()`, which gave out `node`, or would have, when `end` was the end."""
        last, self._size = end
        truncate(self.labels, node)
        truncate(self._next, node)
        truncate(self._prev, node)
        if last >= 0:
            self._next[last] = -1
        else:
            self._head = -1
        self._tail = last

    def before(self, node: int) -> int:
        """The node that stands right before `node`, or -1."""
        return self._prev[node]

    def remove(self, node: int) -> None:
        """Take `node` out. Its number is not used again."""
        self._link(self._prev[node], self._next[node])
        self._journal.assign(self, "_size", self._size - 1)

    def _link(self, before: int, after: int) -> None:
        """Let `after` stand right after `before`; -1 stands for the front, or for the end."""
        if before >= 0:
            self._journal.replace(self._next, before, after)
        else:
            self._journal.assign(self, "_head", after)
        if after >= 0:
            self._journal.replace(self._prev, after, before)
        else:
            self._journal.assign(self, "_tail", before)

    def place_after(self, anchor: int, nodes: Sequence[int]) -> None:
        """Put `nodes`, which stand nowhere, right after `anchor` (-1: at the front), in that order."""
        if not nodes:
            return
        after = self._next[anchor] if anchor >= 0 else self._head
        for node in nodes:
            self._link(anchor, node)
            anchor = node
        self._link(anchor, after)
        self._journal.assign(self, "_size", self._size + len(nodes))
        self._label(nodes)

    def move_after(self, anchor: int, nodes: Sequence[int]) -> None:
        """Take `nodes` from where they stand and put them right after `anchor`, in that order."""
        for node in nodes:
            self.remove(node)
        self.place_after(anchor, nodes)

    def new(self, count: int) -> list[int]:
        """`count` unused numbers that stand nowhere yet, for `place_after`."""
        first = len(self.labels)
        for column in (self._next, self._prev, self.labels):
            self._journal.note((truncate, column, first))
            column.extend([-1] * count)
        return list(range(first, first + count))

    def _label(self, nodes: Sequence[int]) -> None:
        """Give the freshly linked run `nodes` labels between its two neighbours."""
        left, right = self._prev[nodes[0]], self._next[nodes[-1]]
        if self._spread(left, nodes, right, minimum=0.0):
            return
        # No room: widen the run on both sides until its span is roomy, then space it evenly. Each
        # widening doubles, and the room it leaves pays for the insertions that follow.
        run, step = list(nodes), 32
        while True:
            grown: list[int] = []
            while left >= 0 and len(grown) < step:
                grown.append(left)
                left = self._prev[left]
            run = grown[::-1] + run
            for _ in range(step):
                if right < 0:
                    break
                run.append(right)
                right = self._next[right]
            if self._spread(left, run, right, minimum=ROOMY):
                return
            step *= 2

    def _spread(self, left: int, run: Sequence[int], right: int, minimum: float) -> bool:
        """Space `run` evenly between the labels of `left` and `right`, if that leaves `minimum` each."""
        labels = self.labels
        if right < 0:
            low = labels[left] if left >= 0 else 0.0
            gap = GAP
        else:
            low = labels[left] if left >= 0 else labels[right] - GAP * (len(run) + 1)
            gap = (labels[right] - low) / (len(run) + 1)
        # Two labels must differ after rounding, wherever in the range they lie.
        finest = 4 * math.ulp(max(abs(low), abs(labels[right]) if right >= 0 else abs(low) + GAP * len(run)))
        if gap < max(minimum, finest):
            return False
        self._journal.note((self._relabel, run, [labels[node] for node in run]))
        self._relabel(run, [low + gap * number for number in range(1, len(run) + 1)])
        return True

    def _relabel(self, run: Sequence[int], labels: Sequence[float]) -> None:
        for node, label in zip(run, labels, strict=True):
            self.labels[node] = label

    def check(self) -> None:
        """Assert the invariant."""
        before, seen = -1, 0
        for node in self:
            assert self._prev[node] == before, f"node {node} does not know its predecessor"
            if before >= 0:
                assert self.labels[before] < self.labels[node], f"labels fall at node {node}"
            before, seen = node, seen + 1
        assert seen == self._size, f"{seen} nodes linked, {self._size} counted"
        assert self._tail == before, "the tail is not the last node"


Rule = Callable[..., Any]

# A consumer list longer than this becomes a dict, so that leaving a hub costs no search.
MAX_LISTED = 16


class Table:
    """Rules, inputs and consumers of nodes 0, 1, 2, ...; a node without a rule is a source.

    Invariants: `consumers` is the exact mirror of `inputs`, each reader once; `order` holds the
    living nodes, each after all of its inputs. What is overwritten is noted in the journal before.
    """

    __slots__ = ("_journal", "consumers", "inputs", "order", "rules")

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.rules: list[Rule | None] = []
        self.inputs: list[tuple[int, ...]] = []
        self.consumers: list[list[int] | dict[int, None]] = []
        self.order = Order(journal)

    def __len__(self) -> int:
        """Return the count of numbers ever given out; the removed ones are included."""
        return len(self.rules)

    @property
    def labels(self) -> list[float]:
        """Sort keys: an input's label is smaller than that of every node that reads it."""
        return self.order.labels

    def sorted(self, nodes: Iterable[int]) -> list[int]:
        """`nodes`, inputs first."""
        return sorted(nodes, key=self.order.labels.__getitem__)

    # -- change ------------------------------------------------------------------------------

    def append(self, rule: Rule | None, inputs: tuple[int, ...]) -> int:
        """Add a node at the end of the order. Notes nothing: `retract` undoes it."""
        node = self.order.append()
        self._store(rule, inputs)
        for site in inputs:
            self._connect(site, node)
        return node

    def retract(self, node: int, inputs: tuple[int, ...], end: tuple[int, int]) -> None:
        """Undo `append`, which gave out `node`, or would have, when `end` was the order's end."""
        for site in inputs:
            self._disconnect(site, node)
        self._truncate(node)
        self.order.retract(node, end)

    def insert_after(self, anchor: int, rules: Sequence[Rule | None], wiring: Wiring) -> list[int]:
        """Add a run of nodes right after `anchor`; `wiring(numbers)` gives the inputs of each."""
        nodes = self.order.new(len(rules))
        self._journal.note((self._truncate, len(self.rules)))
        for rule in rules:
            self._store(rule, ())
        for node, inputs in zip(nodes, wiring(nodes), strict=True):
            self._read(node, inputs)
        self.order.place_after(anchor, nodes)
        return nodes

    def reroute(self, node: int, old: int, new: int) -> None:
        """Let `node` read `new` wherever it read `old`. The caller keeps the order true."""
        self._read(node, tuple(new if site == old else site for site in self.inputs[node]))

    def path_if_cyclic(self, node: int, inputs: Iterable[int]) -> list[int] | None:
        """The path from `node` to one of `inputs` that reading them would close, if there is one."""
        inputs = set(inputs)
        if node in inputs:
            return [node]
        ahead = self._ahead(node, inputs)
        for site in inputs:
            if site in ahead:
                path = [site]
                while path[-1] != node:
                    path.append(ahead[path[-1]])
                return path[::-1]
        return None

    def rewire(self, node: int, inputs: tuple[int, ...]) -> None:
        """Let `node` read exactly `inputs`, which must close no cycle; repair the order around it.

        A source that stands too late moves to the front. For other inputs, the part of the cone
        of `node` that stands before the last of them moves behind it: the cost is that part's size.
        """
        labels = self.order.labels
        for site in set(inputs):
            if self.rules[site] is None and labels[site] > labels[node]:
                self.order.move_after(-1, [site])
        ahead = self._ahead(node, inputs)
        if ahead:
            last = max(inputs, key=labels.__getitem__)
            self.order.move_after(last, self.sorted(ahead))
        self._read(node, inputs)

    def delete(self, nodes: Collection[int]) -> None:
        """Take out `nodes`, which no node outside of them reads."""
        for node in nodes:
            self._read(node, ())
            self._journal.replace(self.rules, node, None)
            self.order.remove(node)

    def _ahead(self, node: int, inputs: Iterable[int]) -> dict[int, int]:
        """`node` and what lies in its cone up to the last of `inputs`, each with how it was reached.

        Empty when every input already stands before `node`: then nothing has to be searched.
        """
        labels = self.order.labels
        limit = max((labels[site] for site in inputs), default=labels[node])
        if limit <= labels[node] and node not in inputs:
            return {}
        ahead, stack = {node: -1}, [node]
        while stack:
            at = stack.pop()
            for reader in self.consumers[at]:
                if reader not in ahead and labels[reader] <= limit:
                    ahead[reader] = at
                    stack.append(reader)
        return ahead

    def _read(self, node: int, inputs: tuple[int, ...]) -> None:
        """Let `node` read exactly `inputs`, wherever it stands in the order."""
        old, new = dict.fromkeys(self.inputs[node]), dict.fromkeys(inputs)
        for site in old:
            if site not in new:
                self._note_readers(site, node)
                self._disconnect(site, node)
        for site in new:
            if site not in old:
                self._note_readers(site, node)
                self._connect(site, node)
        self._journal.replace(self.inputs, node, inputs)

    def _note_readers(self, site: int, reader: int) -> None:
        readers = self.consumers[site]
        if type(readers) is dict:
            self._journal.note((self._connect if reader in readers else self._disconnect, site, reader))
        else:
            # Few: the list as it is, so that readers stay in their order.
            self._journal.note((self.consumers.__setitem__, site, list(readers)))

    def _store(self, rule: Rule | None, inputs: tuple[int, ...]) -> None:
        self.rules.append(rule)
        self.inputs.append(inputs)
        self.consumers.append([])

    def _truncate(self, length: int) -> None:
        truncate(self.rules, length)
        truncate(self.inputs, length)
        truncate(self.consumers, length)

    def _connect(self, site: int, reader: int) -> None:
        readers = self.consumers[site]
        if type(readers) is dict:
            readers[reader] = None
        elif reader not in readers:
            readers.append(reader)  # type: ignore[union-attr]  # narrowed by the branch above
            if len(readers) > MAX_LISTED:
                self.consumers[site] = dict.fromkeys(readers)

    def _disconnect(self, site: int, reader: int) -> None:
        readers = self.consumers[site]
        if type(readers) is dict:
            readers.pop(reader, None)
        elif reader in readers:
            readers.remove(reader)  # type: ignore[union-attr]  # narrowed by the branch above

    # -- read --------------------------------------------------------------------------------

    def cone(self, nodes: Iterable[int]) -> set[int]:
        """All that is reached from `nodes` by a path of one edge or more. O(cone)."""
        return _reach(nodes, self.consumers)

    def upstream(self, nodes: Iterable[int]) -> set[int]:
        """All from which one of `nodes` is reached by a path of one edge or more."""
        return _reach(nodes, self.inputs)

    def support(self, nodes: Iterable[int], cut: Collection[int]) -> set[int]:
        """`nodes` and their upstream, not looking past the nodes of `cut`."""
        support = set(nodes)
        stack = list(support)
        while stack:
            node = stack.pop()
            if node in cut:
                continue
            for site in self.inputs[node]:
                if site not in support:
                    support.add(site)
                    stack.append(site)
        return support

    def check(self) -> None:
        """Assert the invariants."""
        self.order.check()
        alive = set(self.order)
        for node in alive:
            for site in self.inputs[node]:
                assert site in alive, f"node {node} reads the removed node {site}"
                assert self.labels[site] < self.labels[node], f"{node} stands before its input {site}"
                assert node in self.consumers[site], f"{site} does not know its reader {node}"
            readers = list(self.consumers[node])
            assert len(readers) == len(set(readers)), f"a reader of {node} is listed twice"
            for reader in readers:
                assert node in self.inputs[reader], f"{reader} is listed as a reader of {node}"


Wiring = Callable[[list[int]], Iterable[tuple[int, ...]]]


def _reach(nodes: Iterable[int], steps: Sequence[Iterable[int]]) -> set[int]:
    reached: set[int] = set()
    stack = list(nodes)
    while stack:
        for node in steps[stack.pop()]:
            if node not in reached:
                reached.add(node)
                stack.append(node)
    return reached
