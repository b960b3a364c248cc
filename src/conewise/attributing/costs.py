"""What attribution takes: passes, nodes and FLOPs, by the program alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from conewise.attributing.edge_scores import lines
from conewise.attributing.edge_table import EdgeTable
from conewise.attributing.methods import Cells, Method
from conewise.attributing.star_scores import StarCells
from conewise.attributing.work import flops_backward, flops_forward
from conewise.program.tensors import Tensor
from conewise.sweeps.planning.model_facts import facts_of
from conewise.sweeps.planning.spec import SweepSpec


@dataclass(frozen=True, slots=True)
class Pass:
    """A recorded forward, from `nodes` on with `given` ones replaced, and the backward passes through it.

    `beside` are nodes that are computed beside passes.
    """

    nodes: tuple[str, ...]
    backwards: int
    given: tuple[str, ...] = ()
    beside: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """What some passes take."""

    forwards: int = 0
    backwards: int = 0
    node_evaluations: int = 0
    flops: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.forwards + other.forwards,
            self.backwards + other.backwards,
            self.node_evaluations + other.node_evaluations,
            self.flops + other.flops,
        )


def counts_of(
    method: Method, cells: Cells, spec: SweepSpec, inputs: Mapping[str, Tensor], steps: int
) -> Counts:
    """What one batch takes but for memory; of `inputs` the shapes alone are looked at."""
    model = cells.model
    facts = facts_of(model)
    shape, targets = facts.shape(inputs), facts.targets(spec.metrics)
    total, known = Counts(), dict[Pass, Counts]()
    for one in _passes(method, cells, len(spec.metrics), steps):
        if one not in known:
            behind = [name for name in model.behind(one.nodes, targets) if name not in one.given]
            flops = flops_forward(shape, behind) + one.backwards * flops_backward(shape, behind)
            evaluations = (1 + one.backwards) * len(behind) + one.beside
            known[one] = Counts(1, one.backwards, evaluations, flops)
        total += known[one]
    return total


def _passes(method: Method, cells: Cells, metrics: int, steps: int) -> Iterator[Pass]:
    """Every recorded pass."""
    if isinstance(cells, EdgeTable):
        yield from _edge_passes(method, cells, metrics, steps)
    elif method.name == "atp*":
        star = StarCells(cells.model, cells.cells)
        beside = sum(map(star.computed_for, star.softmaxed))
        yield Pass(star.nodes, metrics * (1 + len(star.layers)), beside=beside)
    elif method.name == "ig":
        for found in cells.sites.values():
            for _ in range(steps):
                yield Pass((found.node,), metrics, (found.node,))
    else:
        yield Pass(cells.nodes, metrics)


def _edge_passes(method: Method, table: EdgeTable, metrics: int, steps: int) -> Iterator[Pass]:
    def one(given: tuple[str, ...] = (), of: range | None = None) -> Pass:
        entries = [entry for entry in table.facts if of is None or of.start < table.writers(entry)]
        others = [slot for slot in table.others if slot.entry in entries]
        beside = sum(
            2 * slot.heads * table.facts[slot.entry].readers.count(slot.entry, (slot.slot,))
            for slot in others
        )
        nodes = (*given, *entries, *(slot.node for slot in others))
        return Pass(nodes, metrics, given, metrics * beside)

    yield one()
    if method.name == "eap-ig":
        line = lines(table, method.name)[0]
        for _ in range(1, steps):
            yield one((line.node,))
    elif method.name == "eap-ig-activations":
        for line in lines(table, method.name):
            for _ in range(1, steps):
                yield one((line.node,), line.writers)
