"""A topological order that changes locally: insert, move or remove, and only the neighbours pay.

A linked list of node numbers, each with a label that grows along the list. Comparing two nodes is
comparing two labels; sorting any handful of nodes is sorting by label.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

# Labels are floats because CPython sorts those fastest. Appended nodes stand GAP apart, so about
# thirty insertions at one place find room by halving before any label has to move.
GAP = float(1 << 20)
ROOMY = 64.0


class Order:
    """The nodes 0, 1, 2, ... in an order that the owner keeps topological.

    Invariant: following `_next` from `_head` visits each member once, with strictly growing labels.
    """

    __slots__ = ("_head", "_next", "_prev", "_size", "_tail", "labels")

    def __init__(self) -> None:
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

    def before(self, node: int) -> int:
        """The node that stands right before `node`, or -1."""
        return self._prev[node]

    def remove(self, node: int) -> None:
        """Take `node` out. Its number is not used again."""
        before, after = self._prev[node], self._next[node]
        if before >= 0:
            self._next[before] = after
        else:
            self._head = after
        if after >= 0:
            self._prev[after] = before
        else:
            self._tail = before
        self._size -= 1

    def place_after(self, anchor: int, nodes: Sequence[int]) -> None:
        """Put `nodes`, which stand nowhere, right after `anchor` (-1: at the front), in that order."""
        if not nodes:
            return
        after = self._next[anchor] if anchor >= 0 else self._head
        for node in nodes:
            self._prev[node] = anchor
            if anchor >= 0:
                self._next[anchor] = node
            else:
                self._head = node
            anchor = node
        self._next[anchor] = after
        if after >= 0:
            self._prev[after] = anchor
        else:
            self._tail = anchor
        self._size += len(nodes)
        self._label(nodes)

    def move_after(self, anchor: int, nodes: Sequence[int]) -> None:
        """Take `nodes` from where they stand and put them right after `anchor`, in that order."""
        for node in nodes:
            self.remove(node)
        self.place_after(anchor, nodes)

    def new(self, count: int) -> list[int]:
        """`count` unused numbers that stand nowhere yet, for `place_after`."""
        first = len(self.labels)
        for column, blank in ((self._next, -1), (self._prev, -1)):
            column.extend([blank] * count)
        self.labels.extend([0.0] * count)
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
        for place, node in enumerate(run, start=1):
            labels[node] = low + gap * place
        return True

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
