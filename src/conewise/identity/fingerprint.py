"""The fingerprint of a module: which weights, in which architecture, as one hash."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

# What a configuration says about its origin and its use, not about what the model computes.
_NOT_COMPUTED = {
    "_attn_implementation",
    "_commit_hash",
    "_model_name_or_path",
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pretraining_tp",
    "problem_type",
    "quantization_config",
    "return_dict",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
}


def fingerprint(module: nn.Module) -> str:
    """A sha256, in hexadecimal, of the module's class, configuration and weights as they are now.

    Every byte of every parameter and persistent buffer is read (about a second per gigabyte), so
    two modules of one fingerprint hold the same weights. A model has one fingerprint whether it
    came from safetensors or from a GGUF file of the same numbers, on whatever device it is; in
    another dtype it is another model, and has another one. The attention implementation is left
    out: it changes rounding, and no weight.
    """
    total = hashlib.sha256(type(module).__name__.encode())
    total.update(json.dumps(_settings(module), sort_keys=True).encode())
    digests: dict[tuple[object, ...], bytes] = {}
    for name, tensor in sorted(module.state_dict().items()):
        # Tied weights have several names and are read once.
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in digests:
            digests[key] = _digest(tensor)
        total.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        total.update(digests[key])
    return total.hexdigest()


def _digest(tensor: Tensor) -> bytes:
    # As bytes, because numpy has no bfloat16.
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).digest()


def _settings(module: nn.Module) -> Any:
    """The configuration as it is saved, less what is not computed; None where there is none."""
    differences = getattr(getattr(module, "config", None), "to_diff_dict", None)
    return _plain(differences()) if differences is not None else None


def _plain(value: Any) -> Any:
    """`value` without what is not computed. Floats keep six digits: a GGUF file has 32 bits of each."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if k not in _NOT_COMPUTED}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return int(value) if value.is_integer() else f"{value:.6g}"
    if isinstance(value, bool | int | str):
        return value
    return str(value)
