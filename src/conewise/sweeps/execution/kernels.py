"""How the operations of a pass are computed, where torch has several ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from conewise.program.kernels import without_cudnn_attention
from conewise.program.precision import multiplying


@contextmanager
def kernels_of_passes(device: torch.device, precision: str | None) -> Iterator[None]:
    """Products in a precision, attention without cuDNN."""
    with multiplying(precision), without_cudnn_attention(device):
        yield
