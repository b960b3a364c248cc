"""A graph by number: parallel lists indexed by node number, kept in topological order.

`Graph` gives it names and errors; the engine reads it directly. Numbers are never used twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from conewise.reactive.journal import Journal, truncate
from conewise.reactive.order import Order

Rule = Callable[..., Any]

# A consumer list longer than this becomes a dict, so that leaving a hub costs no search.
FEW = 16


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
        """How many numbers were ever given out; the removed ones are included."""
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

    def define(self, node: int, rule: Rule) -> None:
        """Let `node` have another rule."""
        self._journal.replace(self.rules, node, rule)

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
            if len(readers) > FEW:
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
