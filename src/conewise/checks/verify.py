"""Verification: the captured graph against the module itself, on random inputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from conewise.anatomy.wiring import ModulePaths
from conewise.errors import InputMismatchError
from conewise.jobs.digests import memory_free
from conewise.program.calls import Call
from conewise.program.export import Sampler, module_leaves, tensor_leaves
from conewise.program.streaming import Streamed, streamed_parameter, streams_of
from conewise.program.tensors import (
    Tensor,
    is_half,
    largest_difference,
    row_tolerance,
)
from conewise.program.walk import bitwise_same
from conewise.runs.captured import Captured
from conewise.runs.run import baseline
from conewise.templates import heading, verdict

MULTIPLE = 2
"""The error that is allowed, as a factor of the module's own: both round, each in its own way."""

_HIGHER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


class NoReferenceError(Exception):
    """There is no reference; the message says why."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A copy of a module that computes in `dtype` on `device`; the module itself computes in `own`.

    Without a device, it computes where the module does: on several.
    """

    module: nn.Module
    own: torch.dtype
    dtype: torch.dtype
    device: torch.device | None

    @property
    def name(self) -> str:
        """The precision, in a word."""
        return str(self.dtype).removeprefix("torch.")

    def lifted(self, value: Any) -> Any:
        """A tensor as the copy takes it: on its device, if it has one, numbers in its precision."""
        return _lifted(value, self.dtype, self.device)

    def inputs(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a run as the copy takes them."""
        return {name: self.lifted(value) for name, value in given.items()}

    def shaken(self, outputs: Any, own: Any, draws: int = 8) -> Iterator[Any]:
        """Yield the copy's outputs with random errors as large as those of the module's own outputs."""
        precise, spec = tree_flatten(outputs)
        theirs = tree_flatten(own)[0]
        where = {one.device for one in precise if _is_number(one)}
        generators = {device: torch.Generator(device).manual_seed(0) for device in where}
        for _ in range(draws):
            made = [
                one + _deviation(one, self.lifted(other)) * _noise(one, generators)
                if _is_number(one)
                else one
                for one, other in zip(precise, theirs, strict=True)
            ]
            yield tree_unflatten(made, spec)


def reference_of(module: nn.Module, own: torch.dtype) -> Reference:
    """A copy of a module that computes in `own`, in the next higher precision.

    It lies on the module's device, or in main memory where it does not fit there. Of a module that is spread
    over several devices, each tensor's copy lies where the tensor does. Raises NoReferenceError.
    """
    dtype = _HIGHER.get(own)
    if dtype is None:
        raise NoReferenceError(f"there is no precision above {str(own).removeprefix('torch.')}")
    tensors = [*module.parameters(), *module.buffers()]
    streams = {one: one.lifted(dtype) for one in streams_of(tensors)}
    needed = {one.device: one.ring.size for one in streams.values()}
    for one in tensors:
        taken = 0 if isinstance(one, Streamed) else one.numel() * max(one.itemsize, dtype.itemsize)
        needed[one.device] = needed.get(one.device, 0) + taken
    if len(needed) > 1:
        device = None
        for there, taken in needed.items():
            _with_room(taken, (there,), dtype)
    else:
        home = next(iter(needed), torch.device("cpu"))
        devices = (home,) if streams else (home, torch.device("cpu"))
        device = _with_room(needed.get(home, 0), devices, dtype)
    try:
        with torch.no_grad():
            # What is in `memo` is taken for a copy that was made already.
            memo: dict[int, Any] = {
                id(one): streamed_parameter(streams[one.stream], one.number)
                if isinstance(one, Streamed)
                else _copied(one, dtype, device)
                for one in tensors
            }
            made = copy.deepcopy(module, memo)
            made = made if device is None or streams else made.to(device)
    except Exception as error:  # a module copies itself as it likes
        raise NoReferenceError(f"the module cannot be copied ({type(error).__name__}: {error})") from error
    return Reference(made, own, dtype, device)


def allowed_error(own_error: float, own: torch.dtype, scale: float, multiple: int = MULTIPLE) -> float:
    """Return the distance from the reference that is allowed, where the module itself is `own_error` off.

    The second term is for values that the module happens to hit: half a machine epsilon of the largest value.
    """
    return multiple * own_error + torch.finfo(own).eps / 2 * scale


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _deviation(one: Tensor, other: Tensor) -> Tensor:
    """The usual difference of two tensors, over all of their numbers."""
    return (one - other).square().nanmean().sqrt().nan_to_num()


def _noise(like: Tensor, generators: Mapping[torch.device, torch.Generator]) -> Tensor:
    device = like.device
    return torch.randn(like.shape, generator=generators[device], device=device, dtype=like.dtype)


def _with_room(needed: int, devices: tuple[torch.device, ...], dtype: torch.dtype) -> torch.device:
    """The first of some devices that has room for the copy and some more."""
    free = {one: memory_free(one) for one in devices}
    for one, there in free.items():
        if there is None or 1.1 * needed <= there:
            return one
    found = " and ".join(f"{(there or 0) / 1e9:.1f} GB on {one}" for one, there in free.items())
    name = str(dtype).removeprefix("torch.")
    raise NoReferenceError(f"a copy in {name} takes {needed / 1e9:.1f} GB, and there are {found} free")


def _copied(tensor: Tensor, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    made = _lifted(tensor.detach(), dtype, device)
    made = made.clone() if made.data_ptr() == tensor.data_ptr() else made
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _lifted(value: Any, dtype: torch.dtype, device: torch.device | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    is_lower = value.is_floating_point() and torch.finfo(value.dtype).bits < torch.finfo(dtype).bits
    return value.to(device or value.device, dtype if is_lower else value.dtype)


FIXED_LENGTH = "the sequence length is fixed in this capture"
SMALLEST = 1e-30
"""Stands for a difference that rounds to nothing, and keeps a quotient finite."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a comparison of the graph with its module.

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
        """True if all that was checked held."""
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
        """Return its outputs for a call, where the module itself returns something `like` this."""
        if self.missing:
            return None
        try:
            if self._reference is None:
                own = next((one.dtype for one in like if one.is_floating_point()), None)
                if own is None:
                    raise NoReferenceError("no output is of floating point")
                self._reference = reference_of(self._model.module, own)
            lifted = self._reference.lifted
            found = module_leaves(
                self._reference.module, self._model.program, call.mapped(lambda _, value: lifted(value))
            )
        except NoReferenceError as error:
            self.missing = str(error)
            return None
        except Exception as error:  # noqa: BLE001  # a module in another precision raises whatever it likes
            self.missing = f"in a higher precision the module raises {type(error).__name__}: {error}"
            return None
        return [one.to(other.device) for one, other in zip(found, like, strict=True)]


def verify(model: Captured, *, seed: int, n: int) -> Verification:
    """Run the graph and the module on random inputs of several sizes, and compare all outputs."""
    sampler = Sampler(model.signature, model.program, model.module)
    sizes: list[tuple[int | None, int | None]] = [(None, None)] * n
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
                module_leaves(model.module, model.program, call)
            unlike += paths.unlike(model.program.ports)
        ours, theirs = tensor_leaves(run.outputs), module_leaves(model.module, model.program, call)
        outputs = len(theirs)
        if len(ours) != len(theirs):
            differences.append(math.inf)
        elif not all(map(bitwise_same, ours, theirs)):
            differences += [
                max(largest_difference(one, other), SMALLEST)
                for one, other in zip(ours, theirs, strict=True)
                if not bitwise_same(one, other)
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
    """Yield the distance of each output of the graph from the reference, as a share of what is allowed.

    Without one, which float64 has not, 100 machine epsilons of the largest output are allowed.
    """
    for index, (one, own) in enumerate(zip(ours, theirs, strict=True)):
        if bitwise_same(one, own):
            continue
        if not own.is_floating_point() or (precise is None and own.dtype.itemsize < 8):
            yield math.inf
            continue
        true = own if precise is None else precise[index]
        scale = max(largest_difference(true, torch.zeros_like(true)), SMALLEST)
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
    """Yield the distance of each output's row from the row alone, relative to the largest; its tolerance."""
    solo, length = sampler.alone(call, row)
    alone = tensor_leaves(baseline(model, solo.args, solo.kwargs).outputs)
    # Outputs may be cast to more bits than they were computed with.
    few_bits = any(map(is_half, (*alone, *(source.value for source in model.program.sources))))
    own = module_leaves(model.module, model.program, solo) if few_bits else alone
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
        scale = max(largest_difference(ours, torch.zeros_like(ours)), SMALLEST)
        if true is not None:
            allowed = allowed_error(largest_difference(own[index], true[index]), whole.dtype, scale)
            yield largest_difference(ours, true[index]) / scale, allowed / scale
        elif not is_half(whole):
            yield largest_difference(ours, single) / scale, row_tolerance(whole)
