"""Edges by plain hooks on a Hugging Face module: written from the definitions alone, one forward a world.

It shares nothing with the package. In a world, some readers see another stream: their own, plus for each edge
that is given what the writer is to have written, less what it wrote in this world. Norm and projection are
computed anew for such a reader, and its queries, keys or values (of one head), its MLP's term, or what the
unembedding reads are replaced; all behind it is live. With one edge and a writer's part of another run, that
is the world of the edge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Block:
    """One layer, by its modules. A norm's input is what its readers read of the stream.

    `columns` gives the columns of a projection's output for a slot's head. `weight` is W_O as [in, out];
    `out_norm` is an RMS norm behind it, and `last` the module whose output the MLP adds to the stream.
    """

    attn_norm: nn.Module
    projections: Mapping[str, nn.Module]
    columns: Callable[[str, int], slice]
    heads: Mapping[str, int]
    out: nn.Module
    weight: Callable[[], Tensor]
    mlp_norm: nn.Module
    mlp: Callable[[Tensor], Tensor]
    last: nn.Module
    out_norm: nn.Module | None = None
    is_parallel: bool = False


@dataclass
class Forward:
    """What was seen in one forward: the parts of writers, the stream of each reader, the logits."""

    parts: dict[str, Tensor] = field(default_factory=dict)
    streams: dict[str, Tensor] = field(default_factory=dict)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))


class HookOracle:
    """The edges of a GPT-2, a Llama, a GPT-NeoX or a Gemma 2 of Hugging Face."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.blocks, self.final_norm = _described(module)
        self.writers = ["input"]
        self.readers: list[str] = []
        self.before: dict[str, int] = {}
        for at, block in enumerate(self.blocks):
            for slot in "qkv":
                short = "h" if block.heads[slot] == block.heads["q"] else "kv"
                for head in range(block.heads[slot]):
                    self._reads(f"a{at}.{short}{head}<{slot}>")
            if block.is_parallel:
                self._reads(f"m{at}")
            self.writers += [f"a{at}.h{head}" for head in range(block.heads["q"])]
            if not block.is_parallel:
                self._reads(f"m{at}")
            self.writers.append(f"m{at}")
        self._reads("logits")

    def _reads(self, reader: str) -> None:
        self.readers.append(reader)
        self.before[reader] = len(self.writers)

    def edges(self) -> list[str]:
        """Every edge, reader after reader."""
        return [f"{writer}->{reader}" for reader in self.readers for writer in self.writers_of(reader)]

    def writers_of(self, reader: str) -> list[str]:
        """The writers whose parts a reader sees."""
        return self.writers[: self.before[reader]]

    def forward(self, **inputs: Tensor) -> Forward:
        """The module as it is."""
        return self.world(inputs, {})

    def edge(
        self, edge: str, source: Forward, inputs: Mapping[str, Tensor], pos: int | Sequence[int] | None = None
    ) -> Forward:
        """The world of one edge: its reader sees the writer's part of `source`, at the positions given."""
        return self.world(inputs, {edge: source.parts[edge.partition("->")[0]]}, pos=pos)

    def removed(
        self, edges: Sequence[str], ablated: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Forward:
        """The world without some edges: their readers see the writers' `ablated` parts."""
        return self.world(inputs, {edge: ablated[edge.partition("->")[0]] for edge in edges})

    @torch.no_grad()
    def world(
        self,
        inputs: Mapping[str, Tensor],
        edges: Mapping[str, Tensor],
        *,
        streams: Mapping[str, Tensor] | None = None,
        pos: int | Sequence[int] | None = None,
    ) -> Forward:
        """One forward in which readers see other parts (by edge), or another stream (by reader)."""
        asked: dict[str, dict[str, Tensor]] = {reader: {} for reader in streams or {}}
        for edge, part in edges.items():
            writer, _, reader = edge.partition("->")
            assert writer in self.writers_of(reader), edge
            asked.setdefault(reader, {})[writer] = part
        world = _World(self, asked, streams or {}, [pos] if isinstance(pos, int) else pos)
        with world.hooked():
            world.seen.logits = self.module(**inputs, use_cache=False).logits
        return world.seen


class _World:
    def __init__(
        self,
        oracle: HookOracle,
        asked: Mapping[str, Mapping[str, Tensor]],
        streams: Mapping[str, Tensor],
        pos: Sequence[int] | None,
    ) -> None:
        self.oracle, self.asked, self.streams = oracle, asked, streams
        self.pos = slice(None) if pos is None else list(pos)
        self.seen = Forward()
        self._is_inside = False
        self._z: dict[int, Tensor] = {}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles: list[Any] = []

        def before(module: nn.Module, action: Callable[[Tensor], None]) -> None:
            def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
                if not self._is_inside:
                    action(args[0])

            handles.append(module.register_forward_pre_hook(hook))

        def behind(module: nn.Module, action: Callable[[Tensor], Tensor]) -> None:
            def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
                return None if self._is_inside else action(output)

            handles.append(module.register_forward_hook(hook))

        for at, block in enumerate(self.oracle.blocks):
            before(block.attn_norm, lambda x, at=at: self._enter(at, x))  # type: ignore[misc]
            for module in dict.fromkeys(block.projections.values()):
                behind(module, lambda y, at=at, module=module: self._projected(at, module, y))  # type: ignore[misc]
            before(block.out, lambda z, at=at: self._z.update({at: z}))  # type: ignore[misc]
            behind(block.out, lambda y, at=at: self._attended(at, y))  # type: ignore[misc]
            before(block.mlp_norm, lambda x, at=at: self.seen.streams.update({f"m{at}": x}))  # type: ignore[misc]
            behind(block.last, lambda y, at=at: self._added(at, y))  # type: ignore[misc]
        before(self.oracle.final_norm, lambda x: self.seen.streams.update({"logits": x}))
        behind(self.oracle.final_norm, lambda y: self._changed("logits", y, self.oracle.final_norm))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, at: int, stream: Tensor) -> None:
        if at == 0:
            self.seen.parts["input"] = stream
        for reader in self.oracle.readers:
            if reader.startswith(f"a{at}."):
                self.seen.streams[reader] = stream

    def _stream(self, reader: str) -> Tensor:
        """The stream as this reader sees it."""
        own = self.seen.streams[reader]
        if reader in self.streams:
            return self.streams[reader]
        for writer, part in self.asked[reader].items():
            own = own + (part - self.seen.parts[writer])
        return own

    def _inside(self, function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        """Modules called from a hook, without hooks of their own."""
        self._is_inside = True
        try:
            return function(value)
        finally:
            self._is_inside = False

    def _changed(self, reader: str, value: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """The value with what the reader makes of its stream, at the positions that are meant."""
        if reader not in self.asked:
            return value
        fresh = value.clone()
        fresh[:, self.pos] = self._inside(function, self._stream(reader))[:, self.pos]
        return fresh

    def _projected(self, at: int, module: nn.Module, value: Tensor) -> Tensor:
        block, fresh = self.oracle.blocks[at], value.clone()
        for slot, projection in block.projections.items():
            for head in range(block.heads[slot]) if projection is module else ():
                short = "h" if block.heads[slot] == block.heads["q"] else "kv"
                reader, columns = f"a{at}.{short}{head}<{slot}>", block.columns(slot, head)
                made = self._changed(reader, value, lambda x: module(block.attn_norm(x)))
                fresh[..., columns] = made[..., columns]
        return fresh

    def _attended(self, at: int, output: Tensor) -> Tensor:
        """Note each head's part: its rows of z times its rows of W_O, without bias; normed as the sum is."""
        block = self.oracle.blocks[at]
        heads = block.heads["q"]
        z, weight = self._z[at].chunk(heads, -1), block.weight().chunk(heads, 0)
        scale = torch.ones(())
        if block.out_norm is not None:  # x / rms(x) * (1 + w), with the rms of the whole
            norm: Any = block.out_norm
            rms = torch.rsqrt(output.float().pow(2).mean(-1, keepdim=True) + norm.eps)
            scale = rms.to(output.dtype) * (1.0 + norm.weight)
        for head in range(heads):
            share = z[head] @ weight[head]
            self.seen.parts[f"a{at}.h{head}"] = share * scale
        return output

    def _added(self, at: int, output: Tensor) -> Tensor:
        block = self.oracle.blocks[at]
        found = self._changed(f"m{at}", output, block.mlp)
        self.seen.parts[f"m{at}"] = found
        return found


def _described(module: Any) -> tuple[list[Block], nn.Module]:
    """The blocks of a module, and its last norm."""
    kind = module.config.model_type
    if kind == "gpt2":
        return [_gpt2(block) for block in module.transformer.h], module.transformer.ln_f
    if kind == "gpt_neox":
        return [_gpt_neox(layer, module.config) for layer in module.gpt_neox.layers], (
            module.gpt_neox.final_layer_norm
        )
    if kind in {"llama", "gemma2"}:
        make = _gemma2 if kind == "gemma2" else _llama
        return [make(layer, module.config) for layer in module.model.layers], module.model.norm
    raise ValueError(f"no oracle for {kind!r}")


def _gpt2(block: Any) -> Block:
    heads, width = block.attn.num_heads, block.attn.head_dim

    def columns(slot: str, head: int) -> slice:
        begin = "qkv".index(slot) * heads * width + head * width
        return slice(begin, begin + width)

    return Block(
        attn_norm=block.ln_1,
        projections=dict.fromkeys("qkv", block.attn.c_attn),
        columns=columns,
        heads=dict.fromkeys("qkv", heads),
        out=block.attn.c_proj,
        weight=lambda: block.attn.c_proj.weight,
        mlp_norm=block.ln_2,
        mlp=lambda x: block.mlp(block.ln_2(x)),
        last=block.mlp,
    )


def _gpt_neox(layer: Any, config: Any) -> Block:
    heads = config.num_attention_heads
    width = config.hidden_size // heads

    def columns(slot: str, head: int) -> slice:
        begin = head * 3 * width + "qkv".index(slot) * width
        return slice(begin, begin + width)

    return Block(
        attn_norm=layer.input_layernorm,
        projections=dict.fromkeys("qkv", layer.attention.query_key_value),
        columns=columns,
        heads=dict.fromkeys("qkv", heads),
        out=layer.attention.dense,
        weight=lambda: layer.attention.dense.weight.T,
        mlp_norm=layer.post_attention_layernorm,
        mlp=lambda x: layer.mlp(layer.post_attention_layernorm(x)),
        last=layer.mlp,
        is_parallel=config.use_parallel_residual,
    )


def _llama(layer: Any, config: Any) -> Block:
    attn = layer.self_attn
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    width = attn.head_dim
    return Block(
        attn_norm=layer.input_layernorm,
        projections={"q": attn.q_proj, "k": attn.k_proj, "v": attn.v_proj},
        columns=lambda _, head: slice(head * width, (head + 1) * width),
        heads={"q": heads, "k": groups, "v": groups},
        out=attn.o_proj,
        weight=lambda: attn.o_proj.weight.T,
        mlp_norm=layer.post_attention_layernorm,
        mlp=lambda x: layer.mlp(layer.post_attention_layernorm(x)),
        last=layer.mlp,
    )


def _gemma2(layer: Any, config: Any) -> Block:
    block = _llama(layer, config)
    block.out_norm = layer.post_attention_layernorm
    block.mlp_norm = layer.pre_feedforward_layernorm
    block.mlp = lambda x: layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
    block.last = layer.post_feedforward_layernorm
    return block
