"""What the worlds of a sweep put in, in bytes: how much is stacked, and how much no run holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from conewise.structure.selections import selected
from conewise.sweeps.planning.costs import Costs
from conewise.sweeps.planning.stacking import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from conewise.locations.located import Located
    from conewise.locations.places import Place
    from conewise.sweeps.sweep import Sweep


class FillSizes:
    """Bytes of what worlds put in; found when they are asked for.

    `order` has the cell of each world. With `from_run`, values come from a run, which holds them already: a
    part takes memory of its own only where it is picked by lists.
    """

    def __init__(
        self, sweep: Sweep, layout: Layout, costs: Costs, order: Sequence[int], *, from_run: bool
    ) -> None:
        self._sweep, self._layout, self._costs = sweep, layout, costs
        self._order, self._from_run = order, from_run
        self._known: dict[tuple[Any, ...], tuple[str, int, bool, bool]] = {}

    def part(self, node: str) -> int:
        """Of one world's part of a node, where those of several worlds are stacked, to be written at once."""
        return self._found[0].get(node, 0)

    def held(self, worlds: int) -> int:
        """Of the tensors that worlds one behind the other put in, and that no run holds."""
        before = self._found[1]
        return before[worlds.bit_length()] - before[(worlds & -worlds).bit_length() - 1]

    @cached_property
    def _found(self) -> tuple[Mapping[str, int], Sequence[int]]:
        """The largest part of each node that is stacked; what all worlds before each hold, and the sum."""
        stacked: dict[str, int] = {}
        own: list[int] = []
        cells = self._sweep.cells
        for cell in self._order:
            held = 0
            for place in cells[cell].places:
                node, size, is_stacked, is_new = self._sizes(place)
                if is_stacked:
                    stacked[node] = max(stacked.get(node, 0), size)
                held += size if is_new else 0
            own.append(held)
        return stacked, list(accumulate(own, initial=0))

    def _sizes(self, place: Place) -> tuple[str, int, bool, bool]:
        """The node of a place, the bytes of its part, whether those are stacked, whether no run holds it."""
        part = place.part
        shape = tuple((axis, 0 if isinstance(index, int) else str(index)) for axis, index in part.items())
        key = place.name, place.layer, place.stack, shape
        if key not in self._known:
            found = self._sweep.model.locate(place)
            is_stacked = all(isinstance(index, int) for index in part.values())
            is_new = not self._from_run or not all(isinstance(index, int | slice) for index in part.values())
            self._known[key] = found.node, self._bytes(found), is_stacked, is_new
        return self._known[key]

    def _bytes(self, found: Located) -> int:
        lengths = found.view.lengths_in(self._costs.shape(found.node) or (), self._layout.sizes(1))
        counts = (
            selected(found.part[axis], size) if axis in found.part else size
            for axis, size in zip(found.view.axes, lengths, strict=True)
        )
        return math.prod(counts) * self._costs.itemsize(found.node)
