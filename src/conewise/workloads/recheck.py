"""Cells of a result against plain full forwards of the original module, with hooks: no graph, no engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from conewise.errors import SweepError, WeightsChangedError
from conewise.frontends.torch.filling import joined, stacked
from conewise.frontends.torch.hooking import HookedModule
from conewise.frontends.torch.interpret import Interpreter
from conewise.frontends.torch.metrics import measured, measured_whole
from conewise.frontends.torch.precision import precision_tolerance
from conewise.frontends.torch.tensors import Tensor, cell_tolerance, computing, largest_difference
from conewise.workloads.result import CellCheck, Result
from conewise.workloads.run import Edit

if TYPE_CHECKING:
    from conewise.workloads.run import Reading
    from conewise.workloads.selectors import Cell
    from conewise.workloads.sweep import Batch, Sweep


def recheck(result: Result, n: int, seed: int) -> CellCheck:
    """Run `n` random cells again, for every prompt, and compare every metric of theirs.

    A serial result has to be equal bit for bit; one of a wavefront may differ by the rounding of batched
    kernels (or of TF32), relative to the metric's largest value; see `cell_tolerance`, `precision_tolerance`.
    """
    sweep = result.sweep
    assert sweep is not None
    if n < 1:
        raise SweepError(f"{n} cells to verify; give at least 1.")
    if sweep.facts.fingerprint != result.provenance["weights"]:
        raise WeightsChangedError(
            f"the weights of {sweep.model.name} were written to after this result was made, so the module "
            "cannot say whether it is right. Put the old weights back, or run the sweep again."
        )
    count = len(sweep.cells)
    chosen = sorted(random.Random(seed).sample(range(count), min(n, count)))
    hooked: set[int] = set()
    found: dict[int, list[Tensor]] = {number: [] for number in chosen}
    for place in range(sweep.batches):
        for number, values, is_hooked in _again(sweep, sweep._batch(place), chosen):
            found[number].append(values)
            hooked |= {number} if is_hooked else set()
    largest = relative = 0.0
    for number, parts in found.items():
        again = joined(parts)
        for metric in range(len(result.metrics)):
            apart = max(
                largest_difference(again[metric], result.per_prompt[metric, number]),
                largest_difference(again[metric].mean(), result.table[metric, number]),
            )
            scale = _scale(result, metric)
            largest = max(largest, apart)
            relative = max(relative, apart / scale if apart else 0.0)
    rounding = precision_tolerance(sweep.precision, cell_tolerance(sweep.facts.dtype))
    tolerance = 0.0 if result.plan.evaluator == "serial" else rounding
    return CellCheck(len(chosen), len(hooked), len(chosen) - len(hooked), largest, relative, tolerance)


def _scale(result: Result, metric: int) -> float:
    """The largest value of a metric: of the cells and of the base."""
    values = [*result.per_prompt[metric].reshape(-1).tolist(), float(result.base[metric])]
    return max((abs(value) for value in values if value == value), default=0.0) or 1.0


def _again(sweep: Sweep, batch: Batch, chosen: list[int]) -> Iterator[tuple[int, Tensor, bool]]:
    """The metrics [metric, prompt] of each chosen cell, run in full, and whether hooks could do it."""
    model, base = sweep.model, batch.base
    if any(edit.found.result is not None for edit in base.edits):
        raise SweepError("the base patches `result`, which no hook on the module can do; it is not verified.")
    module = HookedModule(model.module, model.program, model.signature)
    interpreter = Interpreter(model.program)
    cells = [sweep.cells[number] for number in chosen]
    nodes = {model.locate(place).node for cell in cells for place in cell.places}
    nodes |= {edit.node for edit in base.edits}
    hooks = module.find(dict(zip(nodes, _unpatched(base).demand(nodes), strict=True)), base.inputs)
    given: dict[str, Tensor] = {}
    if batch.source is not None and not batch.source.edits:
        seen = module.read(hooks.values(), batch.source.inputs)
        given = {node: seen[hook] for node, hook in hooks.items()}
    for number, cell in zip(chosen, cells, strict=True):
        edits = _edits(batch, cell, given)
        changes = {node: partial(_changed, own, base._sizes) for node, own in edits.items()}
        if changes.keys() <= hooks.keys():
            outputs = module.outputs(base.inputs, {hooks[node]: changes[node] for node in changes})
            yield number, _metrics(sweep, batch, outputs, partial(module.target, outputs)), True
        else:
            values = interpreter.values(base.inputs, edits=changes)
            yield number, _metrics(sweep, batch, interpreter.output(values), values.__getitem__), False


def _unpatched(base: Reading) -> Reading:
    while base._parent is not None:
        base = base._parent
    return base


def _edits(batch: Batch, cell: Cell, given: Mapping[str, Tensor]) -> dict[str, list[Edit]]:
    """What stands patched in a cell's world, by node: the base's own edits, then the cell's.

    `given` has the source's values at nodes, as far as hooks read them off the module.
    """
    base = batch.base
    edits: dict[str, list[Edit]] = {}
    for edit in base.edits:
        edits.setdefault(edit.node, []).append(edit)
    for place in cell.places:
        found = base.model.locate(place)
        part = (
            found.read(given[found.node], base._sizes)
            if found.node in given
            else batch.intervention.part(place, base)
        )
        edits.setdefault(found.node, []).append(Edit(place, found, part))
    return edits


def _changed(edits: list[Edit], sizes: tuple[int, ...], value: Tensor) -> Tensor:
    for edit in edits:
        value = edit.applied(value, sizes, set())
    return value


def _metrics(sweep: Sweep, batch: Batch, outputs: Any, target: Callable[[str], Tensor]) -> Tensor:
    prompts = sweep._prompts(batch.base)
    rows = []
    with computing():
        for metric in sweep.metrics:
            if metric.whole:
                rows.append(measured_whole(metric, outputs, prompts)[0])
            else:
                node = sweep._target(metric)
                stack = sweep.facts.read.arranged(node, target(node), 1, prompts)
                rows.append(measured(metric, stack)[0])
    return stacked(rows)
