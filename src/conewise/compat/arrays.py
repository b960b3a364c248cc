"""Anything with numbers as a numpy array, for plots."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def to_numpy(tensor: Any) -> Any:
    """A tensor, a list, a tuple, a number or an array as a numpy array."""
    if isinstance(tensor, torch.Tensor):
        plain = tensor.detach().cpu()
        return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    if isinstance(tensor, np.ndarray | list | tuple | int | float | bool):
        return np.asarray(tensor)
    raise ValueError(f"expected a tensor, a list, a number or an array, and not {type(tensor).__name__}.")
