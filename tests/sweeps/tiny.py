"""Two tiny language models with weights large enough for every patch to matter, and plain hooks on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import conewise as cw
from conewise.model import Model

VOCABULARY, LAYERS, HEADS, LENGTH = 61, 3, 4, 7
Change = Callable[[Tensor], Tensor]


@cache
def tiny(name: str) -> Model:
    """A captured "gpt2", or a "llama" with two heads to each head of keys; attention patterns are sites."""
    torch.manual_seed(0)
    library: Any = transformers
    if name == "gpt2":
        config = library.GPT2Config(
            n_layer=LAYERS, n_head=HEADS, n_embd=32, vocab_size=VOCABULARY, n_positions=32,
            bos_token_id=0, eos_token_id=0, attn_implementation="eager",
        )  # fmt: skip
        module: nn.Module = library.GPT2LMHeadModel(config)
    else:
        config = library.LlamaConfig(
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=2, hidden_size=32,
            intermediate_size=48, vocab_size=VOCABULARY, max_position_embeddings=32,
            attn_implementation="eager",
        )  # fmt: skip
        module = library.LlamaForCausalLM(config)
    for weight in module.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=0.3)
    return cw.capture(module.eval(), input_ids=prompts(1))


def prompts(batch: int, seed: int = 0, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator, device="cpu")


PATHS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "embed": "out:transformer.wte",
        "resid_pre": "in:transformer.h.{}",
        "resid_mid": "in:transformer.h.{}.ln_2",
        "resid_post": "out:transformer.h.{}",
        "attn_out": "out:transformer.h.{}.attn",
        "mlp_out": "out:transformer.h.{}.mlp",
        "z": "in:transformer.h.{}.attn.c_proj",
    },
    "llama": {
        "embed": "out:model.embed_tokens",
        "resid_pre": "in:model.layers.{}",
        "resid_mid": "in:model.layers.{}.post_attention_layernorm",
        "resid_post": "out:model.layers.{}",
        "attn_out": "out:model.layers.{}.self_attn",
        "mlp_out": "out:model.layers.{}.mlp",
        "z": "in:model.layers.{}.self_attn.o_proj",
        "q": "out:model.layers.{}.self_attn.q_proj",
        "k": "out:model.layers.{}.self_attn.k_proj",
        "v": "out:model.layers.{}.self_attn.v_proj",
    },
}
"""Where a hook on the module finds each kind."""


@contextmanager
def hooks(name: str, changes: Mapping[tuple[str, int], Change]) -> Iterator[nn.Module]:
    """The module with these kinds (and layers) changed as it runs."""
    module = tiny(name).module

    def enter(change: Change) -> Any:
        return lambda _, args: (change(args[0].clone()), *args[1:])

    def leave(change: Change) -> Any:
        def changed(_: nn.Module, __: Any, out: Any) -> Any:
            whole = change((out[0] if isinstance(out, tuple) else out).clone())
            return (whole, *out[1:]) if isinstance(out, tuple) else whole

        return changed

    with ExitStack() as stack:
        for (kind, layer), change in changes.items():
            way, _, path = PATHS[name][kind].partition(":")
            part = module.get_submodule(path.format(layer))
            made = (
                part.register_forward_pre_hook(enter(change))
                if way == "in"
                else part.register_forward_hook(leave(change))
            )
            stack.callback(made.remove)
        yield module


@torch.no_grad()
def logits(name: str, ids: Tensor, changes: Mapping[tuple[str, int], Change] | None = None) -> Tensor:
    """A plain full forward of the module, with hooks."""
    with hooks(name, changes or {}) as module:
        found: Tensor = module(input_ids=ids, use_cache=False).logits
    return found


def value(name: str, kind: str, layer: int, ids: Tensor) -> Tensor:
    """What a hook sees in a plain forward."""
    seen: list[Tensor] = []

    def look(whole: Tensor) -> Tensor:
        seen.append(whole.clone())
        return whole

    logits(name, ids, {(kind, layer): look})
    return seen[0]
