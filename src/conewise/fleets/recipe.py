"""How a worker gets its model: it loads and captures it itself, and checks that it is the driver's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from conewise.errors import FleetError
from conewise.fleets.payload import Payload, packed, unpacked
from conewise.identity.digests import program_digest
from conewise.identity.fingerprint import fingerprint
from conewise.runs.captured import Captured


@dataclass(frozen=True, slots=True)
class Recipe:
    """A module, or the name that it is loaded by, with the call that it is captured by.

    `program` and `weights` are those of the driver's model: a worker whose model has others is refused.
    """

    name: str
    call: Payload
    program: str
    weights: str
    module: Payload | None = None
    source: str | None = None
    how: Mapping[str, Any] = field(default_factory=dict)


def recipe_of(model: Captured, source: str | None = None, **how: Any) -> Recipe:
    """The recipe of a model; with `source`, a folder or a name, workers load the weights from there.

    `how` is what `cw.load` was given beside the name.
    """
    if model.splices:
        raise FleetError(
            f"{model.name} has a dictionary spliced in ({next(iter(model.splices))}), which workers cannot "
            "be sent: sweep it in this process."
        )
    example = model.signature.example
    # The class goes by its name: whoever captures stands above this room.
    call = packed((type(model), tuple(example.args), dict(example.kwargs), model._batch_dim))
    module = None
    if source is None:
        is_training = model.module.training
        module = packed((model.module, is_training))
    return Recipe(
        model.name,
        call,
        program_digest(model.program),
        fingerprint(model.module),
        module,
        source,
        how,
    )


def prepared(recipe: Recipe, device: str | None = None) -> Captured:
    """The model of a recipe, on this machine. Raises FleetError where it is not the driver's."""
    where = None if device is None else torch.device(device)
    if recipe.module is None:
        from conewise.models.load import load  # noqa: PLC0415  # needs transformers

        assert recipe.source is not None
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
    model: Captured = kind(module, args, kwargs, batch_dim=batch_dim)
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
    return model


def _moved(given: Any, device: torch.device) -> Any:
    if isinstance(given, torch.Tensor):
        return given.to(device)
    if isinstance(given, Mapping):
        return {name: _moved(value, device) for name, value in given.items()}
    return type(given)(_moved(one, device) for one in given) if isinstance(given, list | tuple) else given
