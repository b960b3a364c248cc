"""The sizes of a model under the names that TransformerLens has for them: `model.cfg.n_layers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from conewise.compat.hooks.hook_table import HookTable
from conewise.runs.run import Run


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


def _setting(own: Any, *names: str) -> Any:
    """The first of these names that the module's settings have, or None."""
    found = (getattr(own, name, None) for name in names)
    return next((value for value in found if value is not None), None)


def config_of(table: HookTable, probe: Run, tokenizer: Any, name: str) -> HookedConfig:
    """The sizes of a captured model, read off its sites in a short run."""
    captured = table.model
    module: Any = captured.module
    own = getattr(module, "config", None)
    heads, width = probe.read(("z", 0)).shape[-2:]
    weight = next(module.parameters())
    kinds = captured.site_table.kinds
    norm = table.norms.get("blocks.0.ln1") or table.norms.get("ln_final")
    final = table.norms.get("ln_final")
    shared = probe.read(("k", 0)).shape[-2] if "k" in kinds else heads
    logits = probe.logits
    return HookedConfig(
        n_layers=table.n_layers,
        d_model=probe.read(("resid_pre", 0)).shape[-1],
        n_heads=heads,
        d_head=width,
        d_mlp=probe.read(("post", 0)).shape[-1] if "post" in kinds else None,
        d_vocab=_setting(own, "vocab_size") or logits.shape[-1],
        d_vocab_out=logits.shape[-1],
        n_ctx=_setting(own, "max_position_embeddings", "n_positions", "n_ctx"),
        n_key_value_heads=None if shared == heads else shared,
        act_fn=_setting(own, "activation_function", "hidden_act", "hidden_activation"),
        attn_only="mlp_out" not in kinds,
        gated_mlp="pre_linear" in kinds,
        parallel_attn_mlp="mlp_out" in kinds and "resid_mid" not in kinds,
        normalization_type=None if norm is None else "LN" if norm.is_centered else "RMS",
        final_rms=final is not None and not final.is_centered,
        eps=None if norm is None else norm.eps,
        positional_embedding_type=_positions(table, kinds),
        device=weight.device,
        dtype=weight.dtype,
        model_name=name,
        tokenizer_name=getattr(tokenizer, "name_or_path", None),
        original_architecture=type(module).__name__,
        default_prepend_bos=True,
        tokenizer_prepends_bos=False,
        own=own,
        output_logits_soft_cap=_setting(own, "final_logit_softcapping") or -1.0,
    )


def _positions(table: HookTable, kinds: tuple[str, ...]) -> str:
    if table.pos_embed is not None:
        return "standard"
    return "rotary" if "rot_q" in kinds else "other"
