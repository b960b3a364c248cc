"""The order of a sweep's worlds: which are computed together.

In a causal model a change at a position reaches no earlier one. Worlds whose changes begin late compute few
rows, so they are kept together, as far as the rows that this saves are worth a pass of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LAUNCH_FLOPS = {"cpu": 1_000_000, "cuda": 100_000_000}
"""What launching an operation is worth in operations: constants, so that equal sweeps are cut alike.

On CUDA it is that of a kernel in a graph that is replayed: some microseconds.
"""

FEW = 16
"""How many first positions are told apart at most: further passes save hardly any rows."""


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
    candidates = _few(sorted(set(starts)))
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


def _few(starts: Sequence[int]) -> list[int]:
    """At most `FEW` of these, the first among them, evenly spread."""
    count = min(FEW, len(starts))
    return [starts[number * len(starts) // count] for number in range(count)]


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
