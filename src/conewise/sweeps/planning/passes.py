"""Passes of a plan: steps, and how each gets what it reads. Data, without a tensor in it.

A pass computes some worlds together. The values of a node in the worlds that changed it are its *stack*, laid
one behind the other along the batch, in the order of the worlds; what no world changed is the baseline's.
Where worlds are numbered, they are numbered within the pass.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from conewise.program.records import SIZES, Program
from conewise.program.streaming import Reads, reads_of
from conewise.program.walk import dropped_after
from conewise.reactive.graph import Graph
from conewise.sweeps.planning.fusing import Fusion, fitting
from conewise.sweeps.planning.regions import WHOLE, Masks, Regions, attention_kernel
from conewise.sweeps.planning.schedule import (
    Ranges,
    Schedule,
    count_of,
    merged_order,
    places_in,
    ranges_of,
    schedule,
)
from conewise.sweeps.planning.shapes import ShapeFacts


@dataclass(frozen=True, slots=True)
class Alignment:
    """The way from a stack to the worlds that a reader computes.

    The stack has `worlds`. First those at the places `pick` are taken, None for all; then the baseline is
    added for `add` more worlds, behind them; then they are put in `order`, places again, None where they are
    in order.
    """

    worlds: int = 0
    pick: Ranges | None = None
    add: int = 0
    order: Ranges | None = None

    @property
    def is_nothing(self) -> bool:
        """True if the stack is taken as it is."""
        return self.pick is None and not self.add and self.order is None


AS_IT_IS = Alignment()


@dataclass(frozen=True, slots=True)
class Read:
    """One input of a step: the last `rows` positions of it, None for all.

    With `stacked` it is made of the input's stack, which has the last `have` positions, None for all; else it
    is the baseline's value, for as many worlds as the step has.
    """

    node: str
    rows: int | None = None
    stacked: bool = False
    have: int | None = None
    align: Alignment = AS_IT_IS


@dataclass(frozen=True, slots=True)
class Put:
    """Write what worlds put into a node, by the fill tables of the node.

    `fresh` worlds begin with the baseline's value. `again` are worlds whose value was computed; they stand at
    `places` of the stack. Both together are put in `order`. The last `rows` positions are kept, None for all.
    """

    node: str
    fresh: Ranges = ()
    again: Ranges = ()
    places: Ranges = ()
    order: Ranges | None = None
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Compute `node` in `worlds`, then `put`, then drop what nothing reads any more.

    Only the last `rows` positions are computed, None for all. `inside` are nodes that the same kernel
    computes on the way. `align` is for a part of several values: it is aligned after it was taken out.
    `kernel` says which of several ways to compute it is meant. A step without worlds only puts.
    """

    node: str
    worlds: Ranges = ()
    rows: int | None = None
    reads: tuple[Read, ...] = ()
    inside: tuple[str, ...] = ()
    align: Alignment = AS_IT_IS
    kernel: str = ""
    put: Put | None = None
    drop: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """In how many worlds the node is computed."""
        return count_of(self.worlds)


@dataclass(frozen=True, slots=True)
class PassProgram:
    """Steps in order, then the `targets`, aligned to all `worlds`.

    `rises` says for each step how many bytes are taken while it runs, beyond what was held before it,
    `reading` the same of the end, when targets are aligned and metrics read; `peak` is the most that is held.
    """

    worlds: int
    steps: tuple[Step, ...]
    targets: tuple[Read, ...]
    rises: tuple[int, ...] = ()
    reading: int = 0
    peak: int = 0
    flops: int = 0

    @property
    def node_evaluations(self) -> int:
        """A node counts once for each world, those inside of a fused chain too."""
        return sum(step.count * (1 + len(step.inside)) for step in self.steps)

    @property
    def launches(self) -> int:
        """The number of operations that it launches, fills not counted."""
        return sum(1 for step in self.steps if step.worlds)


# ------------------------------------------------------------------------------------------
# Builds the pass over some worlds: the order of steps, what is stacked, aligned, dropped, and when.
#
# Everything that depends on who changed what is decided here, once. Memory is read off the pass, and an
# executor obeys it.


def build_pass(
    schedule: Schedule,
    inputs: Callable[[str], Sequence[str]],
    regions: Regions,
    *,
    fused: Mapping[str, Fusion] = MappingProxyType({}),
    several: Callable[[str], bool] = lambda _: False,
    kernel: Callable[[str, int | None, int], str] = lambda *_: "",
) -> PassProgram:
    """The pass over all worlds of `schedule`.

    `inputs` says what a node reads. `fused` are the kernels that compute several nodes, by the last of each;
    the schedule's own steps for what is inside are left out. `several` says of a node that its value is
    several tensors, and `kernel` which of several ways to compute it is meant, with so many positions and
    worlds.
    """
    inside = {node for fusion in fused.values() for node in fusion.inside}
    steps = [(node, worlds) for node, worlds in schedule.steps if node not in inside]
    reads = {node: tuple(fused[node].inputs if node in fused else inputs(node)) for node, _ in steps}
    drops = dropped_after(reads.items(), lambda name: name not in schedule.targets)
    builder = _Builder(dict(schedule.patched), regions, several)
    for node, worlds in steps:
        own = reads[node]
        for name in own:
            builder.fill(name)
        rows = regions.of(node)
        made = tuple([builder.read(name, worlds, regions.wanted(node, name)) for name in own])
        taken_from = next((name for name in own if several(name) and name in builder.stacks), None)
        align = AS_IT_IS
        if taken_from is not None and not several(node):
            align = alignment(builder.stacks[taken_from], worlds)
        put = builder.computed(node, worlds)
        dropped = tuple([name for name in drops.get(node, ()) if builder.stacks.pop(name, 0)])
        within = tuple(sorted(fused[node].inside)) if node in fused else ()
        how = kernel(node, rows, worlds.bit_count())
        builder.steps.append(Step(node, ranges_of(worlds), rows, made, within, align, how, put, dropped))
    for target in schedule.targets:
        builder.fill(target)
    everything = (1 << schedule.worlds) - 1
    targets = tuple(
        builder.read(name, everything, regions.tail if name in regions.last else None)
        for name in schedule.targets
    )
    return PassProgram(schedule.worlds, tuple(builder.steps), targets)


def fused_pass(
    graph: Graph,
    facts: ShapeFacts,
    schedule: Schedule,
    regions: Regions,
    kernel: Callable[[str, int | None, int], str],
) -> PassProgram:
    """Return the pass over all worlds of `schedule`, with fused kernels where nothing looks inside."""
    records, consumers = facts.records, graph.table.consumers
    fused = fitting(
        facts.fusions,
        {node: (worlds, regions.of(node)) for node, worlds in schedule.steps},
        {*schedule.patched, *schedule.targets},
        lambda node: map(graph.name, consumers[graph.number(node)]),
    )
    several = facts.program.several.__contains__
    return build_pass(
        schedule, lambda node: records[node].inputs, regions, fused=fused, several=several, kernel=kernel
    )


class _Builder:
    """State while a pass is built: the worlds of each stack, and the patches still to come."""

    def __init__(self, waiting: dict[str, int], regions: Regions, several: Callable[[str], bool]) -> None:
        self.steps: list[Step] = []
        self.stacks: dict[str, int] = {}
        self._waiting, self._regions, self._several = waiting, regions, several

    def fill(self, node: str) -> None:
        """A step of its own for a node that is patched, and that no world computes."""
        if node in self._waiting and node not in self.stacks:
            worlds = self._waiting.pop(node)
            self.stacks[node] = worlds
            self.steps.append(Step(node, put=Put(node, ranges_of(worlds), rows=self._regions.of(node))))

    def computed(self, node: str, worlds: int) -> Put | None:
        """Return what is put into a node after it was computed in `worlds`."""
        patched = self._waiting.pop(node, 0)
        self.stacks[node] = worlds | patched
        if not patched:
            return None
        again, fresh = patched & worlds, patched & ~worlds
        places = places_in(again, worlds)
        order = merged_order(worlds, fresh)
        return Put(node, ranges_of(fresh), ranges_of(again), places, order, self._regions.of(node))

    def read(self, name: str, worlds: int, rows: int | None) -> Read:
        """Return how a step that is computed in `worlds` reads the last `rows` positions of a node."""
        if name == SIZES:
            return Read(name)
        have = self.stacks.get(name, 0)
        if self._several(name) and have:
            return Read(name, rows, True, self._regions.of(name))
        if not have & worlds:
            return Read(name, rows)
        return Read(name, rows, True, self._regions.of(name), alignment(have, worlds))


def alignment(have: int, want: int) -> Alignment:
    """Return how a stack of the worlds `have` becomes one of the worlds `want`: masks, some of both."""
    if have == want:
        return AS_IT_IS
    shared = have & want
    pick: Ranges | None = None if shared == have else places_in(shared, have)
    missing = want & ~have
    if not missing:
        return AS_IT_IS if pick is None else Alignment(have.bit_count(), pick)
    return Alignment(have.bit_count(), pick, missing.bit_count(), merged_order(shared, missing))


# ------------------------------------------------------------------------------------------
# The pass that computes base and source themselves: two worlds, each with inputs of its own.
#
# It is built by the same walker as every other pass. It keeps what the passes of a compiled sweep read of the
# base, and what they take from the source.

PASSES = 16
"""The number of these passes that are kept with a program."""

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
        kept[key] = _built_baseline(graph, facts, targets, masks, worlds)
        while len(kept) > PASSES:
            kept.popitem(last=False)
    return kept[key]


def _built_baseline(
    graph: Graph, facts: ShapeFacts, targets: tuple[str, ...], masks: Masks, worlds: int
) -> PassProgram:
    records, inputs = facts.records, [leaf.name for leaf in facts.program.inputs]
    put = dict.fromkeys(inputs, (1 << worlds) - 1)
    plan = schedule(graph, put, put, worlds, targets)
    program = fused_pass(
        graph,
        facts,
        plan,
        WHOLE,
        lambda node, rows, _: attention_kernel(records[node], rows, facts.layout, masks),
    )
    given = [replace(step, put=None) if step.node in put else step for step in program.steps]
    return replace(program, steps=tuple(given), rises=(0,) * len(given))


def weights_of(program: PassProgram, streamed: Reads, columns: Collection[str] = ()) -> list[tuple[int, ...]]:
    """The streamed weights that each step of a pass reads; of a narrowed product it is rows, looked up."""
    return [
        streamed.at(step.node, [one.node for one in step.reads if not one.stacked])
        if step.worlds and step.node not in columns
        else ()
        for step in program.steps
    ]


def merged_weights(
    program: Program, own: PassProgram, weights: Sequence[tuple[int, ...]], along: PassProgram
) -> list[tuple[int, ...]]:
    """The same of two passes that are computed side by side, node for node, `along` first."""
    order, streamed = program.order, reads_of(program)
    places = itertools.accumulate((order.get(step.node, -1) for step in own.steps), max)
    steps = list(zip(places, itertools.repeat(1), weights, strict=False))
    first = zip(along.steps, weights_of(along, streamed), strict=True)
    steps += [(order.get(step.node, -1), 0, numbers) for step, numbers in first]
    return [numbers for _, _, numbers in sorted(steps, key=lambda one: one[:2])]


def can_stack(facts: ShapeFacts, program: PassProgram) -> bool:
    """True if all inputs, and all that is kept, have rows along which several runs can be stacked."""
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
