"""A small module of torch alone, captured, and a sweep over it."""

from __future__ import annotations

import torch
from torch import nn

import conewise as cw
from conewise.model import Model
from conewise.sweeps.sweep import Sweep


class Stack(nn.Module):
    """Three residual layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        found: torch.Tensor = self.head(x)
        return found


def captured() -> Model:
    torch.manual_seed(0)
    return cw.capture(Stack().eval(), torch.randn(2, 8))


def sweep_of(model: Model) -> Sweep:
    """Each layer patched, read as the first output."""
    base, source = (torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))

    def first(outputs: torch.Tensor) -> torch.Tensor:
        return outputs[:, 0]

    found: Sweep = model.sweep(
        [cw.site(f"layers.{layer}") for layer in range(3)],
        base=model.run(base),
        source=model.run(source),
        metric=first,
    )
    return found
