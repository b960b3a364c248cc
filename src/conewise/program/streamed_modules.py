"""Modules whose weights stream: from safetensors, from memory, or from where accelerate keeps them."""

from __future__ import annotations

import copy
import json
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from conewise.arguments import shown_bytes
from conewise.errors import Argument, CaptureError, LoadError
from conewise.program.streaming import (
    FilePart,
    HostPart,
    Origin,
    Ring,
    Streamed,
    Weight,
    WeightStream,
    streamed_parameter,
)

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor that is kept in a file, or in memory."""

    part: Origin
    dtype: torch.dtype
    shape: tuple[int, ...]

    def load(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, in memory."""
        found = torch.empty(self.shape, dtype=dtype or self.dtype)
        Weight("", self.shape, dtype or self.dtype, self.dtype, self.part).read(found.view(-1), 0)
        return found


def stored_weights(find: Callable[[str], Path | None], named: object = None) -> dict[str, Stored] | None:
    """Where each weight of a model lies in its safetensors files; None where there are none.

    Raises LoadError where a file ends before its weights do.
    """
    index = (
        find(str(named))
        if named is not None
        else find("model.safetensors") or find("model.safetensors.index.json")
    )
    if index is None:
        return None
    files = [index]
    if index.name.endswith(".index.json"):
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = [path for name in sorted(set(names)) if (path := find(name)) is not None]
    found: dict[str, Stored] = {}
    for path in files:
        found |= _in_file(path)
    return found


def _in_file(path: Path) -> dict[str, Stored]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    size, begin = path.stat().st_size, 8 + length
    found: dict[str, Stored] = {}
    for name, one in header.items():
        if name == "__metadata__":
            continue
        first, end = one["data_offsets"]
        if begin + end > size:
            raise LoadError(
                f"the weights file {path} ends early: it has {size:,} bytes, and {name} lies up to byte "
                f"{begin + end:,}. It was cut short: fetch or save it again."
            )
        if one["dtype"] in _DTYPES:
            part = FilePart(path, begin + first)
            found[name] = Stored(part, _DTYPES[one["dtype"]], tuple(one["shape"]))
    return found


@contextmanager
def without_parameters() -> Iterator[None]:
    """Let modules that are built meanwhile have parameters of no memory, and buffers as ever."""
    thread = threading.get_ident()

    def emptied(owner: nn.Module, name: str, one: Any) -> Any:
        del owner, name
        if one is None or one.is_meta or threading.get_ident() != thread:
            return None
        return nn.Parameter(one.detach().to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(emptied)
    try:
        yield
    finally:
        hook.remove()


def built(make: Callable[[], Any], stored: Mapping[str, Stored], dtype: torch.dtype) -> Any:
    """The module that `make` returns, with its weights on the meta device, and where these are stored.

    None where the names in the files are not those of its weights: then transformers makes others of them.
    """
    with without_parameters():
        module = make()
    if getattr(module, "_keep_in_fp32_modules", None) and dtype.itemsize == 2:
        return None
    module.tie_weights()
    names = _found(module, stored)
    return None if names is None else (module.eval(), names)


def _found(module: Any, stored: Mapping[str, Stored]) -> dict[str, Stored] | None:
    """What is stored for each parameter and persistent buffer; None where something is not as it is here."""
    prefix = getattr(module, "base_model_prefix", "")
    found: dict[str, Stored] = {}
    of: dict[int, list[str]] = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, one in parameters.items():
        of.setdefault(id(one), []).append(name)
    persistent = [name for name in module.state_dict() if name not in parameters]
    for names in (*of.values(), *([name] for name in persistent)):
        ways = [way for name in names for way in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))]
        there = next((stored[way] for way in ways if way in stored), None)
        if there is None and names[0] in parameters:
            return None
        if there is not None:
            shape = parameters[names[0]].shape if names[0] in parameters else there.shape
            if tuple(shape) != there.shape:
                return None
            found[names[0]] = there
    return found


def stream_files(
    module: Any, stored: Mapping[str, Stored], device: torch.device, ring: int | None = None
) -> WeightStream:
    """Let the matrices of a module on the meta device stream from files; the rest is loaded."""
    weights = {
        name: Weight(name, tuple(one.shape), one.dtype, stored[name].dtype, stored[name].part)
        for name, one in module.named_parameters()
        if one.ndim >= 2
    }
    loaded = {name: stored[name].load(one.dtype) for name, one in _plain(module, weights) if name in stored}
    return _with_stream(module, weights, loaded, device, ring)


def stream_memory(module: nn.Module, device: torch.device, ring: int | None = None) -> nn.Module:
    """A copy of a module in memory, which shares its weights and streams its matrices to a device."""
    weights = {
        name: Weight(
            name,
            tuple(one.shape),
            one.dtype,
            one.dtype,
            HostPart(one.detach().contiguous()),
            one.requires_grad,
        )
        for name, one in module.named_parameters()
        if one.ndim >= 2 and one.device.type == "cpu"
    }
    shared = {id(one): one for one in (*module.parameters(), *module.buffers())}
    made = copy.deepcopy(module, dict(shared))
    # Modules are copied with tables of their own, whose entries are the same tensors.
    loaded = {name: one.detach() for name, one in _plain(made, weights)}
    _with_stream(made, weights, loaded, device, ring)
    return made


def with_streams(module: nn.Module) -> nn.Module:
    """Return the module; where accelerate offloaded weights of it, a copy in which they stream.

    The copy shares all else with the module, which stays as it is. Its weights are found where accelerate
    keeps them, on disk or in memory, and no hook loads them: operations ask for them. Raises CaptureError
    where they are computed on several devices.
    """
    found = {name: one for path, part in module.named_modules() for name, one in _offloaded(path, part)}
    if not found:
        return module
    devices = sorted({str(device) for _, device in found.values()})
    if len(devices) > 1:
        raise CaptureError(
            f"weights of {type(module).__name__} were offloaded by accelerate for {', '.join(devices)}, and "
            "weights stream to one device. Dispatch the model to one, and let the rest be offloaded: "
            f"`device_map={{..., 'cpu': ...}}` with {devices[0]} alone."
        )
    shared = {id(one): one for one in (*module.parameters(), *module.buffers())}
    hooks = [hook for part in module.modules() if (hook := vars(part).get("_hf_hook")) is not None]
    made = copy.deepcopy(module, {**shared, **{id(hook): _without_offload(hook) for hook in hooks}})
    parameters = dict(made.named_parameters())
    weights = {
        name: Weight(name, one.shape, parameters[name].dtype, one.dtype, one.part)
        for name, (one, _) in found.items()
        if name in parameters and len(one.shape) >= 2
    }
    loaded = {
        name: found[name][0].load(one.dtype) if name in found else one.detach()
        for name, one in _plain(made, weights)
    }
    _with_stream(made, weights, loaded, torch.device(devices[0]), None)
    return made


def _offloaded(path: str, part: nn.Module) -> Iterator[tuple[str, tuple[Stored, torch.device]]]:
    """The tensors that accelerate's hook loads for a module: their names, where they are kept and used."""
    hook = vars(part).get("_hf_hook")
    for one in (hook, *getattr(hook, "hooks", ())):
        if not getattr(one, "offload", False):
            continue
        device = one.execution_device
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        held = part.named_parameters(), part.named_buffers()
        for name, tensor in [each for tensors in held for each in tensors]:
            if tensor.is_meta and ("." not in name or one.place_submodules) and name in one.weights_map:
                yield f"{path}.{name}".lstrip("."), (_kept_at(one.weights_map, name), device)


def _kept_at(kept: Any, name: str) -> Stored:
    """A tensor of a map of accelerate's: in memory, in a safetensors file, or in one of its own."""
    while hasattr(kept, "prefix"):
        kept, name = kept.dataset, f"{kept.prefix}{name}"
    if name in getattr(kept, "state_dict", kept):
        value = kept[name].detach().contiguous()
        return Stored(HostPart(value), value.dtype, tuple(value.shape))
    said = kept.index[name]
    if (file := said.get("safetensors_file")) is not None:
        return _in_file(Path(file))[said.get("weight_name", name)]
    dtype = getattr(torch, said["dtype"])
    return Stored(FilePart(Path(kept.save_folder) / f"{name}.dat", 0), dtype, tuple(said["shape"]))


def _without_offload(hook: Any) -> Any:
    """A hook of accelerate that moves what is handed on, and no weights."""
    made = copy.copy(hook)
    made.offload, made.weights_map = False, None
    if hasattr(made, "hooks"):
        made.hooks = tuple(map(_without_offload, made.hooks))
    return made


def _plain(module: Any, weights: Mapping[str, Weight]) -> list[tuple[str, Tensor]]:
    every = [*module.named_parameters(), *module.named_buffers()]
    return [(name, one) for name, one in every if name not in weights]


def _with_stream(
    module: Any,
    weights: Mapping[str, Weight],
    loaded: Mapping[str, Tensor],
    device: torch.device,
    ring: int | None,
) -> WeightStream:
    stream = WeightStream(tuple(weights.values()), device, ring or ring_bytes(tuple(weights.values())))
    made: dict[int, Any] = {}
    own = dict(module.named_parameters())
    for number, name in enumerate(weights):
        made[id(own[name])] = streamed_parameter(stream, number)
    for name, one in own.items():
        if name not in weights:
            trains = one.is_floating_point() and (one.is_meta or one.requires_grad)
            made[id(one)] = nn.Parameter(loaded[name].to(device), requires_grad=trains)
    for path, part in module.named_modules():
        for name, one in part._parameters.items():
            if one is not None:
                part._parameters[name] = made[id(one)]
        for name, one in part._buffers.items():
            if one is not None:
                key = f"{path}.{name}" if path else name
                part._buffers[name] = made.setdefault(id(one), loaded.get(key, one).to(device))
    return stream


def ring_bytes(weights: Sequence[Weight]) -> int:
    """The room that a ring needs for twice the weights of a layer, and for the largest one beside a layer."""
    layers: dict[str, int] = {}
    for one in weights:
        found = re.match(r"(.*?\.\d+)\.", one.name)
        key = found[1] if found else one.name
        layers[key] = layers.get(key, 0) + Ring([one.nbytes], 1).sizes[0]
    inside = [size for key, size in layers.items() if re.search(r"\.\d+$", key)]
    layer = max(inside, default=0)
    return max(2 * layer, layer + max(layers.values(), default=0), 1)


def expect_ring(stream: WeightStream, budget: int) -> None:
    """Raise LoadError where a budget does not hold two layers of weights."""
    if stream.ring.size > budget:
        raise LoadError(
            f"two layers of this model's weights take {shown_bytes(stream.ring.size)}, and there are "
            f"{shown_bytes(budget)}. Weights stream layer by layer, one in use while the next one comes. "
            "Give more: ",
            Argument("max_memory", 2 * stream.ring.size),
            ".",
        )


def streamed_in(module: nn.Module) -> Iterable[Streamed]:
    """The streamed weights of a module."""
    return [one for one in module.parameters() if isinstance(one, Streamed)]
