"""Architectures of transformers, each with what its layers' named sites are, written by hand from its source.

`there` says which hooks on submodules hold a kind, `missing` why others are not there; see `named.Expected`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from tests.anatomy.named import Expected, because, mlp, neurons, without
from tests.program.zoo import VOCABULARY, pixels, tokens, two_sequences

PARALLEL = {"resid_mid": "computed in parallel"}
EXPERTS = neurons("mixture of experts")
FUSED_UP = {"pre": "", "pre_linear": ""}


@dataclass(frozen=True)
class Named:
    """An architecture: how to make it, an input, and what is expected of its layers."""

    config: str
    model: str
    options: Mapping[str, Any]
    layers: tuple[Expected, ...]
    inputs: Callable[[int, int], dict[str, Any]] = tokens
    attention: str = "eager"

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options, attn_implementation=self.attention)
        module: nn.Module = getattr(transformers, self.model)(config)
        return module.eval()


_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_BERT = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
_IMAGE = {key: value for key, value in _BERT.items() if not key.startswith(("vocab", "max", "pad"))}
_GPT = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": VOCABULARY, "n_positions": 64}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {**{k: v for k, v in _MOE.items() if k != "num_experts"}, "n_routed_experts": 4}
_LATENT = {
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}

STREAM = {"resid_pre": "in:", "resid_post": "out:"}


def usual(
    attn: str = "self_attn",
    mid: str = "post_attention_layernorm",
    mlp: str = "mlp",
    up: str = "gate_proj",
    linear: str = "up_proj",
    down: str = "down_proj",
) -> dict[str, str]:
    """A pre-norm layer: what is added is what attention and MLP return."""
    names = {**STREAM, "attn_out": f"out:{attn}", "resid_mid": f"in:{mid}", "mlp_out": f"out:{mlp}"}
    inside = f"{mlp}." if mlp else ""
    for kind, way, part in (("pre", "out", up), ("pre_linear", "out", linear), ("post", "in", down)):
        if part:
            names[kind] = f"{way}:{inside}{part}"
    return names


def plain(attn: str, mid: str, mlp: str, up: str, down: str) -> dict[str, str]:
    return usual(attn, mid, mlp, up, "", down)


def routed(
    attn: str = "self_attn", mid: str = "post_attention_layernorm", mlp: str = "mlp"
) -> dict[str, str]:
    return usual(attn, mid, mlp, "", "", "")


def each(
    block: str, there: Mapping[str, str], missing: Mapping[str, str] | None = None, count: int = 2
) -> tuple[Expected, ...]:
    return tuple(Expected(block.format(i), there, missing or {}, i) for i in range(count))


def llama(
    name: str, there: Mapping[str, str], missing: Mapping[str, str] | None = None, **options: Any
) -> Named:
    layers = each("model.layers.{}", there, missing, options.get("num_hidden_layers", 2))
    return Named(f"{name}Config", f"{name}ForCausalLM", {**_LLAMA, **options}, layers)


def bert(
    name: str, root: str, there: Mapping[str, str], missing: Mapping[str, str] | None = None, **options: Any
) -> Named:
    layers = each(f"{root}.{{}}", there, missing)
    return Named(f"{name}Config", f"{name}ForMaskedLM", {**_BERT, **options}, layers)


POST_NORM = {
    "resid_pre": "in:",
    "attn_out": "out:attention.output.dense",
    "resid_mid": "in:attention.output.LayerNorm",
    "pre": "out:intermediate.dense",
    "post": "in:output.dense",
    "mlp_out": "out:output.dense",
    "resid_post": "in:output.LayerNorm",
}
SANDWICH = {
    **usual(mid="mlp"),
    "attn_out": "out:post_attention_layernorm",
    "mlp_out": "out:post_feedforward_layernorm",
}
ENCODER = {
    "resid_pre": "in:",
    "attn_out": "out:self_attn",
    "resid_mid": "in:self_attn_layer_norm",
    "pre": "out:fc1",
    "post": "in:fc2",
    "mlp_out": "out:fc2",
    "resid_post": "in:final_layer_norm",
}
PRE_ENCODER = {**ENCODER, "resid_mid": "in:final_layer_norm", "resid_post": "out:"}
DECODER = {**ENCODER, "cross_attn_out": "out:encoder_attn", "resid_mid_cross": "in:encoder_attn_layer_norm"}
PRE_DECODER = {
    **PRE_ENCODER,
    "resid_mid": "in:encoder_attn_layer_norm",
    "cross_attn_out": "out:encoder_attn",
    "resid_mid_cross": "in:final_layer_norm",
}


def bart(name: str, encoder: Mapping[str, str], decoder: Mapping[str, str], model: str = "") -> Named:
    layers = [
        Expected(f"model.{stack}.layers.{i}", there, {}, i, stack)
        for stack, there in (("encoder", encoder), ("decoder", decoder))
        for i in range(2)
    ]
    model = model or f"{name}ForConditionalGeneration"
    return Named(f"{name}Config", model, _BART, tuple(layers), two_sequences)


def vit(name: str, model: str, block: str, there: Mapping[str, str], **options: Any) -> Named:
    shape = {**_IMAGE, "image_size": 16, "patch_size": 8, **options}
    return Named(f"{name}Config", model, shape, each(block, there), pixels)


VISION = plain("attention", "layernorm_after", "mlp", "fc1", "fc2")
CLIP = plain("self_attn", "layer_norm2", "mlp", "fc1", "fc2")

DENSE_THEN_ROUTED = (
    Expected("model.layers.0", usual()),
    Expected("model.layers.1", routed(), EXPERTS, 1),
)

NAMED: dict[str, Named] = {
    # pre-norm, with a gate
    "smollm3": llama("SmolLM3", usual()),
    "gemma": llama("Gemma", usual(), head_dim=16),
    "olmo": llama("Olmo", usual()),
    "helium": llama("Helium", usual(), head_dim=8),
    "ernie4_5": llama("Ernie4_5", usual(), head_dim=16),
    "hunyuan": llama("HunYuanDenseV1", usual(), head_dim=16),
    "seed_oss": llama("SeedOss", usual(), head_dim=16),
    "granite": llama(
        "Granite",
        {**usual(), "attn_out": "0.5*out:self_attn", "mlp_out": "0.5*out:mlp"},
        residual_multiplier=0.5,
    ),
    "glm": llama("Glm", {**usual(), **FUSED_UP}, head_dim=16),
    "bitnet": llama(
        "BitNet", without(usual(), "pre", "pre_linear", "post"), neurons("not one pair of projections")
    ),
    "vaultgemma": Named(
        "VaultGemmaConfig",
        "VaultGemmaForCausalLM",
        {**_LLAMA, "head_dim": 16},
        each("model.layers.{}", usual(mid="pre_feedforward_layernorm")),
    ),
    "modernbert": Named(
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {**_BERT, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4},
        each("model.layers.{}", {**usual("attn", "mlp_norm", "mlp", "", "", "Wo"), **FUSED_UP}),
    ),
    # pre-norm, without a gate
    "nemotron": llama(
        "Nemotron", plain("self_attn", "post_attention_layernorm", "mlp", "up_proj", "down_proj")
    ),
    "arcee": llama("Arcee", plain("self_attn", "post_attention_layernorm", "mlp", "up_proj", "down_proj")),
    "apertus": llama("Apertus", plain("self_attn", "feedforward_layernorm", "mlp", "up_proj", "down_proj")),
    "starcoder2": llama(
        "Starcoder2", plain("self_attn", "post_attention_layernorm", "mlp", "c_fc", "c_proj")
    ),
    "persimmon": Named(
        "PersimmonConfig",
        "PersimmonForCausalLM",
        _BERT,
        each(
            "model.layers.{}",
            plain("self_attn", "post_attention_layernorm", "mlp", "dense_h_to_4h", "dense_4h_to_h"),
        ),
    ),
    "biogpt": Named("BioGptConfig", "BioGptForCausalLM", _BERT, each("biogpt.layers.{}", PRE_ENCODER)),
    "xglm": Named(
        "XGLMConfig",
        "XGLMForCausalLM",
        {
            "d_model": 32,
            "ffn_dim": 48,
            "num_layers": 2,
            "attention_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
        },
        each("model.layers.{}", PRE_ENCODER),
    ),
    "gpt_bigcode": Named(
        "GPTBigCodeConfig",
        "GPTBigCodeForCausalLM",
        {**_GPT, "multi_query": True},
        each("transformer.h.{}", plain("attn", "ln_2", "mlp", "c_fc", "c_proj")),
    ),
    "mpt": Named(
        "MptConfig",
        "MptForCausalLM",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCABULARY, "max_seq_len": 64},
        each(
            "transformer.blocks.{}",
            {**plain("attn", "norm_2", "ffn", "up_proj", "down_proj"), "mlp_out": "out:ffn.down_proj"},
        ),
    ),
    "ctrl": Named(
        "CTRLConfig",
        "CTRLLMHeadModel",
        {**_GPT, "dff": 48},
        each("transformer.h.{}", plain("multi_head_attention", "layernorm2", "ffn", "0", "2")),
    ),
    "megatron_bert": bert(
        "MegatronBert",
        "bert.encoder.layer",
        {
            **without(POST_NORM, "resid_mid", "resid_post"),
            "resid_mid": "in:ln",
            "resid_post": "out:",
        },
    ),
    "esm": bert(
        "Esm",
        "esm.encoder.layer",
        {
            **without(POST_NORM, "resid_mid", "resid_post"),
            "resid_mid": "in:LayerNorm",
            "resid_post": "out:",
        },
        mask_token_id=2,
        position_embedding_type="rotary",
    ),
    "clip_text": Named("CLIPTextConfig", "CLIPTextModel", _BERT, each("encoder.layers.{}", CLIP)),
    # norms behind the branches
    "glm4": llama(
        "Glm4",
        {
            **usual(),
            **FUSED_UP,
            "attn_out": "out:post_self_attn_layernorm",
            "mlp_out": "out:post_mlp_layernorm",
        },
        head_dim=16,
    ),
    "olmo3": llama("Olmo3", SANDWICH),
    "exaone4": llama("Exaone4", SANDWICH),
    # parallel
    "cohere": llama("Cohere", without(usual(), "resid_mid"), PARALLEL),
    "cohere2": llama("Cohere2", without(usual(), "resid_mid"), PARALLEL, head_dim=16),
    "phi": llama("Phi", without(plain("self_attn", "", "mlp", "fc1", "fc2"), "resid_mid"), PARALLEL),
    "codegen": Named(
        "CodeGenConfig",
        "CodeGenForCausalLM",
        {**_GPT, "rotary_dim": 4, "n_ctx": 64},
        each("transformer.h.{}", without(plain("attn", "", "mlp", "fc_in", "fc_out"), "resid_mid"), PARALLEL),
    ),
    # norms of the sums
    "electra": bert("Electra", "electra.encoder.layer", POST_NORM, embedding_size=16),
    "camembert": bert("Camembert", "roberta.encoder.layer", POST_NORM),
    "data2vec_text": Named(
        "Data2VecTextConfig",
        "Data2VecTextForMaskedLM",
        _BERT,
        each("data2vec_text.encoder.layer.{}", POST_NORM),
    ),
    "bigbird": Named(
        "BigBirdConfig",
        "BigBirdForMaskedLM",
        {**_BERT, "attention_type": "original_full"},
        each("bert.encoder.layer.{}", POST_NORM),
    ),
    "rembert": Named(
        "RemBertConfig",
        "RemBertForMaskedLM",
        {**_BERT, "input_embedding_size": 16, "output_embedding_size": 16},
        each("rembert.encoder.layer.{}", POST_NORM),
    ),
    "roformer": Named(
        "RoFormerConfig",
        "RoFormerForMaskedLM",
        {**_BERT, "embedding_size": 32},
        each("roformer.encoder.layer.{}", POST_NORM),
    ),
    "deberta": Named(
        "DebertaConfig",
        "DebertaForMaskedLM",
        {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        each("deberta.encoder.layer.{}", POST_NORM),
    ),
    "deberta_v2": Named(
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
        each("deberta.encoder.layer.{}", POST_NORM),
    ),
    "mpnet": Named(
        "MPNetConfig",
        "MPNetForMaskedLM",
        _BERT,
        each(
            "mpnet.encoder.layer.{}",
            {**POST_NORM, "attn_out": "out:attention.attn.o", "resid_mid": "in:attention.LayerNorm"},
        ),
    ),
    "distilbert": Named(
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 2,
            "n_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
        },
        each(
            "distilbert.transformer.layer.{}",
            {
                "resid_pre": "in:",
                "attn_out": "out:attention",
                "resid_mid": "in:sa_layer_norm",
                "pre": "out:ffn.lin1",
                "post": "in:ffn.lin2",
                "mlp_out": "out:ffn",
                "resid_post": "in:output_layer_norm",
            },
        ),
    ),
    "nomic_bert": Named(
        "NomicBertConfig",
        "NomicBertModel",
        _BERT,
        each(
            "layers.{}",
            {**usual(mid="post_attention_layernorm"), "resid_post": "in:post_mlp_layernorm"},
        ),
    ),
    "openai_gpt": Named(
        "OpenAIGPTConfig",
        "OpenAIGPTLMHeadModel",
        _GPT,
        each(
            "transformer.h.{}",
            {**plain("attn", "ln_1", "mlp", "c_fc", "c_proj"), "resid_post": "in:ln_2"},
        ),
    ),
    "xlm": Named(
        "XLMConfig",
        "XLMWithLMHeadModel",
        {
            "emb_dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "n_words": VOCABULARY,
            "max_position_embeddings": 64,
        },
        tuple(
            Expected(
                "transformer",
                {
                    "resid_pre": f"in:attentions.{i}",
                    "attn_out": f"out:attentions.{i}",
                    "resid_mid": f"in:layer_norm1.{i}",
                    "mlp_out": f"out:ffns.{i}",
                    "resid_post": f"in:layer_norm2.{i}",
                    "pre": f"out:ffns.{i}.lin1",
                    "post": f"in:ffns.{i}.lin2",
                },
                {},
                i,
            )
            for i in range(2)
        ),
    ),
    # mixtures of experts
    "olmoe": llama("Olmoe", routed(), EXPERTS, **_MOE),
    "qwen2_moe": llama("Qwen2Moe", routed(), EXPERTS, **_MOE, shared_expert_intermediate_size=24),
    "qwen3_moe": llama("Qwen3Moe", routed(), EXPERTS, **_MOE, head_dim=16),
    "phimoe": llama("Phimoe", routed(), EXPERTS, num_local_experts=4, num_experts_per_tok=2),
    "flex_olmo": llama(
        "FlexOlmo",
        {
            **routed(mid="mlp"),
            "attn_out": "out:post_attention_layernorm",
            "mlp_out": "out:post_feedforward_layernorm",
        },
        EXPERTS,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "jetmoe": Named(
        "JetMoeConfig",
        "JetMoeForCausalLM",
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16},
        each("model.layers.{}", routed("self_attention"), EXPERTS),
    ),
    "llama4": Named(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**_LLAMA, "head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 48},
        each("model.layers.{}", routed(mlp="feed_forward"), EXPERTS),
    ),
    "deepseek_v2": Named(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**_LLAMA, **_ROUTED, **_LATENT},
        DENSE_THEN_ROUTED,
    ),
    "deepseek_v3": Named(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**_LLAMA, **_ROUTED, **_LATENT},
        DENSE_THEN_ROUTED,
    ),
    "glm4_moe": Named(
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**_LLAMA, **_ROUTED, "head_dim": 16, "first_k_dense_replace": 1},
        DENSE_THEN_ROUTED,
    ),
    "dots1": Named(
        "Dots1Config",
        "Dots1ForCausalLM",
        {**_LLAMA, **_ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1},
        DENSE_THEN_ROUTED,
    ),
    # with recurrences, state spaces or convolutions
    "falcon_h1": llama(
        "FalconH1",
        without(usual(mlp="feed_forward"), "resid_mid"),
        {"resid_mid": r"'model\.layers\.\d/mul' is added together with attention"},
        num_hidden_layers=1,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=4,
    ),
    "jamba": Named(
        "JambaConfig",
        "JambaForCausalLM",
        {
            **_LLAMA,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        (Expected("model.layers.1", routed(mid="pre_ff_layernorm", mlp="feed_forward"), EXPERTS, 1),),
    ),
    "bamba": Named(
        "BambaConfig",
        "BambaForCausalLM",
        {**_LLAMA, **_MAMBA, "attn_layer_indices": [1]},
        (Expected("model.layers.1", usual(mid="pre_ff_layernorm", mlp="feed_forward"), {}, 1),),
    ),
    "recurrent_gemma": Named(
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {
            **_LLAMA,
            "lru_width": 32,
            "attention_window_size": 8,
            "block_types": ["recurrent", "attention"],
        },
        (Expected("model.layers.1", usual("temporal_block", "channel_pre_norm", "mlp_block"), {}, 1),),
    ),
    "lfm2": Named(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {**_LLAMA, "layer_types": ["conv", "full_attention"]},
        (
            Expected(
                "model.layers.1", usual("self_attn", "ffn_norm", "feed_forward", "w1", "w3", "w2"), {}, 1
            ),
        ),
    ),
    "nemotron_h": Named(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **_LLAMA,
            "head_dim": 8,
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": 3,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
        (
            Expected(
                "model.layers.1",
                {**STREAM, "attn_out": "out:mixer"},
                {"resid_mid": "nothing is added behind attention", **mlp("nothing but attention is added")},
                1,
            ),
        ),
    ),
    "convbert": bert(
        "ConvBert",
        "convbert.encoder.layer",
        without(POST_NORM, "attn_out", "resid_mid"),
        because(r"attention\.self/cat' joins attention with", "attn_out", "resid_mid"),
        embedding_size=32,
    ),
    "zamba": Named(
        "ZambaConfig",
        "ZambaForCausalLM",
        {
            **_LLAMA,
            "num_hidden_layers": 6,
            "n_mamba_heads": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
            "attn_layer_period": 3,
            "attn_layer_offset": 2,
        },
        tuple(
            Expected(
                f"model.layers.{i}",
                {"resid_pre": "in:"},
                {
                    **because("holds more than attention and its output projection", "attn_out", "resid_mid"),
                    **because(f"what leaves 'model.layers.{i}' is not the last sum", "resid_post"),
                    **mlp(f"what leaves 'model.layers.{i}' is not the last sum"),
                },
                i,
            )
            for i in (2, 5)
        ),
    ),
    # others
    "minimax": Named(
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        {
            **_LLAMA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention", "linear_attention"],
            "block_size": 4,
            "full_attn_beta_factor": 0.5,
            "mlp_beta_factor": 0.25,
        },
        (
            Expected(
                "model.layers.0",
                {**STREAM, "attn_out": "0.5*out:self_attn", "mlp_out": "0.25*out:mlp"},
                {"resid_mid": "which is not resid_pre itself", **EXPERTS},
            ),
        ),
    ),
    "mobilebert": bert(
        "MobileBert",
        "mobilebert.encoder.layer",
        {"resid_pre": "in:", "resid_post": "in:output.bottleneck.LayerNorm"},
        {
            **because("holds more than attention and its output projection", "attn_out", "resid_mid"),
            **mlp("nothing but attention is added"),
        },
        embedding_size=16,
        intra_bottleneck_size=16,
        true_hidden_size=16,
        num_feedforward_networks=2,
    ),
    "gemma3n": Named(
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            **_LLAMA,
            "head_dim": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": None,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        each(
            "model.layers.{}",
            {"attn_out": "out:post_attention_layernorm"},
            {
                "resid_pre": "which is made within the layer",
                "resid_mid": "is added together with attention",
                **because(r"what leaves 'model\.layers\.\d' is not the last sum", "resid_post"),
                **mlp(r"what leaves 'model\.layers\.\d' is not the last sum"),
            },
        ),
    ),
    "xlnet": Named(
        "XLNetConfig",
        "XLNetLMHeadModel",
        {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "vocab_size": VOCABULARY},
        each(
            "transformer.layer.{}",
            {
                "resid_pre": "in:",
                "attn_out": "",
                "mlp_out": "out:ff.layer_2",
                "resid_mid": "in:rel_attn.layer_norm",
                "resid_post": "in:ff.layer_norm",
                "pre": "out:ff.layer_1",
                "post": "in:ff.layer_2",
            },
        ),
    ),
    # encoders with decoders
    "bart": bart("Bart", ENCODER, DECODER),
    "plbart": bart("PLBart", ENCODER, DECODER),
    "marian": bart("Marian", ENCODER, DECODER, "MarianMTModel"),
    "pegasus": bart("Pegasus", PRE_ENCODER, PRE_DECODER),
    "blenderbot": bart("Blenderbot", PRE_ENCODER, PRE_DECODER),
    # images
    "deit": vit("DeiT", "DeiTForImageClassification", "deit.layers.{}", VISION),
    "beit": vit(
        "Beit",
        "BeitForImageClassification",
        "beit.layers.{}",
        {**VISION, "attn_out": "", "mlp_out": ""},
    ),
    "dinov2": vit(
        "Dinov2",
        "Dinov2Model",
        "encoder.layer.{}",
        {
            **plain("layer_scale1", "norm2", "mlp", "fc1", "fc2"),
            "mlp_out": "out:layer_scale2",
        },
    ),
    "clip_vision": vit("CLIPVision", "CLIPVisionModel", "encoder.layers.{}", CLIP),
    "siglip_vision": vit("SiglipVision", "SiglipVisionModel", "encoder.layers.{}", CLIP),
    "swin": Named(
        "SwinConfig",
        "SwinModel",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 2,
        },
        tuple(
            Expected(
                f"encoder.layers.{stage}.blocks.{i}",
                {**plain("", "layernorm_after", "mlp", "fc1", "fc2"), "attn_out": ""},
                {},
                i,
                str(stage),
            )
            for stage in range(2)
            for i in range(2)
        ),
        pixels,
    ),
}
