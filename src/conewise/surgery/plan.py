"""What a surgery costs, before anything runs: what each step makes invalid, and what is computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from itertools import pairwise

import torch

from conewise.errors import SurgeryError
from conewise.paper.theory.grafts import GraftAt, OrderExtremes, order_extremes
from conewise.program.records import Program, Record
from conewise.program.walk import build_graph, compile_rule, output_names, run_sources
from conewise.reactive.world import World
from conewise.runs.captured import Captured, Made
from conewise.runs.splicing import SpliceStep
from conewise.surgery.steps import Step
from conewise.templates import columns, heading, table


@dataclass(frozen=True, slots=True)
class Difference:
    """What has to be computed on the way from one program to another, as sets of records.

    `fresh` are new, `changed` are computed by another rule, or of other values, `below` depend on either;
    `gone` are needed no more.
    """

    fresh: frozenset[str]
    changed: frozenset[str]
    below: frozenset[str]
    gone: frozenset[str]

    @property
    def recomputed(self) -> int:
        """The evaluations of one demand of the outputs."""
        return len(self.fresh) + len(self.changed) + len(self.below)


def difference(before: Program, after: Program) -> Difference:
    """Tell two programs apart."""
    old, new = before.record_of, after.record_of
    weights = {
        name
        for name, value in after.source_values.items()
        if name in before.source_values and before.source_values[name] is not value
    }
    fresh = frozenset(new.keys() - old.keys())
    changed = frozenset(
        name
        for name, record in new.items()
        if name in old and (not _is_same(record, old[name]) or not weights.isdisjoint(record.inputs))
    )
    moved = set(fresh | changed)
    for record in after.records:
        if not moved.isdisjoint(record.inputs):
            moved.add(record.name)
    return Difference(fresh, changed, frozenset(moved) - fresh - changed, frozenset(old.keys() - new.keys()))


def _is_same(one: Record, other: Record) -> bool:
    return one is other or (one.target, one.args, one.kwargs) == (other.target, other.args, other.kwargs)


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of one step: in its turn (`recomputed`), and on a model of its own (`isolated`).

    `fresh` records are new, `invalid` records lose their value, `removed` records are no longer needed. All
    counts are evaluations of records by one demand of the outputs after the step.
    """

    step: str
    fresh: int
    invalid: int
    removed: int
    recomputed: int
    isolated: int


@dataclass(frozen=True, slots=True)
class SurgeryPlan:
    """The costs of a surgery, with a demand of the outputs after each step, or one demand after all.

    `interleaved` is the sum over the steps in their order, `isolated` the sum over separate copies of the
    model, and `overcount` the excess of the first over the second. `batched` is one demand after all steps,
    in any order. `orders` are the extremes over all orders of the steps that are grafts, `grafts`, by their
    numbers; None if two of them are at one place. `operations` counts the records before and after.
    """

    steps: tuple[StepCost, ...]
    batched: int
    operations: tuple[int, int]
    grafts: tuple[int, ...]
    orders: OrderExtremes | None

    @property
    def interleaved(self) -> int:
        """The cost of the steps in their order, with a demand after each."""
        return sum(step.recomputed for step in self.steps)

    @property
    def isolated(self) -> int:
        """The cost of the steps, each on its own copy of the model."""
        return sum(step.isolated for step in self.steps)

    @property
    def overcount(self) -> int:
        """The excess cost of the order; negative if a step removes records that later steps would compute."""
        return self.interleaved - self.isolated

    def order(self, which: str) -> tuple[int, ...]:
        """The numbers of the steps that are grafts in their "best" or their "worst" order."""
        if self.orders is None:
            raise SurgeryError(
                "the order of grafts at one place is what they compute: it is no matter of cost."
            )
        found = self.orders.best if which == "best" else self.orders.worst
        return tuple(self.grafts[one] for one in found)

    def _rows(self) -> list[tuple[str, ...]]:
        return [(str(number), *map(str, astuple(one))) for number, one in enumerate(self.steps)]

    def _words(self) -> str:
        words = (
            f"interleaved {self.interleaved:,} evaluations, isolated {self.isolated:,}, batched "
            f"{self.batched:,}; {self.operations[0]:,} operations become {self.operations[1]:,}"
        )
        if self.orders is not None and len(self.grafts) > 1:
            words += (
                f"\n  grafts: an order costs {self.orders.least} to {self.orders.most} beyond isolated; best "
                f"{list(self.order('best'))}, worst {list(self.order('worst'))}"
            )
        return words

    def __str__(self) -> str:
        return "\n".join([*columns([_COLUMNS, *self._rows()], (0, *range(2, 7))), self._words()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return heading("Plan of a surgery", self._words()) + table(
            self._rows(), _COLUMNS, numbers=range(2, 7)
        )


_COLUMNS = ("", "step", "fresh", "invalid", "removed", "recomputed", "isolated")


def plan(
    model: Captured,
    steps: Sequence[Step | SpliceStep],
    telling: Callable[[int], AbstractContextManager[None]],
) -> SurgeryPlan:
    """The costs of steps on a model; see `Surgery.plan`."""
    start, programs = model, [model.program]
    costs: list[StepCost] = []
    grafts: list[GraftAt] = []
    numbers: list[int] = []
    for number, whole in enumerate(steps):
        with telling(number):
            for step in whole.parts(model):
                model = step.operated(model)
                programs.append(model.program)
                found = difference(*programs[-2:])
                alone = _alone(step, start)
                isolated = found if alone is None else difference(start.program, alone.program)
                if alone is not None and alone.at is not None:
                    grafts.append(GraftAt(alone.at, len(isolated.fresh)))
                    numbers.append(len(costs))
                counts = len(found.fresh), len(found.changed) + len(found.below), len(found.gone)
                costs.append(StepCost(str(step), *counts, found.recomputed, isolated.recomputed))
    are_apart = len({graft.at for graft in grafts}) == len(grafts)
    return SurgeryPlan(
        tuple(costs),
        difference(programs[0], programs[-1]).recomputed,
        (len(programs[0].records), len(programs[-1].records)),
        tuple(numbers),
        order_extremes(start.graph, grafts) if are_apart else None,
    )


def _alone(step: Step | SpliceStep, start: Captured) -> Made | None:
    """The step on the model as it was; None where it needs an earlier one."""
    if not isinstance(step, Step):
        return None
    try:
        return step.on(start)
    except SurgeryError:
        return None


def operate(world: World, before: Program, after: Program) -> None:
    """Do to the graph of a world what was done to its program: what changes is invalid there."""
    graph, held = world.graph, before.source_values
    for source in after.sources:
        if source.name not in graph:
            graph.source(source.name, source.value, param=source.is_parameter)
        elif held.get(source.name) is not source.value:
            world.set(source.name, source.value)
    found = difference(before, after)
    for record in after.records:
        if record.name in found.fresh:
            graph.node(record.name, compile_rule(record), record.inputs)
        elif record.name in found.changed:
            graph.redefine(record.name, compile_rule(record), record.inputs)
    graph.discard([name for name in before.record_of if name in found.gone])


@torch.no_grad()
def measured(programs: Sequence[Program], inputs: Mapping[str, torch.Tensor]) -> tuple[tuple[int, ...], int]:
    """The evaluations that a ledger counts from each program to the next, and to the last one at once.

    Nothing of the plan takes part: the graph of the first is changed while a world of it is warm.
    """
    sizes = run_sources(programs[-1], dict(inputs))  # sizes are numbered the same in all of them

    def counted(programs: Sequence[Program], *, is_batch: bool) -> tuple[int, ...]:
        world = World(build_graph(programs[0]))
        for name, value in sizes.items():
            world.set(name, value)
        world.demand(output_names(programs[0]))
        counts: list[int] = []
        for number, (before, after) in enumerate(pairwise(programs), 2):
            with world.ledger.interval() as ledger:
                operate(world, before, after)
                if not is_batch or number == len(programs):
                    world.demand(output_names(after))
            counts.append(ledger.count("recomputed"))
        return tuple(counts)

    return counted(programs, is_batch=False), sum(counted(programs, is_batch=True))
