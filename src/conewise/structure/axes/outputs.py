"""How an output is read by metrics: where its prompts lie, and which of its dimensions are positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from conewise.errors import MetricError
from conewise.program.records import Program
from conewise.program.sizes import is_equal, symbols_in
from conewise.structure.axes.placements import Placement, placements_of

Tensor = torch.Tensor


class Outputs:
    """Puts the outputs of a program into the order of metrics: [world, prompt, position, ...].

    Prompts and positions are known by their sizes. Where an output has no size that is known to be
    positions' (their number is fixed, or one alone is computed), positions are the dimension behind the
    prompts, as in [prompt, position, vocabulary], unless another one alone has the length of the inputs.
    One dimension behind the prompts is what a token is picked from, be it a vocabulary or positions.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known = program.dimensions
        self._batch = placements_of(program, self._known.batch)
        self._pos = placements_of(program, self._known.positions)
        self._shapes = program.shapes
        self._fixed_lengths = {
            leaf.shape[1]
            for leaf in program.inputs
            if len(leaf.shape) == (3 if leaf.dtype.is_floating_point else 2)
            and isinstance(leaf.shape[1], int)
        }

    def prompts(self, inputs: Mapping[str, Tensor]) -> int:
        """How many prompts a run with these inputs has; 0 where that is not known."""
        if self._known.doubt:
            return 0
        if self._known.is_unbatched:
            return 1
        for leaf in self._program.inputs:
            for dim, size in enumerate(leaf.shape):
                if str(size) in self._known.batch:
                    return int(inputs[leaf.name].shape[dim])
        wide = [leaf for leaf in self._program.inputs if leaf.shape]
        wide = [leaf for leaf in wide if len(leaf.shape) > 1] or wide
        leading = {int(inputs[leaf.name].shape[0]) for leaf in wide}
        return leading.pop() if len(leading) == 1 else 0 if wide else 1

    def arranged(self, name: str, value: Any, worlds: int, prompts: int) -> Tensor:
        """A stack of an output's values as [world, prompt, ...], positions behind the prompts.

        Raises MetricError where it is not known how they lie.
        """
        if self._known.doubt:
            raise MetricError(f"{self._known.doubt}. A function of the module's outputs needs no batch.")
        shape = self._shapes.get(name)
        if not isinstance(value, torch.Tensor) or shape is None:
            raise MetricError(
                f"the output {name!r} is no tensor. Give a function of the module's outputs as the metric."
            )
        if self._known.is_unbatched:
            pos = self._pos.of(name)
            return value[None, None] if pos is None else value[None, None].movedim(pos.dim + 2, 2)
        placement = self._placement(name, value, prompts)
        dim, count = placement.dim, value.shape[placement.dim] // (worlds * prompts)
        outer, inner = (1, count) if is_equal(placement.outer, 1) else (count, 1)
        split = value.unflatten(dim, (worlds, outer, prompts, inner))  # type: ignore[no-untyped-call]
        # Behind worlds and prompts: the dimensions in front, what shared theirs outside, inside, the others.
        stack: Tensor = split.movedim((dim, dim + 2), (0, 1))
        at = self._position(name, placement)
        stack = stack if at is None else stack.movedim(at, 2)
        for spare in (dim + 3, dim + 2):
            # Positions, if found, stand in front of these now.
            index = spare + (at is not None and at > spare)
            if at != spare and stack.shape[index] == 1:
                stack = stack.squeeze(index)
        return stack

    def has_positions(self, name: str) -> bool:
        """True if an output has positions, and behind them what a token is picked from."""
        if self._known.is_unbatched:
            return len(self._shapes.get(name) or ()) > 1
        placement = self._placement_of(name)
        return placement is not None and self._position(name, placement) is not None

    def has_last(self, name: str) -> bool:
        """Whether the last position can be read off an output without the others."""
        placement = self._pos.of(name)
        rest = len(self._shapes.get(name) or ()) - 1
        shares = placement is not None and not is_equal(placement.outer, 1)
        return placement is not None and (rest > 1 or (shares and rest == 1))

    def ends_in_tokens(self, name: str) -> bool:
        """Whether the last dimension of an output is what a token is picked from, and not positions."""
        shape = self._shapes.get(name) or ()
        placement = self._placement_of(name)
        if placement is None:
            return False
        at = self._position(name, placement)
        return at is None or at != len(shape) + 2

    def _position(self, name: str, batch: Placement) -> int | None:
        """Which dimension is positions', once what shares the prompts' dimension is split off."""
        shape = self._shapes.get(name) or ()
        others = [dim for dim in range(len(shape)) if dim != batch.dim]
        along = [dim for dim in others if not symbols_in(shape[dim]).isdisjoint(self._known.positions)]
        placement = self._pos.of(name)
        if placement is not None and placement.dim == batch.dim:
            return batch.dim + (3 if is_equal(batch.outer, 1) else 2)
        if len(others) < 2:
            return None
        fixed = [dim for dim in others if shape[dim] in self._fixed_lengths]
        if not along and not self._known.positions and len(fixed) == 1:
            along = fixed
        found = (along or others)[0]
        return found + 2 if found < batch.dim else found + 3

    def _placement(self, name: str, value: Tensor, prompts: int) -> Placement:
        placement = self._placement_of(name)
        is_fixed = not self._known.batch
        if placement is None or (is_fixed and value.shape[0] != prompts):
            raise MetricError(
                f"it is not known where the prompts lie in the output {name!r} of shape "
                f"{tuple(value.shape)}. Give a function of the module's outputs as the metric."
            )
        return placement

    def _placement_of(self, name: str) -> Placement | None:
        """Where the prompts lie in an output; a batch of fixed size is its first dimension."""
        if not self._known.batch:
            shape = self._shapes.get(name)
            return Placement(0, shape[0]) if shape else None
        placement = self._batch.of(name)
        if placement is None:
            return None
        return placement if is_equal(placement.outer, 1) or is_equal(placement.inner, 1) else None
