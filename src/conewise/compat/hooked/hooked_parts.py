"""Parts of a model that notebooks call or look into: `model.blocks`, `model.ln_final`, `model.unembed`."""

from __future__ import annotations

from functools import cached_property

from conewise.compat.hooked.blocks import Embed, NormPart, Part, PosEmbed, Unembed, block
from conewise.compat.hooked.hooked_weights import HookedWeights
from conewise.compat.hooks.hook_points import HookPoint


class HookedParts(HookedWeights):
    """A model whose parts have paths."""

    hook_dict: dict[str, HookPoint]

    @cached_property
    def blocks(self) -> list[Part]:
        """The blocks: `model.blocks[3].attn.W_Q`, `model.blocks[3].hook_resid_pre`."""
        norms, points = self.table.norms, self.hook_dict
        return [
            block(layer, points, self._matrices, norms, is_gated=self.cfg.gated_mlp)
            for layer in range(self.cfg.n_layers)
        ]

    @property
    def ln_final(self) -> NormPart:
        """The norm in front of the unembedding; call it with a stream."""
        norm = self.table.norms.get("ln_final")
        if norm is None:
            raise AttributeError("this model has no ln_final: no norm reads the end of its stream.")
        return NormPart("ln_final", self.hook_dict, norm)

    @property
    def unembed(self) -> Unembed:
        """The unembedding; call it with the normed stream."""
        return Unembed("unembed", self.hook_dict, {"W_U": lambda: self.W_U, "b_U": lambda: self.b_U})

    @property
    def embed(self) -> Embed:
        """The table of tokens; call it with tokens."""
        return Embed("embed", self.hook_dict, {"W_E": lambda: self.W_E})

    @property
    def pos_embed(self) -> PosEmbed:
        """The table of positions; call it with tokens."""
        return PosEmbed("pos_embed", self.hook_dict, {"W_pos": lambda: self.W_pos})

    @property
    def all_head_labels(self) -> list[str]:
        """L0H0, L0H1, ..."""
        return [f"L{layer}H{head}" for layer in range(self.cfg.n_layers) for head in range(self.cfg.n_heads)]
