"""Walks: the records between some values and others, for a stack of worlds, at all positions or the last."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch

from conewise.edges.stacked_values import Read
from conewise.program.operations import ATTENTION
from conewise.program.records import SIZES, Program, Record
from conewise.program.rehearsal import is_rehearsal
from conewise.program.rules import Rule, compile_rule
from conewise.program.walk import Walk, WalkStep, between, plan_walk
from conewise.structure.relevance import Relevance
from conewise.sweeps.planning.shapes.attention import repeated_rule
from conewise.sweeps.planning.shapes.fusing import Fusion, fitting, product_then_bias
from conewise.sweeps.planning.shapes.layout import Constants, Layout, compile_stacked_rule, repeated

Tensor = torch.Tensor


class Walks:
    """Finds walks in a program, and computes them for runs of one shape.

    What a walk reads beside the values that it begins with is `read`: a run's own value, repeated.
    """

    def __init__(self, program: Program, layout: Layout, fusions: tuple[Fusion, ...], read: Read) -> None:
        self._program, self._layout, self._fusions, self._read = program, layout, fusions, read
        self._constants = Constants(layout, read)
        self._found: dict[tuple[tuple[str, ...], tuple[str, ...], frozenset[str]], Walk] = {}
        self._fixed: dict[tuple[str, int, int | None], Any] = {}

    def rebase(self, read: Read) -> None:
        """Read another run of the same shape from now on."""
        self._read = read
        self._constants.rebase(read)
        self._fixed.clear()

    def walk(self, starts: Collection[str], targets: Collection[str], keep: Collection[str] = ()) -> Walk:
        """The walk from `starts` to `targets`; values of `keep` are kept to the end too."""
        key = tuple(starts), tuple(targets), frozenset(keep)
        if key not in self._found:
            self._found[key] = self._made(*key)
        return self._found[key]

    def _made(self, starts: tuple[str, ...], targets: tuple[str, ...], keep: frozenset[str]) -> Walk:
        records = between(self._program, starts, targets)
        order = dict.fromkeys(one.name for one in records)
        kept, readers = {*targets, *keep, *starts}, self._program.readers
        fused = fitting(self._fusions, order, kept, lambda node: [one.name for one in readers[node]])
        inside = {name for fusion in fused.values() for name in fusion.inside}
        steps = [
            (one.name, fused[one.name].inputs, fused[one.name].rule)
            if one.name in fused
            else (one.name, one.inputs, _rule(one))
            for one in records
            if one.name not in inside
        ]
        return plan_walk(steps, {*targets, *keep}, starts, records=len(records))

    def run(
        self,
        walk: Walk,
        given: Mapping[str, Tensor],
        worlds: int,
        rows: int | None = None,
        columns: Mapping[str, Tensor] = MappingProxyType({}),
        relevance: Relevance | None = None,
    ) -> dict[str, Any]:
        """The values of the walk's targets, and of what it keeps, for `given` stacks of so many worlds.

        `rows`: of so many last positions, which is what is given then. `columns`: of a product with a
        weight, the columns that are computed. With `relevance` what is recorded is that, by its rules.
        """

        def narrowed(step: WalkStep, operands: list[Any], stacks: dict[str, Any]) -> Any:
            if step.node in columns:
                operands = [
                    value if name in stacks else value.index_select(0, columns[step.node])
                    for name, value in zip(step.inputs, operands, strict=True)
                ]
            return step.rule(*operands)

        compute = narrowed if columns else None if relevance is None else relevance.compute
        return walk.run(dict(given), lambda name: self._operand(name, worlds, rows), compute)

    def _operand(self, name: str, worlds: int, rows: int | None) -> Any:
        """What is read of a run: weights and constants, and values that no start leads to."""
        if name == SIZES:
            return self._layout.sizes(worlds, rows)
        if name not in self._layout.varying and name not in self._program.record_of:
            return self._read(name)
        key = name, worlds, rows
        if is_rehearsal():
            return self._fixed.get(key, self._repeated(name, worlds, rows))
        if key not in self._fixed:
            if len(self._fixed) >= 512:
                self._fixed.clear()
            self._fixed[key] = self._repeated(name, worlds, rows)
        return self._fixed[key]

    def _repeated(self, name: str, worlds: int, rows: int | None) -> Any:
        if name not in self._layout.varying:
            value = self._constants.stacked(name, worlds)
        else:
            value, dim = self._read(name), self._layout.batch_dim.get(name)
            if dim is not None and isinstance(value, torch.Tensor):
                value = repeated(value, dim, worlds)
        if rows is not None and isinstance(value, torch.Tensor):
            value = self._layout.tail(name, value, rows)
        return value


def _rule(record: Record) -> Rule:
    if record.op == ATTENTION:
        return (
            repeated_rule(record, compile_rule) if record.kwargs.get("enable_gqa") else compile_rule(record)
        )
    return product_then_bias(record) or compile_stacked_rule(record)
