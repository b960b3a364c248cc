"""How exactly float32 is multiplied: in float32, or in TF32 where a sweep asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from conewise.errors import Argument, SweepError

TF32 = "tf32"


def expect_precision(asked: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a precision that is not there."""
    if asked is None:
        return
    if asked != TF32:
        raise SweepError(
            f"no precision {asked!r}: there is 'tf32', and None for the model's own. For bfloat16, load the "
            "model with ",
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
def multiplying(asked: str | None) -> Iterator[None]:
    """Matrix products of float32 in the precision that was asked for; the process's setting is put back."""
    if asked is None:
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


def precision_tolerance(asked: str | None, own: float) -> float:
    """How far a cell may lie from a full forward: TF32 keeps 10 bits of a factor."""
    return own if asked is None else max(own, 1e-2)
