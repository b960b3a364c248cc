"""Verification: the captured graph against the module itself, on random inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from conewise.errors import InputMismatchError
from conewise.frontends.torch.sampling import (
    batch_of,
    module_leaves,
    one_row,
    random_call,
    tensor_leaves,
)
from conewise.frontends.torch.tensors import largest_difference, row_tolerance, same_bits

if TYPE_CHECKING:
    from conewise.workloads.model import Model


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked, and what was found.

    `bitwise`: on every input, every output of the graph equalled the module's bit for bit.
    `row_deviation`: the largest difference, relative to the largest output, between a row of a
    batch and the same row run alone; batched kernels round otherwise, so it has a tolerance.
    None where the batch is fixed or the outputs have no rows.
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


def verify(model: Model, *, seed: int, samples: int) -> Verification:
    """Run the graph and the module on random inputs of several sizes, and compare all outputs."""
    example_batch = batch_of(model.signature.example) or 1
    sizes: list[tuple[int | None, int | None]] = [(None, None)] * samples
    notes: list[str] = []
    if model.batch_is_fixed:
        notes.append(f"the batch is fixed in this capture: {model.batch_is_fixed.splitlines()[0]}")
    else:
        sizes += [(example_batch + 2, None), (example_batch + 1, 7)]
    is_bitwise, worst, outputs, checked = True, 0.0, 0, 0
    rows: list[float] = []
    tolerance = 0.0
    for place, (batch, length) in enumerate(sizes):
        call = random_call(model.signature, model.module, seed + place, batch=batch, length=length)
        try:
            run = model.run(*call.args, **call.kwargs)
        except InputMismatchError:
            if length is None:
                raise
            notes.append("the sequence length is fixed in this capture")
            continue
        checked += 1
        ours, theirs = tensor_leaves(run.outputs), module_leaves(model.module, call)
        outputs = len(theirs)
        is_bitwise &= len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=False):
            if not same_bits(one, other):
                is_bitwise, worst = False, max(worst, largest_difference(one, other))
        if model.batch_is_fixed or batch is None:
            continue
        for row in range(batch):
            alone = tensor_leaves(model.run(*(solo := one_row(call, row, batch)).args, **solo.kwargs).outputs)
            for one, single in zip(ours, alone, strict=True):
                if one.ndim and one.shape[0] == batch and one.is_floating_point():
                    scale = max(largest_difference(one, one * 0), 1e-30)
                    rows.append(largest_difference(one[row : row + 1], single) / scale)
                    tolerance = max(tolerance, row_tolerance(one))
    return Verification(
        checked,
        outputs,
        is_bitwise,
        worst,
        max(rows) if rows else None,
        tolerance,
        tuple(dict.fromkeys(notes)),
    )
