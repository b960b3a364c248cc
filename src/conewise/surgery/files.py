"""Surgeries as files: their steps by name, code by where it is imported from, weights in safetensors."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from conewise.anatomy.places import Place
from conewise.errors import FormatError, SurgeryError, describe
from conewise.files import as_path, read_json, write_whole
from conewise.surgery.steps import Compact, Graft, Prune, Redefine, Step, Weight

STEPS, WEIGHTS = "surgery.json", "weights.safetensors"
VERSION = 1
KINDS: Mapping[str, type[Step]] = {
    "prune": Prune,
    "graft": Graft,
    "redefine": Redefine,
    "weight": Weight,
    "compact": Compact,
}


def write(steps: tuple[Any, ...], folder: str | Path) -> None:
    """Write the steps of a surgery into a folder."""
    where, tensors = as_path(folder), dict[str, Tensor]()
    kinds = {kind: name for name, kind in KINDS.items()}
    listed = []
    for number, step in enumerate(steps):
        if type(step) not in kinds:
            raise SurgeryError(
                f"step {number} ({step}) cannot be written: a dictionary has files of its own. Leave it out, "
                "and splice it into the operated model."
            )
        given = {
            name: _written(value, f"{number}.{name}", tensors, step) for name, value in vars(step).items()
        }
        listed.append({"step": kinds[type(step)], **given})
    where.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}, where / WEIGHTS
    )
    write_whole(where / STEPS, json.dumps({"version": VERSION, "steps": listed}, indent=2).encode())


def read(folder: str | Path) -> tuple[Step, ...]:
    """The steps of a surgery that was written: code is imported by its name, and gets the weights."""
    where = as_path(folder)
    try:
        found = read_json(where / STEPS)
        tensors = load_file(where / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise FormatError(
            f"{where} holds no surgery: {STEPS} and {WEIGHTS} are expected there ({error})."
        ) from error
    if (
        not isinstance(found, dict)
        or found.get("version") != VERSION
        or not isinstance(found.get("steps"), list)
    ):
        raise FormatError(f"{where / STEPS} was written by another version of conewise.")
    return tuple(_step(number, one, tensors, where) for number, one in enumerate(found["steps"]))


def _step(number: int, one: Any, tensors: Mapping[str, Tensor], where: Path) -> Step:
    if not isinstance(one, dict) or one.get("step") not in KINDS:
        raise FormatError(f"{where / STEPS}: step {number} is none that is known: {', '.join(KINDS)}.")
    given = {name: _read(value, tensors) for name, value in one.items() if name != "step"}
    try:
        return KINDS[one["step"]](**given)
    except TypeError as error:
        raise FormatError(
            f"{where / STEPS}: step {number} has other parts than it should: {error}."
        ) from error


def _written(value: Any, key: str, tensors: dict[str, Tensor], step: Step) -> Any:
    """A part of a step as JSON; its tensors go beside it."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            tensors[key] = value
            return {"tensor": key}
        case Place():
            part = {axis: _index(index) for axis, index in value.part.items()}
            return {"place": value.name, "layer": value.layer, "stack": value.stack, "part": part}
        case nn.Module():
            for name, tensor in value.state_dict().items():
                tensors[f"{key}/{name}"] = tensor
            return {**_module(value, step), "weights": key, "training": value.training}
    name, home = getattr(value, "__name__", ""), getattr(value, "__module__", None) or "torch"
    if callable(value) and getattr(import_module(home), name, None) is value:
        return {"function": f"{home}:{name}"}
    raise SurgeryError(
        f"{step} cannot be written: {describe(value)} has no name that it could be imported by. Define it at "
        "the top of a module."
    )


def _index(index: Any) -> Any:
    return {"slice": [index.start, index.stop, index.step]} if isinstance(index, slice) else index


def _module(value: nn.Module, step: Step) -> dict[str, Any]:
    """The class of a module by its name, and what it was made with: its attributes of the same names."""
    kind = type(value)
    if getattr(import_module(kind.__module__), kind.__qualname__, None) is not kind:
        raise SurgeryError(f"{step} cannot be written: {kind.__qualname__} cannot be imported by its name.")
    named = f"{kind.__module__}:{kind.__qualname__}"
    if kind is nn.Sequential:
        return {"module": named, "parts": [_module(part, step) for part in value.children()]}
    arguments = {}
    for name, one in inspect.signature(kind).parameters.items():
        if name in {"device", "dtype"} or one.kind in {one.VAR_POSITIONAL, one.VAR_KEYWORD}:
            continue
        found = getattr(value, name, one.default)
        if isinstance(found, Tensor) or (found is None and name == "bias"):
            found = found is not None
        if not isinstance(found, None | bool | int | float | str | tuple | list):
            raise SurgeryError(
                f"{step} cannot be written: what {named} was made with as {name!r} is no plain value that "
                "the module keeps by this name."
            )
        arguments[name] = list(found) if isinstance(found, tuple) else found
    return {"module": named, "arguments": arguments}


def _read(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "place" in value:
        part = {
            axis: slice(*one["slice"])
            if isinstance(one, dict)
            else tuple(one)
            if isinstance(one, list)
            else one
            for axis, one in value["part"].items()
        }
        return Place(value["place"], value["layer"], value["stack"], MappingProxyType(part))
    if "function" in value:
        return _imported(value["function"])
    key = f"{value['weights']}/"
    own = {name.removeprefix(key): tensor for name, tensor in tensors.items() if name.startswith(key)}
    made = _made(value)
    for dtype in {tensor.dtype for tensor in own.values() if tensor.is_floating_point()}:
        made = made.to(dtype)
    made.load_state_dict(own)
    return made.train(value["training"])


def _made(value: Mapping[str, Any]) -> nn.Module:
    if "parts" in value:
        return nn.Sequential(*map(_made, value["parts"]))
    made: nn.Module = _imported(value["module"])(**value["arguments"])
    return made


def _imported(name: str) -> Any:
    home, _, what = name.partition(":")
    try:
        return getattr(import_module(home), what)
    except (ImportError, AttributeError) as error:
        raise FormatError(f"the surgery names {name}, which cannot be imported here: {error}.") from error
