"""A Llama of two small layers, its tokenizer, and both as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from torch import Tensor

LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
# A byte-level vocabulary: special tokens, letters, digits, a space, and two that merging makes.
VOCABULARY = ["<s>", "</s>", *LETTERS, *"0123456789", "Ġ", "ĠĠ", "ab"]
MERGES = ["Ġ Ġ", "a b"]


def small_llama(*, tied: bool = True, layers: int = 2, unused: int = 0, width: int = 32) -> Any:
    """A Llama with random weights; `unused` tokens more than the tokenizer has."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(VOCABULARY) + unused,
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 30_000.0},
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
    )
    # Not typed.
    make: Any = transformers.LlamaForCausalLM
    return make(config).eval()


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k in the order of llama.cpp, which rotates neighbours; transformers rotates halves."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_gguf(module: Any, path: Path, *, architecture: str = "llama", **settings: Any) -> Path:
    """The weights of a small Llama as a GGUF file; `settings` are further keys."""
    config = module.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("small")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(settings.pop("pre", "gpt-2"))
    unused = [f"<unused{n}>" for n in range(config.vocab_size - len(VOCABULARY))]
    writer.add_token_list([*VOCABULARY, *unused])
    writer.add_token_types([3, 3, *[1] * (config.vocab_size - 2)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if "add_bos" in settings:
        writer.add_add_bos_token(settings.pop("add_bos"))
    for key, value in settings.pop("strings", {}).items():
        writer.add_string(key, value)
    leave_out = settings.pop("leave_out", ())
    storage = settings.pop("storage", None)
    assert not settings

    weights = module.state_dict()
    named = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config.tie_word_embeddings:
        named["output.weight"] = "lm_head.weight"
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(config.num_hidden_layers):
        for theirs, ours in parts.items():
            named[f"blk.{layer}.{theirs}.weight"] = f"model.layers.{layer}.{ours}.weight"
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for theirs, ours in named.items():
        if theirs in leave_out:
            continue
        weight = weights[ours]
        part = theirs.split(".")[-2]
        values = (interleaved(weight, heads[part]) if part in heads else weight).numpy()
        if storage is None or values.ndim == 1:
            writer.add_tensor(theirs, values)
        else:
            writer.add_tensor(theirs, gguf.quantize(values, storage), raw_dtype=storage)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small_tokenizer() -> Any:
    make: Any = transformers.GPT2Tokenizer
    merges = [tuple(merge.split()) for merge in MERGES]
    return make(vocab={token: n for n, token in enumerate(VOCABULARY)}, merges=merges, bos_token="<s>")
