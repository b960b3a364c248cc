"""Small models of many architectures whose biases and norms all matter, captured once for all tests."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from conewise.anatomy.components import Components
from conewise.model import Model, capture
from conewise.models.architectures import ARCHITECTURES, Architecture
from conewise.paper.theory import ReaderAt
from conewise.runs.run import Run

LENGTH = 6


def stirred(module: nn.Module, seed: int = 1) -> nn.Module:
    """The module with weights of unit gain, and with biases and norms that are neither 0 nor 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            weight.copy_(
                weight + 0.3 * noise if weight.ndim == 1 else 1.5 * min(weight.shape) ** -0.5 * noise
            )
    return module


def architecture(name: str) -> Architecture:
    """One of the architectures that the package knows."""
    return ARCHITECTURES[name]


@functools.cache
def module_of(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The stirred module of an architecture, two layers deep."""
    return stirred(architecture(name).make(2)).to(dtype)


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Model:
    """The same, captured once, whether the dtype is given or not."""
    return _captured(name, dtype)


@functools.cache
def _captured(name: str, dtype: torch.dtype) -> Model:
    return capture(module_of(name, dtype), **architecture(name).example(5))


def inputs_of(name: str, seed: int, batch: int = 2) -> dict[str, Tensor]:
    """A batch of random inputs."""
    each = [architecture(name).example(LENGTH, seed=100 * seed + row) for row in range(batch)]
    return {key: torch.cat([one[key] for one in each]) for key in each[0]}


@functools.cache
def run_of(name: str, seed: int, dtype: torch.dtype = torch.float32) -> Run:
    """A run of the captured model."""
    return model_of(name, dtype).run(**inputs_of(name, seed))


def readers_of(components: Components) -> list[ReaderAt]:
    """Return the readers by node: heads of one layer that read by one node are parts of one reader."""
    found: dict[tuple[str, str, int], int] = {}
    for reader in components.readers:
        at = (reader.entry, reader.node, reader.writers)
        found[at] = found.get(at, 0) + 1
    return [ReaderAt(*at, parts) for at, parts in found.items()]
