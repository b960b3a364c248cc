"""Which kernels of torch are used, where it has several for an operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
