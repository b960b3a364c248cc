"""Small language models of several families, and one text at a time by plain hooks on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

import conewise as cw
from conewise.model import Model

hugging_face: Any = transformers
VOCABULARY, WIDTH, HEADS, DEPTH = 97, 32, 4, 3
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MHA = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, **TOKENS}
GROUPED = {**MHA, "intermediate_size": 64, "num_key_value_heads": 2}

FAMILIES: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "GPT-2": (
        *("GPT2LMHeadModel", "GPT2Config"),
        {"n_embd": WIDTH, "n_layer": DEPTH, "n_head": HEADS, "n_positions": 64, **TOKENS},
        *("transformer.h", "attn.c_proj"),
    ),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, "model.layers", "self_attn.o_proj"),
    "Gemma 3": (
        *("Gemma3ForCausalLM", "Gemma3TextConfig"),
        {**GROUPED, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
        *("model.layers", "self_attn.o_proj"),
    ),
    "Qwen 3": (
        *("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}),
        *("model.layers", "self_attn.o_proj"),
    ),
    "Mistral": (
        *("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 5}),
        *("model.layers", "self_attn.o_proj"),
    ),
    "GPT-NeoX": (
        *("GPTNeoXForCausalLM", "GPTNeoXConfig", {**MHA, "intermediate_size": 64}),
        *("gpt_neox.layers", "attention.dense"),
    ),
    "Mixtral": (
        *("MixtralForCausalLM", "MixtralConfig"),
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        *("model.layers", "self_attn.o_proj"),
    ),
    "Bloom": (
        *("BloomForCausalLM", "BloomConfig"),
        {"hidden_size": WIDTH, "n_layer": DEPTH, "n_head": HEADS, **TOKENS},
        *("transformer.h", "self_attention.dense"),
    ),
}
"""Class, configuration, the path of the layers, and in each of them the module that gets all heads' z."""


@cache
def captured(name: str) -> Model:
    """A model of a family with random weights."""
    kind, config, settings, _, _ = FAMILIES[name]
    torch.manual_seed(0)
    module = getattr(hugging_face, kind)(getattr(hugging_face, config)(**settings)).eval()
    return cw.capture(module, input_ids=torch.tensor([[1, 5, 6, 7], [1, 4, 3, 9]]))


def prompts(lengths: Sequence[int], seed: int = 1) -> list[Tensor]:
    """Token ids of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def padded(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Prompts with padding in front."""
    width = max(map(len, rows))
    gaps = [torch.zeros(width - len(row), dtype=torch.long) for row in rows]
    ids = torch.stack([torch.cat([gap, row]) for gap, row in zip(gaps, rows, strict=True)])
    mask = [torch.cat([gap, torch.ones_like(row)]) for gap, row in zip(gaps, rows, strict=True)]
    return {"input_ids": ids, "attention_mask": torch.stack(mask)}


Change = Callable[[Tensor], Tensor]


def written_alone(
    module: Any, ids: Tensor, n: int, hooks: Sequence[tuple[str, str, Change]], seed: int, **options: Any
) -> list[int]:
    """The tokens behind one prompt, with changes of a module's "output" or "input", by plain hooks."""
    handles = []
    for path, where, change in hooks:
        part = module.get_submodule(path)

        def of_output(_: Any, __: Any, out: Any, change: Change = change) -> Any:
            return change(out) if isinstance(out, Tensor) else (change(out[0]), *out[1:])

        def of_input(_: Any, args: Any, change: Change = change) -> Any:
            return (change(args[0]), *args[1:])

        handles.append(
            part.register_forward_hook(of_output)
            if where == "output"
            else part.register_forward_pre_hook(of_input)
        )
    torch.manual_seed(seed)
    try:
        found = module.generate(
            ids[None],
            attention_mask=torch.ones_like(ids[None]),
            max_new_tokens=n,
            **{"do_sample": False, **options},
        )
    finally:
        for handle in handles:
            handle.remove()
    tokens: list[int] = found[0, len(ids) :].tolist()
    return tokens
