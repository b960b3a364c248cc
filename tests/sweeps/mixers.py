"""Small models in which positions, or rows of a batch, see each other in every way that we could think of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS = 23, 8, 2

Function = Callable[[Tensor], Tensor]


def ids(batch: int, length: int, seed: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """Embedding, a norm, something in between, an MLP, logits; each but the first two on a stream."""

    def __init__(self, between: nn.Module | Function) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.between = between if isinstance(between, nn.Module) else Lambda(between)
        self.mlp, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        x = x + self.between(self.norm(x))
        x = x + self.mlp(x).relu()
        return {"logits": self.head(x)}


class Lambda(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


Mask = Callable[[int], Tensor]


class Attention(nn.Module):
    """Heads that see what `mask(length)` says, or with none what `is_causal` says."""

    def __init__(self, mask: Mask | None = None, *, is_causal: bool = False, repeated: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mask, self.is_causal, self.repeated = mask, is_causal, repeated

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (one(x).view(batch, length, HEADS, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        mask = None if self.mask is None else self.mask(length)
        if self.repeated:
            k, v = k[:, :1], v[:, :1]
        seen = functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.is_causal, enable_gqa=self.repeated
        )
        return self.o(seen.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def prefix(length: int) -> Tensor:
    """The first three positions see each other, the others what lies before."""
    return causal(length) | (torch.arange(length) < 3)[None]


def window(length: int) -> Tensor:
    return causal(length) & torch.ones(length, length, dtype=torch.bool).triu(-2)


def backwards(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu()


def blind(length: int) -> Tensor:
    """Causal, but position 1 sees nothing."""
    return causal(length) & (torch.arange(length) != 1)[:, None]


def added(seen: Mask, low: float) -> Mask:
    """The mask as numbers to add to scores, less the further away a position is."""

    def mask(length: int) -> Tensor:
        places = torch.arange(length, dtype=torch.float32)
        far = -(places[:, None] - places[None]).abs() / 4
        return far.masked_fill(~seen(length), low)[None, None]

    return mask


LEAST = torch.finfo(torch.float32).min
ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "causal, no mask": lambda: Attention(is_causal=True),
    "causal, a mask": lambda: Attention(causal),
    "causal, repeated heads": lambda: Attention(is_causal=True, repeated=True),
    "everything": Attention,
    "a prefix": lambda: Attention(prefix),
    "a window": lambda: Attention(window),
    "later positions": lambda: Attention(backwards),
    "added, minus infinity": lambda: Attention(added(causal, float("-inf"))),
    "added, the least number": lambda: Attention(added(causal, LEAST)),
    "added, a low number": lambda: Attention(added(causal, -3.0)),
    "a position that sees nothing": lambda: Attention(blind),
    "a position that sees all alike": lambda: Attention(added(blind, LEAST)),
}


def _turned_pairs(x: Tensor) -> Tensor:
    pairs = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2])
    return pairs.flip(2).reshape(x.shape)


def _queries_are_keys(x: Tensor) -> Tensor:
    q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # type: ignore[no-untyped-call]
    return functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


def _eager(x: Tensor) -> Tensor:
    scores = x @ x.transpose(1, 2)
    return scores.masked_fill(~causal(x.shape[1]), float("-inf")).softmax(-1) @ x


def _average(x: Tensor) -> Tensor:
    return causal(x.shape[1]).to(x.dtype) @ x


def _flattened_positions_first(x: Tensor) -> Tensor:
    batch, length, width = x.shape
    return x.transpose(0, 1).reshape(length * batch, width).tanh().view(length, batch, width).transpose(0, 1)


def _convolved(x: Tensor) -> Tensor:
    kernel = torch.linspace(-1, 1, 3).expand(WIDTH, 1, 3)
    return functional.conv1d(functional.pad(x.transpose(1, 2), (2, 0)), kernel, groups=WIDTH).transpose(1, 2)


def _seeing_the_batch(x: Tensor) -> Tensor:
    rows = x.transpose(0, 1)
    return functional.scaled_dot_product_attention(rows, rows, rows).transpose(0, 1)


POSITIONS: dict[str, Function] = {
    "running sum": lambda x: x.cumsum(1),
    "the position before": lambda x: functional.pad(x[:, :-1], (0, 0, 1, 0)),
    "the position behind": lambda x: functional.pad(x[:, 1:], (0, 0, 0, 1)),
    "rolled": lambda x: x.roll(-1, 1),
    "turned round": lambda x: x.flip(1),
    "turned round by index": lambda x: x[:, torch.arange(x.shape[1]).flip(0)],
    "less the mean": lambda x: x - x.mean(1, keepdim=True),
    "softmax over positions": lambda x: x.softmax(1),
    "positions among the features": lambda x: x.reshape(x.shape[0], -1).softmax(-1).view_as(x),
    "features taken for positions": lambda x: x.reshape(x.shape[0], WIDTH, -1).transpose(1, 2),
    "pairs of positions": _turned_pairs,
    "a position in front": lambda x: torch.cat([x[:, :1] * 2, x], 1)[:, 1:],
    "a position in front, read": lambda x: torch.cat([x[:, :1] * 2, x], 1)[:, :-1],
    "the last position": lambda x: x + x[:, -1:],
    "the last position, selected": lambda x: x + x[:, -1][:, None],
    "the first position": lambda x: x + x[:, :1],
    "a position that is last at this length": lambda x: x + x[:, 5:6],
    "a feature chosen by the length": lambda x: x * x[:, :, x.shape[1] - 1][:, :, None],
    "divided by the length": lambda x: x / x.shape[1],
    "weights of positions": lambda x: x * torch.arange(x.shape[1])[None, :, None],
    "sorted": lambda x: x.sort(1).values,
    "the greatest": lambda x: x + x.gather(1, x.argmax(1, keepdim=True)),
    "scattered": lambda x: torch.zeros_like(x).scatter_add(1, (x > 0).long(), x),
    "layer norm over positions": lambda x: functional.layer_norm(x.transpose(1, 2), (x.shape[1],)).transpose(
        1, 2
    ),
    "a group norm": lambda x: functional.group_norm(x.transpose(1, 2), 2).transpose(1, 2),
    "a product with a constant": _average,
    "attention written out": _eager,
    "queries that are keys": _queries_are_keys,
    "a convolution": _convolved,
    "parts of positions": lambda x: torch.cat([p * n for n, p in enumerate(torch.split(x, 2, 1))], 1),
    "parts of features": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "batch and positions in one": lambda x: x.reshape(-1, WIDTH).softmax(-1).view_as(x),
    "positions first": lambda x: x.transpose(0, 1).softmax(-1).transpose(0, 1),
}

BATCHES: dict[str, Function] = {
    "positions first, flattened": _flattened_positions_first,
    "divided by the batch": lambda x: x / x.shape[0],
    "weights of rows": lambda x: x * torch.arange(x.shape[0])[:, None, None],
    "a position chosen by the batch": lambda x: x + x[:, x.shape[0] - 1][:, None],
    "positions from one chosen by the batch": lambda x: x + x[:, x.shape[0] - 1 : x.shape[0]],
    "a feature chosen by the batch": lambda x: x + x[:, :, x.shape[0] - 1][:, :, None],
    "attention over the batch": _seeing_the_batch,
    "statistics of the batch": lambda x: functional.batch_norm(
        x.transpose(1, 2), None, None, training=True
    ).transpose(1, 2),
    "statistics of the flattened batch": lambda x: functional.batch_norm(
        x.reshape(-1, WIDTH), None, None, training=True
    ).view_as(x),
    "softmax over the batch": lambda x: x.softmax(0),
    "repeated": lambda x: x.repeat(2, 1, 1)[: x.shape[0]],
    "two stacked in front": lambda x: torch.stack([x, x * 2]).flatten(0, 1)[: x.shape[0]],
}


def module(between: Any) -> nn.Module:
    """A net with weights far from those of a fresh one, so that patches have an effect worth comparing."""
    torch.manual_seed(0)
    made = Net(between).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return made
