"""Verification: the captured graph against the module itself, on random inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conewise.errors import InputMismatchError
from conewise.frontends.torch.calls import Call
from conewise.frontends.torch.sampling import Sampler, module_leaves, tensor_leaves
from conewise.frontends.torch.tensors import (
    Tensor,
    largest_difference,
    row_tolerance,
    same_bits,
    zeros_like,
)
from conewise.workloads.markup import heading, verdict

if TYPE_CHECKING:
    from conewise.workloads.model import Model

FIXED_LENGTH = "the sequence length is fixed in this capture"
SMALLEST = 1e-30
"""Stands for a difference that rounds to nothing, and keeps a quotient finite."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked, and what was found.

    `bitwise`: on every input, every output of the graph equalled the module's bit for bit.
    `row_deviation`: the largest difference, relative to the row's largest output, between a row of
    a batch and the same row run alone, without its padding where an attention mask says what that
    is; batched kernels round otherwise, so it has a tolerance. None where the batch is fixed or the
    outputs have no rows.
    """

    inputs: int
    outputs: int
    bitwise: bool
    worst: float
    row_deviation: float | None
    row_tolerance: float
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all that was checked held."""
        return self.bitwise and (self.row_deviation is None or self.row_deviation <= self.row_tolerance)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [
            f"{'passed' if self.ok else 'FAILED'}: {self.inputs} random inputs, {self.outputs} outputs each",
            "  the graph equals the module bit for bit"
            if self.bitwise
            else f"  the graph differs from the module by up to {self.worst:.3g}",
        ]
        if self.row_deviation is not None:
            lines.append(
                f"  a row of a batch differs from the row alone by up to {self.row_deviation:.2g} of the "
                f"largest output (allowed: {self.row_tolerance:.0e})"
            )
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def __repr__(self) -> str:
        return "Verification " + "; ".join(line.strip() for line in str(self).splitlines())

    def _repr_html_(self) -> str:
        first, *others = str(self).splitlines()
        return verdict(self.ok, first) + "".join(heading("", line) for line in others)


def verify(model: Model, *, seed: int, samples: int) -> Verification:
    """Run the graph and the module on random inputs of several sizes, and compare all outputs."""
    sampler = Sampler(model.signature, model.program, model.module)
    sizes: list[tuple[int | None, int | None]] = [(None, None)] * samples
    notes: list[str] = []
    if model.batch_is_fixed:
        notes.append(f"the batch is fixed in this capture: {model.batch_is_fixed.splitlines()[0]}")
    else:
        sizes += [(sampler.batch + 2, None), (sampler.batch + 1, 7), (1, None)]
    if sampler.length_is_fixed:
        notes.append(FIXED_LENGTH)
    differences: list[float] = []
    rows: list[tuple[float, float]] = []
    outputs = checked = 0
    for place, (batch, length) in enumerate(sizes):
        call = sampler.draw(seed + place, batch=batch, length=length)
        try:
            run = model.run(*call.args, **call.kwargs)
        except InputMismatchError:
            if length is None:
                raise
            notes.append(FIXED_LENGTH)
            continue
        checked += 1
        ours, theirs = tensor_leaves(run.outputs), module_leaves(model.module, call)
        outputs = len(theirs)
        if len(ours) != len(theirs):
            differences.append(math.inf)
        differences += [
            max(largest_difference(one, other), SMALLEST)
            for one, other in zip(ours, theirs, strict=False)
            if not same_bits(one, other)
        ]
        if batch is not None and batch > 1:
            for row in range(batch):
                rows += _row_deviations(model, sampler, call, row, batch, ours)
    return Verification(
        checked,
        outputs,
        not differences,
        max(differences, default=0.0),
        max((deviation for deviation, _ in rows), default=None),
        max((tolerance for _, tolerance in rows), default=0.0),
        tuple(dict.fromkeys(notes)),
    )


def _row_deviations(
    model: Model, sampler: Sampler, call: Call, row: int, batch: int, outputs: Sequence[Tensor]
) -> Iterator[tuple[float, float]]:
    """How far each output's row lies from the row alone, relative to the largest; and its tolerance."""
    solo, length = sampler.alone(call, row)
    alone = tensor_leaves(model.run(*solo.args, **solo.kwargs).outputs)
    for whole, single in zip(outputs, alone, strict=True):
        if not whole.ndim or whole.shape[0] != batch or not whole.is_floating_point():
            continue
        ours = whole[row : row + 1]
        if length is not None:
            if single.ndim < 2 or single.shape[1] != length:
                continue
            ours = ours[:, :length]
        scale = max(largest_difference(ours, zeros_like(ours)), SMALLEST)
        yield largest_difference(ours, single) / scale, row_tolerance(whole)
