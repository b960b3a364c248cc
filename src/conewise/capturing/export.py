"""From a module and an example to the program that `torch.export` sees.

The batch may vary, and the number of positions too where the module allows it. The
module is read, never written: no hook, buffer or attribute is added to it.
"""

from __future__ import annotations

import inspect
import io
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_map

from conewise.capturing.devices import expect_one_device, expect_plain, expect_values
from conewise.capturing.lowering import lower
from conewise.capturing.sampling import tensor_leaves
from conewise.errors import CaptureError, ControlFlowError
from conewise.program.calls import (
    Call,
    Signature,
    hugging_face_defaults,
    normal_call,
)
from conewise.program.records import Input, Program
from conewise.program.untraced import Untraced, traced, untraced
from conewise.structure.dimensions import find_dimensions
from conewise.structure.wiring.ports import ModulePaths


@dataclass(frozen=True)
class Exported:
    """A captured module: its program, and how to call it.

    `fixed` says why the batch cannot vary, and is empty when it can. `reasons` say where the module
    itself may compute otherwise than the program, as far as that was seen; see `untraced`.
    """

    program: Program
    signature: Signature
    fixed: str
    reasons: tuple[str, ...] = ()


def unwrapped(module: Any) -> Any:
    """The module inside `DataParallel`, `DistributedDataParallel` and `torch.compile`; else what was given.

    Their weights are its own, and what they compute is what it computes.
    """
    while True:
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        elif type(module).__name__ == "OptimizedModule" and "_orig_mod" in getattr(module, "_modules", {}):
            module = module._modules["_orig_mod"]
        else:
            return module


@contextmanager
def eager(module: nn.Module) -> Iterator[None]:
    """Let compiled parts of a module run as they were written: compiled code does not see hooks."""
    is_compiled = any(
        vars(part).get("_compiled_call_impl") is not None or type(part).__name__ == "OptimizedModule"
        for part in module.modules()
    )
    with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
        yield


def export(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    last_position_only: bool = False,
    batch_dim: int | None = None,
) -> Exported:
    """Capture `module` as it computes for an example like `args` and `kwargs`.

    `batch_dim` is the dimension of the inputs along which prompts lie; None leaves that to be found.
    Raises ControlFlowError where what is computed depends on the values of tensors,
    RandomnessError where random numbers are drawn (dropout in training mode), and CaptureError
    with torch's reason otherwise.
    """
    expect_plain(module)
    expect_values(module, tensor_leaves((tuple(args), dict(kwargs or {}))))
    forward = inspect.signature(module.forward)
    defaults = hugging_face_defaults(module, forward, last_position_only=last_position_only)
    call = distinct(normal_call(forward, args, {**defaults, **(kwargs or {})}))
    name = type(module).__name__
    reasons: list[str] = []
    paths = ModulePaths(module)
    for example, shapes, is_shared, keeps_open in _attempts(forward, call, batch_dim):
        for answering in (untraced, traced):
            answers = Untraced()
            try:
                with answering(answers), paths.counting():
                    exported = _torch_export(module, example, shapes)
            except Exception as error:  # torch.export raises whatever the module raises
                if answers.used:
                    continue  # once more, as it is when it is traced
                if reason := _data_dependence(error):
                    raise ControlFlowError(name, reason) from error
                reasons.append(f"{type(error).__name__}: {error}")
                failure = error
                break
            program = lower(exported, example, name, paths)
            if (is_shared and _takes_two_for_one(program)) or (keeps_open and not _is_open(program)):
                break
            given = {leaf: value for leaf, value in example.leaves()[0] if isinstance(value, torch.Tensor)}
            program = replace(program, dimensions=find_dimensions(program, given, module, batch_dim))
            fixed = _why_fixed(program, reasons)
            return Exported(program, Signature(forward, call), fixed, answers.reasons)
    expect_one_device(module, tensor_leaves((call.args, dict(call.kwargs))), failure)
    raise CaptureError(
        f"torch.export cannot capture {name}. It says: {reasons[-1]}\n"
        "Check that `module(*args, **kwargs)` runs with this example; if it does, capture the "
        "submodule that torch.export accepts, or rewrite what it names."
    ) from failure


def _why_fixed(program: Program, reasons: Sequence[str]) -> str:
    """Why the batch cannot vary; empty when it can."""
    dimensions = program.dimensions
    if dimensions.batch:
        return ""
    if dimensions.doubt:
        return dimensions.doubt
    if dimensions.is_unbatched:
        return "the inputs are one prompt, without a batch"
    return reasons[-1] if reasons else "the module's own computation fixes the batch of its inputs"


def _attempts(
    forward: inspect.Signature, call: Call, batch_dim: int | None = None
) -> Iterator[tuple[Call, Any, bool, bool]]:
    """Examples with their dynamic dimensions, the most general first; None is fully static.

    The third says whether all leading sizes that are equal in the example are taken for one; the fourth that
    the attempt is to be left for the next where a size was fixed on the way.
    """
    tensors = [leaf for _, leaf in call.leaves()[0] if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if tensors:
        # An input of one dimension beside others may be positions: its size need not be the batch's. Nor need
        # that of a square one, which may be a mask.
        wide = [tensor for tensor in tensors if tensor.ndim > 1] or tensors
        wide = [tensor for tensor in wide if not _is_square(tensor)] or wide
        is_one = all(tensor.shape[0] == 1 for tensor in wide)
        batch, rank = max(2, wide[0].shape[0]), min(tensor.ndim for tensor in wide)
        # Some versions of torch refuse a batch of any size where they find out by themselves that it may
        # vary. A fixed size of 1 beside it would be taken for what it is not.
        ways = [
            (Dim("batch"), True),
            (Dim.AUTO, True),
            (Dim("batch"), False),
            (Dim.AUTO, True),
            (Dim.AUTO, False),
        ]
        for number, (leading, sequence) in enumerate(ways):
            grown = _without_ones(call, is_one, sequence)
            vary = _Varying(batch, rank, leading, sequence, batch_dim)
            yield grown, vary.shapes(forward, grown), leading is not Dim.AUTO, number == 1
    yield call, None, False, False


def _is_open(program: Program) -> bool:
    """Whether no leading size of an input was fixed, nor one that looks like positions."""
    return all(
        not isinstance(leaf.shape[dim], int)
        for leaf in program.inputs
        for dim in range(min(len(leaf.shape), 2 if _looks_like_sequence(leaf) else 1))
    )


def _looks_like_sequence(leaf: Input) -> bool:
    return len(leaf.shape) == (3 if leaf.dtype.is_floating_point else 2)


def _is_square(tensor: torch.Tensor) -> bool:
    return tensor.ndim > 1 and tensor.shape[-2] == tensor.shape[-1]


def distinct(call: Call) -> Call:
    """The example with a copy of every tensor: `torch.export` takes one tensor, given twice, for one."""
    args, kwargs = tree_map(
        lambda value: value.detach().clone() if isinstance(value, torch.Tensor) else value,
        (call.args, dict(call.kwargs)),
    )
    return Call(args, kwargs)


def _without_ones(call: Call, repeat_batch: bool, repeat_sequence: bool) -> Call:
    """The example with dimensions of size 1 repeated: `torch.export` would take 1 for a constant."""

    def repeat(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        if repeat_batch and value.shape[0] == 1:
            value = value.repeat(2, *[1] * (value.ndim - 1))
        if repeat_sequence and _has_sequence(value) and value.shape[1] == 1:
            value = value.repeat(1, 2, *[1] * (value.ndim - 2))
        return value

    args, kwargs = tree_map(repeat, (call.args, dict(call.kwargs)))
    return Call(args, kwargs)


def _has_sequence(tensor: torch.Tensor) -> bool:
    """Whether dimension 1 looks like positions: token ids and masks, or embeddings."""
    if tensor.is_floating_point():
        return tensor.ndim == 3
    return tensor.ndim == 2


@dataclass(frozen=True, slots=True)
class _Varying:
    """Which sizes may vary: the `batch` that leads inputs of `rank` dimensions or more, and lengths.

    What else leads an input may vary where the module allows it, and so may dimension `given`.
    """

    batch: int
    rank: int
    leading: Any
    sequence: bool
    given: int | None

    def shapes(self, forward: inspect.Signature, call: Call) -> Any:
        """As `torch.export` takes them, by argument."""
        bound = forward.bind(*call.args, **call.kwargs)
        return tree_map(self._dims, dict(bound.arguments))

    def _dims(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        dynamic: dict[int, Any] = {}
        if value.ndim >= self.rank and value.shape[0] == self.batch:
            dynamic[0] = self.leading
        elif value.ndim:
            dynamic[0] = Dim.AUTO
        if self.sequence and _has_sequence(value):
            dynamic[1] = Dim.AUTO
        if isinstance(self.given, int) and 0 < self.given < value.ndim:
            dynamic[self.given] = Dim.AUTO
        return dynamic


def _takes_two_for_one(program: Program) -> bool:
    """Whether each size that leads an input is also another dimension of one.

    With as many prompts as positions in the example, a mask [pos, pos] makes one size of the two.
    """
    varying = [[str(size) for size in leaf.shape if not isinstance(size, int)] for leaf in program.inputs]
    twice = {size for sizes in varying for size in sizes if sizes.count(size) > 1}
    leading = {str(leaf.shape[0]) for leaf in program.inputs if len(leaf.shape) > 1}
    return bool(leading) and leading <= twice


def _torch_export(module: nn.Module, call: Call, shapes: Any) -> ExportedProgram:
    with torch.no_grad(), _quiet():
        return torch.export.export(module, call.args, dict(call.kwargs), dynamic_shapes=shapes, strict=False)


def _data_dependence(error: BaseException) -> str:
    """Torch's reason, in a line or two, when `error` speaks of data-dependent control flow."""
    seen: BaseException | None = error
    while seen is not None:
        kind, text = type(seen).__name__, str(seen)
        if "DataDependent" in kind or "data-dependent" in text or "Could not guard on" in text:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return " ".join(lines[:2])
        seen = seen.__cause__ or seen.__context__
    return ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch logs and prints about an attempt that fails out of the user's terminal."""
    logger = logging.getLogger("torch")
    level = logger.level
    printed = io.StringIO()
    try:
        logger.setLevel(logging.CRITICAL)
        with redirect_stderr(printed):
            yield
        if sys.stderr is not None:
            sys.stderr.write(printed.getvalue())
    finally:
        try:
            logger.setLevel(level)
        except BaseException:  # interrupted: once more, for the user's own logs would be gone
            logger.setLevel(level)
            raise
