"""Facts about all runs of one shape: where dimensions lie, what values cost, how they lie in memory.

Found once for each model and shape, and kept: a new pair of prompts finds all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from conewise.program.records import Program
from conewise.sweeps.planning.costs import Costs
from conewise.sweeps.planning.fusing import Fusion
from conewise.sweeps.planning.independence import Trial
from conewise.sweeps.planning.layout import Layout
from conewise.sweeps.planning.memory_layout import MemoryLayout, Workspace, memory_layout
from conewise.sweeps.planning.regions import Mask, Masks, RegionFinder, masks_of, read_masks


class ShapeFacts:
    """The facts of one shape. `fusions` are chains that one kernel of the device computes."""

    def __init__(
        self,
        program: Program,
        symbols: dict[str, int],
        device: torch.device,
        fusions: tuple[Fusion, ...],
    ) -> None:
        self.program, self.device, self.fusions = program, device, fusions
        self.layout = Layout(program, symbols)
        self.costs = Costs(program, self.layout)
        self.finder = RegionFinder(self.layout)
        self.records = program.record_of
        self._narrow_costs: dict[tuple[tuple[str, int], ...], Costs] = {}
        self._masks = masks_of(program)
        self._constant_masks: dict[str, Mask] | None = None
        self._independent: dict[str, bool] = {}

    def device_of(self, node: str) -> torch.device:
        """Return the device on which the value of a node lies."""
        return self.records[node].device or self.device

    @cached_property
    def memory_layout(self) -> MemoryLayout:
        """The values that share memory, and those that a product has to copy."""
        return memory_layout(self.layout, self.device)

    def narrow_costs(self, columns: Mapping[str, int]) -> Costs:
        """Costs where only so many columns of some nodes are computed."""
        key = tuple(columns.items())
        if not key:
            return self.costs
        if key not in self._narrow_costs:
            wanted = {node: range(count) for node, count in columns.items()}
            self._narrow_costs[key] = Costs(self.program, self.layout, wanted)
        return self._narrow_costs[key]

    def workspace(self, costs: Costs) -> Workspace:
        """Return the bytes that operations take beside their values."""
        return Workspace(self.layout, costs, self.device)

    def masks(self, read: Callable[[str], Any]) -> Masks:
        """Return what the masks hide in a run whose values `read` gives; constant ones are read once."""
        if not self._masks:
            return {}
        varying = tuple(name for name in self._masks if name in self.layout.varying)
        if self._constant_masks is None:
            constant = tuple(name for name in self._masks if name not in self.layout.varying)
            self._constant_masks = read_masks(constant, read)
        return {**self._constant_masks, **read_masks(varying, read)} if varying else self._constant_masks

    def forget_values(self) -> None:
        """Forget what was found with other weights: what was tried, and what masks among them hide."""
        self._independent.clear()
        self._constant_masks = None

    def mixing(self, nodes: tuple[str, ...], read: Callable[[str], Any]) -> str:
        """The first of `nodes` that mixes the rows of the batch; empty where none does.

        Most are known from their kinds; the others are tried once, on the values of a run.
        """
        trial: Trial | None = None
        for node in nodes:
            if node not in self._independent:
                trial = trial or Trial(self.layout, read)
                self._independent[node] = trial.is_batch_independent(node)
            if not self._independent[node]:
                return node
        return ""
