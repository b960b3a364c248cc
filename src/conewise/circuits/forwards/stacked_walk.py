"""Walks: the records between some values and others, for a stack of worlds, at all positions or the last."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from conewise.edges.stacked_values import Read
from conewise.program.operations import ATTENTION
from conewise.program.records import SIZES, Program, Record
from conewise.program.rules import Rule, compile_rule
from conewise.structure.relevance import Relevance
from conewise.structure.wiring.wiring import Wiring
from conewise.sweeps.planning.shapes.attention_rules import repeated_rule
from conewise.sweeps.planning.shapes.fusing import Fusion, fitting, product_then_bias
from conewise.sweeps.planning.shapes.layout import Constants, Layout, compile_stacked_rule, repeated

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class WalkStep:
    """One value: what it reads, by which rule; behind it the values of `drop` are read no more."""

    node: str
    inputs: tuple[str, ...]
    rule: Rule
    drop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Walk:
    """The steps from some values to `targets`. `records` are as many as without fusions."""

    steps: tuple[WalkStep, ...]
    targets: tuple[str, ...]
    records: int


class Walks:
    """Finds walks in a program, and computes them for runs of one shape.

    What a walk reads beside the values that it begins with is `read`: a run's own value, repeated.
    """

    def __init__(
        self, program: Program, wiring: Wiring, layout: Layout, fusions: tuple[Fusion, ...], read: Read
    ) -> None:
        self._program, self._wiring, self._layout = program, wiring, layout
        self._fusions, self._read = fusions, read
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
        wiring, begun = self._wiring, frozenset(starts)
        everything = frozenset(wiring.records)
        names = {name for target in targets for name in wiring.above(target, everything, begun)}
        cone: set[str] = set()
        for name in sorted(names, key=wiring.order.__getitem__):
            if any(one in begun or one in cone for one in wiring.records[name].inputs):
                cone.add(name)
        cone -= begun
        order = sorted(cone, key=wiring.order.__getitem__)
        kept = {*targets, *keep, *begun}
        fused = fitting(
            self._fusions, dict.fromkeys(order), kept, lambda node: [one.name for one in wiring.readers[node]]
        )
        inside = {name for fusion in fused.values() for name in fusion.inside}
        steps: list[tuple[str, tuple[str, ...], Rule]] = []
        for name in order:
            if name in fused:
                steps.append((name, fused[name].inputs, fused[name].rule))
            elif name not in inside:
                record = wiring.records[name]
                steps.append((name, record.inputs, _rule(record)))
        last = {one: at for at, (_, inputs, _) in enumerate(steps) for one in inputs}
        drops: dict[int, list[str]] = {}
        for name, at in last.items():
            if (name in cone or name in begun) and name not in kept - begun:
                drops.setdefault(at, []).append(name)
        made = tuple(
            WalkStep(name, inputs, rule, tuple(drops.get(at, ())))
            for at, (name, inputs, rule) in enumerate(steps)
        )
        return Walk(made, targets, len(order))

    def run(
        self,
        walk: Walk,
        given: Mapping[str, Tensor],
        worlds: int,
        rows: int | None = None,
        columns: Mapping[str, Tensor] | None = None,
        relevance: Relevance | None = None,
    ) -> dict[str, Any]:
        """The values of the walk's targets, and of what it keeps, for `given` stacks of so many worlds.

        `rows`: of so many last positions, which is what is given then. `columns`: of a product with a
        weight, the columns that are computed. With `relevance` what is recorded is that, by its rules.
        """
        stacks: dict[str, Any] = dict(given)
        for step in walk.steps:
            operands = [
                stacks[name] if name in stacks else self._operand(name, worlds, rows) for name in step.inputs
            ]
            if columns and step.node in columns:
                operands = [
                    value if name in stacks else value.index_select(0, columns[step.node])
                    for name, value in zip(step.inputs, operands, strict=True)
                ]
            if relevance is None or step.node not in relevance.rules:
                stacks[step.node] = step.rule(*operands)
            else:
                entry = stacks.get(relevance.entries.get(step.node, ""))
                stacks[step.node] = relevance.rules[step.node](step.rule, operands, entry)
            for name in step.drop:
                del stacks[name]
        return stacks

    def _operand(self, name: str, worlds: int, rows: int | None) -> Any:
        """What is read of a run: weights and constants, and values that no start leads to."""
        if name == SIZES:
            return self._layout.sizes(worlds, rows)
        if name not in self._layout.varying and name not in self._program.record_of:
            return self._read(name)
        key = name, worlds, rows
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
