"""Which kernels a pass is computed with, where torch has several for an operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from conewise.program.precision import multiplying


@contextmanager
def kernels_of_passes(device: torch.device, precision: str | None) -> Iterator[None]:
    """Products in a precision; attention without cuDNN. What the process had is put back.

    cuDNN plans anew for each number of rows, some 20 ms each time, and a pass has another in each layer.
    """
    with multiplying(precision):
        is_on = device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        if not is_on:
            yield
            return
        try:
            torch.backends.cuda.enable_cudnn_sdp(enabled=False)
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(enabled=True)
