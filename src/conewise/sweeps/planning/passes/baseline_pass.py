"""The pass that computes base and source themselves: two worlds, each with inputs of its own.

It is built by the same walker as every other pass. It keeps what the passes of a compiled sweep read of the
base, and what they take from the source.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import replace

from conewise.program.records import SIZES, Program
from conewise.reactive.graph import Graph
from conewise.sweeps.planning.passes.build_pass import Chain, build_pass
from conewise.sweeps.planning.passes.instructions import PassProgram
from conewise.sweeps.planning.passes.schedule import schedule
from conewise.sweeps.planning.shapes.fusing import fitting
from conewise.sweeps.planning.shapes.masks import Masks, attention_kernel
from conewise.sweeps.planning.shapes.regions import WHOLE
from conewise.sweeps.planning.shapes.shape_facts import ShapeFacts

PASSES = 16
"""How many of these passes are kept with a program."""

_KEPT: weakref.WeakKeyDictionary[Program, OrderedDict[Hashable, PassProgram]] = weakref.WeakKeyDictionary()


def baseline_pass(
    graph: Graph, facts: ShapeFacts, wanted: Iterable[str], masks: Masks, worlds: int
) -> PassProgram:
    """The pass over `worlds` runs of one shape, whose targets are the nodes `wanted` that inputs reach.

    Its first steps, those of the inputs, put nothing: the executor brings the stacks of inputs along. All
    positions are computed, so that it is the same for every shape with such masks: it is kept.
    """
    varying, records = facts.layout.varying, facts.records
    # Values of several tensors are made of others that are wanted, or computed again.
    targets = tuple(
        name
        for name in dict.fromkeys(wanted)
        if name in varying and name in records and records[name].shape is not None
    )
    kept = _KEPT.setdefault(facts.program, OrderedDict())
    key = targets, worlds, frozenset(name for name, mask in masks.items() if mask.is_causal), facts.device
    if key not in kept:
        kept[key] = _built(graph, facts, targets, masks, worlds)
        while len(kept) > PASSES:
            kept.popitem(last=False)
    return kept[key]


def _built(
    graph: Graph, facts: ShapeFacts, targets: tuple[str, ...], masks: Masks, worlds: int
) -> PassProgram:
    records, inputs = facts.records, [leaf.name for leaf in facts.program.inputs]
    put = dict.fromkeys(inputs, (1 << worlds) - 1)
    plan = schedule(graph, put, put, worlds, targets)
    steps = {node: (mask, None) for node, mask in plan.steps}
    consumers = graph.table.consumers
    fused = fitting(
        facts.fusions,
        steps,
        {*inputs, *targets},
        lambda node: map(graph.name, consumers[graph.number(node)]),
    )
    program = build_pass(
        plan,
        lambda node: records[node].inputs,
        WHOLE,
        chains={node: Chain(one.inputs, tuple(sorted(one.inside))) for node, one in fused.items()},
        several=facts.program.several.__contains__,
        kernel=lambda node, rows, _: attention_kernel(records[node], rows, facts.layout, masks),
    )
    given = [replace(step, put=None) if step.node in put else step for step in program.steps]
    return replace(program, steps=tuple(given), rises=(0,) * len(given))


def can_stack(facts: ShapeFacts, program: PassProgram) -> bool:
    """Whether all inputs, and all that is kept, have rows along which several runs lie one behind another."""
    batch_dim = facts.layout.batch_dim
    names = [*(leaf.name for leaf in facts.program.inputs), *(one.node for one in program.targets)]
    return all(batch_dim.get(name) is not None for name in names)


def read_of_base(program: PassProgram) -> list[str]:
    """The nodes whose values in the base a pass reads."""
    found: dict[str, None] = {}
    for step in program.steps:
        for one in step.reads:
            if not one.stacked or one.align.add or (one.rows is None and one.have is not None):
                found[one.node] = None
        if step.align.add or step.put is not None:
            found[step.node] = None
    for one in program.targets:
        found[one.node] = None
    found.pop(SIZES, None)
    return list(found)
