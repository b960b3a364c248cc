"""Models with removed edges in plain PyTorch: a Hugging Face model's modules, one reader at a time.

Nothing of conewise is used. A reader's stream is the sum of all that was written before it, each part that
of this world where its edge is kept and the ablated one where it is removed; norm, projection, attention
follow for it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as rotate_neox
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_llama

Parts = dict[str, Tensor]
"""What each writer wrote, in order of computation."""


class Plain:
    """GPT-2, in steps. Others say what differs."""

    is_parallel = False

    def __init__(self, module: Any) -> None:
        self.module = module
        config = module.config
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads
        self.groups = getattr(config, "num_key_value_heads", None) or self.heads
        self.width = config.hidden_size

    # -- what an architecture says of itself -----------------------------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        body = self.module.transformer
        found: Tensor = body.wte(ids) + body.wpe(torch.arange(ids.shape[1]))
        return found

    def project(self, layer: int, slot: str, stream: Tensor) -> Tensor:
        """[batch, pos, head, d_head] of one slot, every head."""
        block = self.module.transformer.h[layer]
        whole = block.attn.c_attn(block.ln_1(stream)).split(self.width, -1)["qkv".index(slot)]
        return _by_head(whole, self.heads)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        del layer
        return _attention(q, k, v, q.shape[-1] ** -0.5)

    def head_parts(self, layer: int, z: Tensor) -> tuple[Tensor, Tensor]:
        """[head, batch, pos, d_model], and what no head wrote."""
        c_proj = self.module.transformer.h[layer].attn.c_proj
        weight = c_proj.weight.reshape(self.heads, -1, self.width)
        return torch.einsum("bphd,hdm->hbpm", z, weight), c_proj.bias.expand(*z.shape[:2], -1)

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        block = self.module.transformer.h[layer]
        found: Tensor = block.mlp(block.ln_2(stream))
        return found

    def logits(self, stream: Tensor) -> Tensor:
        found: Tensor = self.module.lm_head(self.module.transformer.ln_f(stream))
        return found

    # -- one forward pass --------------------------------------------------------------------

    def slots(self) -> Iterator[tuple[str, int, Callable[[int, int], str]]]:
        """Each slot of attention: how many readers it has, and their names by (layer, number)."""
        grouped = self.groups != self.heads
        yield "q", self.heads, lambda layer, head: f"a{layer}.h{head}<q>"
        for slot in "kv":
            kind = "kv" if grouped else "h"
            yield slot, self.groups, lambda layer, head, s=slot, n=kind: f"a{layer}.{n}{head}<{s}>"  # type: ignore[misc]

    @torch.no_grad()
    def forward(
        self,
        ids: Tensor,
        removed: Collection[tuple[str, str]] = (),
        ablated: Mapping[str, Tensor] | None = None,
        by_edge: Mapping[tuple[str, str], Tensor] | None = None,
    ) -> tuple[Tensor, Parts]:
        """The logits, and the parts, where (writer, reader) pairs are `removed`.

        They carry what is `ablated`, by writer, or what they have of their own.
        """
        lost = set(removed)

        def carried(writer: str, reader: str, part: Tensor) -> Tensor:
            if (writer, reader) not in lost:
                return part
            if by_edge is not None:
                return by_edge[writer, reader]
            assert ablated is not None
            return ablated[writer]

        return self.world(ids, carried)

    def world(self, ids: Tensor, carried: Callable[[str, str, Tensor], Tensor]) -> tuple[Tensor, Parts]:
        """The logits and the parts, where a reader sees what is `carried` (writer, reader, its part)."""
        parts: Parts = {"input": self.embed(ids)}
        constant = torch.zeros_like(parts["input"])

        def seen(reader: str, before: Parts, rest: Tensor) -> Tensor:
            stream = rest.clone()
            for writer, part in before.items():
                stream = stream + carried(writer, reader, part)
            return stream

        for layer in range(self.layers):
            before, rest = dict(parts), constant
            found = {}
            for slot, count, named in self.slots():
                rows = [
                    self.project(layer, slot, seen(named(layer, n), before, rest))[:, :, n]
                    for n in range(count)
                ]
                found[slot] = torch.stack(rows, 2)
            wrote, added = self.head_parts(layer, self.attend(layer, **found))
            parts |= {f"a{layer}.h{head}": part for head, part in enumerate(wrote)}
            constant = constant + added
            if not self.is_parallel:
                before, rest = dict(parts), constant
            parts[f"m{layer}"] = self.mlp(layer, seen(f"m{layer}", before, rest))
        return self.logits(seen("logits", parts, constant)), parts

    def edges(self) -> list[tuple[str, str]]:
        """(writer, reader) of every edge: readers in order of computation, for each its writers in order."""
        found: list[tuple[str, str]] = []
        writers = ["input"]
        for layer in range(self.layers):
            for _, count, named in self.slots():
                found += [(writer, named(layer, n)) for n in range(count) for writer in writers]
            heads = [f"a{layer}.h{head}" for head in range(self.heads)]
            found += [
                (writer, f"m{layer}") for writer in (writers if self.is_parallel else [*writers, *heads])
            ]
            writers += [*heads, f"m{layer}"]
        return found + [(writer, "logits") for writer in writers]

    def feeds(self, reader: str) -> list[str]:
        """The writers whose output depends on a reader; none for the logits."""
        if reader == "logits":
            return []
        component = reader.partition("<")[0]
        if ".kv" not in component:
            return [component]
        layer, _, group = component.partition(".kv")
        each = self.heads // self.groups
        return [f"{layer}.h{int(group) * each + head}" for head in range(each)]


class Llama(Plain):
    """Llama: rotary embeddings, grouped queries, no biases."""

    def embed(self, ids: Tensor) -> Tensor:
        found: Tensor = self.module.model.embed_tokens(ids)
        return found

    def project(self, layer: int, slot: str, stream: Tensor) -> Tensor:
        block = self.module.model.layers[layer]
        whole = getattr(block.self_attn, f"{slot}_proj")(block.input_layernorm(stream))
        return _by_head(whole, self.heads if slot == "q" else self.groups)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cos, sin = self.rotary(layer, q)
        q, k = rotate_llama(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        each = self.heads // self.groups
        k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 2)
        return _attention(q.transpose(1, 2), k.transpose(1, 2), v, self.scale(q), self.cap())

    def rotary(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        del layer
        found: tuple[Tensor, Tensor] = self.module.model.rotary_emb(q, torch.arange(q.shape[1])[None])
        return found

    def scale(self, q: Tensor) -> float:
        return float(q.shape[-1] ** -0.5)

    def cap(self) -> float | None:
        return None

    def head_parts(self, layer: int, z: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.module.model.layers[layer].self_attn.o_proj.weight
        by_head = weight.T.reshape(self.heads, -1, self.width)
        wrote = torch.einsum("bphd,hdm->hbpm", z, by_head)
        return wrote, torch.zeros_like(wrote[0])

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        block = self.module.model.layers[layer]
        found: Tensor = block.mlp(block.post_attention_layernorm(stream))
        return found

    def logits(self, stream: Tensor) -> Tensor:
        found: Tensor = self.module.lm_head(self.module.model.norm(stream))
        return found


class Gemma2(Llama):
    """Gemma 2: norms on the way out, scores and logits that are capped."""

    def embed(self, ids: Tensor) -> Tensor:
        found = super().embed(ids)  # newer versions scale in the embedding itself
        return found if hasattr(self.module.model.embed_tokens, "embed_scale") else found * self.width**0.5

    def scale(self, q: Tensor) -> float:
        return float(self.module.config.query_pre_attn_scalar**-0.5)

    def cap(self) -> float | None:
        cap: float | None = self.module.config.attn_logit_softcapping
        return cap

    def head_parts(self, layer: int, z: Tensor) -> tuple[Tensor, Tensor]:
        wrote, constant = super().head_parts(layer, z)
        norm = self.module.model.layers[layer].post_attention_layernorm
        scale = (wrote.sum(0).pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt()
        return wrote * scale * (1.0 + norm.weight), constant

    def feeds(self, reader: str) -> list[str]:
        """The norm's scale is that of all heads: they move together."""
        heads = super().feeds(reader)
        if not heads or heads[0].startswith("m"):
            return heads
        return [f"{heads[0].partition('.')[0]}.h{head}" for head in range(self.heads)]

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        block = self.module.model.layers[layer]
        found: Tensor = block.post_feedforward_layernorm(block.mlp(block.pre_feedforward_layernorm(stream)))
        return found

    def logits(self, stream: Tensor) -> Tensor:
        cap = self.module.config.final_logit_softcapping
        found: Tensor = torch.tanh(super().logits(stream) / cap) * cap
        return found


class Gemma3(Gemma2):
    """Gemma 3: queries and keys are normed too, layers have rotary embeddings of their own, no caps."""

    def project(self, layer: int, slot: str, stream: Tensor) -> Tensor:
        found, attention = super().project(layer, slot, stream), self.module.model.layers[layer].self_attn
        norms = {"q": attention.q_norm, "k": attention.k_norm}
        return norms[slot](found) if slot in norms else found

    def rotary(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(q.shape[1])[None]
        kind = self.module.config.layer_types[layer]
        found: tuple[Tensor, Tensor] = self.module.model.rotary_emb(q, positions, kind)
        return found

    def cap(self) -> float | None:
        return None

    def logits(self, stream: Tensor) -> Tensor:
        return Llama.logits(self, stream)


class NeoX(Plain):
    """GPT-NeoX: attention and MLP in parallel, q, k and v of a head side by side."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.is_parallel = module.config.use_parallel_residual

    def embed(self, ids: Tensor) -> Tensor:
        found: Tensor = self.module.gpt_neox.embed_in(ids)
        return found

    def project(self, layer: int, slot: str, stream: Tensor) -> Tensor:
        block = self.module.gpt_neox.layers[layer]
        whole = _by_head(block.attention.query_key_value(block.input_layernorm(stream)), self.heads)
        return whole.chunk(3, -1)["qkv".index(slot)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        del layer
        cos, sin = self.module.gpt_neox.rotary_emb(q, torch.arange(q.shape[1])[None])
        q, k = rotate_neox(q.transpose(1, 2), k.transpose(1, 2), cos, sin)  # type: ignore[no-untyped-call]
        return _attention(q.transpose(1, 2), k.transpose(1, 2), v, q.shape[-1] ** -0.5)

    def head_parts(self, layer: int, z: Tensor) -> tuple[Tensor, Tensor]:
        dense = self.module.gpt_neox.layers[layer].attention.dense
        by_head = dense.weight.T.reshape(self.heads, -1, self.width)
        return torch.einsum("bphd,hdm->hbpm", z, by_head), dense.bias.expand(*z.shape[:2], -1)

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        block = self.module.gpt_neox.layers[layer]
        found: Tensor = block.mlp(block.post_attention_layernorm(stream))
        return found

    def logits(self, stream: Tensor) -> Tensor:
        body = self.module.gpt_neox
        head = getattr(self.module, "embed_out", None) or self.module.lm_head
        found: Tensor = head(body.final_layer_norm(stream))
        return found


KINDS: Mapping[str, type[Plain]] = {"gpt2": Plain, "llama": Llama, "gpt_neox": NeoX, "gemma2": Gemma2}


def _by_head(whole: Tensor, heads: int) -> Tensor:
    return whole.reshape(*whole.shape[:2], heads, -1)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float | None = None) -> Tensor:
    """[batch, pos, head, d_head] of causal attention, written out."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    pattern = scores.masked_fill(ahead, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", pattern, v)


def published_acdc(
    plain: Plain,
    ids: Tensor,
    ablated: Mapping[str, Tensor],
    metric: Callable[[Tensor], float],
    threshold: float,
    *,
    absolute: bool,
) -> list[tuple[str, str, bool]]:
    """ACDC as it was published, one edge at a time: (writer, reader, kept) in the order of decisions.

    Readers from the last to the first, for each its writers from the last to the first. A reader of a
    component that nothing reads any more is left out, with all its edges.
    """
    edges = plain.edges()
    removed: set[tuple[str, str]] = set()
    log: list[tuple[str, str, bool]] = []
    current = metric(plain.forward(ids)[0])
    for reader in reversed(dict.fromkeys(reader for _, reader in edges)):
        feeding = set(plain.feeds(reader))
        is_read = reader == "logits" or any(
            writer in feeding and (writer, other) not in removed for writer, other in edges
        )
        for writer in reversed([writer for writer, other in edges if other == reader]):
            if not is_read:
                removed.add((writer, reader))
                log.append((writer, reader, False))
                continue
            value = metric(plain.forward(ids, removed | {(writer, reader)}, ablated)[0])
            change = abs(value - current) if absolute else value - current
            if change < threshold:
                removed.add((writer, reader))
                current = value
            log.append((writer, reader, not change < threshold))
    return log
