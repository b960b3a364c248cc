"""An instrument: how many rows of nodes wavefronts compute, by the sizes of the tensors that rules return."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from conewise.program.rules import Rule
from conewise.runs.run import Run
from conewise.sweeps.execution.wavefront import Wavefront
from conewise.sweeps.planning.passes.instructions import Step
from conewise.sweeps.planning.plan import SweepPlan


@dataclass(slots=True)
class RowCount:
    """Node-rows that were computed: a node counts once for each world and position."""

    rows: int = 0


@contextmanager
def counting_rows(base: Run, positions: int) -> Iterator[RowCount]:
    """Count what wavefronts over runs of the base's shape compute, from the first run of each on.

    A row of a node has as many numbers as the base's value has, over its positions where it has some.
    """
    count, original, lengths = RowCount(), Wavefront._rule, _lengths(base, positions)

    def counted(self: Wavefront, step: Step) -> Rule:
        rule = original(self, step)

        def noting(*operands: Any) -> Any:
            value = rule(*operands)
            columns = self._columns.get(step.node)  # of a product of which only some are computed
            each = lengths[step.node] if columns is None else columns.numel()
            rows, rest = divmod(_numbers(value), each)
            assert not rest, f"{step.node} is computed in whole rows"
            count.rows += rows * (1 + len(step.inside))
            return value

        return noting

    Wavefront._rule = counted  # type: ignore[method-assign]
    try:
        yield count
    finally:
        Wavefront._rule = original  # type: ignore[method-assign]


def planned_rows(plan: SweepPlan, positions: int) -> int:
    """The node-rows that a plan says: its steps, by their worlds and their positions."""
    assert plan.compiled is not None, "a planned sweep is compiled"
    programs = plan.compiled.programs
    return sum(
        step.count * (1 + len(step.inside)) * (positions if step.rows is None else step.rows)
        for one in plan.compiled.passes
        for step in programs[one.program].steps
    )


def _lengths(base: Run, positions: int) -> dict[str, int]:
    """How many numbers a row of each node has."""
    program = base.model.program
    names = [record.name for record in program.records]
    found = {}
    for name, value in zip(names, base.demand(names), strict=True):
        has_rows = any(program.pos_dims[one] is not None for one in (name, *program.parts.get(name, ())))
        found[name] = _numbers(value) // (positions if has_rows else 1)
    return found


def _numbers(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    return sum(map(_numbers, value)) if isinstance(value, tuple | list) else 0
