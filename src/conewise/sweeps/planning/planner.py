"""The planner of one sweep: reads the conditions off its runs, and finds or compiles the plan for them.

Compiled sweeps are kept with the model by spec, shape and conditions, so that a new pair of prompts of the
same shape compiles nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from conewise.anatomy.placements import Outputs
from conewise.anatomy.places import EdgePlace
from conewise.circuits.replaced_parts import edge_facts
from conewise.errors import Argument, SweepError
from conewise.jobs.digests import device_and_dtype
from conewise.program.sizes import has_unbacked
from conewise.program.streaming import reads_of
from conewise.program.tensors import Tensor, computing, is_wrapper
from conewise.program.walk import Rule, output_names
from conewise.program.weights import Sums
from conewise.runs.captured import Captured
from conewise.runs.metrics import Metric, most_behind, nodes_read
from conewise.runs.reading import Reading
from conewise.runs.run import InputRun, PassRun
from conewise.runs.values import reader
from conewise.sweeps.execution.cuda_graph import GraphPool
from conewise.sweeps.planning.compiler import Compilation
from conewise.sweeps.planning.costs import SplitWeights
from conewise.sweeps.planning.fusing import find_fusions
from conewise.sweeps.planning.patching import Patching
from conewise.sweeps.planning.plan import COUNTED, SweepPlan
from conewise.sweeps.planning.shapes import ShapeFacts
from conewise.sweeps.planning.spec import Conditions, ReadOut, StoredCut, SweepSpec, read_conditions

KEPT = 64
"""The number of compiled sweeps of a model that are kept."""
EXECUTORS = 8
"""The number of executors of a model that are kept: they may hold the memory of a GPU."""

PlanKey = tuple[str, tuple[tuple[str, int], ...], Conditions]
"""The key of a compiled sweep: the spec's identity, the sizes of the inputs, the conditions."""


class ModelFacts:
    """`outputs`: the output nodes; `read`: how metrics read them.

    `device` is where the weights lie, or most of the work is done where they lie on several `devices`;
    `input_device` is where the inputs have to lie. `plans` are compiled sweeps, by all that they depend on;
    `executors` what runs them, for the weights that are there now, and `split_weights` the parts of these;
    `rules` and `graph_pool` are what executors share.
    """

    def __init__(self, model: Captured) -> None:
        self.program = program = model.program
        self.outputs = output_names(program)
        self._read: dict[str, tuple[str, ...]] = {}
        self.read = Outputs(program)
        self.device, self.dtype = device_and_dtype(program)
        self.devices = program.devices or (self.device,)
        self.input_device = program.inputs[0].device if program.inputs else self.device
        self.fusions = find_fusions(program, self.device)
        self.split_weights = SplitWeights(program)
        self.plans: OrderedDict[PlanKey, SweepPlan] = OrderedDict()
        self.patchings: OrderedDict[str, Patching] = OrderedDict()
        self.mixing: dict[Hashable, str] = {}
        self.executors: OrderedDict[Hashable, Any] = OrderedDict()
        self.rules: dict[str, Rule] = {}
        self._shapes: dict[Hashable, ShapeFacts] = {}
        self._found_with: Sums | None = None
        self._graph, self._found_in = model.graph, model.graph.changes

    def expect_weights(self, now: Sums) -> None:
        """Forget what was found out with other weights than these, or of the graph before a change."""
        if self._found_in != self._graph.changes:
            self.forget()
            self.plans.clear()
            self.patchings.clear()
            self._found_in = self._graph.changes
        if self._found_with != now:
            self.forget()
            self._found_with = now

    def forget(self) -> None:
        """Forget all that was found out with the weights that were there."""
        for shape in self._shapes.values():
            shape.forget_values()
        self.mixing.clear()
        self.executors.clear()
        self.split_weights.clear()
        self._found_with = None

    @cached_property
    def graph_pool(self) -> GraphPool:
        """The memory of the model's graphs, made when the first is recorded."""
        return GraphPool(self.device)

    def shape(self, inputs: Mapping[str, Tensor]) -> ShapeFacts:
        """The facts of runs with inputs of these shapes."""
        program = self.program
        given = {name: tuple(value.shape) for name, value in inputs.items()}
        leaves = {leaf.name: leaf.shape for leaf in program.inputs}
        symbols = program.sizes.symbols_of(leaves, given)
        key = (*symbols.items(), *((name, shape) for name, shape in given.items()))
        if key not in self._shapes:
            self._shapes[key] = ShapeFacts(program, symbols, self.device, self.fusions)
        return self._shapes[key]

    def target(self, metric: Metric) -> str:
        """The node that a metric reads."""
        return self.targets((metric,))[0]

    def targets(self, metrics: tuple[Metric, ...]) -> tuple[str, ...]:
        """The nodes that metrics read."""
        found = [self._nodes_read(metric) for metric in metrics]
        return tuple(dict.fromkeys(name for names in found for name in names))

    def _nodes_read(self, metric: Metric) -> tuple[str, ...]:
        if metric.reads:
            return nodes_read(self.program, metric)
        key = "" if metric.whole else metric.output
        if key not in self._read:
            self._read[key] = nodes_read(self.program, metric)
        return self._read[key]


def keep(known: OrderedDict[Any, Any], key: Hashable, made: Any, count: int) -> None:
    """Keep what was made, and the last few beside it."""
    known[key] = made
    while len(known) > count:
        known.popitem(last=False)


def facts_of(model: Captured) -> ModelFacts:
    """The facts about a model, found at the first call. They lie with it, so that they go when it goes."""
    facts: ModelFacts | None = vars(model).get(_FACTS)
    if facts is None:
        facts = vars(model)[_FACTS] = ModelFacts(model)
    return facts


_FACTS = "_facts_for_sweeps"


class Planner:
    """Plans what `spec` asks of a model, for any base and source."""

    def __init__(self, model: Captured, spec: SweepSpec) -> None:
        self.model, self.spec = model, spec
        self.facts = facts_of(model)

    def plan(
        self,
        base: Reading,
        source: Reading | None,
        *,
        batches: int = 1,
        max_memory: int | None = None,
        evaluator: str = "auto",
        cut: StoredCut | None = None,
    ) -> SweepPlan:
        """The plan for one batch, costs of so many like it; `cut` is how a run that is resumed was cut."""
        shape = self.facts.shape(base.inputs)
        conditions = self.conditions(base, source, shape)
        conditions = replace(conditions, max_memory=max_memory, evaluator=evaluator, cut=cut)
        found, precision = self.compiled(shape, conditions), self.spec.precision
        if found.evaluator == "serial" and precision:
            otherwise = "" if conditions.obstacle else ", or run it as a wavefront"
            raise SweepError(
                f"a serial run is a full re-run bit for bit, and {precision} rounds otherwise. Leave ",
                Argument("precision", precision),
                f" out{otherwise}.",
            )
        return replace(found, batches=batches, **{name: batches * getattr(found, name) for name in COUNTED})

    def fitted(self, plan: SweepPlan, base: Reading, source: Reading | None) -> SweepPlan | None:
        """A plan, if it is one for this spec and these runs: what it computes, and from which position on.

        One that was made for it is known; for another, read from JSON say, it is compiled with its chunks.
        What steps take of memory depends on the machine, so it is that of this one.
        """
        shape = self.facts.shape(base.inputs)
        conditions = self.conditions(base, source, shape)
        own = self.spec.identity, tuple(shape.layout.symbols.items()), conditions
        for (spec, symbols, made_for), known in self.facts.plans.items():
            of_runs = replace(made_for, max_memory=None, evaluator="auto", cut=None)
            if known.compiled is plan.compiled and own == (spec, symbols, of_runs):
                return plan
        cut = StoredCut(plan.evaluator, plan.chunks)
        compiled = self.compiled(shape, replace(conditions, evaluator=plan.evaluator, cut=cut)).compiled
        if plan.compiled is None or compiled is None or compiled.work() != plan.compiled.work():
            return None
        return plan if compiled == plan.compiled else replace(plan, compiled=compiled)

    def order(self, base: Reading, source: Reading | None) -> tuple[int, ...]:
        """The cell of each world, for runs like these."""
        shape = self.facts.shape(base.inputs)
        return self.compilation(shape, self.conditions(base, source, shape)).order.cells

    # -- what is pure ------------------------------------------------------------------------

    def compiled(self, shape: ShapeFacts, conditions: Conditions) -> SweepPlan:
        """Return the plan of one batch: the one that is kept, or a new one."""
        key = self.spec.identity, tuple(shape.layout.symbols.items()), conditions
        if key not in self.facts.plans:
            keep(self.facts.plans, key, self.compilation(shape, conditions).plan(), KEPT)
        return self.facts.plans[key]

    def compilation(self, shape: ShapeFacts, conditions: Conditions) -> Compilation:
        """Return what compiles the sweep for runs of one shape."""
        spec, patching = self.spec, self.patching
        stacks = {group.place.stack for group in patching.groups if group.writers is not None}
        writers = [len(edge_facts(self.model, one).components.writers) for one in stacks]
        read = readout(self.facts, spec, shape, ends=True)
        return Compilation(patching, shape, spec, read, conditions, max(writers, default=0))

    @property
    def patching(self) -> Patching:
        """The nodes that the cells patch; kept with the model, for runs of any shape."""
        spec, model, known = self.spec, self.model, self.facts.patchings
        if spec.identity not in known:
            targets = self.facts.targets(spec.metrics)
            made = Patching(model.graph, spec.cells, targets, model.locate, is_function=spec.is_function)
            keep(known, spec.identity, made, KEPT)
        return known[spec.identity]

    # -- what is read off the runs -----------------------------------------------------------

    def conditions(self, base: Reading, source: Reading | None, shape: ShapeFacts) -> Conditions:
        """Read off the runs what the plan depends on besides spec and shape, before anything is planned."""
        read = reader(base)
        found = read_conditions(base, source, shape, read)
        found = replace(found, tail=tail_of(self.facts, self.spec.metrics, base.inputs))
        runs = [one for one in (base, source) if one is not None]
        has_edges = any(isinstance(place, EdgePlace) for cell in self.spec.cells for place in cell)
        if reads_of(self.facts.program).stream is not None and not has_edges:
            is_along = all(isinstance(one, InputRun | PassRun) for one in runs)
            found = replace(found, along=len(runs) if is_along else 0)
        return replace(found, obstacle=self._obstacle(base, shape, found, read))

    def _obstacle(
        self, base: Reading, shape: ShapeFacts, conditions: Conditions, read: Callable[[str], Any]
    ) -> str:
        """Return why the worlds cannot be stacked; empty where they can."""
        model = self.model
        if changed := model.changed_sites:
            if any(isinstance(place, EdgePlace) for cell in self.spec.cells for place in cell):
                model.expect_program("sweep edges")
            return (
                f"the graph was changed after the capture, at {', '.join(map(repr, changed))}: its rules are "
                "called one world after another, and the cost of what changed is that of what was captured"
            )
        if any(edit.found.result is not None for edit in base.edits):
            return "the base patches `result`, which is no node of the graph"
        if model.batch_is_fixed:
            known = model.program.dimensions
            is_open = known.doubt or known.is_unbatched
            return model.batch_is_fixed if is_open else "the batch size is fixed in this capture"
        key = self.spec.identity, tuple(shape.layout.symbols.items()), conditions.edits
        if key not in self.facts.mixing:
            schedule = self.compilation(shape, conditions).schedule_of(range(len(self.spec.cells)))
            self.facts.mixing[key] = _mixing(shape, schedule.patched, [n for n, _ in schedule.steps], read)
        return self.facts.mixing[key]


def _mixing(
    shape: ShapeFacts, patched: Iterable[str], computed: Sequence[str], read: Callable[[str], Any]
) -> str:
    """Return which node keeps the rows of a batch from being independent; empty where none does."""
    for node in patched:
        if shape.layout.batch_dim.get(node) is None:
            return f"{node!r} is patched and has no batch along which worlds could be stacked"
    for node in computed:
        if any(map(has_unbacked, shape.layout.program.shapes.get(node) or ())):
            return f"the size of {node!r} depends on values, so that it differs from world to world"
    with computing():
        mixing = shape.mixing(tuple(computed), read)
    return f"{mixing!r} mixes the rows of the batch" if mixing else ""


def readout(facts: ModelFacts, spec: SweepSpec, shape: ShapeFacts, *, ends: bool = False) -> ReadOut:
    """Return what the metrics of a spec read of runs of one shape.

    With `ends`, a metric that reads some last positions of all is read off these alone: see `Metric.ending`.
    """
    of_outputs = tuple([metric for metric in spec.metrics if metric.whole or not metric.reads])
    targets, outputs = facts.targets(spec.metrics), facts.targets(of_outputs)
    columns: tuple[tuple[str, int], ...] = ()
    reads_few_tokens = all(metric.among is not None for metric in of_outputs)
    # What a site shows is read whole, also where it is an output.
    sites = {one.node for metric in spec.metrics for one in metric.found}
    is_apart = len(outputs) == 1 and sites.isdisjoint(outputs)
    if is_apart and reads_few_tokens and is_product(outputs[0], facts, shape):
        columns = ((outputs[0], len(spec.tokens)),)
    taken = tuple(
        (target, metric.last or (ends and metric.rows > 0), metric.copies)
        for metric in spec.metrics
        if not metric.whole and metric.copies
        for target in facts.targets((metric,))
    )
    every = [one for one in spec.metrics if not one.last and not (ends and one.rows)]
    whole = {target for one in every for target in facts.targets((one,))}
    whole |= {one for one in outputs if not facts.read.has_last(one)}
    whole |= {
        one.node
        for metric in spec.metrics
        for one in metric.found
        if not shape.finder.shows_positions(one.node, one.view)
    }
    return ReadOut(targets, tuple([one for one in targets if one not in whole]), columns, taken)


def tail_of(facts: ModelFacts, metrics: Sequence[Metric], inputs: Mapping[str, Tensor]) -> int:
    """Return how many of the last positions metrics read of a run, where they read no others."""
    read = (most_behind(one, facts.program, inputs, facts.target(one)) for one in metrics)
    return 1 + max(read, default=0)


def is_product(target: str, facts: ModelFacts, shape: ShapeFacts) -> bool:
    """True if an output is a product with a weight, of which a few columns can be computed alone."""
    record = shape.records.get(target)
    return (
        record is not None
        and record.op == "linear"
        and len(record.inputs) == len(record.args)
        and shape.layout.varying.isdisjoint(record.inputs[1:])
        and facts.read.ends_in_tokens(target)
        # Rows of a quantised weight are not taken out of it.
        and not is_wrapper(facts.program.source_values.get(record.inputs[1]))
    )
