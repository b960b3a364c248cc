"""Circuits as plain values, and the selection of edges by scores."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, SupportsFloat, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from conewise.anatomy.edge_graph import EdgeGraph
from conewise.errors import Argument, CircuitError, describe

Scores = NDArray[np.float64]
SELECTIONS = ("signed", "absolute")


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision about one edge: if it was kept, and the change of the metric without it."""

    edge: str
    kept: bool
    change: float


@dataclass(frozen=True, repr=False)
class CircuitData:
    """Edges of a graph, in its order, and what is known of them.

    `of` is the name of the model. `scores` are those of all edges that were scored, whether they are in the
    circuit or not, and `helps` is the sign of those of edges that help: −1 where they are effects of removal.
    `log` has the decisions of a search in the order of visits.
    """

    of: str
    graph: EdgeGraph = field(hash=False)
    edges: tuple[str, ...]
    method: str | None = None
    threshold: float | None = None
    scores: Mapping[str, float] | None = field(default=None, hash=False)
    log: tuple[Decision, ...] = field(default=(), hash=False)
    helps: float = -1.0

    @cached_property
    def numbers(self) -> np.ndarray:
        """The numbers of the circuit's edges in the graph."""
        return self.graph.numbers(self.edges)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The components that the circuit's edges join, in order of computation, the logits last.

        The keys and values of a group of heads stand for the heads of the group that the circuit has
        otherwise; for all heads of the group if it has none.
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
        """The scores indexed by edge number, NaN for edges without a score."""
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
    """True if it is a number, of Python's or another kind, and not a truth."""
    if type(given) in (float, int):  # a protocol is asked slowly, and a search has a number for every edge
        return True
    return isinstance(given, SupportsFloat) and not isinstance(given, bool)


def is_whole(given: object) -> bool:
    """True if it is a whole number, and not a truth."""
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
    found = []
    for one in log:
        is_decision = isinstance(one, Decision) and type(one.kept) is bool
        if not is_decision or not is_number(one.change):
            raise CircuitError(
                f"a log holds decisions, such as those of `circuit.log` of a search, and {describe(one)} is "
                "none."
            )
        graph.number(one.edge)
        found.append(one)
    return tuple(found)


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


def helpful(scores: np.ndarray) -> np.ndarray:
    """Sizes in which the most helpful is largest, where `scores` are positive if an edge helps.

    They are the scores where these are positive, and below them the others, in order.
    """
    known = np.sort(np.unique(scores[~np.isnan(scores)]))
    least = known[known > 0].min(initial=1.0)
    places = (np.searchsorted(known, np.where(np.isnan(scores), 0.0, scores)) + 1) / (len(known) + 2)
    return np.where(np.isnan(scores) | (scores > 0), scores, places * least)


def chosen(
    graph: EdgeGraph,
    scores: np.ndarray,
    *,
    top: int | None,
    threshold: float | None,
    connected: bool,
    signed: float | None = None,
) -> np.ndarray:
    """The numbers of the edges that `top` or `threshold` choose, in order; one of the two is given.

    They are chosen by size, or with `signed`, the sign of the scores of edges that help, helpful ones first.
    """
    if signed is not None:
        scores = helpful(signed * scores) if threshold is None else np.fmax(signed * scores, 0.0)
    if (top is None) == (threshold is None):
        raise CircuitError(
            "a circuit is chosen by ",
            Argument("top"),
            ", how many edges at most, or by ",
            Argument("threshold"),
            ", how large a score at least; give one of the two.",
        )
    if threshold is not None:
        if not is_number(threshold) or not 0 <= threshold < math.inf:
            raise CircuitError(Argument("threshold", threshold), " is no size of a score: it is 0 or more.")
        if connected:
            return above(graph, scores, threshold)
        return best(np.abs(scores))[: int((np.abs(scores) >= threshold).sum())]
    assert top is not None
    scored = int((~np.isnan(scores)).sum())
    if not is_whole(top) or not 1 <= top <= scored:
        raise CircuitError(
            "there are ", f"{scored:,} edges with scores; ", Argument("top", top), " is none of 1 to that."
        )
    return grown(graph, scores, top) if connected else best(np.abs(scores), top)


def best(keys: np.ndarray, count: int | None = None) -> NDArray[np.int64]:
    """The numbers of the `count` largest, equal ones in order; those that are NaN are none."""
    flat = keys.ravel()
    known = np.flatnonzero(~np.isnan(flat))
    found: NDArray[np.int64] = known[np.argsort(-flat[known], kind="stable")][:count]
    return found


def pruned(graph: EdgeGraph, edges: np.ndarray) -> np.ndarray:
    """The edges that are on a path over `edges`: the largest part of them without a dead end."""
    sizes = np.full(graph.count, np.nan)
    sizes[edges] = 1.0
    return above(graph, sizes, 1.0)


def above(graph: EdgeGraph, scores: np.ndarray, threshold: float) -> np.ndarray:
    """The edges of at least `threshold` that are on a path over such edges."""
    found: np.ndarray = np.flatnonzero(levels(graph, scores) >= threshold)
    return found


def levels(graph: EdgeGraph, scores: np.ndarray) -> np.ndarray:
    """For each edge, the largest threshold at which it is still on a path; −1 where it is on none.

    It is the smallest |score| on the best path through the edge, where the best path is the one whose
    smallest is largest.
    """
    sizes = np.where(np.isnan(scores), -1.0, np.abs(scores))
    reached = np.full(len(graph.writers), -1.0)
    for writer, readers in enumerate(graph.feeding):
        if not readers:
            reached[writer] = np.inf
        for reader in readers:
            start, stop = graph.starts[reader], graph.starts[reader + 1]
            along = np.minimum(sizes[start:stop], reached[: stop - start])
            reached[writer] = max(reached[writer], along.max(initial=-1.0))
    found = np.full(graph.count, -1.0)
    leading = np.full(len(graph.writers), -1.0)
    for reader in range(len(graph.readers) - 1, -1, -1):
        start, stop = graph.starts[reader], graph.starts[reader + 1]
        fed = graph.fed[reader]
        onwards = np.inf if graph.readers[reader].slot == "logits" else leading[list(fed)].max(initial=-1.0)
        along = np.minimum(sizes[start:stop], onwards)
        leading[: stop - start] = np.maximum(leading[: stop - start], along)
        found[start:stop] = np.minimum(along, reached[: stop - start])
    return found


def grown(graph: EdgeGraph, scores: np.ndarray, top: int) -> np.ndarray:
    """At most `top` edges, each on a path: the largest circuit of that size that growing comes by.

    Growing begins at the logits and takes the edge with the largest |score| of those that lead to what it
    has; edges that no path from the input has reached yet wait, and come in together once one does. So
    circuits of growing size contain each other. Raises CircuitError where the first to come in are more than
    `top`.
    """
    found: list[int] = []
    for group in growing(graph, scores):
        if len(found) + len(group) > top:
            if not found:
                raise CircuitError(
                    "growing by the largest scores from the logits, the first edges that lead to the input ",
                    f"are {len(group):,}, more than ",
                    Argument("top", top),
                    ". Take as many, or leave paths aside with ",
                    Argument("connected", False),
                    ".",
                )
            break
        found += group
    return np.asarray(sorted(found), dtype=np.int64)


def growing(graph: EdgeGraph, scores: np.ndarray) -> Iterator[list[int]]:
    """The edges in groups, in the order in which growing brings them onto a path; see `grown`."""
    alive = [not readers for readers in graph.feeding]
    waiting: list[list[int]] = [[] for _ in graph.writers]
    for edge in from_logits(graph, np.abs(scores)):
        writer = int(graph.edge_writers[edge])
        if not alive[writer]:
            waiting[writer].append(edge)
            continue
        group, reached = [], [edge]
        while reached:
            one = reached.pop()
            group.append(one)
            for fed in graph.fed[int(graph.edge_readers[one])]:
                if not alive[fed]:
                    alive[fed] = True
                    reached += waiting[fed]
                    waiting[fed] = []
        yield group


def stops(level: np.ndarray, points: int, most: int) -> list[tuple[float, int]]:
    """Falling thresholds, and how many edges each keeps: at most so many points, at most so many edges.

    `level` is what `levels` returns. The sizes are spread evenly in their logarithms; the first threshold has
    the fewest edges that there can be, even where these are more than `most`.
    """
    values, counts = np.unique(level[level > 0], return_counts=True)
    if not values.size:
        return []
    values, sizes = values[::-1], np.cumsum(counts[::-1])
    fitting = max(1, int(np.searchsorted(sizes, most, side="right")))
    values, sizes = values[:fitting], sizes[:fitting]
    wanted = np.geomspace(sizes[0], sizes[-1], max(points, 1))
    picked = np.unique(np.clip(np.searchsorted(sizes, np.round(wanted)), 0, len(sizes) - 1))
    return [(float(values[at]), int(sizes[at])) for at in picked]


# -- the sizes of a curve ----------------------------------------------------------------------------------

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The sizes of the benchmark, as shares of all edges, nodes or neurons."""


def sizes_of(shares: Sequence[float] | None, items: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Nominal shares, and how many items each is: all are counts where one is above 1.

    Raises CircuitError.
    """
    given = list(SHARES if shares is None else shares)
    for one in given:
        if not is_number(one) or not 0 < one <= max(items, 1):
            raise CircuitError(
                f"{one!r} in `sizes` is no size: a share between 0 and 1, or a count up to {items:,}."
            )
    if len(given) < 2 or sorted(given) != given:
        raise CircuitError("`sizes` are two or more, from the smallest to the largest.")
    if given[-1] <= 1:
        return tuple(map(float, given)), tuple(int(one * items) for one in given)
    for one in given:
        if one != int(one):
            raise CircuitError(
                f"{one!r} in `sizes` is no count, and {given[-1]!r} is one: give shares, or counts."
            )
    return tuple(float(one / items) for one in given), tuple(map(int, given))


def ranked(scores: Scores, select: str) -> Scores:
    """Return keys of which the largest is taken first; `scores` are positive where something helps."""
    if select not in SELECTIONS:
        raise CircuitError(f"select={select!r} is none of {', '.join(map(repr, SELECTIONS))}.")
    return np.abs(scores) if select == "absolute" else scores


def greedy_edges(graph: EdgeGraph, keys: Scores, count: int) -> NDArray[np.int64]:
    """The largest edges by growing from the logits: always the largest into what is there by then.

    It is the benchmark's greedy selection: an edge may come in whose writer never gets an edge of its own,
    and is pruned then.
    """
    return np.fromiter(itertools.islice(from_logits(graph, keys), count), dtype=np.int64)


def from_logits(graph: EdgeGraph, keys: Scores) -> Iterator[int]:
    """The edges that lead to the logits: always the one with the largest key into what is there by then."""
    queue: list[tuple[float, int]] = []
    opened = set[int]()
    readers = [number for number, reader in enumerate(graph.readers) if reader.slot == "logits"]
    while True:
        for reader in readers:
            if reader not in opened:
                opened.add(reader)
                for edge in range(int(graph.starts[reader]), int(graph.starts[reader + 1])):
                    if not np.isnan(keys[edge]):
                        heapq.heappush(queue, (-float(keys[edge]), edge))
        if not queue:
            return
        _, edge = heapq.heappop(queue)
        yield edge
        readers = list(graph.feeding[int(graph.edge_writers[edge])])


def edges_of_nodes(graph: EdgeGraph, kept: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The edges out of the writers that are kept, without dead ends."""
    return pruned(graph, np.flatnonzero(kept[graph.edge_writers]))
