"""Small random models of many architectures, which transformers makes of configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from conewise.extras import needs
from conewise.program.foreign import quiet

with needs("hf"):
    import transformers

VOCABULARY = 211

Reads = Literal["tokens", "pixels", "two sequences"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture: its configuration and its model by the names that transformers has for them.

    `depth` names the settings that say how many layers there are, if any do; `settings` are the others.
    """

    config: str
    model: str
    depth: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    reads: Reads = "tokens"
    attention: bool = True

    def make(self, layers: int, seed: int = 0) -> nn.Module:
        """A model of `layers` layers (in each of its stacks) with random weights, ready to be captured."""
        settings = {**self.settings, **dict.fromkeys(self.depth, layers)}
        if self.attention:
            settings["attn_implementation"] = "eager"
        if "attention_types" in settings:
            settings["attention_types"] = [[["global", "local"], layers // 2]]
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = getattr(transformers, self.config)(**settings)
            made: nn.Module = getattr(transformers, self.model)(config)
        return made.eval()

    def example(self, positions: int, seed: int = 0) -> dict[str, Tensor]:
        """One random input."""
        generator = torch.Generator().manual_seed(seed)

        def tokens(length: int) -> Tensor:
            return torch.randint(0, VOCABULARY, (1, length), generator=generator)

        if self.reads == "pixels":
            size = self.settings["image_size"]
            return {"pixel_values": torch.randn(1, 3, size, size, generator=generator)}
        if self.reads == "two sequences":
            return {"input_ids": tokens(positions), "decoder_input_ids": tokens(positions)}
        return {"input_ids": tokens(positions)}


_HEADS: Mapping[str, Any] = {"hidden_size": 64, "num_attention_heads": 4}
_WORDS: Mapping[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
_WIDE: Mapping[str, Any] = {**_HEADS, **_WORDS, "intermediate_size": 96}
_GROUPED: Mapping[str, Any] = {**_WIDE, "num_key_value_heads": 2}
_GPT: Mapping[str, Any] = {"n_head": 4, "n_embd": 64, "vocab_size": VOCABULARY, "n_positions": 64}
_LAYERS = ("num_hidden_layers",)


def _causal(
    name: str, base: Mapping[str, Any] = _GROUPED, *, depth: str = _LAYERS[0], config: str = "", **own: Any
) -> Architecture:
    """A language model as transformers names it: `name`ForCausalLM, and `name`Config unless it is another."""
    settings = {**base, "bos_token_id": 0, "eos_token_id": 0, **own}
    attention = settings.pop("attention", True)
    return Architecture(
        config or f"{name}Config", f"{name}ForCausalLM", (depth,), settings, attention=attention
    )


def _masked(name: str, **own: Any) -> Architecture:
    """A model that fills in masked words."""
    return Architecture(f"{name}Config", f"{name}ForMaskedLM", _LAYERS, {**_WIDE, **own})


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "gpt2": replace(_causal("GPT2", _GPT, depth="n_layer"), model="GPT2LMHeadModel"),
        "gpt_neo": _causal(
            "GPTNeo",
            {**_WORDS, "hidden_size": 64, "num_heads": 4},
            depth="num_layers",
            attention_types=[],
            window_size=4,
        ),
        "gpt_neox": _causal("GPTNeoX", _WIDE),
        "gpt_neox_sequential": _causal("GPTNeoX", _WIDE, use_parallel_residual=False),
        "gptj": _causal("GPTJ", _GPT, depth="n_layer", rotary_dim=8),
        "opt": _causal("OPT", _WIDE, ffn_dim=96, word_embed_proj_dim=64, pad_token_id=1),
        "llama": _causal("Llama"),
        "mistral": _causal("Mistral", sliding_window=4),
        "qwen2": _causal("Qwen2"),
        "qwen3": _causal("Qwen3", head_dim=24),
        "gemma2": _causal("Gemma2", head_dim=16, sliding_window=4, pad_token_id=0),
        "gemma3": _causal("Gemma3", config="Gemma3TextConfig", head_dim=16, sliding_window=4, pad_token_id=0),
        "phi3": _causal("Phi3", pad_token_id=0),
        "olmo2": _causal("Olmo2", pad_token_id=0),
        "stablelm": _causal("StableLm"),
        "bert": _masked("Bert"),
        "roberta": _masked("Roberta"),
        "albert": _masked("Albert", bos_token_id=0, eos_token_id=0, embedding_size=32),
        "vit": Architecture(
            "ViTConfig",
            "ViTForImageClassification",
            _LAYERS,
            {**_HEADS, "intermediate_size": 96, "image_size": 16, "patch_size": 8, "num_labels": 5},
            reads="pixels",
        ),
        "t5": Architecture(
            "T5Config",
            "T5ForConditionalGeneration",
            ("num_layers", "num_decoder_layers"),
            {
                "num_heads": 4,
                "d_model": 64,
                "d_kv": 16,
                "d_ff": 96,
                "vocab_size": VOCABULARY,
                "decoder_start_token_id": 0,
            },
            reads="two sequences",
        ),
        "mixtral": _causal("Mixtral", num_local_experts=4, num_experts_per_tok=2),
        "falcon": _causal("Falcon", {**_HEADS, "vocab_size": VOCABULARY}),
        "bloom": _causal(
            "Bloom",
            {"n_head": 4, "hidden_size": 64, "vocab_size": VOCABULARY},
            depth="n_layer",
            attention=False,
        ),
        "mamba": _causal(
            "Mamba", {"hidden_size": 32, "state_size": 4, "vocab_size": VOCABULARY}, attention=False
        ),
        "mobilenet_v2": Architecture(
            "MobileNetV2Config",
            "MobileNetV2ForImageClassification",
            (),
            {"depth_multiplier": 0.35, "image_size": 64, "num_labels": 5},
            reads="pixels",
            attention=False,
        ),
    }
)
"""By the names that docs/coverage.md has for them; and a convolutional one, whose layers are not alike."""
