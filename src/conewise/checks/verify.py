"""Verification: the captured graph against the module itself, on random inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from conewise.capturing.sampling import Sampler, module_leaves, tensor_leaves
from conewise.checks.reference import (
    NoReferenceError,
    Reference,
    allowed_error,
    reference_of,
)
from conewise.errors import InputMismatchError
from conewise.markup import heading, verdict
from conewise.program.calls import Call
from conewise.program.tensors import (
    Tensor,
    is_half,
    largest_difference,
    row_tolerance,
    same_bits,
    zeros_like,
)
from conewise.runs.baseline import baseline
from conewise.runs.captured import Captured
from conewise.structure.wiring.ports import ModulePaths

FIXED_LENGTH = "the sequence length is fixed in this capture"
SMALLEST = 1e-30
"""Stands for a difference that rounds to nothing, and keeps a quotient finite."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked, and what was found.

    `bitwise`: on every input, every output of the graph equalled the module's bit for bit. Where it did not,
    `worst` is the largest difference, and `excess` the largest distance of an output from that of the module
    in a higher precision, as a share of what is allowed: twice the distance of the module's own output, and
    half a machine epsilon. A graph that differs passes where it `may_round` otherwise, as `model.fidelity`
    says, and the excess is at most 1.

    `row_deviation`: the largest difference, relative to the row's largest output, between a row of
    a batch and the same row run alone, without its padding where an attention mask says what that
    is; batched kernels round otherwise, so it has a tolerance. In half precision the row alone is that of
    the module in a higher precision, and the tolerance is measured as above. None where the batch is
    fixed, the outputs have no rows, or there is no higher precision to compare with.

    `calls_differ`: a module was called more or less often than the graph shows, which the notes name.
    """

    inputs: int
    outputs: int
    bitwise: bool
    worst: float
    row_deviation: float | None
    row_tolerance: float
    notes: tuple[str, ...] = ()
    excess: float = math.inf
    may_round: bool = False
    calls_differ: bool = False

    @property
    def ok(self) -> bool:
        """Whether all that was checked held."""
        is_the_module = self.bitwise or (self.may_round and self.excess <= 1)
        if self.calls_differ:
            return False
        return is_the_module and (self.row_deviation is None or self.row_deviation <= self.row_tolerance)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        word = "passed" if self.ok else "FAILED"
        lines = [f"{word}: {self.inputs} random inputs, {self.outputs} outputs each", self._equality()]
        if self.row_deviation is not None:
            lines.append(
                f"  a row of a batch differs from the row alone by up to {self.row_deviation:.2g} of the "
                f"largest output (allowed: {self.row_tolerance:.0e})"
            )
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def _equality(self) -> str:
        if self.bitwise:
            return "  the graph equals the module bit for bit"
        differs = f"  the graph differs from the module by up to {self.worst:.3g}"
        if math.isinf(self.excess):
            return differs
        return f"{differs}, {self.excess:.2g} of what rounding errors like the module's own would allow"

    def __repr__(self) -> str:
        return "Verification " + "; ".join(line.strip() for line in str(self).splitlines())

    def _repr_html_(self) -> str:
        first, *others = str(self).splitlines()
        return verdict(self.ok, first) + "".join(heading("", line) for line in others)


class _Precise:
    """The module in a higher precision, made when it is asked for; `missing` says why there is none."""

    def __init__(self, model: Captured) -> None:
        self._model = model
        self._reference: Reference | None = None
        self.missing = ""

    def outputs(self, call: Call, like: Sequence[Tensor]) -> list[Tensor] | None:
        """What it returns for a call, where the module itself returns something `like` this."""
        if self.missing:
            return None
        try:
            if self._reference is None:
                own = next((one.dtype for one in like if one.is_floating_point()), None)
                if own is None:
                    raise NoReferenceError("no output is of floating point")
                self._reference = reference_of(self._model.module, own)
            found = module_leaves(self._reference.module, self._reference.call(call))
        except NoReferenceError as error:
            self.missing = str(error)
            return None
        except Exception as error:  # noqa: BLE001  # a module in another precision raises whatever it likes
            self.missing = f"in a higher precision the module raises {type(error).__name__}: {error}"
            return None
        return [one.to(other.device) for one, other in zip(found, like, strict=True)]


def verify(model: Captured, *, seed: int, samples: int) -> Verification:
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
    if model.changed_sites:
        notes.append(f"the graph was changed after the capture, at {', '.join(model.changed_sites)}")
    precise = _Precise(model)
    differences: list[float] = []
    excesses: list[float] = []
    rows: list[tuple[float, float]] = []
    unlike: list[str] = []
    outputs = checked = 0
    for index, (batch, length) in enumerate(sizes):
        call = sampler.draw(seed + index, batch=batch, length=length)
        try:
            run = baseline(model, call.args, call.kwargs)
        except InputMismatchError:
            if length is None:
                raise
            notes.append(FIXED_LENGTH)
            continue
        checked += 1
        if checked == 1:
            paths = ModulePaths(model.module)
            with paths.counting():
                module_leaves(model.module, call)
            unlike += paths.unlike(model.program.ports)
        ours, theirs = tensor_leaves(run.outputs), module_leaves(model.module, call)
        outputs = len(theirs)
        if len(ours) != len(theirs):
            differences.append(math.inf)
        elif not all(map(same_bits, ours, theirs)):
            differences += [
                max(largest_difference(one, other), SMALLEST)
                for one, other in zip(ours, theirs, strict=True)
                if not same_bits(one, other)
            ]
            excesses += _excesses(ours, theirs, precise.outputs(call, theirs))
        if batch is not None and batch > 1:
            for row in range(batch):
                rows += _row_deviations(model, sampler, call, row, batch, ours, precise)
    if differences and not model.fidelity.bitwise:
        notes.append(f"at capture it was {model.fidelity}")
    elif differences:
        notes += model.fidelity.reasons
    if precise.missing:
        notes.append(f"there was no higher precision to compare with: {precise.missing}")
    deviation, tolerance = max(rows, key=lambda found: found[0] / found[1], default=(None, 0.0))
    return Verification(
        checked,
        outputs,
        not differences,
        max(differences, default=0.0),
        deviation,
        tolerance,
        tuple(dict.fromkeys([*notes, *unlike])),
        math.inf if math.inf in differences else max(excesses, default=math.inf),
        not model.fidelity.bitwise or bool(model.fidelity.reasons),
        bool(unlike),
    )


def _excesses(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], precise: Sequence[Tensor] | None
) -> Iterator[float]:
    """How far from the reference each output of the graph is, as a share of what is allowed.

    Without one, which float64 has not, 100 machine epsilons of the largest output are allowed.
    """
    for index, (one, own) in enumerate(zip(ours, theirs, strict=True)):
        if same_bits(one, own):
            continue
        if not own.is_floating_point() or (precise is None and own.dtype.itemsize < 8):
            yield math.inf
            continue
        true = own if precise is None else precise[index]
        scale = max(largest_difference(true, zeros_like(true)), SMALLEST)
        allowed = row_tolerance(own) * scale
        if precise is not None:
            allowed = allowed_error(largest_difference(own, true), own.dtype, scale)
        yield largest_difference(one, true) / allowed if math.isfinite(allowed) else math.inf


def _row_deviations(
    model: Captured,
    sampler: Sampler,
    call: Call,
    row: int,
    batch: int,
    outputs: Sequence[Tensor],
    precise: _Precise,
) -> Iterator[tuple[float, float]]:
    """How far each output's row lies from the row alone, relative to the largest; and its tolerance."""
    solo, length = sampler.alone(call, row)
    alone = tensor_leaves(baseline(model, solo.args, solo.kwargs).outputs)
    # Outputs may be cast to more bits than they were computed with.
    few_bits = any(map(is_half, (*alone, *(source.value for source in model.program.sources))))
    own = module_leaves(model.module, solo) if few_bits else alone
    true = precise.outputs(solo, own) if own is not alone else None
    for index, (whole, single) in enumerate(zip(outputs, alone, strict=True)):
        if not whole.ndim or whole.shape[0] != batch or not whole.is_floating_point():
            continue
        if single.shape[0] != 1:
            continue  # dimension 0 is as long as the batch, and is another one
        ours = whole[row : row + 1]
        if length is not None:
            if single.ndim < 2 or single.shape[1] != length:
                continue
            ours = ours[:, :length]
        scale = max(largest_difference(ours, zeros_like(ours)), SMALLEST)
        if true is not None:
            allowed = allowed_error(largest_difference(own[index], true[index]), whole.dtype, scale)
            yield largest_difference(ours, true[index]) / scale, allowed / scale
        elif not is_half(whole):
            yield largest_difference(ours, single) / scale, row_tolerance(whole)
