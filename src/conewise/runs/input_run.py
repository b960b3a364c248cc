"""Runs of inputs that are computed when something of them is read, and runs whose values a pass computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conewise.program.build import run_sources
from conewise.program.tensors import Tensor, computing
from conewise.program.walk import stream
from conewise.program.weights import Contents, Sums
from conewise.reactive.world import World
from conewise.runs.baseline import computed, sizes_of
from conewise.runs.captured import Captured
from conewise.runs.reading import Reading
from conewise.runs.run import Run

FEW = 0.2
"""What depends on no more than this share of the operations is computed alone: masks, first positions."""


class InputRun(Run):
    """The baseline for one input, which is computed when a value of it is first read, bit for bit."""

    def __init__(self, model: Captured, inputs: dict[str, Tensor]) -> None:
        self._given = inputs
        self._early: dict[str, Any] = {}
        self._early_of = 0
        super().__init__(model, None, sizes_of(model, inputs), inputs)

    @property
    def is_computed(self) -> bool:
        """Whether all of it was computed."""
        return self._world is not None

    def is_of(self, weights: Sums) -> bool:
        """Whether nothing was read of it that was computed with other weights than these."""
        return (not self._early and self._world is None) or self._weights.whole == weights

    @property
    def made_with(self) -> Contents:
        """What the weights held when the run was computed; it is computed where it was not."""
        if not self._early and self._world is None:
            _ = self.world
        return self._weights

    @property
    def world(self) -> World:
        """The world of the run, all of whose outputs are computed."""
        if self._world is None:
            if not self._early:
                self._begin()
            self._world = computed(self.model, self._given)
        return self._world

    def _values(self, nodes: tuple[str, ...]) -> tuple[Any, ...]:
        if self._early_of != self.model.graph.changes:
            self._early, self._early_of = {}, self.model.graph.changes
        if self._world is None and len(self.model.support(nodes)) < FEW * len(self.model.program.records):
            if not all(node in self._early for node in nodes):
                if not self._early:
                    self._begin()
                sources = run_sources(self.model.program, self._given)
                with computing():
                    found = stream(self.model.graph, sources, nodes)
                self._early |= {node: found[node] for node in nodes if node in found}
            if all(node in self._early for node in nodes):
                return tuple(self._early[node] for node in nodes)
        return super()._values(nodes)

    def _check_bits(self, weights: Contents | None = None) -> None:
        if self.is_computed or self._early:
            super()._check_bits(weights)

    def _check_lent(self) -> None:
        if self.is_computed or self._early:
            super()._check_lent()


class PassRun(Reading):
    """A run whose values a pass computed, together with others: equal to its own up to rounding.

    `values` are these, by the graph's own names; what is not among them is read of `run`.
    """

    def __init__(self, run: InputRun, values: Mapping[str, Any]) -> None:
        super().__init__(run.model, None, run._sizes, run)
        self._run, self.values = run, values

    @property
    def world(self) -> World:
        """The world of the run itself."""
        return self._run.world

    def _values(self, nodes: tuple[str, ...]) -> tuple[Any, ...]:
        known = self.values
        if all(node in known for node in nodes):
            return tuple([known[node] for node in nodes])
        return tuple(known[node] if node in known else self._run._values((node,))[0] for node in nodes)
