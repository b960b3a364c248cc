"""How exactly float32 is multiplied: in float32, or in TF32 where a sweep asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from conewise.errors import Argument, SweepError

TF32 = "tf32"


def expect_precision(precision: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a precision that is not there."""
    if precision is None:
        return
    if precision != TF32:
        raise SweepError(
            f"no precision {precision!r}: there is 'tf32', and None for the model's own. For bfloat16, "
            "load the model with ",
            Argument("dtype", "bfloat16"),
            ".",
        )
    if device.type != "cuda" or dtype != torch.float32:
        raise SweepError(
            f"TF32 is a way of multiplying float32 on a CUDA device, and this model is in {dtype} on "
            f"{device}. Leave ",
            Argument("precision"),
            " out.",
        )


@contextmanager
def multiplying(precision: str | None) -> Iterator[None]:
    """Matrix products of float32 in this precision; the process's own is put back."""
    if precision is None:
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
    """How far a cell may be from a full forward: TF32 keeps 10 bits of a factor."""
    return own if precision is None else max(own, 1e-2)
