"""Whether a program treats the rows of a batch apart: only then can worlds be stacked along it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from conewise.frontends.torch.records import SIZES, Program
from conewise.frontends.torch.rules import compile_rule
from conewise.frontends.torch.stacking import Layout

CLOSE = 1e-3
"""How far a row may move when its neighbour is another, relative to the largest value of the node: far
above the rounding of batched kernels, far below what reading the neighbour would do."""


@torch.no_grad()
def mixing_node(program: Program, layout: Layout, inputs: Mapping[str, torch.Tensor]) -> str | None:
    """A node at which rows of the batch mix, or None: found by running a batch beside another one.

    The first half of the stack is the given batch, the second half another; where the first half of a value
    depends on the second, or a value has no batch although what it reads has, rows mix.
    """
    alone = _values(program, layout, dict(inputs), 1)
    beside = {name: torch.cat([value, _other(value)]) for name, value in inputs.items()}
    stacked = _values(program, layout, beside, 2)
    for record in program.records:
        name = record.name
        if name not in layout.varying or not isinstance(alone[name], torch.Tensor):
            continue
        dim = layout.batch_dim.get(name)
        if dim is None or stacked[name].shape[dim] != 2 * alone[name].shape[dim]:
            return name
        half = stacked[name].narrow(dim, 0, alone[name].shape[dim])
        if not _close(half, alone[name]):
            return name
    return None


def _values(program: Program, layout: Layout, inputs: dict[str, Any], worlds: int) -> dict[str, Any]:
    values: dict[str, Any] = {source.name: source.value for source in program.sources}
    values |= inputs
    values[SIZES] = layout.sizes(worlds)
    for record in program.records:
        values[record.name] = compile_rule(record)(*[values[name] for name in record.inputs])
    return values


def _other(value: torch.Tensor) -> torch.Tensor:
    """Another input of the same kind: the positions in reverse, or the values negated."""
    if value.ndim > 1 and not torch.equal(value, value.flip(1)):
        return value.flip(1)
    return -value if value.is_floating_point() else value


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    finite = torch.isfinite(other)
    if not torch.equal(finite, torch.isfinite(one)):
        return False
    if not bool(finite.any()):
        return True
    scale = max(float(other[finite].abs().max()), 1e-30)
    return float((one[finite] - other[finite]).abs().max()) <= CLOSE * scale
