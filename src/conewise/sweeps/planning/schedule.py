"""A schedule: which nodes are computed in which worlds of a sweep, in order, before any of it is.

Sets of worlds are bit masks: bit i is world i. Worlds are numbered so that patches further down the
graph have higher numbers; the worlds in which a node is computed are then mostly the first few, and a
stack of them grows at its end as the pass descends.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from conewise.arguments import shown_bytes
from conewise.errors import BudgetError
from conewise.reactive.graph import Graph


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps inputs first: nodes with the worlds in which each is computed.

    `patched` has, for each patched node, the worlds that patch it, `whole` those of them that replace its
    whole value. A world that replaces a node's whole value does not compute it; one that replaces a part of
    it computes it only when another patch of the same world reaches it.
    """

    worlds: int
    steps: tuple[tuple[str, int], ...]
    patched: Mapping[str, int]
    targets: tuple[str, ...]
    whole: Mapping[str, int]

    @property
    def node_evaluations(self) -> int:
        """Σ over worlds of the nodes computed there: what a serial run computes, one by one."""
        return sum(worlds.bit_count() for _, worlds in self.steps)

    @property
    def launches(self) -> int:
        """The number of nodes that some world computes: what a wavefront launches."""
        return len(self.steps)

    @property
    def reached(self) -> int:
        """The worlds in which a target changes."""
        found = 0
        for _, worlds in self.steps:
            found |= worlds
        for target in self.targets:
            found |= self.patched.get(target, 0)
        return found

    def of(self, first: int, count: int) -> Schedule:
        """The part that concerns `count` worlds from `first` on, which is then world 0."""

        def cut(masks: Mapping[str, int]) -> dict[str, int]:
            return {node: found for node, mask in masks.items() if (found := mask >> first & all_of_them)}

        all_of_them = (1 << count) - 1
        steps = tuple((node, found) for node, mask in self.steps if (found := mask >> first & all_of_them))
        return Schedule(count, steps, cut(self.patched), self.targets, cut(self.whole))


def schedule(
    graph: Graph,
    patched: Mapping[str, int],
    whole: Mapping[str, int],
    worlds: int,
    targets: Sequence[str],
) -> Schedule:
    """The schedule of worlds that patch some nodes: masks by node, and those that replace the whole value.

    For each world the computed nodes are (cone(P) − P) ∩ support(targets, cut at P), where P are the nodes
    replaced whole, and the cone is that of all patched nodes.
    """
    table, numbers = graph.table, graph.numbers(targets)
    put = {graph.number(node): mask for node, mask in patched.items()}
    replaced = {graph.number(node): mask for node, mask in whole.items()}
    order = table.sorted(table.support(numbers, ()))
    changed: dict[int, int] = {}
    computed: dict[int, int] = {}
    for node in order:
        reached = 0
        for site in table.inputs[node]:
            reached |= changed.get(site, 0)
        reached &= ~replaced.get(node, 0)
        if reached:
            computed[node] = reached
        if reached or node in put:
            changed[node] = reached | put.get(node, 0)
    wanted: dict[int, int] = dict.fromkeys(numbers, (1 << worlds) - 1)
    for node in reversed(order):
        here = computed.get(node, 0) & wanted.get(node, 0)
        if here:
            computed[node] = here
            for site in table.inputs[node]:
                wanted[site] = wanted.get(site, 0) | here
        else:
            computed.pop(node, None)
    steps = tuple((graph.name(node), computed[node]) for node in order if node in computed)
    return Schedule(worlds, steps, dict(patched), tuple(targets), dict(whole))


# ------------------------------------------------------------------------------------------
# Sets of worlds: bit masks while a plan is made, ranges where it is kept.
#
# Bit i of a mask is world i. Worlds are numbered so that most sets are a few ranges: (start, stop) pairs in
# order, that do not touch.

Ranges = tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=4096)
def ranges_of(mask: int) -> Ranges:
    """The worlds of a mask as ranges."""
    found, start = [], 0
    while mask:
        gap = (mask & -mask).bit_length() - 1
        mask >>= gap
        start += gap
        length = (~mask & (mask + 1)).bit_length() - 1
        found.append((start, start + length))
        mask >>= length
        start += length
    return tuple(found)


def mask_of_members(members: Sequence[int]) -> int:
    """The mask of worlds that are given one by one."""
    if len(members) < 8:
        return sum(1 << member for member in set(members))
    bits = np.zeros(max(members) + 1, dtype=bool)
    bits[np.asarray(members)] = True
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")


def count_of(ranges: Ranges) -> int:
    """Return how many worlds there are."""
    if len(ranges) == 1:
        return ranges[0][1] - ranges[0][0]
    return sum(stop - start for start, stop in ranges)


def members(worlds: int | Ranges) -> list[int]:
    """The worlds of a mask, or of ranges, first to last."""
    ranges = ranges_of(worlds) if isinstance(worlds, int) else worlds
    return [world for start, stop in ranges for world in range(start, stop)]


def places_in(part: int, whole: int) -> Ranges:
    """Return where the worlds of the mask `part` stand among those of `whole`, which has all of them."""
    if whole & (whole + 1) == 0:
        return ranges_of(part)
    found: list[tuple[int, int]] = []
    for start, stop in ranges_of(part):
        first = (whole & ((1 << start) - 1)).bit_count()
        last = first + stop - start
        if found and found[-1][1] == first:
            found[-1] = found[-1][0], last
        else:
            found.append((first, last))
    return tuple(found)


def merged_order(first: int, second: int) -> Ranges | None:
    """The worlds of both masks, those of `first` before those of `second`, as places in their own order.

    None where they stand in their own order already.
    """
    if first.bit_length() <= (second & -second).bit_length() - 1 or not first or not second:
        return None
    pieces = sorted(
        (start, stop, base + before)
        for mask, base in ((first, 0), (second, first.bit_count()))
        for start, stop in ranges_of(mask)
        for before in [(mask & ((1 << start) - 1)).bit_count()]
    )
    found: list[tuple[int, int]] = []
    for start, stop, place in pieces:
        if found and found[-1][1] == place:
            found[-1] = found[-1][0], place + stop - start
        else:
            found.append((place, place + stop - start))
    return tuple(found)


# ------------------------------------------------------------------------------------------
# The order of a sweep's worlds: which are computed together.
#
# In a causal model a change at a position reaches no earlier one. Worlds whose changes begin late compute few
# rows, so they are kept together, as far as the rows that this saves are worth a pass of their own.

LAUNCH_FLOPS = {"cpu": 1_000_000, "cuda": 100_000_000}
"""Cost of launching an operation, in operations: constants, so that equal sweeps are cut alike.

On CUDA it is that of a kernel in a graph that is replayed: some microseconds.
"""

FEW = 16
"""The most first positions that are told apart: further passes save hardly any rows."""


@dataclass(frozen=True, slots=True)
class WorldOrder:
    """`cells`: the cells by world, `groups`: how many worlds make a pass, one behind the other."""

    cells: tuple[int, ...]
    groups: tuple[int, ...]


def ordered(
    order: Sequence[int],
    starts: Sequence[int],
    work: Callable[[], Sequence[int]],
    share: Callable[[int], float],
    overhead: int,
) -> WorldOrder:
    """Cut the worlds into passes by where they begin, at the least cost.

    `order` are the cells by depth, `starts` their beginnings. `work()` has the operations of each cell with
    all positions, `share(start)` is how much of it is left from there on, `overhead` what a pass costs.
    """
    distinct = sorted(set(starts))
    count = min(FEW, len(distinct))  # evenly spread, the first among them
    candidates = [distinct[number * len(distinct) // count] for number in range(count)]
    if len(candidates) == 1:
        return WorldOrder(tuple(order), (len(order),))
    begin_of = {start: max(one for one in candidates if one <= start) for start in set(starts)}
    begins = [begin_of[start] for start in starts]
    amounts = work()
    held = {start: sum(amounts[cell] for cell in order if begins[cell] == start) for start in candidates}
    first_of = _cut(candidates, held, share, overhead)
    group = {start: first for first, members in first_of.items() for start in members}
    firsts = sorted(first_of)
    by_group = {first: [cell for cell in order if group[begins[cell]] == first] for first in firsts}
    return WorldOrder(
        tuple(cell for first in firsts for cell in by_group[first]),
        tuple(len(by_group[first]) for first in firsts),
    )


def _cut(
    starts: Sequence[int], held: Mapping[int, int], share: Callable[[int], float], overhead: int
) -> dict[int, list[int]]:
    """Runs of beginnings, by the first of each, so that all passes together cost the least."""
    left = [share(start) for start in starts]
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(starts) + 1):
        options = []
        for begin in range(end):
            amount = sum(held[start] for start in starts[begin:end])
            options.append((best[begin][0] + overhead + amount * left[begin], begin))
        best.append(min(options))
    groups: dict[int, list[int]] = {}
    end = len(starts)
    while end:
        begin = best[end][1]
        groups[starts[begin]] = list(starts[begin:end])
        end = begin
    return groups


# ------------------------------------------------------------------------------------------
# The cut of a sweep into passes: as few runs of worlds as fit the memory budget.

Piece = tuple[int, int, int]
"""Worlds that are computed together: the first, how many, the first position that they change."""


def cut_worlds(
    groups: Sequence[int], starts: Sequence[int], budget: int, peak: Callable[[int, int, int], int]
) -> list[Piece]:
    """Cut groups of so many worlds, one behind the other, into pieces that each fit the budget.

    `starts` has the first position that each world changes, `peak` the most bytes that a piece holds. Raises
    BudgetError where one world alone takes more.
    """
    found: list[Piece] = []
    for first, count in zip(accumulate(groups, initial=0), groups, strict=False):
        found += _pieces(first, count, starts, budget, peak)
    return found


def stored_pieces(chunks: Sequence[int], starts: Sequence[int]) -> list[Piece]:
    """The pieces of a run that was cut into chunks of so many worlds before."""
    return [
        _piece(first, count, starts)
        for first, count in zip(accumulate(chunks, initial=0), chunks, strict=False)
    ]


def _piece(first: int, count: int, starts: Sequence[int]) -> Piece:
    return first, count, min(starts[first : first + count])


def _pieces(
    first: int, count: int, starts: Sequence[int], budget: int, peak: Callable[[int, int, int], int]
) -> list[Piece]:
    """Runs of worlds of about equal length, as few as possible."""
    pieces = 1
    while True:
        size = math.ceil(count / pieces)
        found = [_piece(first + begin, min(size, count - begin), starts) for begin in range(0, count, size)]
        most = 0
        for piece in found:
            most = max(most, peak(*piece))
            if most > budget and size > 1:
                break
        if most <= budget:
            return found
        if size == 1:
            raise no_room(max(peak(*_piece(world, 1, starts)) for world in range(len(starts))), budget)
        pieces = min(count, max(pieces + 1, math.ceil(pieces * most / budget)))


def no_room(least: int, budget: int, what: str = "one world alone") -> BudgetError:
    """The error where one world alone takes more than the budget."""
    return BudgetError(f"{what} takes {shown_bytes(least)}", shown_bytes(budget), least)
