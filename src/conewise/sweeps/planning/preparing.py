"""What holds for baselines of one shape: the schedule, the rows, whether worlds can be stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from conewise.errors import SweepError
from conewise.program.tensors import computing
from conewise.sweeps.planning.arrangement import LAUNCH_FLOPS, Arrangement, Beginnings, arranged, depths
from conewise.sweeps.planning.costs import Costs
from conewise.sweeps.planning.filled import FillSizes
from conewise.sweeps.planning.mixing import Trial
from conewise.sweeps.planning.passes import Prepared, reader
from conewise.sweeps.planning.regions import WHOLE, RegionFinder, Regions
from conewise.sweeps.planning.schedule import Schedule, schedule
from conewise.sweeps.planning.stacking import Layout
from conewise.sweeps.planning.workspace import Workspace

if TYPE_CHECKING:
    from conewise.locations.selectors import Cell
    from conewise.runs.run import Edit, Reading
    from conewise.sweeps.sweep import Batch, Sweep


class Preparation:
    """Prepares one sweep: all of its plan that does not depend on a budget of memory."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self._graph = sweep.model.graph
        self._prepared: dict[tuple[Any, ...], Prepared] = {}
        self._cones: dict[frozenset[int], frozenset[int]] = {}
        self._layouts: dict[tuple[Any, ...], Layout] = {}
        self._arrangement: Arrangement | None = None
        self._starts: tuple[Batch | None, tuple[int, ...]] = None, ()

    # -- the shape of it -----------------------------------------------------------------------

    @property
    def arrangement(self) -> Arrangement:
        """The order of the worlds; the first batch determines it."""
        if self._arrangement is None:
            self._arrangement = self._arranged(self.sweep._batch(0))
        return self._arrangement

    def prepare(self, batch: Batch) -> Prepared:
        """All that depends on the shape of the baseline alone."""
        base = batch.base
        given = {name: tuple(value.shape) for name, value in base.inputs.items()}
        standing = base.edits
        key = (*given.items(), *((str(edit.place), edit.covers) for edit in standing))
        if key not in self._prepared:
            if self._arrangement is None:
                self._arrangement = self._arranged(batch)
            layout, targets = self._layout(base), self.sweep.targets()
            plan = self._schedule(self._arrangement.order, standing)
            self._expect_effect(plan)
            name, steps = self._graph.name, dict(plan.steps)
            again = {name(node) for node, patched in plan.patched.items() if steps.get(node, 0) & patched}
            finder = RegionFinder(layout)
            has_last = self.sweep.facts.read.has_last
            reads_last = all(m.last and has_last(self.sweep._target(m)) for m in self.sweep.metrics)
            last = finder.last(targets, again) if reads_last else frozenset()
            columns = self._columns(plan, layout)
            program = self.sweep.model.program
            costs, order = Costs(program, layout, columns), self._arrangement.order
            whole = Costs(program, layout)
            self._prepared[key] = Prepared(
                layout,
                plan,
                costs,
                whole,
                last,
                columns,
                self._obstacle(base, layout, plan),
                finder,
                FillSizes(self.sweep, layout, costs, order, from_run=batch.source is not None),
                Workspace(layout, costs, self.sweep.facts.device),
                self._full(whole),
            )
        return self._prepared[key]

    def _full(self, whole: Costs) -> tuple[int, int]:
        """The nodes that a full run computes, and its FLOPs: a walk of the graph, so not one for each run."""
        rules, support = self._graph.table.rules, self.sweep.model.support(self.sweep.targets())
        computed = [node for node in support if rules[node] is not None]
        return len(computed), sum(whole.flops(self._graph.name(node)) for node in computed)

    def starts(self, prepared: Prepared, batch: Batch) -> tuple[int, ...]:
        """For each world, the first position that it changes."""
        if prepared.obstacle:
            return (0,) * len(self.sweep.cells)
        known, starts = self._starts
        if known is None or not (batch.is_lasting and batch.is_same(known)):
            begins = Beginnings(self.sweep, prepared.layout, prepared.finder).of(batch)
            starts = tuple(begins[cell] for cell in self.arrangement.order)
            if batch.is_lasting:
                self._starts = batch, starts
        return starts

    def regions(self, prepared: Prepared, start: int, base: Reading) -> Regions:
        """Which positions of which nodes are computed in worlds that change nothing before `start`."""
        if start not in prepared.regions or prepared.finder.masks_vary:
            found = self._regions(prepared.finder, prepared.schedule, start, base)
            prepared.regions[start] = found.ending(prepared.last)
        return prepared.regions[start]

    def _regions(self, finder: RegionFinder, plan: Schedule, start: int, base: Reading) -> Regions:
        if not start:
            return WHOLE
        name = self._graph.name
        computed, patched = {name(node) for node, _ in plan.steps}, {name(node) for node in plan.patched}
        with computing():
            return finder.changed(start, patched, computed, reader(base))

    def reached(self, cell: Cell, standing: Sequence[Edit]) -> list[Edit]:
        """Those of the base's own edits that lie downstream of the cell: its world makes them again."""
        if not standing:
            return []
        sites = frozenset(self._graph.number(self.sweep.model.locate(place).node) for place in cell.places)
        if sites not in self._cones:
            self._cones[sites] = frozenset(self._graph.table.cone(sites))
        return [edit for edit in standing if self._graph.number(edit.node) in self._cones[sites]]

    # -- worlds --------------------------------------------------------------------------------

    def _layout(self, base: Reading) -> Layout:
        program = self.sweep.model.program
        shapes = {leaf.name: leaf.shape for leaf in program.inputs}
        given = {name: tuple(value.shape) for name, value in base.inputs.items()}
        key = tuple(given.items())
        if key not in self._layouts:
            self._layouts[key] = Layout(program, program.sizes.symbols_of(shapes, given))
        return self._layouts[key]

    def _schedule(self, order: Sequence[int], standing: Sequence[Edit]) -> Schedule:
        worlds = [self._patches(self.sweep.cells[number], standing) for number in order]
        return schedule(self._graph, worlds, self._graph.numbers(self.sweep.targets()))

    def _arranged(self, batch: Batch) -> Arrangement:
        sweep, base = self.sweep, batch.base
        order, layout = depths(sweep), self._layout(base)
        finder = RegionFinder(layout)
        starts = Beginnings(sweep, layout, finder).of(batch)
        if len(set(starts)) == 1:
            return Arrangement(tuple(order), (len(order),))
        plan = self._schedule(order, base.edits)
        costs, name = Costs(sweep.model.program, layout), self._graph.name
        whole = sum(costs.flops(name(node)) * worlds.bit_count() for node, worlds in plan.steps)

        def work() -> list[int]:
            """Worlds that patch the same nodes compute the same."""
            known: dict[frozenset[str], int] = {}
            amounts = [0] * len(order)
            for world, cell in enumerate(order):
                nodes = frozenset(sweep.model.locate(place).node for place in sweep.cells[cell].places)
                if nodes not in known:
                    known[nodes] = sum(
                        costs.flops(name(node)) for node, worlds in plan.steps if worlds >> world & 1
                    )
                amounts[cell] = known[nodes]
            return amounts

        def share(start: int) -> float:
            regions = self._regions(finder, plan, start, base)
            left = sum(
                costs.flops(name(node), rows=regions.of(name(node))) * worlds.bit_count()
                for node, worlds in plan.steps
            )
            return left / whole if whole else 1.0

        overhead = LAUNCH_FLOPS.get(sweep.facts.device.type, LAUNCH_FLOPS["cuda"]) * plan.launches
        return arranged(order, starts, work, share, overhead)

    def _patches(self, cell: Cell, standing: Sequence[Edit]) -> dict[int, bool]:
        """The nodes that a world patches, and whether whole: the cell's, and what it must patch again."""
        patches: dict[int, bool] = {}
        for place in cell.places:
            found = self.sweep.model.locate(place)
            if found.result is not None:
                raise SweepError(
                    f"{place} is computed from z and is no node of the graph: it cannot be swept. Sweep z: "
                    "patching a head's z patches its result."
                )
            number = self._graph.number(found.node)
            patches[number] = patches.get(number, False) or not (found.part or self.sweep.is_function)
        for edit in self.reached(cell, standing):
            number = self._graph.number(edit.node)
            patches[number] = patches.get(number, False) or edit.covers
        return patches

    def _expect_effect(self, plan: Schedule) -> None:
        reached = 0
        for _, worlds in plan.steps:
            reached |= worlds
        for target in plan.targets:
            reached |= plan.patched.get(target, 0)
        order, cells = self.arrangement.order, self.sweep.cells
        idle = [cells[order[world]] for world in range(plan.worlds) if not reached >> world & 1]
        if idle:
            raise SweepError(
                f"the metric does not depend on {len(idle)} of {plan.worlds} cells, {idle[0].name} for one. "
                "Leave them out, or choose a metric that reads more of the outputs."
            )

    def _columns(self, plan: Schedule, layout: Layout) -> dict[str, tuple[int, ...]]:
        """The columns of the unembedding that the metrics read, where they read few and it is a product."""
        metrics, targets = self.sweep.metrics, self.sweep.targets()
        tokens = sorted({token for metric in metrics for token in metric.tokens})
        if len(targets) != 1 or any(metric.among is None for metric in metrics):
            return {}
        number, record = self._graph.number(targets[0]), self.sweep.facts.records.get(targets[0])
        is_product = (
            record is not None
            and record.op == "linear"
            and len(record.inputs) == len(record.args)
            and layout.varying.isdisjoint(record.inputs[1:])
        )
        if not is_product or number in plan.patched or number not in dict(plan.steps):
            return {}
        if not self.sweep.facts.read.ends_in_tokens(targets[0]):
            return {}
        return {targets[0]: tuple(tokens)}

    def _obstacle(self, base: Reading, layout: Layout, plan: Schedule) -> str:
        """Why the worlds cannot be stacked, or nothing."""
        model, facts = self.sweep.model, self.sweep.facts
        if any(edit.found.result is not None for edit in base.edits):
            return "the base patches `result`, which is no node of the graph"
        if model.batch_is_fixed:
            known = model.program.dimensions
            is_open = known.doubt or known.is_unbatched
            return model.batch_is_fixed if is_open else "the batch size is fixed in this capture"
        name = self._graph.name
        for node in plan.patched:
            if layout.batch_dim.get(name(node)) is None:
                return f"{name(node)!r} is patched and has no batch along which worlds could be stacked"
        trial, shape = Trial(layout, reader(base)), tuple(layout.symbols.values())
        with computing():
            for node, _ in plan.steps:
                key = name(node), shape
                apart = facts.keeps_apart.get(key)
                if apart is None:
                    apart = facts.keeps_apart[key] = trial.keeps_rows_apart(name(node))
                if not apart:
                    return f"{name(node)!r} mixes the rows of the batch"
        return ""
