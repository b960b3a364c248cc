"""Values of a run, or of several worlds stacked along the batch, as the rules of a program read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conewise.program.records import SIZES, Program
from conewise.sweeps.planning.shapes.layout import Constants, Layout, repeated

Tensor = torch.Tensor
Read = Callable[[str], Any]
"""The value at a node, a weight or an input of a run. Values may be stacks of worlds along the batch."""


class StackedValues:
    """Reads values of runs of a program for stacks of worlds; keeps what depends on their shapes alone."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._inputs = tuple(leaf.name for leaf in program.inputs)
        self._known: dict[tuple[tuple[int, ...], ...], tuple[Layout, Constants]] = {}

    def layout(self, read: Read) -> Layout:
        """The layout of runs of this shape."""
        return self._of(read)[0]

    def worlds_in(self, read: Read, name: str, value: Tensor) -> int:
        """How many worlds a value is a stack of."""
        layout = self.layout(read)
        dim, shape = layout.batch_dim.get(name), layout.shape(name)
        return 1 if dim is None or shape is None else value.shape[dim] // shape[dim]

    def reading(self, read: Read, worlds: int) -> Read:
        """Reads every value as a stack of so many worlds: what has fewer of them is repeated."""
        layout, constants = self._of(read)
        constants.rebase(read)

        def stacked(name: str) -> Any:
            if name == SIZES:
                return layout.sizes(worlds)
            if name not in layout.varying:
                return constants.stacked(name, worlds)
            value, dim = read(name), layout.batch_dim.get(name)
            if dim is None or not isinstance(value, torch.Tensor):
                return value
            shape = layout.shape(name)
            assert shape is not None
            return repeated(value, dim, worlds * shape[dim] // value.shape[dim])

        return stacked

    def _of(self, read: Read) -> tuple[Layout, Constants]:
        shapes = tuple(tuple(read(name).shape) for name in self._inputs)
        if shapes not in self._known:
            given = dict(zip(self._inputs, shapes, strict=True))
            layout = Layout(self._program, self._program.symbols_of(given))
            self._known[shapes] = layout, Constants(layout, read)
        return self._known[shapes]
