"""The sizes of a model under the names that TransformerLens has for them: `model.cfg.n_layers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class HookedConfig:
    """Read off the captured graph, as far as it shows them, and else off the module's own settings.

    A name that is not here is looked for in these: `cfg.rope_theta` is `model.module.config.rope_theta`.
    """

    n_layers: int
    d_model: int
    n_heads: int
    d_head: int
    d_mlp: int | None
    d_vocab: int
    d_vocab_out: int
    n_ctx: int | None
    n_key_value_heads: int | None
    act_fn: str | None
    attn_only: bool
    gated_mlp: bool
    parallel_attn_mlp: bool
    normalization_type: str | None
    final_rms: bool
    eps: float | None
    positional_embedding_type: str
    device: torch.device
    dtype: torch.dtype
    model_name: str
    tokenizer_name: str | None
    original_architecture: str
    default_prepend_bos: bool
    tokenizer_prepends_bos: bool
    own: Any
    """The module's own settings."""
    use_attn_result: bool = False
    use_hook_mlp_in: bool = False
    use_split_qkv_input: bool = False
    use_attn_in: bool = False
    n_devices: int = 1
    output_logits_soft_cap: float = -1.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "own":
            raise AttributeError(name)
        if self.own is not None and hasattr(self.own, name):
            return getattr(self.own, name)
        raise AttributeError(f"the configuration has no {name!r}, and neither has the module's own.")

    @property
    def d_attn(self) -> int:
        """The width of all heads together."""
        return self.n_heads * self.d_head

    def to_dict(self) -> dict[str, Any]:
        """The names that are here, without the module's own settings."""
        return {name: value for name, value in vars(self).items() if name != "own"}


def setting(own: Any, *names: str) -> Any:
    """The first of these names that the module's settings have, or None."""
    found = (getattr(own, name, None) for name in names)
    return next((value for value in found if value is not None), None)
