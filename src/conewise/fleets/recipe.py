"""How a worker gets its model: it loads and captures it itself, and checks that it is the driver's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from conewise.errors import FleetError
from conewise.fleets.payload import Payload, packed, unpacked
from conewise.identity.digests import fingerprint, program_digest
from conewise.runs.captured import Captured
from conewise.splicing.splice_module import Held


@dataclass(frozen=True, slots=True)
class Recipe:
    """A module, or the name that it is loaded by, with the call that it is captured by.

    `splices` are the dictionaries that are spliced in then, as `splice` takes them, one behind the other.
    `program` and `weights` are those of the driver's model: a worker whose model has others is refused.
    """

    name: str
    call: Payload
    program: str
    weights: str
    module: Payload | None = None
    source: str | None = None
    how: Mapping[str, Any] = field(default_factory=dict)
    splices: Payload | None = None


def recipe_of(model: Captured, source: str | None = None, **how: Any) -> Recipe:
    """The recipe of a model; with `source`, a folder or a name, workers load the weights from there.

    `how` is what `cw.load` was given beside the name.
    """
    host, splices = model, list[Mapping[str, Any]]()
    while host.spliced_into is not None:
        host, given = host.spliced_into
        splices.insert(0, given)
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
        packed(splices) if splices else None,
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
    model: Any = kind(module, args, kwargs, batch_dim=batch_dim)
    for given in () if recipe.splices is None else unpacked(recipe.splices, device=where):
        if where is not None:
            for half in ("encode", "decode"):
                Held(given[half]).to(where)  # the modules that it reads
        model = model.splice(**given)
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
