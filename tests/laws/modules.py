"""Random small networks whose layouts are known by construction, and what plain hooks make of them.

A network is drawn from a grammar: how its inputs, blocks and outputs lie in memory, how heads are packed,
what mixes positions and what mixes prompts. Every value of interest passes through an `nn.Identity`, a tap,
so that hooks can change it with no graph, no site and no view: that is the oracle.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS = 17, 8, 2
EACH = WIDTH // HEADS

BOUNDARIES = (
    "ids",
    "embeddings",
    "sequence first",
    "positions given",
    "unbatched",
    "channels",
    "fixed length",
)
INSIDE = ("batch first", "sequence first", "flat")
PACKINGS = ("fused", "eager", "batch·head", "head·batch", "multihead", "grouped")
MIXERS = (
    *["nothing"] * 10, "mean of the batch", "row numbers", "attention over rows",
    "rows turned", "largest of the batch", "running mean", "positions turned",
)  # fmt: skip
OUTPUTS = (
    "logits",
    "logits",
    "vocabulary first",
    "pointers",
    "flat",
    "flat, positions first",
    "pooled",
    "two",
)
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Choices:
    """One network of the grammar."""

    seed: int
    boundary: str
    inside: str
    packing: str
    mixer: str
    output: str
    dtype: torch.dtype
    is_causal: bool
    has_large_feature: bool
    is_gated: bool
    is_parallel: bool
    is_named: bool
    layers: int

    @classmethod
    def draw(cls, seed: int) -> Choices:
        """The network of a seed."""
        pick = random.Random(seed)
        boundary = pick.choice(BOUNDARIES)
        mixer = pick.choice(MIXERS)
        output = pick.choice(OUTPUTS)
        if boundary == "unbatched" and output.startswith("flat"):
            output = "logits"
        return cls(
            seed,
            boundary,
            pick.choice(INSIDE) if boundary not in {"unbatched", "channels"} else "batch first",
            pick.choice(PACKINGS),
            mixer if boundary not in {"unbatched", "channels"} else "nothing",
            output if boundary != "channels" else "pooled",
            pick.choice(DTYPES),
            pick.random() < 0.6,
            pick.random() < 0.3,
            pick.random() < 0.5,
            pick.random() < 0.3,
            pick.random() < 0.3,
            2 if pick.random() < 0.25 else 1,
        )


class Attention(nn.Module):
    """Heads over positions, packed in one of the ways that are seen in the wild; a tap at z."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self.choices = choices
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.z = nn.Identity()
        self.multihead = nn.MultiheadAttention(WIDTH, HEADS, batch_first=choices.inside == "batch first")

    def forward(self, x: Tensor) -> Tensor:
        """`x` and the result lie as the blocks do; the tap `z` has [batch, pos, head·d_head] or its turn."""
        choices = self.choices
        if choices.packing == "multihead" and choices.inside != "flat":
            mask = None
            if choices.is_causal:
                length = x.shape[1] if choices.inside == "batch first" else x.shape[0]
                mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            seen: Tensor = self.multihead(x, x, x, attn_mask=mask, need_weights=False)[0]
            return seen
        turned = choices.inside == "sequence first"
        if turned:
            length, batch, _ = x.shape
        else:
            batch, length, _ = x.shape
        q, k, v = (self._heads(one(x), turned) for one in (self.q, self.k, self.v))
        if choices.packing == "grouped":
            k, v = k[:, :1], v[:, :1]
        seen = self._seen(q, k, v, length, batch)
        lying = seen.permute(2, 0, 1, 3) if turned else seen.transpose(1, 2)
        z = self.z(lying.reshape(*x.shape[:2], WIDTH))
        return self.o(z)  # type: ignore[no-any-return]

    def _heads(self, value: Tensor, turned: bool) -> Tensor:
        """[batch, head, pos, d_head]."""
        apart = value.view(*value.shape[:2], HEADS, EACH)
        return apart.permute(1, 2, 0, 3) if turned else apart.transpose(1, 2)

    def _seen(self, q: Tensor, k: Tensor, v: Tensor, length: int, batch: int) -> Tensor:
        match self.choices.packing:
            case "batch·head":
                q, k, v = (one.reshape(batch * HEADS, length, EACH) for one in (q, k, v))
                seen = self._eager(q, k, v, length).view(batch, HEADS, length, EACH)
            case "head·batch":
                q, k, v = (one.transpose(0, 1).reshape(HEADS * batch, length, EACH) for one in (q, k, v))
                seen = self._eager(q, k, v, length).view(HEADS, batch, length, EACH).transpose(0, 1)
            case "eager":
                seen = self._eager(q, k, v, length)
            case _:
                is_grouped = self.choices.packing == "grouped"
                seen = functional.scaled_dot_product_attention(
                    q, k, v, is_causal=self.choices.is_causal, enable_gqa=is_grouped
                )
        return seen

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
        scores = q @ k.transpose(-1, -2) / EACH**0.5
        if self.choices.is_causal:
            scores = scores.masked_fill(
                torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1), float("-inf")
            )
        seen: Tensor = scores.softmax(-1) @ v
        return seen


class Mlp(nn.Module):
    def __init__(self, is_gated: bool) -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12) if is_gated else None, nn.Linear(12, WIDTH)
        )  # fmt: skip
        self.post = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.post(functional.gelu(self.up(x))))  # type: ignore[no-any-return]
        return self.down(self.post(functional.silu(self.gate(x)) * self.up(x)))  # type: ignore[no-any-return]


class Mixer(nn.Module):
    """What lets one prompt see another, or their order; `rows` is the dimension of the batch."""

    def __init__(self, kind: str, rows: int) -> None:
        super().__init__()
        self.kind, self.rows, self.positions = kind, rows, 1 - rows

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows
        match self.kind:
            case "mean of the batch":
                return x + 1e-3 * x.mean(rows, keepdim=True)
            case "row numbers":
                shape = [1, 1, 1]
                shape[rows] = x.shape[rows]
                return x + 3e-4 * torch.arange(x.shape[rows], device=x.device).to(x.dtype).view(shape)
            case "attention over rows":
                own = x if rows == 1 else x.transpose(0, 1)
                seen = (own @ own.transpose(1, 2)).softmax(-1) @ own
                return x + 1e-2 * (seen if rows == 1 else seen.transpose(0, 1))
            case "rows turned":
                return x + 1e-2 * x.flip(rows)
            case "largest of the batch":
                return x / x.abs().amax(rows, keepdim=True).clamp(min=1.0)
            case "running mean":
                return x + x.cumsum(self.positions)
            case "positions turned":
                return x + 0.1 * x.flip(self.positions)
            case _:
                return x


class Block(nn.Module):
    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(choices), Mlp(choices.is_gated)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixer = Mixer(choices.mixer, 1 if choices.inside == "sequence first" else 0)
        self.attn_out, self.mlp_out = nn.Identity(), nn.Identity()
        self.is_parallel = choices.is_parallel

    def forward(self, x: Tensor) -> Tensor:
        if self.is_parallel:
            return self.mixer(  # type: ignore[no-any-return]
                x + self.attn_out(self.attention(self.norm1(x))) + self.mlp_out(self.mlp(self.norm2(x)))
            )
        x = x + self.attn_out(self.attention(self.norm1(x)))
        return self.mixer(x + self.mlp_out(self.mlp(self.norm2(x))))  # type: ignore[no-any-return]


class Network(nn.Module):
    """A network of the grammar. Its `forward` takes what `inputs_of` makes."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self.choices = choices
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.patch = nn.Linear(3, WIDTH)
        self.fixed = nn.Parameter(torch.randn(length_of(choices), WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block(choices) for _ in range(choices.layers))
        self.resid = nn.ModuleList(nn.Identity() for _ in range(choices.layers))
        self.norm, self.unembed = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.pointer = nn.Linear(WIDTH, 1)
        if choices.has_large_feature:
            with torch.no_grad():
                self.places.weight[:, 0] += 300.0 if choices.dtype.itemsize > 2 else 8.0

    def stream(self, x: Tensor) -> Tensor:
        """[batch, pos, width] to the same, however the blocks lie."""
        inside = self.choices.inside
        if inside == "sequence first":
            x = x.transpose(0, 1)
        for block, tap in zip(self.blocks, self.resid, strict=True):
            x = block(tap(x))
        if inside == "sequence first":
            x = x.transpose(0, 1)
        if inside == "flat":
            batch, length, width = x.shape
            x = self.norm(x.reshape(batch * length, width)).view(batch, length, width)
        return self.norm(x)  # type: ignore[no-any-return]

    def embedded(self, ids: Tensor, places: Tensor | None = None) -> Tensor:
        if places is None:
            places = torch.arange(ids.shape[-1], device=ids.device)
        return self.embed(ids) + self.places(places)  # type: ignore[no-any-return]

    def finish(self, x: Tensor) -> Any:
        """The outputs, of the stream [batch, pos, width]."""
        match self.choices.output:
            case "vocabulary first":
                return {"logits": self.unembed(x).transpose(1, 2)}
            case "pointers":
                return {"logits": self.pointer(x)[..., 0]}
            case "flat":
                return {"logits": self.unembed(x.reshape(-1, WIDTH))}
            case "flat, positions first":
                return {"logits": self.unembed(x.transpose(0, 1).reshape(-1, WIDTH))}
            case "pooled":
                return {"logits": self.unembed(x.mean(1))}
            case "two":
                return {"hidden": x, "logits": self.unembed(x)}
            case _:
                return {"logits": self.unembed(x)}


class Ids(Network):
    def forward(self, ids: Tensor) -> Any:
        x = self.embedded(ids)
        return self.finish(self.stream(x + self.fixed if self.choices.boundary == "fixed length" else x))


class NamedIds(Network):
    def forward(self, input_ids: Tensor) -> Any:
        x = self.embedded(input_ids)
        return self.finish(self.stream(x + self.fixed if self.choices.boundary == "fixed length" else x))


class Embeddings(Network):
    def forward(self, x: Tensor) -> Any:
        return self.finish(self.stream(x + self.places(torch.arange(x.shape[1], device=x.device))))


class SequenceFirst(Network):
    """Ids [pos, batch]; outputs lie so too."""

    def forward(self, ids: Tensor) -> Any:
        found = self.finish(self.stream(self.embedded(ids.T)))
        if self.choices.output in {"logits", "two"}:
            found = {key: value.transpose(0, 1) for key, value in found.items()}
        return found


class PositionsGiven(Network):
    def forward(self, places: Tensor, ids: Tensor) -> Any:
        return self.finish(self.stream(self.embedded(ids, places)))


class Unbatched(Network):
    def forward(self, ids: Tensor) -> Any:
        found = self.finish(self.stream(self.embedded(ids)[None]))
        return {key: value[0] for key, value in found.items()}


class Channels(Network):
    """[batch, channel, time]: every channel by itself, cut into patches; attention over the patches."""

    def forward(self, x: Tensor) -> Any:
        batch, channels, _ = x.shape
        patches = self.patch(x.reshape(batch * channels, -1, 3))
        seen = self.stream(patches + self.places(torch.arange(patches.shape[1], device=x.device)))
        return self.finish(seen.reshape(batch, -1, WIDTH))


KINDS: Mapping[str, type[Network]] = {
    "ids": Ids,
    "fixed length": Ids,
    "embeddings": Embeddings,
    "sequence first": SequenceFirst,
    "positions given": PositionsGiven,
    "unbatched": Unbatched,
    "channels": Channels,
}


def length_of(choices: Choices) -> int:
    """How many positions the inputs have."""
    return 3 + choices.seed % 4


def network(choices: Choices) -> Network:
    """The network, its weights drawn from its seed."""
    torch.manual_seed(choices.seed)
    kind = KINDS[choices.boundary]
    if kind is Ids and choices.is_named:
        kind = NamedIds
    built = kind(choices)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if parameter.ndim > 1 and "places" not in name:
                parameter.mul_(1.5)
    return built.to(choices.dtype).eval()


def prompts_of(choices: Choices) -> int:
    """How many prompts the inputs are."""
    return 1 if choices.boundary == "unbatched" else 1 + choices.seed % 3


def inputs_of(choices: Choices, seed: int) -> dict[str, Tensor]:
    """Inputs by name, of the same shapes for each seed."""
    made = torch.Generator().manual_seed(1000 * choices.seed + seed)
    batch, length = prompts_of(choices), length_of(choices)
    ids = torch.randint(0, VOCABULARY, (batch, length), generator=made)
    match choices.boundary:
        case "embeddings":
            return {"x": torch.randn(batch, length, WIDTH, generator=made).to(choices.dtype)}
        case "sequence first":
            return {"ids": ids.T.contiguous()}
        case "positions given":
            return {"places": torch.arange(length), "ids": ids}
        case "unbatched":
            return {"ids": ids[0]}
        case "channels":
            return {"x": torch.randn(batch, 2, 3 * length, generator=made).to(choices.dtype)}
        case _:
            return {"input_ids" if choices.is_named else "ids": ids}


def scores(choices: Choices, outputs: Mapping[str, Tensor]) -> Tensor:
    """[prompt, vocabulary] at the last position, read off the outputs as they are known to lie."""
    logits, batch = outputs["logits"], prompts_of(choices)
    is_turned = choices.boundary == "sequence first" and choices.output in {"logits", "two"}
    if choices.boundary == "unbatched":
        logits = logits[None]
    match choices.output:
        case "vocabulary first":
            return logits[:, :, -1]
        case "pointers" | "pooled":
            return logits
        case "flat":
            return logits.view(batch, -1, VOCABULARY)[:, -1]
        case "flat, positions first":
            return logits.view(-1, batch, VOCABULARY)[-1]
        case _:
            return logits[-1] if is_turned else logits[:, -1]


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Without the fused kernel of torch's own attention, which no capture sees and which rounds otherwise."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


Change = Callable[[Tensor], Tensor]


def hooked(
    network: Network, inputs: Mapping[str, Tensor], changes: Mapping[str, Change]
) -> Mapping[str, Tensor]:
    """The outputs of the network itself when what its taps hand on is changed."""
    handles = [
        network.get_submodule(path).register_forward_hook(lambda _, __, out, own=change: own(out.clone()))
        for path, change in changes.items()
    ]
    try:
        with torch.no_grad(), without_fast_path():
            found: Mapping[str, Tensor] = network(**inputs)
            return found
    finally:
        for handle in handles:
            handle.remove()


def tapped(network: Network, inputs: Mapping[str, Tensor], path: str) -> Tensor:
    """What a tap hands on."""
    seen: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        seen.append(value.clone())
        return value

    hooked(network, inputs, {path: keep})
    return seen[0]
