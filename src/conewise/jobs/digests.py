"""Digests of modules, programs and inputs, and of the machine that computes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from conewise.program.records import Program, Record, Ref, SizeRef
from conewise.program.streaming import Streamed
from conewise.version import __version__

# What a configuration says about its origin and its use, not about what the model computes.
_NOT_COMPUTED = {
    "_attn_implementation",
    "_commit_hash",
    "_model_name_or_path",
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pretraining_tp",
    "problem_type",
    "quantization_config",
    "return_dict",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
}


def fingerprint(module: nn.Module) -> str:
    """Return the SHA-256, in hexadecimal, of the module's class, configuration and weights as they are now.

    Every byte of every parameter and persistent buffer is read (about a second per gigabyte), so
    two modules of one fingerprint hold the same weights. A model has one fingerprint whether it
    came from safetensors or from a GGUF file of the same numbers, on whatever device it is; in
    another dtype it is another model, and has another one. The attention implementation is left
    out: it changes rounding, and no weight.
    """
    total = hashlib.sha256(type(module).__name__.encode())
    total.update(json.dumps(_settings(module), sort_keys=True).encode())
    digests: dict[tuple[object, ...], bytes] = {}
    for name, tensor in sorted(module.state_dict().items()):
        # Tied weights have several names and are read once.
        place = (id(tensor.stream), tensor.number) if isinstance(tensor, Streamed) else tensor.data_ptr()
        key = (tensor.device, place, tensor.shape, tensor.stride(), tensor.dtype)
        if key not in digests:
            digests[key] = hashlib.sha256(_bytes(tensor)).digest()
        total.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        total.update(digests[key])
    return total.hexdigest()


def _settings(module: nn.Module) -> Any:
    """The configuration as it is saved, less what is not computed; None where there is none."""
    differences = getattr(getattr(module, "config", None), "to_diff_dict", None)
    return _plain(differences()) if differences is not None else None


def _plain(value: Any) -> Any:
    """`value` without what is not computed. Floats keep six digits: a GGUF file has 32 bits of each."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if k not in _NOT_COMPUTED}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return int(value) if value.is_integer() else f"{value:.6g}"
    if isinstance(value, bool | int | str):
        return value
    return str(value)


def device_and_dtype(program: Program) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype of a program's first floating-point weight; the CPU without one.

    Where weights lie on the CPU and on CUDA devices, it is the first one on CUDA.
    """
    weights = [source.value for source in program.sources if source.value.is_floating_point()]
    if not weights:
        return torch.device("cpu"), torch.float32
    on_cuda = [weight for weight in weights if weight.is_cuda] if len(program.devices) > 1 else []
    first = (on_cuda or weights)[0]
    return first.device, first.dtype


def inputs_digest(inputs: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 over the names, shapes and values of a run's inputs."""
    digest = hashlib.sha256()
    for name in sorted(inputs):
        digest.update(f"{name}{tuple(inputs[name].shape)}{inputs[name].dtype}".encode())
        digest.update(_bytes(inputs[name]))
    return digest.hexdigest()


def program_digest(program: Program) -> str:
    """Return the SHA-256 over what a program computes: operations with their arguments, sizes, outputs."""
    named = {symbol: f"<{name} {dim}>" for symbol, (name, dim) in program.sizes.symbols.items()}
    sizes = [re.sub(r"\w+", lambda m: named.get(m[0], m[0]), str(e)) for e in program.sizes.expressions]
    lines = [*map(_line, program.records), *sizes, _text(program.outputs), str(program.output_spec)]
    lines += [f"{leaf.name} {leaf.dtype}" for leaf in program.inputs]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _line(record: Record) -> str:
    return f"{record.name} = {_text(record.target)} {_text(record.args)} {_text(dict(record.kwargs))}"


def _text(template: Any) -> str:
    """An argument, an operation or what one writes to, as text without addresses in memory."""
    match template:
        case Ref(name):
            return f"<{name}>"
        case SizeRef(index):
            return f"<size {index}>"
        case tuple() | list():
            return f"({', '.join(map(_text, template))})"
        case dict():
            return f"{{{', '.join(f'{key!r}: {_text(item)}' for key, item in template.items())}}}"
        case slice():
            return f"slice{_text((template.start, template.stop, template.step))}"
        case torch.Tensor():
            return inputs_digest({"": template})
        case torch.fx.GraphModule():
            held = {**template._parameters, **template._buffers, **template._modules}
            return f"{template.code} {_text(held)}"
        case torch._ops.OperatorBase() | torch.dtype() | torch.device():
            return str(template)
    if callable(template) and hasattr(template, "__qualname__"):
        return f"{template.__module__}.{template.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(template))


def _bytes(value: torch.Tensor) -> memoryview:
    # As bytes, because numpy has no bfloat16.
    value = value.on_host() if isinstance(value, Streamed) else value
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def machine(device: torch.device) -> dict[str, Any]:
    """Return what a stored run goes on with: versions, settings and hardware."""
    # Releases of one series, 0.1 of 0.1.3, go on with the stores of each other: they compute the same bits.
    # What is no release, as 0.2.0.dev1, is by itself.
    series = re.fullmatch(r"(\d+\.\d+)\.\d+", __version__)
    return {
        "conewise": __version__ if series is None else series[1],
        "python": ".".join(platform.python_version_tuple()[:2]),
        **numerics(device),
    }


def numerics(device: torch.device) -> dict[str, Any]:
    """Settings and hardware that choose kernels, and with them the rounding: equal here, equal bits."""
    found: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "float32 products": torch.get_float32_matmul_precision(),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":
        found["processor"] = torch.cuda.get_device_name(device)
        found["TF32 in convolutions"] = torch.backends.cudnn.allow_tf32
    else:
        found["processor"] = f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
    return found


def memory_held(device: torch.device) -> int:
    """Bytes held now: by tensors on a GPU, by the process elsewhere (its peak, where that is all it says).

    0 on systems that say neither.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    try:
        import resource  # noqa: PLC0415  # not on every system
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_free(device: torch.device) -> int | None:
    """Bytes that could be held beside what is held now; None on systems that do not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    lines = meminfo.read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
