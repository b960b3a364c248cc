"""The order of a sweep's worlds, and where each world's change begins.

In a causal model a change at a position reaches no earlier one. Worlds whose changes begin late compute few
rows, so they are kept together, as far as the rows that this saves are worth a pass of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conewise.program.tensors import Tensor
from conewise.sweeps.planning.regions import RegionFinder, first_differences

if TYPE_CHECKING:
    from conewise.locations.selectors import Cell
    from conewise.runs.run import Reading
    from conewise.sweeps.planning.stacking import Layout
    from conewise.sweeps.sweep import Batch, Sweep

LAUNCH_FLOPS = {"cpu": 1_000_000, "cuda": 500_000_000}
"""What launching an operation is worth in operations: constants, so that equal sweeps are cut alike."""

FEW = 16
"""How many beginnings are told apart at most."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """`order`: the cells by world, `groups`: how many worlds make a pass, one behind the other."""

    order: tuple[int, ...]
    groups: tuple[int, ...]


class Beginnings:
    """For each cell of a sweep, the first position that it changes in a run."""

    def __init__(self, sweep: Sweep, layout: Layout, finder: RegionFinder) -> None:
        self._sweep, self._layout, self._finder = sweep, layout, finder
        self._length = next(iter(layout.lengths), 0) if len(layout.lengths) == 1 else 0

    def of(self, batch: Batch) -> tuple[int, ...]:
        """By cell; 0 where nothing is known, so that every position is computed."""
        cells = self._sweep.cells
        # A function in the base may carry a change to any part of what it is given.
        if self._length < 2 or any(not isinstance(edit.part, Tensor) for edit in batch.base.edits):
            return (0,) * len(cells)
        differing = self._differing(batch) if batch.source is not None else {}
        return tuple(min(self._start(place, differing) for place in cell.places) for cell in cells)

    def _start(self, place: Any, differing: Mapping[str, int]) -> int:
        found = self._sweep.model.locate(place)
        if not self._finder.has_rows(found.node):
            return 0
        index = found.part.get("pos")
        if index is None:
            return differing.get(found.node, 0)
        if not self._finder.shows_positions(found.node, found.site.view or found.view):
            return 0
        rows = range(self._length)
        picked = (
            [rows[index]] if isinstance(index, int) else rows[index] if isinstance(index, slice) else index
        )
        return min((row % self._length for row in picked), default=0)

    def _differing(self, batch: Batch) -> dict[str, int]:
        """The first position at which a node's value in the source is not the base's."""
        assert batch.source is not None
        locate = self._sweep.model.locate
        found = (locate(place) for cell in self._sweep.cells for place in cell.places)
        nodes = dict.fromkeys(one.node for one in found if "pos" not in one.part)
        known = [node for node in nodes if self._finder.has_rows(node)]
        pairs = [(self._values(batch.base, node), self._values(batch.source, node)) for node in known]
        return dict(zip(known, first_differences(self._layout, known, pairs), strict=True))

    def _values(self, run: Reading, node: str) -> Tensor:
        (value,) = run.demand([node])
        assert isinstance(value, Tensor)
        return value


def depths(sweep: Sweep) -> list[int]:
    """The cells, the patch that stands first in the graph first: stacks then grow at their ends."""
    graph = sweep.model.graph
    labels = graph.table.labels

    def depth(cell: Cell) -> float:
        return min(labels[graph.number(sweep.model.locate(place).node)] for place in cell.places)

    return sorted(range(len(sweep.cells)), key=lambda number: depth(sweep.cells[number]))


def arranged(
    order: Sequence[int],
    starts: Sequence[int],
    work: Callable[[], Sequence[int]],
    share: Callable[[int], float],
    overhead: int,
) -> Arrangement:
    """Cut the worlds into passes by where they begin, at the least cost.

    `order` are the cells by depth, `starts` their beginnings. `work()` has the operations of each cell with
    all positions, `share(start)` is how much of it is left from there on, `overhead` what a pass costs.
    """
    candidates = _few(sorted(set(starts)))
    if len(candidates) == 1:
        return Arrangement(tuple(order), (len(order),))
    begins = [max(one for one in candidates if one <= start) for start in starts]
    amounts = work()
    held = {start: sum(amounts[cell] for cell in order if begins[cell] == start) for start in candidates}
    first_of = _cut(candidates, held, share, overhead)
    group = {start: first for first, members in first_of.items() for start in members}
    firsts = sorted(first_of)
    by_group = {first: [cell for cell in order if group[begins[cell]] == first] for first in firsts}
    return Arrangement(
        tuple(cell for first in firsts for cell in by_group[first]),
        tuple(len(by_group[first]) for first in firsts),
    )


def _few(starts: Sequence[int]) -> list[int]:
    step = -(-len(starts) // FEW)
    return list(starts[::step])


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
