"""Slices as TransformerLens writes them, and anything with numbers as an array."""

from __future__ import annotations

import operator
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


Tensor = torch.Tensor


class Slice:
    """Which entries along one dimension; a number drops the dimension.

    A tuple is the arguments of Python's `slice`: (5,) is :5, (1, 5) is 1:5. A list, an array or a tensor of
    numbers (or of booleans) takes these entries. None takes all.
    """

    def __init__(self, input_slice: Any = None) -> None:
        self.slice, self.mode = _index(input_slice)

    @classmethod
    def unwrap(cls, slice_input: Any) -> Slice:
        """A slice of what was given; a number becomes a list of one, so that the dimension stays."""
        if isinstance(slice_input, Slice):
            return slice_input
        made = cls(slice_input)
        return cls([made.slice]) if made.mode == "int" else made

    def apply(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """These entries of a tensor, along one of its dimensions."""
        whole: list[Any] = [slice(None)] * tensor.ndim
        whole[dim] = self.slice
        return tensor[tuple(whole)]

    def indices(self, max_ctx: int | None = None) -> Any:
        """The numbers of the entries, along a dimension of this length."""
        if self.mode == "int":
            return torch.tensor([self.slice]).numpy()
        if max_ctx is None:
            raise ValueError("max_ctx is needed: which entries these are depends on how many there are.")
        return torch.arange(max_ctx)[self.slice].numpy()

    def __repr__(self) -> str:
        return f"Slice: {self.slice} Mode: {self.mode}"


def _index(given: Any) -> tuple[Any, str]:
    if given is None:
        return slice(None), "identity"
    if isinstance(given, Slice):
        return given.slice, given.mode
    if isinstance(given, slice):
        return given, "slice"
    if isinstance(given, tuple):
        return slice(*given), "slice"
    if not isinstance(given, bool) and hasattr(given, "__index__") and getattr(given, "ndim", 0) == 0:
        return operator.index(given), "int"
    if isinstance(given, list) or hasattr(given, "__array__"):
        return torch.as_tensor(given), "array"
    raise ValueError(
        f"a slice is a number, a tuple (start, stop), a list of numbers or None, and {given!r} is none of "
        "these."
    )
