"""Small networks with long skips, and one of parallel towers, with random weights."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

WIDTH: Final = 4


class UNet(nn.Module):
    """Down by three levels and up again; each level up reads the one down beside it."""

    def __init__(self, levels: int = 3) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, WIDTH, 3, padding=1), nn.SiLU())
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1, stride=2), nn.SiLU()) for _ in range(levels)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2) for _ in range(levels))
        self.join = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=1), nn.SiLU()) for _ in range(levels)
        )
        self.last = nn.Conv2d(WIDTH, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Of the image's own size."""
        found: Tensor = self.first(image)
        kept = []
        for down in self.down:
            kept.append(found)
            found = down(found)
        for up, join, beside in zip(self.up, self.join, reversed(kept), strict=True):
            found = join(torch.cat([up(found), beside], 1))
        return self.last(found)  # type: ignore[no-any-return]


class DenseNet(nn.Module):
    """Layers that read all layers before them."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(size), nn.SiLU(), nn.Conv2d(size, WIDTH, 3, padding=1))
            for size in range(WIDTH, WIDTH * (layers + 1), WIDTH)
        )
        self.last = nn.Linear(WIDTH * (layers + 1), 5)

    def forward(self, image: Tensor) -> Tensor:
        """Five logits."""
        found: Tensor = self.first(image)
        for layer in self.layers:
            found = torch.cat([found, layer(found)], 1)
        return self.last(found.mean((2, 3)))  # type: ignore[no-any-return]


class Towers(nn.Module):
    """Towers side by side, whose outputs are added up: nothing in one reads another."""

    def __init__(self, towers: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(8, 8), nn.Tanh())))
            for _ in range(towers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The sum of what the towers make of x."""
        return torch.stack([tower(x) for tower in self.towers]).sum(0)
