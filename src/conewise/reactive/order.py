"""A topological order that changes locally: insert, move or remove, and only the neighbours pay.

A linked list of node numbers, each with a label that grows along the list. Comparing two nodes is
comparing two labels; sorting any handful of nodes is sorting by label.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

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
        if self._spread(left, nodes, right, least=0.0):
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
            if self._spread(left, run, right, least=ROOMY):
                return
            step *= 2

    def _spread(self, left: int, run: Sequence[int], right: int, least: float) -> bool:
        """Space `run` evenly between the labels of `left` and `right`, if that leaves `least` each."""
        labels = self.labels
        if right < 0:
            low = labels[left] if left >= 0 else 0.0
            gap = GAP
        else:
            low = labels[left] if left >= 0 else labels[right] - GAP * (len(run) + 1)
            gap = (labels[right] - low) / (len(run) + 1)
        # Two labels must differ after rounding, wherever in the range they lie.
        finest = 4 * math.ulp(max(abs(low), abs(labels[right]) if right >= 0 else abs(low) + GAP * len(run)))
        if gap < max(least, finest):
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
