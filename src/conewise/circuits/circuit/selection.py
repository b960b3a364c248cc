"""Circuits from scores: by a threshold, the largest so many, grown from the logits; and pruning.

Edges are numbers here, as `EdgeGraph` numbers them, and scores an array with one number for each edge; an
edge that was not scored is NaN and never chosen. An edge is *on a path* if, over chosen edges, its writer is
reached from the input and the logits are reached from its reader. A head is reached through any of its q, k
and v.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

import numpy as np

from conewise.circuits.circuit.circuit_data import is_number, is_whole
from conewise.errors import Argument, CircuitError
from conewise.structure.components.edge_graph import EdgeGraph


def chosen(
    graph: EdgeGraph, scores: np.ndarray, *, top: int | None, threshold: float | None, connected: bool
) -> np.ndarray:
    """The numbers of the edges that `top` or `threshold` choose, in order; one of the two is given."""
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
        return above(graph, scores, threshold) if connected else largest_first(scores, threshold=threshold)
    assert top is not None
    scored = int((~np.isnan(scores)).sum())
    if not is_whole(top) or not 1 <= top <= scored:
        raise CircuitError(
            "there are ", f"{scored:,} edges with scores; ", Argument("top", top), " is none of 1 to that."
        )
    return grown(graph, scores, top) if connected else largest_first(scores)[:top]


def largest_first(scores: np.ndarray, threshold: float = 0.0) -> np.ndarray:
    """The scored edges of at least `threshold`, the largest |score| first, equal ones in graph order."""
    found = np.flatnonzero(np.abs(scores) >= threshold)
    return found[np.argsort(-np.abs(scores[found]), kind="stable")]


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
    sizes = np.abs(scores)
    alive = [not readers for readers in graph.feeding]
    opened = [False] * len(graph.readers)
    waiting: list[list[int]] = [[] for _ in graph.writers]
    queue: list[tuple[float, int]] = []

    def open_reader(reader: int) -> None:
        if not opened[reader]:
            opened[reader] = True
            for edge in range(graph.starts[reader], graph.starts[reader + 1]):
                if not np.isnan(sizes[edge]):
                    heapq.heappush(queue, (-float(sizes[edge]), edge))

    for number, reader in enumerate(graph.readers):
        if reader.slot == "logits":
            open_reader(number)
    while queue:
        _, edge = heapq.heappop(queue)
        writer = int(graph.edge_writers[edge])
        for feeding in graph.feeding[writer]:
            open_reader(feeding)
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
