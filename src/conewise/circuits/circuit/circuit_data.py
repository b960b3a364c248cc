"""What a circuit is made of, as plain values: the graph, the edges, their scores, how they were found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, SupportsFloat, SupportsIndex

import numpy as np

from conewise.circuits.circuit.decision import Decision
from conewise.errors import CircuitError, describe
from conewise.structure.components.edge_graph import EdgeGraph


@dataclass(frozen=True, repr=False)
class CircuitData:
    """Edges of a graph, in its order, and what is known of them.

    `of` is the name of the model. `scores` are those of all edges that were scored, whether they are in the
    circuit or not. `log` has the decisions of a search in the order of visits.
    """

    of: str
    graph: EdgeGraph = field(hash=False)
    edges: tuple[str, ...]
    method: str | None = None
    threshold: float | None = None
    scores: Mapping[str, float] | None = field(default=None, hash=False)
    log: tuple[Decision, ...] = field(default=(), hash=False)

    @cached_property
    def numbers(self) -> np.ndarray:
        """The numbers of its edges in the graph."""
        return self.graph.numbers(self.edges)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The components that its edges join, in order of computation, the logits last.

        The keys and values of a group of heads stand for those heads of it that the circuit has otherwise;
        for all of them where it has none.
        """
        graph = self.graph
        writers = set(graph.edge_writers[self.numbers].tolist())
        readers = sorted(set(graph.edge_readers[self.numbers].tolist()))
        found = set(writers)
        found |= {one for reader in readers if len(graph.fed[reader]) == 1 for one in graph.fed[reader]}
        for reader in readers:
            group = set(graph.fed[reader])
            if len(group) > 1 and not group & found:
                found |= group
        ends = [graph.readers[reader].name for reader in readers if not graph.fed[reader]]
        return (*(graph.writers[one].name for one in sorted(found)), *ends)

    def score_array(self) -> np.ndarray:
        """The scores by the numbers of the edges, NaN where there is none."""
        return score_array(self.graph, self.scores or {})

    def __len__(self) -> int:
        return len(self.edges)

    def __contains__(self, edge: object) -> bool:
        return edge in self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.edges)


def score_array(graph: EdgeGraph, scores: Mapping[str, float]) -> np.ndarray:
    """Scores by name as an array by number, NaN where there is none."""
    found = np.full(graph.count, np.nan)
    for edge, score in scores.items():
        found[graph.number(edge)] = score
    return found


def is_number(given: object) -> bool:
    """Whether it is a number, of Python's or another kind, and not a truth."""
    return isinstance(given, SupportsFloat) and not isinstance(given, bool)


def is_whole(given: object) -> bool:
    """Whether it is a whole number, and not a truth."""
    return isinstance(given, SupportsIndex) and not isinstance(given, bool)


def checked_scores(graph: EdgeGraph, scores: Mapping[str, float]) -> Mapping[str, float]:
    """The scores in graph order, each a finite number of an edge of the graph. Raises CircuitError if not."""
    if not isinstance(scores, Mapping):
        raise CircuitError(f"scores are numbers by the names of edges, a dict, not {describe(scores)}.")
    found = {}
    for edge, score in scores.items():
        number = graph.number(edge)
        if not is_number(score) or not math.isfinite(score):
            raise CircuitError(
                f"the score of {edge} is {score!r}; scores are finite numbers. Leave out edges that have "
                "none."
            )
        found[number] = float(score)
    return MappingProxyType({graph.edges[number]: found[number] for number in sorted(found)})


def checked_log(graph: EdgeGraph, log: Iterable[Any]) -> tuple[Decision, ...]:
    """The decisions, each about an edge of the graph. Raises CircuitError for what is none."""
    found = tuple(log)
    for one in found:
        is_decision = isinstance(one, Decision) and type(one.kept) is bool
        if not is_decision or not is_number(one.change):
            raise CircuitError(
                f"a log holds decisions, such as those of `circuit.log` of a search, and {describe(one)} is "
                "none."
            )
        graph.number(one.edge)
    return found


def between(graph: EdgeGraph, nodes: Iterable[str]) -> np.ndarray:
    """The edges between some components: `input` and `logits` are always among them.

    Keys and values that a group of heads shares are there with any head of the group.
    """
    nodes = list(nodes)
    for name in nodes:
        if not isinstance(name, str):
            raise CircuitError(f"components are named by texts such as 'a0.h1', not by {describe(name)}.")
    ends = {reader.name for reader in graph.readers if reader.slot == "logits"}
    starts = {writer for writer, readers in enumerate(graph.feeding) if not readers}
    kept = starts | {graph.writer_number(name) for name in nodes if name not in ends}
    reads = [not fed or not kept.isdisjoint(fed) for fed in graph.fed]
    writes = np.zeros(len(graph.writers), dtype=bool)
    writes[sorted(kept)] = True
    found: np.ndarray = np.flatnonzero(writes[graph.edge_writers] & np.asarray(reads)[graph.edge_readers])
    return found


def expect_same_graph(one: EdgeGraph, other: EdgeGraph, what: str) -> None:
    """The two graphs have the same components and edges; raises CircuitError, which says `what` failed."""
    if (one.writers, one.readers) == (other.writers, other.readers):
        return
    differing = _first_difference([r.name for r in one.readers], [r.name for r in other.readers]) or (
        _first_difference([w.name for w in one.writers], [w.name for w in other.writers])
    )
    where = f" The first component that differs is {differing}." if differing else ""
    raise CircuitError(
        f"{what}: the circuit is of a graph of {one.count:,} edges ({len(one.writers)} writers, "
        f"{len(one.readers)} readers), and the other is one of {other.count:,} ({len(other.writers)} "
        f"writers, {len(other.readers)} readers).{where} Both have to have the same heads and MLPs."
    )


def _first_difference(one: Sequence[str], other: Sequence[str]) -> str | None:
    for first, second in zip(one, other, strict=False):
        if first != second:
            return f"{first} here, {second} there"
    longer = max(one, other, key=len)
    return longer[min(len(one), len(other))] if len(one) != len(other) else None
