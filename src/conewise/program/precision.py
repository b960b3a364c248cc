"""How exactly float32 is multiplied: in float32; in TF32 or in bfloat16 parts where a sweep asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from conewise.errors import Argument, SweepError

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


def precision_tolerance(precision: str | None, own: float) -> float:
    """How far a cell may be from a full forward: TF32 keeps 10 bits of a factor, parts keep all."""
    return max(own, 1e-2) if precision == TF32 else own


def wants_reference(precision: str | None) -> bool:
    """Whether cells are held against the module in a higher precision, however small the tolerance is."""
    return precision == SPLIT
