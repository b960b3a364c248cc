"""Pickles what travels to a worker: functions by their code, models and runs by name, tensors beside it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from conewise.errors import FleetError
from conewise.extras import needs
from conewise.runs.captured import Captured
from conewise.runs.reading import Reading
from conewise.runs.run import InputRun

with needs("workers"):
    import cloudpickle

Tensor = torch.Tensor

ALIGNED = 64
"""Bytes at whose multiples torch lets tensors of a CPU begin."""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes to `body`; `arrays` are the tensors, as arrays of bytes."""

    def __init__(self, body: io.BytesIO, model: Captured | None) -> None:
        super().__init__(body, protocol=5)
        self._model = model
        self.arrays: list[NDArray[np.uint8]] = []
        self._known: dict[int, tuple[Any, int]] = {}

    def persistent_id(self, given: Any) -> Any:
        """Return how a model, a run or a tensor is referred to; None for what is pickled."""
        if isinstance(given, Captured):
            if given is not self._model:
                raise FleetError(
                    f"this sweep reads another captured model ({given.name}), which workers do not have."
                )
            return ("model",)
        if isinstance(given, Reading):
            edits = [(edit.place, edit.part) for edit in given.edits]
            return ("run", self._number(given), isinstance(given, InputRun), dict(given.inputs), edits)
        if type(given) in {torch.Tensor, torch.nn.Parameter}:
            return ("tensor", *self._tensor(given))
        return None

    def reducer_override(self, given: Any) -> Any:
        """Return how a value is made again that has no way of its own."""
        if isinstance(given, MappingProxyType):
            return _read_only, (dict(given),)
        return super().reducer_override(given)

    def _number(self, given: Any) -> int:
        return self._known.setdefault(id(given), (given, len(self._known)))[1]

    def _tensor(self, given: Tensor) -> tuple[Any, ...]:
        is_new = id(given) not in self._known
        number = self._number(given)
        value = given.detach()
        order = _order(value)
        if is_new:
            flat = value.permute(order).cpu().contiguous().reshape(-1)
            self.arrays.append(flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8))
        at = len(self.arrays) - 1 if is_new else None
        kind = "parameter" if isinstance(given, torch.nn.Parameter) else "tensor"
        needs = given.requires_grad
        offset = value.data_ptr() % ALIGNED if value.device.type == "cpu" else 0
        layout = order, offset if offset % value.dtype.itemsize == 0 else 0
        return number, at, str(value.dtype), tuple(value.shape), value.device.type, kind, needs, layout


def _order(value: Tensor) -> tuple[int, ...]:
    """The dimensions in the order in which they lie in memory; as they are where there are gaps."""
    plain, strides = tuple(range(value.ndim)), value.stride()
    order = tuple(sorted(plain, key=lambda dim: -strides[dim]))
    return order if value.permute(order).is_contiguous() else plain


def _read_only(given: dict[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(given)
