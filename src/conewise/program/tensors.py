"""Tensors: how they are computed, copied and compared, and in which precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from conewise.errors import Argument, SweepError

Tensor = torch.Tensor

is_wrapper: Callable[[object], bool] = is_traceable_wrapper_subclass
"""True for a tensor that wraps plain ones, as quantised weights do."""


def computing() -> AbstractContextManager[None]:
    """The context in which a captured graph is computed: no gradients are recorded.

    The caller's inference mode is left: its tensors could not be differentiated later, nor written to.
    """
    return _outside_inference_mode() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


@contextmanager
def recording() -> Iterator[None]:
    """The context in which gradients are computed, whatever the caller switched off; also a decorator."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        yield


def recordable(value: Any) -> Any:
    """The same value, for autograd: a copy of a tensor that was made in inference mode."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def as_constant(value: Any) -> Any:
    """The same value, for autograd: without its gradient where it is a weight, of which there is one."""
    return value.detach() if isinstance(value, Tensor) and value.requires_grad and value.is_leaf else value


def copy_of(value: Tensor) -> Tensor:
    """A copy that shares no memory with `value`, of the same strides."""
    return value.detach().clone()


def inner_tensors(value: Any) -> list[Tensor]:
    """The plain tensors that a tensor wraps, as a quantised weight does; of a plain one, itself."""
    if not is_wrapper(value):
        return [value]
    return [one for name in value.__tensor_flatten__()[0] for one in inner_tensors(getattr(value, name))]


def brought(value: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device. A GPU is not waited for, whatever it is at work on."""
    if device.type != "cuda" or value.device.type != "cpu":
        return value.to(device)
    return value.pin_memory().to(device, non_blocking=True)


def has_nan(value: Tensor) -> bool:
    """True if there is a NaN in it."""
    return bool(torch.isnan(value).any()) if value.is_floating_point() else False


def writes_to(value: object) -> int:
    """The number of writes to a tensor's memory in place; 0 where torch does not count."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return 0
    return value._version


def mean_of(value: Tensor, axes: Sequence[str], shown: Tensor | None = None) -> Tensor:
    """The mean over the batch and the positions, for every element; `axes` are those of `value`.

    `shown` says which entries count, where some are padding. Raises ValueError where there is nothing to take
    a mean of.
    """
    over = [dim for dim, axis in enumerate(axes) if axis in {"batch", "pos"}]
    if not over or not (value.is_floating_point() or value.is_complex()):
        raise ValueError(f"{value.dtype} with the axes {', '.join(axes)}")
    if shown is None:
        return value.mean(dim=over, keepdim=True).expand_as(value)
    total, count = sum_of(value, over, shown)
    return (total / count.clamp(min=1)).to(value.dtype).expand_as(value)


def sum_of(value: Tensor, dims: list[int], shown: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over dimensions of the entries that are shown, in float64, and how many these are."""
    wide = torch.promote_types(value.dtype, torch.float64)
    total = torch.where(shown, value, 0).sum(dims, keepdim=True, dtype=wide)
    sizes = [value.shape[dim] if dim in dims else shown.shape[dim] for dim in range(value.ndim)]
    return total, shown.expand(sizes).sum(dims, keepdim=True)


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Max |one − other|, where equal infinities and NaN on both sides differ by 0, NaN on one by ∞."""
    if one.shape != other.shape:
        return math.inf
    if one.numel() == 0:
        return 0.0
    left, right = one.to(torch.float64), other.to(torch.float64)
    apart = (left - right).abs()
    apart[(left == right) | (left.isnan() & right.isnan())] = 0.0
    return float(apart.nan_to_num(nan=math.inf).max())


def is_half(value: Tensor) -> bool:
    """True if the numbers have so few bits that rounding and errors cannot be distinguished by their size."""
    return value.is_floating_point() and torch.finfo(value.dtype).bits <= 16


def row_tolerance(value: Tensor) -> float:
    """The error allowed in a row of a batch against the row alone: 100 machine epsilons of the dtype.

    Batched kernels sum in another order; the deviation grows with depth, not with the batch. In half
    precision that would allow anything; see `is_half`.
    """
    return 100 * torch.finfo(value.dtype).eps


def cell_tolerance(dtype: torch.dtype) -> float:
    """The error allowed in a cell of a wavefront, relative to the metric's largest value.

    Batched kernels sum in another order, so that every operation may round otherwise, and a metric such as
    a difference of logits is smaller than what it is made of: 840 machine epsilons, which is 1e-4 in
    float32. In half precision that would allow anything; see `is_half`.
    """
    return 840 * torch.finfo(dtype).eps


TF32 = "tf32"
SPLIT = "split"
"""Each factor in three bfloat16 parts; see `split_products`."""

_NAMES = {TF32: "TF32 is a way", SPLIT: "Splitting into bfloat16 parts is a way"}


def expect_precision(precision: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a precision that is not there."""
    if precision is None:
        return
    if precision not in _NAMES:
        raise SweepError(
            f"no precision {precision!r}: there are 'tf32', 'split', and None for the model's own. For "
            "bfloat16, load the model with ",
            Argument("dtype", "bfloat16"),
            ".",
        )
    if device.type != "cuda" or dtype != torch.float32:
        raise SweepError(
            f"{_NAMES[precision]} of multiplying float32 on a CUDA device, and this model is in {dtype} on "
            f"{device}. Leave ",
            Argument("precision", precision),
            " out.",
        )
    if precision == SPLIT and torch.cuda.get_device_capability(device) < (8, 0):
        raise SweepError(
            f"{torch.cuda.get_device_name(device)} has no fast products of bfloat16, which those of float32 "
            "would be split into. Leave ",
            Argument("precision", precision),
            " out.",
        )


@contextmanager
def multiplying(precision: str | None) -> Iterator[None]:
    """Matrix products of float32 in this precision; the process's own is put back."""
    if precision != TF32:
        yield
        return
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        yield
    finally:
        try:
            torch.set_float32_matmul_precision(before)
        except BaseException:  # interrupted: once more, for all that follows would be rounded otherwise
            torch.set_float32_matmul_precision(before)
            raise


@contextmanager
def without_cudnn_attention(device: torch.device) -> Iterator[None]:
    """Attention by torch's own kernels; what the process had is put back.

    cuDNN plans anew for each number of rows, some 20 ms each time, and a pass has another in each layer.
    """
    is_on = device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    if not is_on:
        yield
        return
    try:
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled=True)
