"""Where a program lives, what it computes, and whether two runs had the same inputs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch

from conewise.program.records import Program, Record, Ref, SizeRef


def home(program: Program) -> tuple[torch.device, torch.dtype]:
    """The device and the dtype of a program's first floating-point weight; the CPU without one.

    Where weights lie on the CPU and on CUDA devices, it is the first one on CUDA.
    """
    weights = [source.value for source in program.sources if source.value.is_floating_point()]
    if not weights:
        return torch.device("cpu"), torch.float32
    on_cuda = [weight for weight in weights if weight.is_cuda] if len(program.devices) > 1 else []
    first = (on_cuda or weights)[0]
    return first.device, first.dtype


def inputs_digest(inputs: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over the names, shapes and values of a run's inputs."""
    digest = hashlib.sha256()
    for name in sorted(inputs):
        digest.update(f"{name}{tuple(inputs[name].shape)}{inputs[name].dtype}".encode())
        digest.update(_bytes(inputs[name]))
    return digest.hexdigest()


def program_digest(program: Program) -> str:
    """SHA-256 over what a program computes: its operations with their arguments, its sizes, its outputs."""
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
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
