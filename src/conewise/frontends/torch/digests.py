"""Where a program lives, and whether two runs had the same inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from conewise.frontends.torch.records import Program


def home(program: Program) -> tuple[torch.device, torch.dtype]:
    """The device and the dtype of a program's first floating-point weight; of the CPU without one."""
    for source in program.sources:
        if source.value.is_floating_point():
            return source.value.device, source.value.dtype
    return torch.device("cpu"), torch.float32


def inputs_digest(inputs: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over the names, shapes and values of a run's inputs."""
    digest = hashlib.sha256()
    for name in sorted(inputs):
        digest.update(f"{name}{tuple(inputs[name].shape)}{inputs[name].dtype}".encode())
        digest.update(_bytes(inputs[name]))
    return digest.hexdigest()


def _bytes(value: torch.Tensor) -> memoryview:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
