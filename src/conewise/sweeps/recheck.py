"""Cells of a result, run again by the witness: plain full forwards of the original module, with hooks.

No graph and no engine take part. Cells whose sites no module shows are run by the captured program, operation
by operation; they are counted apart.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from conewise.anatomy.placements import Outputs
from conewise.anatomy.places import EdgePlace, Place, SourcedPlace
from conewise.anatomy.selectors import Cell
from conewise.anatomy.sites import Located
from conewise.checks.hooking import Hook, HookedModule
from conewise.checks.verify import MULTIPLE, NoReferenceError, Reference, allowed_error, reference_of
from conewise.errors import SweepError, UnhookedWarning, warn
from conewise.jobs.digests import device_and_dtype
from conewise.program.export import tensor_leaves
from conewise.program.streaming import side_by_side, streams_of
from conewise.program.tensors import (
    SPLIT,
    TF32,
    Tensor,
    cell_tolerance,
    computing,
    largest_difference,
    multiplying,
)
from conewise.program.walk import Interpreter, bitwise_same
from conewise.runs.captured import Captured
from conewise.runs.metrics import Metric, applied, at_run, fetched, flat
from conewise.runs.reading import Reading
from conewise.runs.values import Edit, applied_in_turn
from conewise.sweeps.execution.batch import Batch
from conewise.sweeps.storage.result_data import CellCheck, ResultData

CAN_FAIL = 1e-3
"""The largest share of the largest value that may be allowed: with more, a comparison could hardly fail."""

SIDE_BY_SIDE = 16
"""Forwards of a module whose weights stream that share a pass over them: each holds its values meanwhile."""

TF32_TOLERANCE = 1e-2
"""The error allowed in a cell where TF32 keeps 10 bits of a factor."""

FLOAT32_MULTIPLE = 4
"""The error of products in parts that is allowed, as a factor of the module's own error.

In float32 the errors of a few cells are single draws, of which one may happen to be small.
"""


def recheck(result: ResultData, rerun: Rerun, n: int, seed: int, *, is_serial: bool) -> CellCheck:
    """Run `n` random cells and the base again, for every prompt, and compare every metric of theirs.

    A serial result has to be equal bit for bit, where the module's own base is. Else numbers may differ by
    rounding: in float32 and float64 by `cell_tolerance` of the metric's largest value. In half precision and
    in TF32 that could hide anything, and products in parts promise little more than float32's error: there
    they may be no further from the module in a higher precision, nor from its own forwards, than those lie
    from it, a few times over; see `allowed_error`. Warns of cells that no hook could run.
    """
    if n < 1:
        raise SweepError(f"{n} cells to verify; give at least 1.")
    rerun.model.expect_program("check cells by hooks on the module")
    count = len(rerun.cells)
    chosen = sorted(random.Random(seed).sample(range(count), min(n, count)))
    module = Witness(rerun, chosen)
    for make in rerun.batches:
        module.run(make())
    unhooked = [rerun.cells[number].name for number in chosen if number not in module.hooked]
    if unhooked:
        shown = ", ".join(unhooked[:4]) + (", ..." if len(unhooked) > 4 else "")
        warn(
            f"{len(unhooked)} of {len(chosen)} cells were compared with the captured program alone, not with "
            f"the module itself, because no module shows their sites: {shown}.",
            UnhookedWarning,
        )
    check = CellCheck(len(chosen), len(module.hooked), len(unhooked), 0.0, 0.0, 0.0)
    if is_serial and module.is_exact:
        return _compared(result, module, check, 0.0)
    _, dtype = device_and_dtype(rerun.model.program)
    rounding = max(cell_tolerance(dtype), TF32_TOLERANCE if rerun.precision == TF32 else 0.0)
    if rounding <= CAN_FAIL and rerun.precision != SPLIT:
        return _compared(result, module, check, rounding)
    try:
        reference = reference_of(rerun.model.module, dtype)
        precise = Witness(rerun, sorted(module.hooked), reference)
        for make in rerun.batches:
            precise.run(make(), module)
        multiple = FLOAT32_MULTIPLE if dtype == torch.float32 and rounding <= CAN_FAIL else MULTIPLE
        return _judged(result, module, precise, reference, check, multiple)
    except NoReferenceError as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001  # a module in another precision raises whatever it likes
        why = f"in a higher precision the module raises {type(error).__name__}: {error}"
    return _compared(result, module, replace(check, unchecked=why), rounding)


def _compared(result: ResultData, module: Witness, check: CellCheck, tolerance: float) -> CellCheck:
    """Return the check with the distance of the result from full forwards of the module."""
    apart = list(_differences(result, module, module))
    return replace(
        check,
        largest_deviation=max(far for _, far in apart),
        relative=max(far / _scale(result, metric) if far else 0.0 for metric, far in apart),
        tolerance=tolerance,
    )


def _judged(
    result: ResultData,
    module: Witness,
    precise: Witness,
    reference: Reference,
    check: CellCheck,
    multiple: int,
) -> CellCheck:
    """Return the check with the distances of result and module from the reference, of the worst metric."""
    found: list[CellCheck] = []
    for metric in range(len(result.table)):
        scale = _scale(result, metric)
        own, deviation = _own_error(module, precise, metric), _largest(result, module, module, metric)
        if not math.isfinite(own):
            raise NoReferenceError(
                "the module's own forwards overflow, and in a higher precision they do not"
            )
        found.append(
            replace(
                check,
                largest_deviation=deviation,
                relative=max(deviation, _largest(result, precise, module, metric)) / scale,
                tolerance=allowed_error(own, reference.own, scale, multiple) / scale,
                own_error=own / scale,
                reference=reference.name,
            )
        )
    return max(found, key=lambda one: one.excess)


def _own_error(module: Witness, precise: Witness, metric: int) -> float:
    """Return the distance of the module's own forwards from the reference.

    That is the largest error of the cells and bases; where these are few and happen to be exact, it is what
    errors as large as those of all outputs usually do to the metric.
    """
    pairs = list(zip(module.base, precise.base, strict=True))
    for number, rows in precise.cells.items():
        pairs += zip(module.cells[number], rows, strict=True)
    if not pairs:
        raise NoReferenceError("the module itself could run neither a cell nor the base")
    shaken = [(one[metric] - other[metric]).square().mean() for one, other in precise.shaken]
    usual = math.sqrt(sum(map(float, shaken)) / len(shaken))
    return max(usual, *(largest_difference(one[metric], other[metric]) for one, other in pairs))


def _largest(result: ResultData, witness: Witness, others: Witness, metric: int) -> float:
    return max(far for number, far in _differences(result, witness, others) if number == metric)


def _differences(result: ResultData, witness: Witness, others: Witness) -> Iterator[tuple[int, float]]:
    """(metric, difference) of each cell and of the base; `others` ran the cells that `witness` did not."""
    for metric in range(len(result.table)):
        for number in others.cells:
            found = torch.cat((witness if number in witness.cells else others).cells[number], dim=-1)[metric]
            yield metric, largest_difference(found, result.per_prompt[metric, number])
            yield metric, largest_difference(found.mean(), result.table[metric, number])
        if result.base_per_prompt is not None and len(witness.base) == len(witness.hooks):
            yield (
                metric,
                largest_difference(torch.cat(witness.base, dim=-1)[metric], result.base_per_prompt[metric]),
            )


def _scale(result: ResultData, metric: int) -> float:
    """The largest value of a metric: of the cells and of the base; of a vector, of all its numbers."""
    _, rows = result._metric_at(metric)
    values = [*result.per_prompt[rows].reshape(-1).tolist(), *result.base[rows].tolist()]
    return max((abs(value) for value in values if value == value), default=0.0) or 1.0


# -- the witness ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rerun:
    """The cells of a sweep that are run again, over its batches.

    Each of `batches` makes a batch when it is its turn. `targets` has the output that each of `metrics`
    reads; '' for one that reads all of them, or sites.
    """

    model: Captured
    cells: Sequence[Cell]
    batches: Sequence[Callable[[], Batch]]
    targets: Sequence[str]
    metrics: Sequence[Metric]
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
        streams = streams_of(module.parameters()) if not rerun.model.program.written else ()
        self._stream = streams[0] if streams else None
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
            self.is_exact &= len(theirs) == len(ours) and all(map(bitwise_same, theirs, ours))
        else:
            if not self._sites <= hooks.keys():
                raise NoReferenceError("no module shows a site that a metric reads")
            seen = self._module.read([hooks[node] for node in self._sites], inputs)
            shown = {node: seen[hooks[node]] for node in self._sites}
            true = self._of_module(batch, plain, shown)
            # Computed again: those of all batches would not fit into memory.
            for outputs in self._reference.shaken(plain, module._outputs(module._inputs(base), {})):
                self.shaken.append((true, self._of_module(batch, outputs, shown)))
        given = self._source_values(batch, hooks)
        own = self._edits(batch, (), given, hooks)
        hooked = partial(self._hooked, batch, hooks=hooks, plain=plain)
        wanted: list[tuple[list[Tensor], Callable[[], Tensor]]] = []
        if own.keys() | self._sites <= hooks.keys():
            wanted.append((self.base, partial(hooked, own)))
        for number, rows in self.cells.items():
            places = self._places(number)
            changes = self._edits(batch, places, given, hooks)
            entries = {_entry(place.entry) for place in places if isinstance(place, EdgePlace)}
            if changes.keys() | entries | self._sites <= hooks.keys():
                wanted.append((rows, partial(hooked, changes)))
            else:
                values = self._interpreter.values(inputs, edits=changes)
                outputs = self._interpreter.output(values)
                rows.append(self._metrics(batch, outputs, values.__getitem__, values))
                self.hooked.discard(number)
        for first in range(0, len(wanted), SIDE_BY_SIDE):
            some = wanted[first : first + SIDE_BY_SIDE]
            made = side_by_side(self._stream, [task for _, task in some])
            for (rows, _), found in zip(some, made, strict=True):
                rows.append(found)

    @property
    def _sites(self) -> set[str]:
        """The nodes inside of the model that metrics read."""
        return {one.node for metric in self._rerun.metrics for one in metric.found}

    def _hooked(
        self,
        batch: Batch,
        changes: Mapping[str, Callable[[Tensor], Tensor]],
        hooks: Mapping[str, Hook],
        plain: Any,
    ) -> Tensor:
        """The metrics of a forward with these changes, read behind them; `plain` are those without any."""
        shown: dict[str, Tensor] = {}

        def keep(node: str, value: Tensor) -> Tensor:
            changed = changes[node](value) if node in changes else value
            shown[node] = changed.clone()
            return changed

        edits = {hooks[node]: change for node, change in changes.items()}
        edits |= {hooks[node]: partial(keep, node) for node in self._sites}
        outputs = self._outputs(self._inputs(batch.base), edits) if edits else plain
        return self._of_module(batch, outputs, shown)

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
        """Return the places that a cell patches."""
        return self._rerun.model.each_call(self._rerun.cells[number].places)

    def _find(self, batch: Batch) -> dict[str, Hook]:
        """Return the hooks at which the module shows the nodes that the cells and the base patch."""
        model, base = self._rerun.model, batch.base
        places = [place for number in self.cells for place in self._places(number)]
        nodes = {model.locate(place).node for place in places} | {edit.node for edit in base.edits}
        nodes |= self._sites
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
        """Return the readers of an entry on the way to these sites."""
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
        """Return the changes of a world by node: the base's own edits, then those at the places of a cell."""
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

    def _of_module(self, batch: Batch, outputs: Any, shown: Mapping[str, Tensor]) -> Tensor:
        return self._metrics(batch, outputs, partial(self._module.target, outputs), shown)

    def _metrics(
        self, batch: Batch, outputs: Any, target: Callable[[str], Tensor], shown: Mapping[str, Tensor]
    ) -> Tensor:
        """Every metric; `shown` are the values of the sites that they read."""
        found: list[Tensor] = []
        model, inputs, sizes = batch.base.model, batch.base.inputs, batch.base._sizes
        prompts = self._read.prompts(inputs)

        def presented(one: Located) -> Tensor:
            return one.view.present(shown[one.node], sizes)[None]

        with computing():
            for metric, node in zip(batch.metrics, self._rerun.targets, strict=True):
                own = at_run(metric, model, inputs, node)
                stack = self._read.arranged(node, target(node), 1, prompts) if own.is_of_output else None
                numbers = applied(own, prompts, stack, presented, outputs)
                found.append(flat(fetched(metric, numbers))[0])
        return torch.cat(found)


def _entry(node: str) -> str:
    """The name of the hook that changes a node for readers of edges alone."""
    return f"{node} as it enters"


def _unpatched(base: Reading) -> Reading:
    while base._parent is not None:
        base = base._parent
    return base
