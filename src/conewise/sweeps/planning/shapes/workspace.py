"""What operations take beside their values while they run: fused attention is the one that takes much."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from conewise.program.operations import ATTENTION
from conewise.program.records import Record, Ref
from conewise.structure.attention.sizes import attention_argument
from conewise.sweeps.planning.shapes.costs import Costs
from conewise.sweeps.planning.shapes.layout import Layout

QUERIES = ((768, 256), (192, 64), (0, 32))
"""Of the CPU's kernel: with so many queries or more, so many are in a tile."""
KEYS = 512
"""Of the CPU's kernel: how many keys are in a tile."""


class Workspace:
    """Bytes that operations take beside their values, for runs of one shape.

    `rows` is how many positions of a value are computed, None for all; `is_causal` says of a mask that it
    hides just what comes later.
    """

    def __init__(self, layout: Layout, costs: Costs, device: torch.device) -> None:
        self._layout, self._costs, self._device = layout, costs, device
        self._attention = {r.name: r for r in layout.program.records if r.op == ATTENTION}

    def each(self, name: str, rows: int | None, is_causal: Callable[[str], bool]) -> int:
        """For each world that is computed."""
        record = self._attention.get(name)
        if record is None:
            return 0
        query, key, value = (self._shape(record, place, rows if place == 0 else None) for place in range(3))
        size, counted = self._costs.itemsize(name), math.prod(query[:-1])
        taken = counted * max(size, 4)  # the logarithms of the sums, that a gradient would read
        if record.kwargs.get("enable_gqa"):
            taken += 2 * size * math.prod(query[:-2]) * math.prod(key[-2:])  # keys and values, repeated
        if len(query) != 4 or query[-1] != value[-1]:
            # No fused kernel: scores before and after their softmax, queries and keys scaled.
            taken += size * (2 * counted * key[-2] + math.prod(query) + math.prod(key))
        mask = self._mask(record, rows, is_causal)
        if mask is not None and self._layout.batch_dim.get(mask) is not None:
            taken += size * self._costs.elements(mask, rows=rows)
        return taken

    def fixed(self, name: str, rows: int | None, is_causal: Callable[[str], bool]) -> int:
        """For all worlds together, however many."""
        record = self._attention.get(name)
        if record is None:
            return 0
        size, taken = self._costs.itemsize(name), 0
        query, key = self._shape(record, 0, rows), self._shape(record, 1, None)
        mask = self._mask(record, rows, is_causal)
        if mask is not None and self._layout.batch_dim.get(mask) is None:
            taken += size * self._costs.elements(mask, rows=rows)
        if rows is not None and attention_argument(record, "is_causal"):
            taken += size * query[-2] * key[-2]
        if (record.device or self._device).type == "cpu" and len(query) == 4:
            queries = min(query[-2], next(tile for least, tile in QUERIES if query[-2] >= least))
            keys = min(key[-2], KEYS)
            tile = max(size, 4) * queries * (keys + 2 + query[-1]) + (
                size * queries * keys if size < 4 else 0
            )
            taken += torch.get_num_threads() * tile
        return taken

    def _mask(self, record: Record, rows: int | None, is_causal: Callable[[str], bool]) -> str | None:
        """The mask of booleans that is turned into numbers to be added; None where there is none."""
        mask = attention_argument(record, "attn_mask")
        if not isinstance(mask, Ref) or self._costs.itemsize(mask.name) != 1:
            return None
        if rows is None and mask.name not in self._layout.varying:
            return None if is_causal(mask.name) else mask.name
        return mask.name

    def _shape(self, record: Record, place: int, rows: int | None) -> tuple[int, ...]:
        given = record.args[place]
        shape = self._costs.shape(given.name, rows=rows) if isinstance(given, Ref) else None
        return shape or (1, 1)
