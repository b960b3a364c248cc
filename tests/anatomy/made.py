"""Small transformers of many forms, written by hand. What a module is called says nothing; its form does.

Every layer has its parts as submodules, so that hooks on them say what each is: `attn`, `mlp` and whatever
else is added to the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HEADS, WORDS, LENGTH = 16, 2, 31, 9


class Heads(nn.Module):
    """Attention over positions with as many heads as is said."""

    def __init__(self, heads: int = HEADS, *, fused: bool = True, width: int = WIDTH) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        out: Tensor = self.o(self.joined(x, memory))
        return out

    def joined(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Each head's result, side by side."""
        source = x if memory is None else memory
        parts = (self.q(x), self.k(source), self.v(source))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        if self.fused:
            z = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=memory is None)
        else:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            z = scores.softmax(-1) @ v
        return z.transpose(1, 2).flatten(2)


class Mlp(nn.Module):
    """Up, an activation, down."""

    def __init__(self, width: int = WIDTH, act: Callable[[Tensor], Tensor] = nn.functional.gelu) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(width, 3 * width), nn.Linear(3 * width, width), act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x)))
        return out


class Gated(nn.Module):
    """A gate and a plain projection up, their product, down."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


class ThreeProjections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class Experts(nn.Module):
    """A dense mixture: every expert is computed, and weighed by what the router gave it."""

    def __init__(self, experts: int = 3, chosen: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(Mlp() for _ in range(experts))
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best, which = weights.topk(self.chosen, -1)
        kept = torch.zeros_like(weights).scatter(-1, which, best)
        parts = [kept[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts)]
        return torch.stack(parts, -1).sum(-1)


class Convolved(nn.Module):
    """Up, a convolution over positions, down: no MLP, though it has two projections and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.conv = nn.Conv1d(24, 24, 3, padding=1, groups=24)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.silu(self.conv(self.up(x).transpose(1, 2)).transpose(1, 2)))
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.rnn, self.down = (
            nn.Linear(WIDTH, 8),
            nn.GRU(8, 8, batch_first=True),
            nn.Linear(8, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.rnn(self.up(x))[0].relu())
        return out


class Scan(nn.Module):
    """A linear recurrence over positions, as state-space layers have it: a gated cumulative sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        state = torch.cumsum(self.up(x), 1)
        out: Tensor = self.down(state * nn.functional.silu(self.gate(x)))
        return out


class Shifted(nn.Module):
    """An MLP that reads the position before, by padding in front and cutting behind."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.mlp = nn.Parameter(torch.full((WIDTH,), 0.5)), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        before = nn.functional.pad(x, (0, 0, 1, -1))
        out: Tensor = self.mlp(x * self.mix + before * (1 - self.mix))
        return out


class OverPositions(nn.Module):
    """An MLP over the positions of each feature: a mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(x.transpose(1, 2)).transpose(1, 2)
        return out


class Layer(nn.Module):
    """A layer with parts of any names; `flow` says how they are put together."""

    def __init__(self, flow: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.flow = flow
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.flow(self, x)


class Model(nn.Module):
    """Embeddings of words and positions, layers, a norm and an unembedding."""

    def __init__(self, layers: Sequence[nn.Module], *, given_positions: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.given_positions = given_positions

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        places = torch.arange(ids.shape[1]) if positions is None else positions
        x = self.words(ids) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


def norm() -> nn.LayerNorm:
    made = nn.LayerNorm(WIDTH)
    nn.init.uniform_(made.weight, 0.5, 1.5)
    return made


def stacked(flow: Callable[[Any, Tensor], Tensor], count: int = 2, **parts: Callable[[], nn.Module]) -> Model:
    """A model of `count` layers of one form, each with parts of its own."""
    torch.manual_seed(0)
    model = Model([Layer(flow, **{name: part() for name, part in parts.items()}) for _ in range(count)])
    return model.eval()


# -- how layers are put together ----------------------------------------------------------------


def pre_norm(self: Any, x: Tensor) -> Tensor:
    x = x + self.attn(self.ln1(x))
    out: Tensor = x + self.mlp(self.ln2(x))
    return out


def post_norm(self: Any, x: Tensor) -> Tensor:
    x = self.ln1(x + self.attn(x))
    out: Tensor = self.ln2(x + self.mlp(x))
    return out


def sandwich(self: Any, x: Tensor) -> Tensor:
    x = x + self.after1(self.attn(self.ln1(x)))
    out: Tensor = x + self.after2(self.mlp(self.ln2(x)))
    return out


def parallel(self: Any, x: Tensor) -> Tensor:
    read = self.ln1(x)
    out: Tensor = x + self.attn(read) + self.mlp(read)
    return out


def parallel_branches_first(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.mlp(self.ln2(x)) + self.attn(self.ln1(x)) + x
    return out


def parallel_with_a_sum_kept(self: Any, x: Tensor) -> Tensor:
    """The MLP reads what enters, and is added behind attention: a value of the stream lies between."""
    middle = x + self.attn(self.ln1(x))
    out: Tensor = self.keep(middle) + self.mlp(self.ln2(x))
    return out


def macaron(self: Any, x: Tensor) -> Tensor:
    x = x + 0.5 * self.first(self.ln1(x))
    x = x + self.attn(self.ln2(x))
    x = x + self.conv(self.ln3(x))
    x = x + 0.5 * self.second(self.ln4(x))
    out: Tensor = self.ln5(x)
    return out


def macaron_without_convolution(self: Any, x: Tensor) -> Tensor:
    x = x + 0.5 * self.first(self.ln1(x))
    x = x + self.attn(self.ln2(x))
    out: Tensor = x + 0.5 * self.second(self.ln4(x))
    return out


def mlp_first(self: Any, x: Tensor) -> Tensor:
    x = x + self.mlp(self.ln1(x))
    out: Tensor = x + self.attn(self.ln2(x))
    return out


def attention_only(self: Any, x: Tensor) -> Tensor:
    out: Tensor = x + self.attn(self.ln1(x))
    return out


def beside(self: Any, x: Tensor) -> Tensor:
    """Attention and another branch read the same norm and are added together; then comes the MLP."""
    read = self.ln1(x)
    x = x + (self.other(read) + self.attn(read))
    out: Tensor = x + self.mlp(self.ln2(x))
    return out


def in_place_of_the_mlp(self: Any, x: Tensor) -> Tensor:
    x = x + self.attn(self.ln1(x))
    out: Tensor = x + self.other(self.ln2(x))
    return out


def between(self: Any, x: Tensor) -> Tensor:
    x = x + self.attn(self.ln1(x))
    x = x + self.other(self.ln3(x))
    out: Tensor = x + self.mlp(self.ln2(x))
    return out


def two_side_by_side(self: Any, x: Tensor) -> Tensor:
    x = x + self.attn(self.ln1(x))
    read = self.ln2(x)
    out: Tensor = x + self.first(read) + self.second(read)
    return out


def shared_expert(self: Any, x: Tensor) -> Tensor:
    x = x + self.attn(self.ln1(x))
    out: Tensor = x + self.mlp(self.ln2(x))
    return out


def scaled_stream(self: Any, x: Tensor) -> Tensor:
    x = self.ln1(x * 1.7 + self.attn(x))
    out: Tensor = self.ln2(x * 1.7 + self.mlp(x))
    return out


def scaled_branches(self: Any, x: Tensor) -> Tensor:
    x = x + self.scale1(self.attn(self.ln1(x)))
    out: Tensor = x + self.scale2(self.mlp(self.ln2(x)))
    return out


def normed_stream(self: Any, x: Tensor) -> Tensor:
    """What attention is added to is a norm of what enters."""
    x = self.ln1(x)
    x = x + self.attn(x)
    x = self.ln2(x)
    out: Tensor = x + self.mlp(x)
    return out


def fused_output(self: Any, x: Tensor) -> Tensor:
    """Heads and neurons go through one projection together."""
    read = self.ln1(x)
    joined = torch.cat([self.attn.joined(read), nn.functional.gelu(self.up(read))], -1)
    out: Tensor = x + self.out(joined)
    return out


def attention_then_mlp_in_one_branch(self: Any, x: Tensor) -> Tensor:
    out: Tensor = x + self.mlp(self.ln2(self.attn(self.ln1(x))))
    return out


def gated_attention(self: Any, x: Tensor) -> Tensor:
    read = self.ln1(x)
    x = x + self.attn.o(self.attn.joined(read) * torch.sigmoid(self.gate(read)))
    out: Tensor = x + self.mlp(self.ln2(x))
    return out


def adapted(self: Any, x: Tensor) -> Tensor:
    """Low-rank additions to the output projection and to the MLP's last."""
    z = self.attn.joined(self.ln1(x))
    x = x + (self.attn.o(z) + self.low(z))
    out: Tensor = x + self.mlp(self.ln2(x))
    return out


def without_a_stream(self: Any, x: Tensor) -> Tensor:
    x = self.attn(self.ln1(x))
    out: Tensor = self.mlp(self.ln2(x))
    return out


def one_projection(self: Any, x: Tensor) -> Tensor:
    x = x + self.attn(self.ln1(x))
    out: Tensor = x + nn.functional.relu(self.lin(self.ln2(x)))
    return out


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


# -- models that are no list of layers ------------------------------------------------------------


class OneLayer(nn.Module):
    """One layer, written out in the model itself; positions are given, so that both embeddings vary."""

    def __init__(self, *, with_mlp: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.ln1, self.ln2, self.ln3 = norm(), norm(), norm()
        self.attn, self.mlp, self.head = Heads(), Mlp(), nn.Linear(WIDTH, WORDS)
        self.with_mlp = with_mlp

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.words(ids) + self.places(positions)
        x = x + self.attn(self.ln1(x))
        if self.with_mlp:
            x = x + self.mlp(self.ln2(x))
        out: Tensor = self.head(self.ln3(x))
        return out


class Nested(nn.Module):
    """Pairs of attention and MLP in lists within a list; the sums are the model's own."""

    def __init__(self, count: int = 3, *, wrapped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.pairs = nn.ModuleList(
            nn.ModuleList([self._branch(Heads(), wrapped), self._branch(Mlp(), wrapped)])
            for _ in range(count)
        )
        self.wrapped = wrapped

    def _branch(self, part: nn.Module, wrapped: bool) -> nn.Module:
        branch = nn.Sequential(norm(), part)
        return Residual(branch) if wrapped else branch

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for pair in self.pairs:
            for branch in pair:  # type: ignore[attr-defined]
                x = branch(x) if self.wrapped else x + branch(x)
        out: Tensor = self.head(x)
        return out


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class Lists(nn.Module):
    """Attentions in one list and MLPs in another, as XLM has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.attentions = nn.ModuleList(Heads() for _ in range(3))
        self.mlps = nn.ModuleList(Mlp() for _ in range(3))
        self.norms = nn.ModuleList(norm() for _ in range(6))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for i, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = self.norms[2 * i](x + attention(x))
            x = self.norms[2 * i + 1](x + mlp(x))
        out: Tensor = self.head(x)
        return out


class InTurns(nn.Module):
    """Attention, MLP, attention, MLP, each a layer by itself in one list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        parts = (Heads(), Mlp(), Heads(), Mlp())
        self.net = nn.Sequential(*(Residual(nn.Sequential(norm(), part)) for part in parts))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.net(self.words(ids)))
        return out


class Shared(nn.Module):
    """One layer's weights, used three times: as a module, or part by part."""

    def __init__(self, *, as_module: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layer = Layer(pre_norm, ln1=norm(), attn=Heads(), ln2=norm(), mlp=Mlp())
        self.as_module = as_module

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for _ in range(3):
            x = self.layer(x) if self.as_module else pre_norm(self.layer, x)
        out: Tensor = self.head(x)
        return out


class Decoder(nn.Module):
    """A layer with attention to another sequence between its own attention and its MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2, self.ln3 = norm(), norm(), norm()
        self.attn, self.cross, self.mlp = Heads(), Heads(), Mlp()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        x = x + self.cross(self.ln2(x), memory)
        out: Tensor = x + self.mlp(self.ln3(x))
        return out


class EncoderDecoder(nn.Module):
    """Two stacks, each a list of layers; or, `single`, one layer each that is in no list."""

    def __init__(self, *, single: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

        def layer() -> nn.Module:
            return Layer(pre_norm, ln1=norm(), attn=Heads(), ln2=norm(), mlp=Mlp())

        self.single = single
        self.encoder: Any = layer() if single else nn.ModuleList(layer() for _ in range(2))
        self.decoder: Any = Decoder() if single else nn.ModuleList(Decoder() for _ in range(2))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        memory, x = self.words(ids), self.words(targets)
        for layer in [self.encoder] if self.single else self.encoder:
            memory = layer(memory)
        for layer in [self.decoder] if self.single else self.decoder:
            x = layer(x, memory)
        out: Tensor = self.head(x)
        return out


class Plain(nn.Module):
    """No attention at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Residual(nn.Sequential(norm(), Mlp())) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


class Bare(nn.Module):
    """Two layers out of parameters alone: no module says where one begins."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = [(4, WIDTH, WIDTH), (WIDTH, 24), (24, WIDTH)] * 2
        self.weights = nn.ParameterList(torch.randn(shape) / 4 for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        for at in (0, 3):
            attention, up, down = self.weights[at : at + 3]
            q, k, v = ((x @ attention[i]).unflatten(-1, (HEADS, -1)).transpose(1, 2) for i in range(3))
            z = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + z @ attention[3]
            x = x + nn.functional.gelu(x @ up) @ down
        return x


# -- few heads, and heads in odd places -----------------------------------------------------------


class OneHead(nn.Module):
    """One head, without a dimension for it: [batch, pos, d_head] throughout."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.way == "fused":
            z = nn.functional.scaled_dot_product_attention(q, k, v)
        elif self.way == "einsum":
            z = torch.einsum("bqk,bkd->bqd", torch.einsum("bqd,bkd->bqk", q, k).softmax(-1), v)
        else:
            z = (q @ k.transpose(1, 2) / 4).softmax(-1) @ v
        out: Tensor = self.o(z)
        return out


class OneKey(nn.Module):
    """Four heads that share one key and one value, which has a dimension of its own or none.

    `beside`: heads share a dimension with positions, [batch, pos·head, d_head].
    """

    def __init__(self, *, beside: bool) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 4), nn.Linear(WIDTH, WIDTH // 4)
        self.beside = beside

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x).unflatten(-1, (4, -1)), self.k(x), self.v(x)
        if self.beside:
            z = (q.flatten(1, 2) @ k.transpose(1, 2) / 2).softmax(-1) @ v
        else:
            z = (q.transpose(1, 2) @ k[:, None].transpose(-2, -1) / 2).softmax(-1) @ v[:, None]
            z = z.transpose(1, 2)
        out: Tensor = self.o(z.reshape(x.shape))
        return out
