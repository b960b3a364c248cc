"""The witness: cells of a sweep, each run again in full by the module itself, with hooks.

No graph and no engine take part. Cells whose sites no module shows are run by the captured program, operation
by operation; they are counted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

from conewise.anatomy.placements import Outputs
from conewise.anatomy.places import EdgePlace, Place, SourcedPlace
from conewise.anatomy.selectors import Cell
from conewise.checks.hooking import Hook, HookedModule
from conewise.checks.verify import Reference
from conewise.errors import SweepError
from conewise.program.export import tensor_leaves
from conewise.program.tensors import Tensor, computing, multiplying, same_bits
from conewise.program.walk import Interpreter
from conewise.runs.captured import Captured
from conewise.runs.fillings import stacked
from conewise.runs.interventions import Intervention
from conewise.runs.metrics import Metric, at_run, measured, measured_whole
from conewise.runs.reading import Reading
from conewise.runs.values import Edit, applied_in_turn


class Batch(Protocol):
    """A baseline, and what is put into it."""

    @property
    def base(self) -> Reading:
        """The run that is changed."""

    @property
    def source(self) -> Reading | None:
        """The run that values come from, where they come from one."""

    @property
    def intervention(self) -> Intervention:
        """What is put in a place."""

    def part(self, place: Place) -> Any:
        """What a world puts at one place: the sweep's, or a cell's own."""

    @property
    def metrics(self) -> Sequence[Metric]:
        """What is measured of it."""

    def seen(self, place: EdgePlace) -> tuple[Tensor, bool]:
        """What the reader of an edge sees more than in the base, shaped like its entry's value.

        Or all that it sees, and True.
        """


@dataclass(frozen=True, slots=True)
class Rerun:
    """What is run again: the cells of a sweep over its batches.

    Each of `batches` makes a batch when it is its turn. `targets` has the node that each metric reads; '' for
    a metric that reads all outputs.
    """

    model: Captured
    cells: Sequence[Cell]
    batches: Sequence[Callable[[], Batch]]
    targets: Sequence[str]
    precision: str | None = None


class Witness:
    """Cells and the base, run again by the module; or by a more precise copy of it, the reference.

    `cells` and `base` hold metrics [metric, prompt] of each batch; `hooked` are the cells that hooks could
    run in every batch. `is_exact`: the module's outputs for every base, unpatched, were the graph's bit for
    bit. `shaken` are pairs of the reference's metrics: of its outputs as they are, and of these with errors
    as large as the module's own.
    """

    def __init__(self, rerun: Rerun, chosen: Sequence[int], reference: Reference | None = None) -> None:
        self.cells: dict[int, list[Tensor]] = {number: [] for number in chosen}
        self.base: list[Tensor] = []
        self.hooks: list[dict[str, Hook]] = []
        self.hooked = set(chosen)
        self.is_exact = True
        self.shaken: list[tuple[Tensor, Tensor]] = []
        self._rerun, self._reference = rerun, reference
        module = rerun.model.module if reference is None else reference.module
        self._module = HookedModule(module, rerun.model.program, rerun.model.signature)
        self._read = Outputs(rerun.model.program)

    @cached_property
    def _interpreter(self) -> Interpreter:
        return Interpreter(self._rerun.model.program)

    def run(self, batch: Batch, module: Witness | None = None) -> None:
        """Run the cells of the next batch; the reference with the hooks that were found on the `module`."""
        base, inputs = batch.base, self._inputs(batch.base)
        if any(edit.found.result is not None for edit in base.edits):
            raise SweepError(
                "the base patches `result`, which no hook on the module can do; it is not verified."
            )
        number = len(self.hooks)
        hooks = self._find(batch) if module is None else module.hooks[number]
        plain = self._outputs(inputs, {})
        if not self.hooks:
            self._expect_every_call(inputs)
        self.hooks.append(hooks)
        if self._reference is None or module is None:
            theirs, ours = tensor_leaves(plain), tensor_leaves(_unpatched(base).outputs)
            self.is_exact &= len(theirs) == len(ours) and all(map(same_bits, theirs, ours))
        else:
            true = self._of_module(batch, plain)
            # Computed again: those of all batches would not fit into memory.
            for outputs in self._reference.shaken(plain, module._outputs(module._inputs(base), {})):
                self.shaken.append((true, self._of_module(batch, outputs)))
        given = self._source_values(batch, hooks)
        own = self._edits(batch, (), given, hooks)
        if own.keys() <= hooks.keys():
            outputs = self._outputs(inputs, {hooks[node]: own[node] for node in own}) if own else plain
            self.base.append(self._of_module(batch, outputs))
        for number, rows in self.cells.items():
            places = self._places(number)
            changes = self._edits(batch, places, given, hooks)
            entries = {_entry(place.entry) for place in places if isinstance(place, EdgePlace)}
            if changes.keys() | entries <= hooks.keys():
                outputs = self._outputs(inputs, {hooks[node]: changes[node] for node in changes})
                rows.append(self._of_module(batch, outputs))
            else:
                values = self._interpreter.values(inputs, edits=changes)
                outputs = self._interpreter.output(values)
                rows.append(self._metrics(batch, outputs, values.__getitem__))
                self.hooked.discard(number)

    def _expect_every_call(self, inputs: Mapping[str, Tensor]) -> None:
        """Raise SweepError where a module whose path is patched is called otherwise than the graph shows."""
        program = self._rerun.model.program
        named = {place.name for number in self.cells for place in self._rerun.cells[number].places}
        if named.isdisjoint(path for port in program.ports for path in port.paths):
            return
        with self._module.paths.counting():
            self._outputs(inputs, {})
        for unlike in self._module.paths.unlike(program.ports, named):
            raise SweepError(
                f"{unlike}, so that not all of its calls were patched. Capture the module again."
            )

    def _places(self, number: int) -> tuple[Place, ...]:
        """What a cell patches."""
        return self._rerun.model.each_call(self._rerun.cells[number].places)

    def _find(self, batch: Batch) -> dict[str, Hook]:
        """Where the module shows the nodes that the cells and the base patch."""
        model, base = self._rerun.model, batch.base
        places = [place for number in self.cells for place in self._places(number)]
        nodes = {model.locate(place).node for place in places} | {edit.node for edit in base.edits}
        values = dict(zip(nodes, _unpatched(base).demand(nodes), strict=True))
        found = self._module.find(values, base.inputs)
        edges = [place for place in places if isinstance(place, EdgePlace)]
        for entry in dict.fromkeys(place.entry for place in edges):
            sites = [model.locate(place).node for place in edges if place.entry == entry]
            (value,) = _unpatched(base).demand([entry])
            for hook in self._module.find(
                {entry: value}, base.inputs, {entry: self._reading(entry, sites)}
            ).values():
                found[_entry(entry)] = hook
        return found

    def _reading(self, entry: str, sites: Sequence[str]) -> set[str]:
        """Who reads an entry on the way to these sites."""
        graph = self._rerun.model.graph
        above = graph.table.support(graph.numbers(sites), (graph.number(entry),))
        readers = self._rerun.model.program.readers[entry]
        return {reader.name for reader in readers if graph.number(reader.name) in above}

    def _of_edge(self, batch: Batch, place: EdgePlace, hooks: Mapping[str, Hook]) -> Tensor:
        """A reader's part as the module itself makes it, where its entry is changed by hooks."""
        base, found = batch.base, batch.base.model.locate(place)
        seen_there, is_whole = batch.seen(place)
        put: Tensor = self._lifted(seen_there)
        changes = self._edits(batch, (), {}, hooks)

        def changed(value: Tensor) -> Tensor:
            return put.expand_as(value).clone() if is_whole else value + put

        entry = _entry(place.entry)
        # A reader without a norm is patched where it reads: there is nothing between that a hook could see.
        if found.node != place.entry and {entry, found.node} | changes.keys() <= hooks.keys():
            seen: list[Tensor] = []

            def keep(value: Tensor) -> Tensor:
                seen.append(value.clone())
                return value

            edits = {hooks[node]: change for node, change in changes.items()}
            edits |= {hooks[found.node]: keep, hooks[entry]: changed}
            self._outputs(self._inputs(base), edits)
            return found.read(seen[-1], base._sizes)
        values = self._interpreter.values(self._inputs(base), edits={**changes, place.entry: changed})
        return found.read(values[found.node], base._sizes)

    def _source_values(self, batch: Batch, hooks: Mapping[str, Hook]) -> dict[str, Tensor]:
        """The source's values at nodes, as far as hooks read them off the module."""
        if batch.source is None or batch.source.edits:
            return {}
        with multiplying(self._precision):
            seen = self._module.read(hooks.values(), self._inputs(batch.source))
        return {node: seen[hook] for node, hook in hooks.items()}

    def _edits(
        self,
        batch: Batch,
        places: Sequence[Place],
        given: Mapping[str, Tensor],
        hooks: Mapping[str, Hook],
    ) -> dict[str, Callable[[Tensor], Tensor]]:
        """What a world changes, by node: the base's own edits, then those at the places of a cell."""
        base = batch.base
        edits: dict[str, list[Edit]] = {}
        for edit in base.edits:
            edits.setdefault(edit.node, []).append(Edit(edit.place, edit.found, self._lifted(edit.part)))
        for place in places:
            found = base.model.locate(place)
            if isinstance(place, EdgePlace):
                part = self._of_edge(batch, place, hooks)
            elif found.node in given and not isinstance(place, SourcedPlace):
                part = found.read(given[found.node], base._sizes)
            else:
                part = self._lifted(batch.part(place))
            edits.setdefault(found.node, []).append(Edit(place, found, part))
        return {node: partial(applied_in_turn, own, sizes=base._sizes) for node, own in edits.items()}

    @property
    def _precision(self) -> str | None:
        return self._rerun.precision if self._reference is None else None

    def _outputs(
        self, inputs: Mapping[str, Tensor], changes: Mapping[Hook, Callable[[Tensor], Tensor]]
    ) -> Any:
        with multiplying(self._precision):
            return self._module.outputs(inputs, changes)

    def _inputs(self, base: Reading) -> Mapping[str, Tensor]:
        return base.inputs if self._reference is None else self._reference.inputs(base.inputs)

    def _lifted(self, part: Any) -> Any:
        return part if self._reference is None else self._reference.lifted(part)

    def _of_module(self, batch: Batch, outputs: Any) -> Tensor:
        return self._metrics(batch, outputs, partial(self._module.target, outputs))

    def _metrics(self, batch: Batch, outputs: Any, target: Callable[[str], Tensor]) -> Tensor:
        found: list[Tensor] = []
        prompts = self._read.prompts(batch.base.inputs)
        with computing():
            for metric, node in zip(batch.metrics, self._rerun.targets, strict=True):
                if metric.whole:
                    found.append(measured_whole(metric, outputs, prompts)[0])
                else:
                    metric = at_run(metric, batch.base.model, batch.base.inputs, node)  # noqa: PLW2901
                    stack = self._read.arranged(node, target(node), 1, prompts)
                    found.append(measured(metric, stack)[0])
        return stacked(found)


def _entry(node: str) -> str:
    """The name of the hook that changes a node for readers of edges alone."""
    return f"{node} as it enters"


def _unpatched(base: Reading) -> Reading:
    while base._parent is not None:
        base = base._parent
    return base
