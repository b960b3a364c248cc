"""What travels to a worker: anything that a sweep was given, but never a captured model or its values.

A captured model stands in it as a name, and a run as its inputs and its patches: the worker has its own
model, and runs them again. Tensors travel beside the rest, once each.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from conewise.errors import FleetError
from conewise.runs.baseline import baseline
from conewise.runs.captured import Captured
from conewise.runs.input_run import InputRun
from conewise.runs.reading import Reading

Tensor = torch.Tensor


class Payload:
    """Bytes that refer to tensors, as arrays of bytes beside them."""

    __slots__ = ("arrays", "body")

    def __init__(self, body: bytes, arrays: Sequence[NDArray[np.uint8]]) -> None:
        self.body, self.arrays = body, list(arrays)


def packed(given: Any, model: Captured | None = None) -> Payload:
    """What was given, to be sent. Raises FleetError where something of it cannot travel."""
    from conewise.fleets.pickler import Pickler  # noqa: PLC0415  # needs cloudpickle

    body = io.BytesIO()
    pickler = Pickler(body, model)
    try:
        pickler.dump(given)
    except FleetError:
        raise
    except Exception as error:
        raise FleetError(
            f"a worker cannot be sent what this sweep was given ({type(error).__name__}: {error}). Metrics, "
            "interventions and modules have to be such that they can be pickled: without open files, locks "
            "or generators."
        ) from error
    return Payload(body.getvalue(), pickler.arrays)


def unpacked(payload: Payload, model: Captured | None = None, device: torch.device | None = None) -> Any:
    """What was sent. `model` stands where the sender's stood; tensors of a GPU come to `device`.

    This runs what the sender wrote: a worker takes payloads from its own driver alone.
    """
    return _Unpickler(payload, model, device).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, payload: Payload, model: Captured | None, device: torch.device | None) -> None:
        super().__init__(io.BytesIO(payload.body))
        self._arrays, self._model, self._device = payload.arrays, model, device
        self._known: dict[int, Any] = {}

    def persistent_load(self, given: Any) -> Any:
        kind, *rest = given
        if kind == "model":
            return self._model
        number = rest[0]
        if number not in self._known:
            self._known[number] = self._tensor(*rest[1:]) if kind == "tensor" else self._run(*rest[1:])
        return self._known[number]

    def _tensor(
        self,
        at: int,
        dtype: str,
        shape: Sequence[int],
        device: str,
        kind: str,
        needs_gradient: bool,
        layout: tuple[Sequence[int], int],
    ) -> Tensor:
        number, (order, offset) = getattr(torch, dtype.removeprefix("torch.")), layout
        array = self._arrays[at]
        # A copy: what was sent may be shared and read-only. It lies in memory as the sender's does, since how
        # products round depends on that.
        room = torch.empty(offset + array.nbytes, dtype=torch.uint8)[offset:]
        room.numpy()[:] = array
        sizes = [shape[dim] for dim in order]
        value = room.view(number).reshape(sizes) if array.nbytes else torch.empty(sizes, dtype=number)
        value = value.permute([list(order).index(dim) for dim in range(len(order))])
        if device != "cpu":
            value = value.to(self._device or torch.device(device))
        if kind == "parameter":
            return torch.nn.Parameter(value, requires_grad=needs_gradient)
        return value.requires_grad_() if needs_gradient else value

    def _run(self, is_input: bool, inputs: Mapping[str, Tensor], edits: Sequence[tuple[Any, Any]]) -> Reading:
        assert self._model is not None
        if is_input and not edits:
            return InputRun(self._model, dict(inputs))
        run: Any = baseline(self._model, (), inputs)
        if not edits:
            return run  # type: ignore[no-any-return]
        world = run.fork()
        for place, part in edits:
            world.patch(place, part)
        return world  # type: ignore[no-any-return]
