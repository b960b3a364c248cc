"""Builds the pass over some worlds: the order of steps, what is stacked, aligned, dropped, and when.

Everything that depends on who changed what is decided here, once. Memory is read off the pass, and an
executor obeys it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from conewise.program.records import SIZES
from conewise.sweeps.planning.passes.instructions import AS_IT_IS, Alignment, PassProgram, Put, Read, Step
from conewise.sweeps.planning.passes.schedule import Schedule
from conewise.sweeps.planning.passes.worlds import Ranges, merged_order, places_in, ranges_of
from conewise.sweeps.planning.shapes.regions import Regions


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of nodes that one kernel computes from `inputs`; `inside` are all but the last."""

    inputs: tuple[str, ...]
    inside: tuple[str, ...]


def build_pass(
    schedule: Schedule,
    inputs: Callable[[str], Sequence[str]],
    regions: Regions,
    *,
    chains: Mapping[str, Chain] | None = None,
    several: Callable[[str], bool] = lambda _: False,
    kernel: Callable[[str, int | None, int], str] = lambda *_: "",
) -> PassProgram:
    """The pass over all worlds of `schedule`.

    `inputs` says what a node reads. `chains` are nodes that a fused kernel computes, with what is inside of
    each; the schedule's own steps for these are left out. `several` says of a node that its value is several
    tensors, and `kernel` which of several ways to compute it is meant, with so many positions and worlds.
    """
    chains = chains or {}
    inside = {node for chain in chains.values() for node in chain.inside}
    steps = [(node, worlds) for node, worlds in schedule.steps if node not in inside]
    reads = {node: tuple(chains[node].inputs if node in chains else inputs(node)) for node, _ in steps}
    drops = _drops(steps, reads, schedule.targets)
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
        chain = chains[node].inside if node in chains else ()
        builder.steps.append(
            Step(
                node,
                ranges_of(worlds),
                rows,
                made,
                chain,
                align,
                kernel(node, rows, worlds.bit_count()),
                put,
                dropped,
            )
        )
    for target in schedule.targets:
        builder.fill(target)
    everything = (1 << schedule.worlds) - 1
    targets = tuple(builder.read(name, everything, regions.wanted_of(name)) for name in schedule.targets)
    return PassProgram(schedule.worlds, tuple(builder.steps), targets)


class _Builder:
    """What stands where while a pass is built: the worlds of each stack, and the patches still to come."""

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
        """What is put into a node after it was computed in `worlds`."""
        patched = self._waiting.pop(node, 0)
        self.stacks[node] = worlds | patched
        if not patched:
            return None
        again, fresh = patched & worlds, patched & ~worlds
        places = places_in(again, worlds)
        order = merged_order(worlds, fresh)
        return Put(node, ranges_of(fresh), ranges_of(again), places, order, self._regions.of(node))

    def read(self, name: str, worlds: int, rows: int | None) -> Read:
        """How a step that is computed in `worlds` reads a node: its last `rows` positions."""
        if name == SIZES:
            return Read(name)
        have = self.stacks.get(name, 0)
        if self._several(name) and have:
            return Read(name, rows, True, self._regions.of(name))
        if not have & worlds:
            return Read(name, rows)
        return Read(name, rows, True, self._regions.of(name), alignment(have, worlds))


def alignment(have: int, want: int) -> Alignment:
    """How a stack of the worlds `have` becomes one of the worlds `want`: masks, some of both."""
    if have == want:
        return AS_IT_IS
    shared = have & want
    pick: Ranges | None = None if shared == have else places_in(shared, have)
    missing = want & ~have
    if not missing:
        return AS_IT_IS if pick is None else Alignment(have.bit_count(), pick)
    return Alignment(have.bit_count(), pick, missing.bit_count(), merged_order(shared, missing))


def _drops(
    steps: Sequence[tuple[str, int]], reads: Mapping[str, Sequence[str]], targets: Sequence[str]
) -> dict[str, list[str]]:
    """For each step, what it is the last to read; targets are kept to the end."""
    last: dict[str, str] = {}
    for node, _ in steps:
        for name in reads[node]:
            last[name] = node
    drops: dict[str, list[str]] = {}
    for name, reader in last.items():
        if name not in targets:
            drops.setdefault(reader, []).append(name)
    return drops
