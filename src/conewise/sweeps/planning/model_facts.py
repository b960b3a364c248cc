"""Facts about a model that sweeps need, found once and kept: outputs by name, shapes, compiled sweeps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from conewise.identity.digests import device_and_dtype
from conewise.program.rules import Rule
from conewise.program.streaming import output_names
from conewise.program.tensors import Tensor
from conewise.program.weights import Sums
from conewise.runs.captured import Captured
from conewise.runs.metrics import Metric, nodes_read
from conewise.structure.axes.outputs import Outputs
from conewise.sweeps.planning.plan import Compiled, Costing
from conewise.sweeps.planning.shapes.costs import SplitWeights
from conewise.sweeps.planning.shapes.fusing import find_fusions
from conewise.sweeps.planning.shapes.shape_facts import ShapeFacts
from conewise.sweeps.planning.spec import Conditions
from conewise.sweeps.planning.spec_facts import SpecFacts

KEPT = 64
"""How many compiled sweeps of a model are kept."""
EXECUTORS = 8
"""How many executors of a model are kept: they may hold the memory of a GPU."""

PlanKey = tuple[str, tuple[tuple[str, int], ...], Conditions]
"""What a compiled sweep depends on: the spec's identity, the sizes of the inputs, the conditions."""


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
        self.plans: OrderedDict[PlanKey, tuple[Compiled, Costing]] = OrderedDict()
        self.mixing: dict[Hashable, str] = {}
        self.executors: OrderedDict[Hashable, Any] = OrderedDict()
        self.rules: dict[str, Rule] = {}
        self.graph_pool: Any = None
        self._shapes: dict[Hashable, ShapeFacts] = {}
        self._asked: OrderedDict[str, SpecFacts] = OrderedDict()
        self._found_with: Sums | None = None
        self._graph, self._found_in = model.graph, model.graph.changes

    def expect_weights(self, now: Sums) -> None:
        """Forget what was found out with other weights than these, or of the graph before a change."""
        if self._found_in != self._graph.changes:
            self.forget()
            self.plans.clear()
            self._asked.clear()
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
        for metric in metrics:
            key = "" if metric.whole else metric.output
            if key not in self._read:
                self._read[key] = nodes_read(self.program, metric)
        found = (self._read["" if metric.whole else metric.output] for metric in metrics)
        return tuple(dict.fromkeys(name for names in found for name in names))

    def asked(self, identity: str, make: Callable[[], SpecFacts]) -> SpecFacts:
        """What holds for a spec of this identity whatever the shape: kept, as the last few are, or made."""
        found = self._asked.get(identity)
        if found is None:
            found = self._asked[identity] = make()
            while len(self._asked) > KEPT:
                self._asked.popitem(last=False)
        return found

    def keep_plan(self, key: PlanKey, plan: tuple[Compiled, Costing]) -> None:
        """Keep a compiled sweep, and the last few beside it."""
        self.plans[key] = plan
        while len(self.plans) > KEPT:
            self.plans.popitem(last=False)

    def keep_executor(self, key: Hashable, executor: Any) -> None:
        """Keep an executor, and the last few beside it."""
        self.executors[key] = executor
        while len(self.executors) > EXECUTORS:
            self.executors.popitem(last=False)


def facts_of(model: Captured) -> ModelFacts:
    """The facts about a model, found at the first call. They lie with it, so that they go when it goes."""
    facts: ModelFacts | None = vars(model).get(_FACTS)
    if facts is None:
        facts = vars(model)[_FACTS] = ModelFacts(model)
    return facts


_FACTS = "_facts_for_sweeps"
