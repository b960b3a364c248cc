"""The walk: compute records of a program in order, and drop each value after its last use.

A walk is planned once, from what it starts with to what it is asked for, and run over the values of any run.
Baselines, checks, the lens, readers of edges, forwards with removed edges and gradients are walks. The
wavefront (`sweeps/execution/wavefront.py`) follows a pass instead, which is a walk with stacks of worlds that
grow from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from conewise.program.build import run_sources
from conewise.program.records import SIZES, Program, Record
from conewise.program.rules import Rule, compile_rule
from conewise.program.streaming import assembled
from conewise.reactive.graph import Graph

Read = Callable[[str], Any]
"""The value of a name that a walk does not compute: a weight, an input, a value of the run it starts from."""


@dataclass(frozen=True, slots=True)
class WalkStep:
    """One value: what it reads and by which rule. After it, the values of `drop` are read no more."""

    node: str
    inputs: tuple[str, ...]
    rule: Rule
    drop: tuple[str, ...] = ()


Compute = Callable[[WalkStep, list[Any], dict[str, Any]], Any]
"""The value of a step, given its operands and the values that are held: for edits, gradients, relevance."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Steps in order. `records` counts the records that they compute; a fused step computes several."""

    steps: tuple[WalkStep, ...]
    records: int

    def run(self, values: dict[str, Any], read: Read, compute: Compute | None = None) -> dict[str, Any]:
        """Add the value of each step to `values`, which holds what the walk starts with, and return them.

        Names that are not among the values are read with `read`. `compute` replaces the call of a step's
        rule.
        """
        for step in self.steps:
            operands = [values[name] if name in values else read(name) for name in step.inputs]
            values[step.node] = step.rule(*operands) if compute is None else compute(step, operands, values)
            for name in step.drop:
                del values[name]
        return values


def between(
    program: Program, starts: Collection[str], targets: Iterable[str], members: Collection[str] | None = None
) -> list[Record]:
    """Return the records that depend on `starts` and that `targets` depend on, in order.

    The starts are not among them, nor what lies before them. With `members`, only paths through these count.
    """
    records, needed, queue = program.record_of, set(starts), list(targets)
    while queue:
        name = queue.pop()
        if name not in needed and name in records:
            needed.add(name)
            queue += records[name].inputs
    found, moved = [], set(starts)
    for name in sorted(needed - moved, key=program.order.__getitem__):
        if (members is None or name in members) and not moved.isdisjoint(records[name].inputs):
            moved.add(name)
            found.append(records[name])
    return found


def plan_walk(
    steps: Iterable[tuple[str, tuple[str, ...], Rule]],
    keep: Collection[str],
    starts: Collection[str] = (),
    *,
    also_reads: Mapping[str, str] | None = None,
    records: int | None = None,
) -> Walk:
    """Plan the walk over `steps`, which are (node, inputs, rule) in order.

    What it computes and its `starts` are dropped after their last use, except for the names of `keep`.
    `also_reads` are values that steps read beside their inputs.
    """
    listed, also = list(steps), also_reads or {}
    held = {node for node, _, _ in listed}.union(starts).difference(keep)
    drops: list[list[str]] = [[] for _ in listed]
    last: dict[str, int] = {}
    for at, (node, inputs, _) in enumerate(listed):
        last.update(dict.fromkeys(inputs, at))
        if node in also:
            last[also[node]] = at
    for name, at in last.items():
        if name in held:
            drops[at].append(name)
    made = (
        WalkStep(node, inputs, rule, tuple(drop))
        for (node, inputs, rule), drop in zip(listed, drops, strict=True)
    )
    return Walk(tuple(made), len(listed) if records is None else records)


def stream(graph: Graph, sources: Mapping[str, Any], keep: Collection[str]) -> dict[str, Any]:
    """Return the values of `keep` in a run of `graph` with these sources, holding no others for long."""
    table = graph.table
    order = table.sorted(
        node for node in table.support(graph.numbers(keep), ()) if table.rules[node] is not None
    )
    steps = ((graph.name(node), graph.names(table.inputs[node]), table.rules[node]) for node in order)
    walk = plan_walk(((name, inputs, rule) for name, inputs, rule in steps if rule is not None), keep)
    values = walk.run(dict(sources), lambda name: graph.default(graph.number(name)))
    return {name: values[name] for name in keep if name in values}


def support(program: Program, targets: Iterable[str]) -> list[Record]:
    """Return the records that `targets` depend on, themselves included, in order."""
    records, found, queue = program.record_of, set(), list(targets)
    while queue:
        name = queue.pop()
        if name in records and name not in found:
            found.add(name)
            queue += records[name].inputs
    return [records[name] for name in sorted(found, key=program.order.__getitem__)]


class Interpreter:
    """Runs a program record by record, without an engine: the reference that a world must equal."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._walk = program_walk(program, program.record_of, program.record_of)

    @torch.no_grad()
    def values(
        self,
        inputs: Mapping[str, torch.Tensor],
        patches: Mapping[str, Any] | None = None,
        edits: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> dict[str, Any]:
        """Return every value of a run by name: sources, inputs, sizes and records.

        A name in `patches` has that value in place of its own; one in `edits` has what the function makes
        of the value that it would have had.
        """
        given, changed = patches or {}, edits or {}
        values: dict[str, Any] = {**self.program.source_values, **run_sources(self.program, dict(inputs))}
        for name in changed.keys() & values.keys():
            values[name] = changed[name](values[name])

        def compute(step: WalkStep, operands: list[Any], _: dict[str, Any]) -> Any:
            value = given[step.node] if step.node in given else step.rule(*operands)
            return changed[step.node](value) if step.node in changed else value

        return self._walk.run(values, values.__getitem__, compute if given or changed else None)

    def output(self, values: Mapping[str, Any]) -> Any:
        """Return the module's output in its own structure."""
        return assembled(self.program, values, values[SIZES])


def program_walk(program: Program, targets: Iterable[str], keep: Collection[str]) -> Walk:
    """Plan the walk from a program's sources to `targets`; it ends with the values of `keep`."""
    return plan_walk(
        ((record.name, record.inputs, compile_rule(record)) for record in support(program, targets)), keep
    )
