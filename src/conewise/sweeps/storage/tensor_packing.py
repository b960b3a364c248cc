"""Numbers as bytes and back, bit for bit: float64, little-endian, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def packed(value: torch.Tensor) -> bytes:
    """The numbers of a float64 tensor. Raises TypeError for another dtype: nothing is rounded."""
    if value.dtype != torch.float64:
        raise TypeError(f"only float64 is packed, and this is {value.dtype}.")
    return value.detach().cpu().contiguous().numpy().astype("<f8", copy=False).tobytes()


def unpacked(data: bytes, shape: Sequence[int]) -> torch.Tensor:
    """A float64 tensor of `shape`. Raises ValueError when the bytes are more or fewer than it takes."""
    return torch.from_numpy(np.frombuffer(data, "<f8").reshape(tuple(shape)).astype(np.float64))


def from_rows(rows: Sequence[Sequence[float]] | Sequence[float]) -> torch.Tensor:
    """A float64 tensor of nested lists."""
    return torch.tensor(rows, dtype=torch.float64)
