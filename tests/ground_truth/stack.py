"""A small transformer without norms and biases. Its weights come from a compiler, a hand, or training."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Attention without biases; `is_causal` says that no position sees those behind it."""

    def __init__(self, width: int, heads: int, head_width: int, *, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.head_width, self.is_causal = heads, head_width, is_causal
        self.query = nn.Linear(width, heads * head_width, bias=False)
        self.key = nn.Linear(width, heads * head_width, bias=False)
        self.value = nn.Linear(width, heads * head_width, bias=False)
        self.out = nn.Linear(heads * head_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """What all heads together write into the stream."""
        written: Tensor = self.out(self.mix(self.query(x), self.key(x), self.value(x)))
        return written

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The values of all heads, mixed by where they look. All are [batch, pos, head * head_width]."""
        z: Tensor = self.pattern(q, k) @ self._by_head(v)
        return z.transpose(1, 2).flatten(2)

    def pattern(self, q: Tensor, k: Tensor) -> Tensor:
        """Where each head looks, [batch, head, query, key]."""
        scores: Tensor = self._by_head(q) @ self._by_head(k).transpose(-1, -2) / self.head_width**0.5
        if self.is_causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(hidden, -1e30)
        return scores.softmax(-1)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, self.head_width).transpose(1, 2)


class Layer(nn.Module):
    """Attention, then (where there are neurons) an MLP with a ReLU; each adds to the stream."""

    def __init__(self, width: int, heads: int, head_width: int, neurons: int, *, is_causal: bool) -> None:
        super().__init__()
        self.attn = Attention(width, heads, head_width, is_causal=is_causal)
        self.mlp: nn.Sequential | None = None
        if neurons:
            into, out = nn.Linear(width, neurons, bias=False), nn.Linear(neurons, width, bias=False)
            self.mlp = nn.Sequential(into, nn.ReLU(), out)

    def forward(self, x: Tensor) -> Tensor:
        """The stream behind this layer."""
        x = x + self.attn(x)
        return x if self.mlp is None else x + self.mlp(x)


class Outputs(NamedTuple):
    """What a stack puts out, [batch, pos, value]."""

    logits: Tensor


class Stack(nn.Module):
    """`ids` [batch, pos] to a number for each value, by tokens, positions and some layers."""

    def __init__(
        self,
        *,
        tokens: int,
        length: int,
        width: int,
        layers: int,
        heads: int,
        head_width: int,
        neurons: int,
        outputs: int,
        is_causal: bool,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, head_width, neurons, is_causal=is_causal) for _ in range(layers)
        )
        self.unembed = nn.Linear(width, outputs, bias=False)

    def forward(self, ids: Tensor) -> Outputs:
        """What is read off the stream at each position."""
        x = self.entry(ids)
        for layer in self.layers:
            x = layer(x)
        return Outputs(self.unembed(x))

    def entry(self, ids: Tensor) -> Tensor:
        """The stream as it enters layer 0."""
        entry: Tensor = self.embed(ids) + self.positions(torch.arange(ids.shape[-1], device=ids.device))
        return entry

    @property
    def blocks(self) -> list[Layer]:
        """The layers, by their type."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]


def of_weights(weights: dict[str, Tensor], *, heads: int, is_causal: bool) -> Stack:
    """The stack that has these weights, its sizes read off their shapes."""
    tokens, width = weights["embed.weight"].shape
    stack = Stack(
        tokens=tokens,
        length=len(weights["positions.weight"]),
        width=width,
        layers=1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers.")),
        heads=heads,
        head_width=len(weights["layers.0.attn.query.weight"]) // heads,
        neurons=len(weights["layers.0.mlp.0.weight"]) if "layers.0.mlp.0.weight" in weights else 0,
        outputs=len(weights["unembed.weight"]),
        is_causal=is_causal,
    )
    stack.load_state_dict(weights)
    return stack.requires_grad_(False).eval()
