"""Small models of many architectures, and where a hook on the module finds each kind of site.

A hook is written `in:path` or `out:path`, relative to the block; an empty path is the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 211


def tokens(batch: int, length: int) -> dict[str, Any]:
    return {"input_ids": torch.randint(0, VOCABULARY, (batch, length))}


def masked_tokens(batch: int, length: int) -> dict[str, Any]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, -1] = 0 if length > 2 else 1
    return {**tokens(batch, length), "attention_mask": mask}


def pixels(batch: int, length: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 16, 16)}


def two_sequences(batch: int, length: int) -> dict[str, Any]:
    target = torch.randint(0, VOCABULARY, (batch, max(1, length - 3)))
    return {**tokens(batch, length), "decoder_input_ids": target}


@dataclass(frozen=True)
class Case:
    """One architecture: how to make it, what it reads, its blocks, and its hooks by kind."""

    config: str
    model: str
    options: Mapping[str, Any]
    block: str = ""
    hooks: Mapping[str, str] = field(default_factory=dict)
    inputs: Callable[[int, int], dict[str, Any]] = tokens
    attention: tuple[str, ...] = ("eager", "sdpa")
    lengths: tuple[int, ...] = (12, 7, 1, 40)
    parallel: bool = False

    def make(self, attention: str, dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(0)
        if self.config == "":
            module: nn.Module = globals()[self.model]()
        else:
            options = {**self.options, "attn_implementation": attention}
            if not attention:
                options.pop("attn_implementation")
            config = getattr(transformers, self.config)(**options)
            module = getattr(transformers, self.model)(config)
        return module.eval().to(dtype)

    def example(self, batch: int, length: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        given = self.inputs(batch, length)
        return {
            key: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for key, value in given.items()
        }


class Skips(nn.Module):
    """A small convolutional network with skips, batch norms and in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
            for _ in range(3)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.norm(self.stem(pixel_values)).relu_()
        for block in self.blocks:
            x = x + block(x)
        x += 1
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class TwoAndTwo(nn.Module):
    """Two inputs, a keyword, two outputs, and writes through views that alias."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(6, 8), nn.Linear(5, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, left: Tensor, right: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        hidden, other = torch.tanh(self.left(left)) * scale, self.right(right)
        row = hidden[:, 0]
        row.mul_(2)
        hidden[:, 1:3] = 0.5
        total = self.drop(hidden + other + row[:, None])
        return {"sum": self.out(total), "parts": (hidden, other.relu())}


def two_inputs(batch: int, length: int) -> dict[str, Any]:
    return {"left": torch.randn(batch, 6), "right": torch.randn(batch, 5), "scale": 1.5}


_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
_BERT = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
_GPT = {"n_layer": 3, "n_head": 4, "n_embd": 64, "vocab_size": VOCABULARY, "n_positions": 64}

_STREAM = {"resid_pre": "in:", "resid_post": "out:"}
_LLAMA_ATTENTION = {
    "q": "out:self_attn.q_proj",
    "k": "out:self_attn.k_proj",
    "v": "out:self_attn.v_proj",
    "z": "in:self_attn.o_proj",
}
_GATED = {
    "pre": "out:mlp.gate_proj",
    "pre_linear": "out:mlp.up_proj",
    "post": "in:mlp.down_proj",
}
_LLAMA_HOOKS = {
    **_STREAM,
    **_LLAMA_ATTENTION,
    **_GATED,
    "attn_out": "out:self_attn.o_proj",
    "resid_mid": "in:post_attention_layernorm",
    "mlp_out": "out:mlp.down_proj",
}
_SANDWICH_HOOKS = {
    **_STREAM,
    **_LLAMA_ATTENTION,
    **_GATED,
    "attn_out": "out:post_attention_layernorm",
    "mlp_out": "out:post_feedforward_layernorm",
}
_BERT_HOOKS = {
    "resid_pre": "in:",
    "q": "out:attention.self.query",
    "k": "out:attention.self.key",
    "v": "out:attention.self.value",
    "z": "in:attention.output.dense",
    "attn_out": "out:attention.output.dense",
    "resid_mid": "in:attention.output.LayerNorm",
    "pre": "out:intermediate.dense",
    "post": "in:output.dense",
    "mlp_out": "out:output.dense",
    "resid_post": "in:output.LayerNorm",
}


def _llama(name: str, hooks: Mapping[str, str] = _LLAMA_HOOKS, **options: Any) -> Case:
    config = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    attention = ("eager",) if name == "Gemma2" else ("eager", "sdpa")
    return Case(
        config, f"{name}ForCausalLM", {**_LLAMA, **options}, "model.layers.{}", hooks, attention=attention
    )


_FUSED_HOOKS = {
    kind: hook for kind, hook in _LLAMA_HOOKS.items() if kind not in {"q", "k", "v", "pre", "pre_linear"}
}

ZOO: dict[str, Case] = {
    "gpt2": Case(
        "GPT2Config",
        "GPT2LMHeadModel",
        _GPT,
        "transformer.h.{}",
        {
            **_STREAM,
            "z": "in:attn.c_proj",
            "attn_out": "out:attn.c_proj",
            "resid_mid": "in:ln_2",
            "pre": "out:mlp.c_fc",
            "post": "in:mlp.c_proj",
            "mlp_out": "out:mlp.c_proj",
        },
    ),
    "gpt_neo": Case(
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "num_layers": 2,
            "num_heads": 4,
            "hidden_size": 64,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
        "transformer.h.{}",
        {
            **_STREAM,
            "q": "out:attn.attention.q_proj",
            "k": "out:attn.attention.k_proj",
            "v": "out:attn.attention.v_proj",
            "z": "in:attn.attention.out_proj",
            "attn_out": "out:attn.attention.out_proj",
            "resid_mid": "in:ln_2",
            "pre": "out:mlp.c_fc",
            "post": "in:mlp.c_proj",
            "mlp_out": "out:mlp.c_proj",
        },
        attention=("eager",),
    ),
    "gpt_neox": Case(
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        _BERT,
        "gpt_neox.layers.{}",
        {
            **_STREAM,
            "z": "in:attention.dense",
            "attn_out": "out:attention.dense",
            "pre": "out:mlp.dense_h_to_4h",
            "post": "in:mlp.dense_4h_to_h",
            "mlp_out": "out:mlp.dense_4h_to_h",
        },
        parallel=True,
    ),
    "gpt_neox_sequential": Case(
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {**_BERT, "use_parallel_residual": False},
        "gpt_neox.layers.{}",
        {
            **_STREAM,
            "z": "in:attention.dense",
            "attn_out": "out:attention.dense",
            "resid_mid": "in:post_attention_layernorm",
            "mlp_out": "out:mlp.dense_4h_to_h",
        },
    ),
    "gptj": Case(
        "GPTJConfig",
        "GPTJForCausalLM",
        {**_GPT, "rotary_dim": 8},
        "transformer.h.{}",
        {
            **_STREAM,
            "q": "out:attn.q_proj",
            "k": "out:attn.k_proj",
            "v": "out:attn.v_proj",
            "z": "in:attn.out_proj",
            "attn_out": "out:attn.out_proj",
            "pre": "out:mlp.fc_in",
            "post": "in:mlp.fc_out",
            "mlp_out": "out:mlp.fc_out",
        },
        attention=("eager",),
        parallel=True,
    ),
    "opt": Case(
        "OPTConfig",
        "OPTForCausalLM",
        {**_BERT, "ffn_dim": 96, "word_embed_proj_dim": 64},
        "model.decoder.layers.{}",
        {
            **_STREAM,
            "q": "out:self_attn.q_proj",
            "k": "out:self_attn.k_proj",
            "v": "out:self_attn.v_proj",
            "z": "in:self_attn.out_proj",
            "attn_out": "out:self_attn.out_proj",
            "pre": "out:fc1",
            "post": "in:fc2",
            "mlp_out": "out:fc2",
        },
    ),
    "llama": _llama("Llama"),
    "mistral": _llama("Mistral", sliding_window=4),
    "qwen2": _llama("Qwen2"),
    "qwen3": _llama("Qwen3", head_dim=24),
    "gemma2": _llama(
        "Gemma2",
        {**_SANDWICH_HOOKS, "resid_mid": "in:pre_feedforward_layernorm"},
        head_dim=16,
        sliding_window=4,
    ),
    "gemma3": _llama(
        "Gemma3",
        {**_SANDWICH_HOOKS, "resid_mid": "in:pre_feedforward_layernorm"},
        head_dim=16,
        sliding_window=4,
        num_hidden_layers=7,
    ),
    "phi3": _llama("Phi3", _FUSED_HOOKS, pad_token_id=0),
    "olmo2": _llama("Olmo2", {**_SANDWICH_HOOKS, "resid_mid": "in:mlp"}),
    "stablelm": _llama("StableLm"),
    "bert": Case("BertConfig", "BertForMaskedLM", _BERT, "bert.encoder.layer.{}", _BERT_HOOKS, masked_tokens),
    "roberta": Case(
        "RobertaConfig",
        "RobertaForMaskedLM",
        _BERT,
        "roberta.encoder.layer.{}",
        _BERT_HOOKS,
        masked_tokens,
    ),
    "albert": Case(
        "AlbertConfig",
        "AlbertForMaskedLM",
        {**_BERT, "embedding_size": 32},
        "albert.encoder.albert_layer_groups.0.albert_layers.0",
        {
            "resid_pre": "in:",
            "q": "out:attention.query",
            "k": "out:attention.key",
            "v": "out:attention.value",
            "z": "in:attention.dense",
            "attn_out": "out:attention.dense",
            "resid_mid": "in:attention.LayerNorm",
            "pre": "out:ffn",
            "post": "in:ffn_output",
            "mlp_out": "out:ffn_output",
            "resid_post": "in:full_layer_layer_norm",
        },
    ),
    "vit": Case(
        "ViTConfig",
        "ViTForImageClassification",
        {
            **{k: v for k, v in _BERT.items() if k not in {"vocab_size", "max_position_embeddings"}},
            "image_size": 16,
            "patch_size": 8,
            "num_labels": 5,
        },
        "vit.layers.{}",
        {
            **_STREAM,
            "q": "out:attention.q_proj",
            "k": "out:attention.k_proj",
            "v": "out:attention.v_proj",
            "z": "in:attention.o_proj",
            "attn_out": "out:attention.o_proj",
            "resid_mid": "in:layernorm_after",
            "pre": "out:mlp.fc1",
            "post": "in:mlp.fc2",
            "mlp_out": "out:mlp.fc2",
        },
        pixels,
        lengths=(12,),
    ),
    "t5": Case(
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "num_layers": 2,
            "num_heads": 4,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "vocab_size": VOCABULARY,
            "decoder_start_token_id": 0,
        },
        "decoder.block.{}",
        {
            "resid_pre": "in:",
            "q": "out:layer.0.SelfAttention.q",
            "k": "out:layer.0.SelfAttention.k",
            "v": "out:layer.0.SelfAttention.v",
            "z": "in:layer.0.SelfAttention.o",
            "attn_out": "out:layer.0.SelfAttention.o",
            "resid_mid": "in:layer.1.layer_norm",
            "cross_q": "out:layer.1.EncDecAttention.q",
            "cross_k": "out:layer.1.EncDecAttention.k",
            "cross_v": "out:layer.1.EncDecAttention.v",
            "cross_z": "in:layer.1.EncDecAttention.o",
            "cross_attn_out": "out:layer.1.EncDecAttention.o",
            "resid_mid_cross": "in:layer.2.layer_norm",
            "pre": "out:layer.2.DenseReluDense.wi",
            "post": "in:layer.2.DenseReluDense.wo",
            "mlp_out": "out:layer.2.DenseReluDense.wo",
            "resid_post": "out:",
        },
        two_sequences,
    ),
    "mixtral": _llama(
        "Mixtral",
        {
            **_STREAM,
            **_LLAMA_ATTENTION,
            "attn_out": "out:self_attn.o_proj",
            "resid_mid": "in:post_attention_layernorm",
            "mlp_out": "out:mlp",
        },
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "falcon": Case(
        "FalconConfig",
        "FalconForCausalLM",
        {k: v for k, v in _BERT.items() if k not in {"intermediate_size", "max_position_embeddings"}},
        "transformer.h.{}",
        {
            **_STREAM,
            "z": "in:self_attention.dense",
            "attn_out": "out:self_attention.dense",
            "pre": "out:mlp.dense_h_to_4h",
            "post": "in:mlp.dense_4h_to_h",
        },
        parallel=True,
    ),
    "bloom": Case(
        "BloomConfig",
        "BloomForCausalLM",
        {"n_layer": 2, "n_head": 4, "hidden_size": 64, "vocab_size": VOCABULARY},
        "transformer.h.{}",
        {
            **_STREAM,
            "z": "in:self_attention.dense",
            "attn_out": "out:self_attention.dense",
            "resid_mid": "in:post_attention_layernorm",
            "pre": "out:mlp.dense_h_to_4h",
            "post": "in:mlp.dense_4h_to_h",
            "mlp_out": "out:mlp.dense_4h_to_h",
        },
        attention=("",),
    ),
    "mamba": Case(
        "MambaConfig",
        "MambaForCausalLM",
        {"num_hidden_layers": 2, "hidden_size": 32, "state_size": 4, "vocab_size": VOCABULARY},
        attention=("",),
        lengths=(12,),
    ),
    "skips": Case("", "Skips", {}, inputs=pixels, attention=("",), lengths=(12,)),
    "two_and_two": Case("", "TwoAndTwo", {}, inputs=two_inputs, attention=("",), lengths=(12,)),
}
