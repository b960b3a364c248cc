"""Cells of a result against the witness: plain full forwards of the original module, with hooks."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from conewise.checks.verify import (
    MULTIPLE,
    NoReferenceError,
    Reference,
    allowed_error,
    reference_of,
)
from conewise.checks.witness import Rerun, Witness
from conewise.errors import SweepError, UnhookedWarning
from conewise.jobs.digests import device_and_dtype
from conewise.program.tensors import (
    Tensor,
    cell_tolerance,
    largest_difference,
    precision_tolerance,
    wants_reference,
)
from conewise.runs.fillings import joined
from conewise.templates import verdict


@dataclass(frozen=True, slots=True)
class CellCheck:
    """Cells of a result against plain full forwards of the original module, with hooks.

    `hooked` cells were run again by the module itself. The sites of the `interpreted` ones lie at no boundary
    of a module, so that the captured operations were all run again, one by one, without an engine: they do
    not show that the program itself is right. `largest_deviation` is from these forwards.

    `relative` has to be at most `tolerance`; both are shares of the metric's largest value. With a
    `reference`, the module in that higher precision, `relative` is the result's distance from it, or from the
    module's own forwards where that is larger, and `own_error` is that of these forwards from the reference;
    else it is the largest deviation. `unchecked` says why there is no reference where there has to be one,
    and is empty otherwise.
    """

    cells: int
    hooked: int
    interpreted: int
    largest_deviation: float
    relative: float
    tolerance: float
    own_error: float | None = None
    reference: str = ""
    unchecked: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing was found to be wrong; `passed` says whether the module itself says so."""
        return self.relative <= self.tolerance and not self.unchecked

    @property
    def excess(self) -> float:
        """How much more was found than is allowed, as a factor; 0 where nothing was found."""
        return self.relative / self.tolerance if self.tolerance else math.inf if self.relative else 0.0

    @property
    def passed(self) -> bool:
        """Whether every cell was run again by the module itself, and was right."""
        return self.ok and not self.interpreted

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return f"{self._verdict()}: largest deviation {self.largest_deviation:.3g}, {self._sizes()}"

    def _verdict(self) -> str:
        alone = "the captured program alone, operation by operation (no module shows the site)"
        with_hooks = f"{self.hooked} with hooks on the module"
        if self.ok and not self.hooked:
            return f"not checked by the module: {self.cells} random cells agree with {alone}"
        word = "passed in part" if self.interpreted else "passed"
        if not self.ok:
            word = "FAILED" if self.excess > 1 else "NOT CHECKED"
        ways = [with_hooks] if self.hooked else []
        ways += [f"{self.interpreted} against {alone}"] if self.interpreted else []
        return f"{word}: {self.cells} random cells against full forwards, {' and '.join(ways)}"

    def _sizes(self) -> str:
        if self.unchecked:
            return f"{self.relative:.2g} of the largest value, which says nothing here: {self.unchecked}"
        if not self.reference:
            return f"{self.relative:.2g} of the largest value (allowed: {self.tolerance:.0e})"
        return (
            f"{self.relative:.2g} of the largest value from the module in {self.reference}, where the "
            f"module's own forwards are {self.own_error:.2g} off (allowed: {self.tolerance:.2g})"
        )

    def __repr__(self) -> str:
        return f"CellCheck {self}"

    def _repr_html_(self) -> str:
        return verdict(self.ok, str(self))


CAN_FAIL = 1e-3
"""Where more than this share of the largest value had to be allowed, a comparison could hardly fail."""

FLOAT32_MULTIPLE = 4
"""How many times the module's own error products in parts may have.

In float32 the errors of a few cells are single draws, of which one may happen to be small.
"""


class Numbers(Protocol):
    """The numbers that are checked: each metric for each cell and for the base, by prompt and on average."""

    @property
    def table(self) -> Tensor:
        """[metric, cell]."""

    @property
    def per_prompt(self) -> Tensor:
        """[metric, cell, prompt]."""

    @property
    def base(self) -> Tensor:
        """[metric]."""

    @property
    def base_per_prompt(self) -> Tensor | None:
        """[metric, prompt]."""


def recheck(result: Numbers, rerun: Rerun, n: int, seed: int, *, is_serial: bool) -> CellCheck:
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
        warnings.warn(
            f"{len(unhooked)} of {len(chosen)} cells were compared with the captured program alone, not with "
            f"the module itself, because no module shows their sites: {shown}.",
            UnhookedWarning,
            stacklevel=5,
        )
    check = CellCheck(len(chosen), len(module.hooked), len(unhooked), 0.0, 0.0, 0.0)
    if is_serial and module.is_exact:
        return _compared(result, module, check, 0.0)
    _, dtype = device_and_dtype(rerun.model.program)
    rounding = precision_tolerance(rerun.precision, cell_tolerance(dtype))
    if rounding <= CAN_FAIL and not wants_reference(rerun.precision):
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


def _compared(result: Numbers, module: Witness, check: CellCheck, tolerance: float) -> CellCheck:
    """How far the result is from full forwards of the module, of the largest value."""
    apart = list(_differences(result, module, module))
    return replace(
        check,
        largest_deviation=max(far for _, far in apart),
        relative=max(far / _scale(result, metric) if far else 0.0 for metric, far in apart),
        tolerance=tolerance,
    )


def _judged(
    result: Numbers, module: Witness, precise: Witness, reference: Reference, check: CellCheck, multiple: int
) -> CellCheck:
    """How far the result is from the reference, and how far the module itself is: of the worst metric."""
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
    """How far the module's own forwards are from the reference.

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


def _largest(result: Numbers, witness: Witness, others: Witness, metric: int) -> float:
    return max(far for number, far in _differences(result, witness, others) if number == metric)


def _differences(result: Numbers, witness: Witness, others: Witness) -> Iterator[tuple[int, float]]:
    """(metric, difference) of each cell and of the base; `others` ran the cells that `witness` did not."""
    for metric in range(len(result.table)):
        for number in others.cells:
            found = joined((witness if number in witness.cells else others).cells[number])[metric]
            yield metric, largest_difference(found, result.per_prompt[metric, number])
            yield metric, largest_difference(found.mean(), result.table[metric, number])
        if result.base_per_prompt is not None and len(witness.base) == len(witness.hooks):
            yield metric, largest_difference(joined(witness.base)[metric], result.base_per_prompt[metric])


def _scale(result: Numbers, metric: int) -> float:
    """The largest value of a metric: of the cells and of the base."""
    values = [*result.per_prompt[metric].reshape(-1).tolist(), float(result.base[metric])]
    return max((abs(value) for value in values if value == value), default=0.0) or 1.0
