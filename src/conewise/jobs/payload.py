"""Payloads for workers: functions by their code, models by recipe, tensors beside them."""

from __future__ import annotations

import hashlib
import io
import pickle
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from conewise.errors import FleetError
from conewise.jobs.digests import fingerprint, program_digest
from conewise.runs.captured import Captured
from conewise.runs.reading import Reading
from conewise.runs.run import InputRun, baseline
from conewise.runs.splicing import Held

Tensor = torch.Tensor


class Payload:
    """Bytes that refer to tensors, as arrays of bytes beside them."""

    __slots__ = ("arrays", "body")

    def __init__(self, body: bytes, arrays: Sequence[NDArray[np.uint8]]) -> None:
        self.body, self.arrays = body, list(arrays)


def packed(given: Any, model: Captured | None = None) -> Payload:
    """Pickle what was given, to be sent. Raises FleetError where something of it cannot travel."""
    from conewise.jobs.pickler import Pickler  # noqa: PLC0415  # needs cloudpickle

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
    """Unpickle what was sent. `model` stands where the sender's stood; tensors of a GPU come to `device`.

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


@dataclass(frozen=True, slots=True)
class Recipe:
    """A module, or the name that it is loaded by, with the call that it is captured by.

    `steps` are those of a surgery that is made then, one behind the other.
    `program` and `weights` are those of the driver's model: a worker whose model has others is refused.
    """

    name: str
    call: Payload
    program: str
    weights: str
    module: Payload | None = None
    source: str | None = None
    how: Mapping[str, Any] = field(default_factory=dict)
    steps: Payload | None = None


def recipe_of(model: Captured, source: str | None = None, **how: Any) -> Recipe:
    """The recipe of a model; with `source`, a folder or a name, workers load the weights from there.

    `how` is what `cw.load` was given beside the name.
    """
    host, steps = model, list[Any]()
    while host.operated_from is not None:
        host, step = host.operated_from
        steps.insert(0, step)
    example = model.signature.example
    # The class goes by its name: whoever captures stands above this room.
    call = packed((type(model), tuple(example.args), dict(example.kwargs), model._batch_dim))
    module = None
    if source is None:
        is_training = host.module.training
        module = packed((host.module, is_training))
    return Recipe(
        model.name,
        call,
        program_digest(model.program),
        fingerprint(model.module),
        module,
        source,
        how,
        packed(steps) if steps else None,
    )


def prepared(recipe: Recipe, device: str | None = None) -> Captured:
    """The model of a recipe, on this machine. Raises FleetError where it is not the driver's."""
    where = None if device is None else torch.device(device)
    if recipe.module is None:
        assert recipe.source is not None
        # It goes by its name, as the class of the model does: both stand above this folder.
        load = import_module("conewise.loading").load
        how = dict(recipe.how) if device is None else {**recipe.how, "device": device}
        module = load(recipe.source, **how).module
    else:
        module, is_training = unpacked(recipe.module, device=where)
        module.train(is_training)
        if where is not None:
            module = module.to(where)
    kind, args, kwargs, batch_dim = unpacked(recipe.call, device=where)
    if where is not None:
        args, kwargs = _moved(args, where), _moved(kwargs, where)
    model: Any = kind(module, args, kwargs, batch_dim=batch_dim)
    for step in () if recipe.steps is None else unpacked(recipe.steps, device=where):
        if where is not None:
            for given in vars(step).values():
                if callable(given):
                    Held(given).to(where)  # the modules that it reads
        model = step.operated(model)
    if program_digest(model.program) != recipe.program:
        raise FleetError(
            f"{recipe.name} was captured as another program on this worker than on the driver. Install the "
            "same versions of torch, transformers and conewise on both."
        )
    if fingerprint(model.module) != recipe.weights:
        raise FleetError(
            f"{recipe.name} has other weights on this worker than on the driver"
            + ("." if recipe.source is None else f", where it was loaded from {recipe.source!r}.")
        )
    found: Captured = model
    return found


def _moved(given: Any, device: torch.device) -> Any:
    if isinstance(given, torch.Tensor):
        return given.to(device)
    if isinstance(given, Mapping):
        return {name: _moved(value, device) for name, value in given.items()}
    return type(given)(_moved(one, device) for one in given) if isinstance(given, list | tuple) else given


@dataclass(frozen=True, slots=True)
class Work:
    """A job as workers are told of it, each part once: its model, what is asked, the plan of each batch.

    `asked` is a function and what it is given beside the model: it makes the `Computing` of a worker.
    """

    model: Captured
    asked: Payload
    plans: Mapping[int, str] = field(default_factory=dict)
    key: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def model_key(self) -> str:
        """Return what the model is known by: one with other weights is another."""
        self.model.expect_program("send this model to workers")
        weights = self.model.weights.contents().whole.numbers
        return hashlib.sha256(f"{program_digest(self.model.program)}{weights}".encode()).hexdigest()
