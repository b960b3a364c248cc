"""What attribution takes: passes, nodes, FLOPs and memory, by the program alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from conewise.attributing.edge_scores import lines
from conewise.attributing.edge_table import EdgeTable
from conewise.attributing.methods import Cells, Method
from conewise.attributing.star_scores import StarCells
from conewise.attributing.work import flops_backward, flops_forward, narrowest
from conewise.program.tensors import Tensor
from conewise.runs.captured import Captured
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
    """What some passes take; `peak_bytes` is an upper estimate of what is held at a time."""

    forwards: int = 0
    backwards: int = 0
    node_evaluations: int = 0
    flops: int = 0
    peak_bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.forwards + other.forwards,
            self.backwards + other.backwards,
            self.node_evaluations + other.node_evaluations,
            self.flops + other.flops,
            max(self.peak_bytes, other.peak_bytes),
        )


def counts_of(
    method: Method,
    cells: Cells,
    spec: SweepSpec,
    inputs: Mapping[str, Tensor],
    steps: int,
    *,
    has_source: bool,
) -> Counts:
    """What one batch takes; of `inputs` the shapes alone are looked at."""
    model = cells.model
    facts = facts_of(model)
    shape, targets = facts.shape(inputs), facts.targets(spec.metrics)
    sizes = dict(model.estimated_bytes(inputs))
    narrow = narrowest(model, spec, shape)
    if narrow is not None:
        sizes.pop(narrow.target, None)
    held = _held(model, method, cells, sizes, has_source=has_source)
    total, known = Counts(), dict[Pass, Counts]()
    for one in _passes(method, cells, len(spec.metrics), steps):
        if one not in known:
            behind = [name for name in model.behind(one.nodes, targets) if name not in one.given]
            flops = flops_forward(shape, behind) + one.backwards * flops_backward(shape, behind)
            recorded = [sizes.get(name, 0) for name in behind]
            gradients = sum(sizes.get(name, 0) for name in one.nodes) + 2 * max(recorded, default=0)
            known[one] = Counts(
                1,
                one.backwards,
                (1 + one.backwards) * len(behind) + one.beside,
                flops,
                held + sum(recorded) + gradients,
            )
        total += known[one]
    return total


def _held(
    model: Captured, method: Method, cells: Cells, sizes: Mapping[str, int], *, has_source: bool
) -> int:
    """The bytes of runs that were given as inputs, and of what patches are made of."""

    def taken(names: Collection[str]) -> int:
        return sum(sizes.get(name, 0) for name in names)

    reads = taken(cells.reads)
    held = reads if method.is_one_pass else taken([record.name for record in model.program.records])
    held += reads if has_source else 0
    if isinstance(cells, EdgeTable):
        entries = {entry: sizes.get(entry, 0) for entry in cells.facts}
        widest = max(entries.values(), default=0)
        writers = max((cells.writers(entry) for entry in entries), default=0)
        heads = max(sum(one.heads for one in slots) for slots in cells.by_entry.values())
        return held + widest * (3 * writers + 5 * heads)
    return held + reads  # the changes


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
