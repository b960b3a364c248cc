"""Pieces of an attribution: prompts that are computed at a time, as many as fit the memory budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from conewise.amounts import shown_bytes
from conewise.attributing.costs import Counts, counts_of
from conewise.attributing.methods import Cells, Method
from conewise.errors import Argument, SweepError
from conewise.program.tensors import Tensor
from conewise.runs.captured import Captured
from conewise.runs.input_run import InputRun
from conewise.runs.interventions.interventions import as_intervention
from conewise.runs.metrics import Metric
from conewise.runs.reading import Reading
from conewise.runs.run import Run
from conewise.sweeps.execution.batch import Batch
from conewise.sweeps.planning.model_facts import facts_of
from conewise.sweeps.planning.spec import SweepSpec
from conewise.sweeps.sweep import Sweep


@dataclass(frozen=True, slots=True)
class Piece:
    """Some prompts of one batch, `rows` of it; all of them where it is None."""

    number: int
    rows: range | None
    counts: Counts

    def spec(self, sweep: Sweep) -> SweepSpec:
        """What is asked of these prompts."""
        return replace(sweep.spec, metrics=self._metrics(sweep))

    def _metrics(self, sweep: Sweep) -> tuple[Metric, ...]:
        found, rows = sweep._batches.metrics(self.number), self.rows
        if rows is None:
            return found
        return tuple(
            one if one.prompts is None or one.of_prompts is None else one.of_prompts(rows) for one in found
        )

    def batch(self, sweep: Sweep) -> Batch:
        """The base with these prompts alone, and what is put into it."""
        whole = sweep.batch(self.number)
        if self.rows is None:
            return whole
        model, (_, given) = sweep.model, sweep._batches.given(self.number)
        base = InputRun(model, rows_of(model, whole.base.inputs, self.rows))
        if whole.source is None:
            return Batch(base, None, as_intervention(given, model), metrics=self._metrics(sweep))
        source = InputRun(model, rows_of(model, whole.source.inputs, self.rows))
        return Batch(base, source, as_intervention(source, model), metrics=self._metrics(sweep))


def pieces_of(
    sweep: Sweep, method: Method, cells: Cells, steps: int, max_memory: int | None
) -> tuple[Piece, ...]:
    """All batches, cut into pieces of prompts that take no more than `max_memory` each.

    Raises SweepError where a batch takes more and cannot be cut, or one prompt alone does.
    """
    found: list[Piece] = []
    for number in range(sweep.batches):
        inputs, has_source = _shapes(sweep, number)

        spec = replace(sweep.spec, metrics=sweep._batches.metrics(number))

        def counted(
            inputs: Mapping[str, Tensor], spec: SweepSpec = spec, has_source: bool = has_source
        ) -> Counts:
            return counts_of(method, cells, spec, inputs, steps, has_source=has_source)

        whole = counted(inputs)
        if max_memory is None or whole.peak_bytes <= max_memory:
            found.append(Piece(number, None, whole))
            continue
        prompts = facts_of(sweep.model).read.prompts(inputs)
        reason = "it is one prompt" if prompts < 2 else _obstacle(sweep, number)
        if reason:
            raise SweepError(
                f"batch {number} takes up to {shown_bytes(whole.peak_bytes)}, more than ",
                Argument("max_memory"),
                f" allows ({shown_bytes(max_memory)}), and cannot be cut into fewer prompts: {reason}.",
            )
        at_once = max(1, min(prompts - 1, prompts * max_memory // whole.peak_bytes))
        while True:
            one = counted(rows_of(sweep.model, inputs, range(at_once)))
            if one.peak_bytes <= max_memory:
                break
            if at_once == 1:
                raise SweepError(
                    f"one prompt takes up to {shown_bytes(one.peak_bytes)}, more than ",
                    Argument("max_memory"),
                    f" allows ({shown_bytes(max_memory)}).",
                )
            at_once = at_once * 3 // 4 or 1
        for first in range(0, prompts, at_once):
            rows = range(first, min(first + at_once, prompts))
            own = one if len(rows) == at_once else counted(rows_of(sweep.model, inputs, rows))
            found.append(Piece(number, rows, own))
    return tuple(found)


def rows_of(model: Captured, inputs: Mapping[str, Tensor], rows: range) -> dict[str, Tensor]:
    """Some prompts of inputs."""
    batch, found = model.program.dimensions.batch, dict(inputs)
    for leaf in model.program.inputs:
        for dim, size in enumerate(leaf.shape):
            if str(size) in batch and leaf.name in found:
                found[leaf.name] = found[leaf.name].narrow(dim, rows.start, len(rows))
    return found


def _shapes(sweep: Sweep, number: int) -> tuple[dict[str, Tensor], bool]:
    """The shapes of a batch's inputs, as tensors without numbers, and whether it has a source of its own.

    What makes its runs when asked is asked for them.
    """
    base, source = sweep._batches.given(number)
    if isinstance(base, Reading):
        inputs: Mapping[str, Any] = base.inputs
    elif isinstance(base, Mapping):
        inputs = sweep.model.signature.bind((), base)
    else:
        inputs = sweep.batch(number).base.inputs
    shapes = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in inputs.items()
    }
    return shapes, isinstance(source, Reading | Mapping)


def _obstacle(sweep: Sweep, number: int) -> str:
    """Why a batch cannot be cut into fewer prompts; empty where it can."""
    model, whole = sweep.model, sweep.batch(number)
    if model.batch_is_fixed or not model.program.dimensions.batch:
        return "the model's batch is of one size"
    for name, run in (("base", whole.base), ("source", whole.source)):
        if run is not None and not isinstance(run, Run):
            return f"the {name} is a world with patches. Give the prompts one by one, as a list of bases"
    put = whole.intervention
    if whole.source is None and put.described != ("zero",):
        return (
            f"what {put.name} puts in may depend on all prompts. Give a list of bases, of a few prompts each"
        )
    for metric in whole.metrics:
        if metric.whole or (metric.prompts is not None and metric.of_prompts is None):
            return (
                f"the metric {metric.name!r} is a function of all prompts' outputs. Give a list of bases, of "
                "a few prompts each"
            )
    return ""


def full_counts(sweep: Sweep, piece: Piece) -> tuple[int, int]:
    """The node evaluations and FLOPs of a full forward for each world of a piece."""
    model, (inputs, _) = sweep.model, _shapes(sweep, piece.number)
    if piece.rows is not None:
        inputs = rows_of(model, inputs, piece.rows)
    names = [record.name for record in model.program.records]
    each = sum(map(facts_of(model).shape(inputs).costs.flops, names))
    return len(sweep.cells) * len(names), len(sweep.cells) * each


def part_of(sweep: Sweep, method: Method, cells: Cells, steps: int, piece: Piece, rows: range) -> Piece:
    """Some prompts of a piece. Raises SweepError where it cannot be cut."""
    reason = _obstacle(sweep, piece.number)
    if reason:
        raise SweepError(f"batch {piece.number} cannot be cut into fewer prompts: {reason}.")
    inputs, has_source = _shapes(sweep, piece.number)
    spec = replace(sweep.spec, metrics=sweep._batches.metrics(piece.number))
    own = rows_of(sweep.model, inputs, rows)
    return Piece(piece.number, rows, counts_of(method, cells, spec, own, steps, has_source=has_source))


def rows_in(sweep: Sweep, piece: Piece) -> range:
    """The prompts of a piece, by their numbers in its batch."""
    if piece.rows is not None:
        return piece.rows
    inputs, _ = _shapes(sweep, piece.number)
    return range(facts_of(sweep.model).read.prompts(inputs))


def prompts_at_once(pieces: Sequence[Piece]) -> int | None:
    """The most prompts of a piece that is a part of a batch; None where batches are whole."""
    return max((len(one.rows) for one in pieces if one.rows is not None), default=None)
