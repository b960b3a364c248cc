"""Tiny networks of six architectures, in double precision, and what each surgery may do to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 61
WIDTH, HEADS, INNER, LAYERS = 16, 4, 24, 2


def tokens(batch: int, length: int) -> dict[str, Any]:
    return {"input_ids": torch.randint(0, VOCABULARY, (batch, length))}


def two_sequences(batch: int, length: int) -> dict[str, Any]:
    return {**tokens(batch, length), "decoder_input_ids": torch.randint(0, VOCABULARY, (batch, length - 2))}


def pixels(batch: int, _: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 16, 16, dtype=torch.float64)}


@dataclass(frozen=True)
class Network:
    """How to make a network, what it reads, and its parts: paths by layer, with `{}` for its number.

    `z` and `neurons` are modules whose input is of heads and of neurons; `outs` those whose output is one
    value of the network's own; `edges` pairs of a module that writes and one that reads what it writes;
    `rules` are paths of submodules with what may stand there, `last` the parts whose output is the
    whole's; `weights` linears.
    """

    config: str
    model: str
    options: Mapping[str, Any]
    inputs: Callable[[int, int], dict[str, Any]] = tokens
    layers: int = LAYERS
    stack: str = ""
    z: str = ""
    neurons: str = ""
    outs: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    edges: tuple[tuple[str, str], ...] = ()
    rules: tuple[tuple[str, str], ...] = ()
    last: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    width: int = WIDTH
    dim: int = -1

    def make(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**self.options)
        module: nn.Module = getattr(transformers, self.model)(config)
        with torch.no_grad():
            for name, buffer in module.named_buffers():  # statistics of norms that say something
                if name.endswith("running_var"):
                    buffer.uniform_(0.5, 1.5)
        return module.eval().double()

    def example(self, seed: int, batch: int = 2, length: int = 6) -> dict[str, Any]:
        torch.manual_seed(seed)
        return self.inputs(batch, length)


_LLAMA = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_BLOCK = "model.layers.{}"
_LIKE_LLAMA: dict[str, Any] = {
    "z": f"{_BLOCK}.self_attn.o_proj",
    "neurons": f"{_BLOCK}.mlp.down_proj",
    "outs": (f"{_BLOCK}.self_attn.o_proj", f"{_BLOCK}.mlp.down_proj"),
    "streams": (_BLOCK,),
    "edges": ((_BLOCK, "model.norm"),),
    "rules": (
        (f"{_BLOCK}.mlp.act_fn", "relu"),
        (f"{_BLOCK}.mlp", "linear"),
        (f"{_BLOCK}.self_attn", "mixer"),
    ),
    "last": {f"{_BLOCK}.mlp": f"{_BLOCK}.mlp.down_proj", f"{_BLOCK}.self_attn": f"{_BLOCK}.self_attn.o_proj"},
    "weights": (f"{_BLOCK}.mlp.up_proj", f"{_BLOCK}.self_attn.q_proj", f"{_BLOCK}.mlp.down_proj"),
}

NETWORKS: dict[str, Network] = {
    "gpt2": Network(
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_embd": WIDTH,
            "n_inner": INNER,
            "vocab_size": VOCABULARY,
            "n_positions": 32,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        z="transformer.h.{}.attn.c_proj",
        neurons="transformer.h.{}.mlp.c_proj",
        outs=("transformer.h.{}.attn.c_proj", "transformer.h.{}.mlp.c_proj"),
        streams=("transformer.h.{}",),
        edges=(("transformer.h.{}", "transformer.ln_f"),),
        rules=(
            ("transformer.h.{}.mlp.act", "relu"),
            ("transformer.h.{}.mlp", "linear"),
            ("transformer.h.{}.ln_2", "same"),
        ),
        last={"transformer.h.{}.mlp": "transformer.h.{}.mlp.c_proj"},
        weights=("transformer.h.{}.mlp.c_fc", "transformer.h.{}.attn.c_attn"),
    ),
    "llama": Network("LlamaConfig", "LlamaForCausalLM", _LLAMA, **_LIKE_LLAMA),
    "gemma": Network(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**_LLAMA, "head_dim": 4, "attn_implementation": "eager", "sliding_window": 4},
        **{**_LIKE_LLAMA, "rules": ((f"{_BLOCK}.mlp.act_fn", "relu"), (f"{_BLOCK}.mlp", "linear"))},
    ),
    "t5": Network(
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": WIDTH,
            "d_kv": 4,
            "d_ff": INNER,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "vocab_size": VOCABULARY,
            "decoder_start_token_id": 0,
        },
        two_sequences,
        stack="encoder",
        z="encoder.block.{}.layer.0.SelfAttention.o",
        neurons="encoder.block.{}.layer.1.DenseReluDense.wo",
        outs=("encoder.block.{}.layer.0.SelfAttention.o", "encoder.block.{}.layer.1.DenseReluDense.wo"),
        streams=(),
        edges=(("encoder.block.{}.layer.0.SelfAttention.o", "encoder.block.{}.layer.1.layer_norm"),),
        rules=(
            ("encoder.block.{}.layer.1.DenseReluDense.act", "tanh"),
            ("decoder.block.{}.layer.2.DenseReluDense", "linear"),
        ),
        weights=("encoder.block.{}.layer.1.DenseReluDense.wi", "decoder.block.{}.layer.0.SelfAttention.q"),
    ),
    "resnet": Network(
        "ResNetConfig",
        "ResNetForImageClassification",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 12],
            "depths": [2, 1],
            "layer_type": "basic",
            "num_channels": 3,
        },
        pixels,
        outs=(
            "resnet.encoder.stages.0.layers.{}.layer.0.convolution",
            "resnet.encoder.stages.0.layers.{}.layer.1.normalization",
        ),
        streams=("resnet.encoder.stages.0.layers.{}.activation",),
        rules=(
            ("resnet.encoder.stages.0.layers.{}.layer.0.activation", "tanh"),
            ("resnet.encoder.stages.0.layers.{}.layer.0", "halved"),
            ("resnet.encoder.stages.0.layers.{}.activation", "tanh"),
        ),
        weights=("resnet.encoder.stages.0.layers.{}.layer.1.convolution",),
        width=8,
        dim=1,
    ),
}
NETWORKS["tiny"] = Network(
    "LlamaConfig", "LlamaForCausalLM", {**_LLAMA, "num_key_value_heads": HEADS}, **_LIKE_LLAMA
)


class Mixer(nn.Module):
    """Another attention: a product, of what attention is handed."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator, dtype=torch.float64) / 8)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return hidden_states.cumsum(1) @ self.weight, None


class Bottleneck(nn.Module):
    """A block x + f(x), of the features in dimension `dim`."""

    def __init__(self, width: int, seed: int, dim: int = -1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.down, self.up = (
            nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) / 4)
            for shape in ((width, 4), (4, width))
        )
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(x.movedim(self.dim, -1) @ self.down) @ self.up
        return x + inner.movedim(-1, self.dim)


def rule_named(name: str, width: int, seed: int) -> Any:
    """What a submodule is redefined as."""
    if name == "linear":
        made = nn.Linear(width, width, dtype=torch.float64)
        with torch.no_grad():
            made.weight.copy_(torch.randn(width, width, generator=torch.Generator().manual_seed(seed)) / 4)
        return made
    if name == "mixer":
        return Mixer(width, seed)
    return {"relu": torch.relu, "tanh": torch.tanh, "same": lambda x: x, "halved": lambda x: x / 2}[name]
