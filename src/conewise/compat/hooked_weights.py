"""The weights of a model under the names of TransformerLens: `model.W_Q`, `model.W_U`, `model.b_out`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from conewise.compat.hook_table import HookTable
from conewise.compat.matrices import FactoredMatrix, Matrices, stacked
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


Tensor = torch.Tensor


class HookedWeights:
    """The module's own weights, layer first; nothing is folded into them, and biases that are none are zeros.

    They are copies: writing to them changes no model. Keys and values have their own heads where several
    heads of queries share them. A weight that the model has not is an AttributeError that says why.
    """

    cfg: HookedConfig
    module: Any
    table: HookTable
    _matrices: Matrices

    @property
    def W_Q(self) -> Tensor:
        """[layer, head, d_model, d_head]."""
        return self._made("q")[0]

    @property
    def W_K(self) -> Tensor:
        """[layer, head, d_model, d_head], of the heads of keys."""
        return self._made("k")[0]

    @property
    def W_V(self) -> Tensor:
        """[layer, head, d_model, d_head], of the heads of values."""
        return self._made("v")[0]

    @property
    def W_O(self) -> Tensor:
        """[layer, head, d_head, d_model]."""
        return stacked(lambda layer: self._matrices.out_of_heads(layer)[0], self.cfg.n_layers)

    @property
    def b_Q(self) -> Tensor:
        """[layer, head, d_head]."""
        return self._made("q")[1]

    @property
    def b_K(self) -> Tensor:
        """[layer, head, d_head], of the heads of keys."""
        return self._made("k")[1]

    @property
    def b_V(self) -> Tensor:
        """[layer, head, d_head], of the heads of values."""
        return self._made("v")[1]

    @property
    def b_O(self) -> Tensor:
        """[layer, d_model]."""
        return stacked(lambda layer: self._matrices.out_of_heads(layer)[1], self.cfg.n_layers)

    @property
    def W_in(self) -> Tensor:
        """[layer, d_model, d_mlp]; of a gated MLP, what is not activated."""
        return self._made("pre_linear" if self.cfg.gated_mlp else "pre")[0]

    @property
    def b_in(self) -> Tensor:
        """[layer, d_mlp]."""
        return self._made("pre_linear" if self.cfg.gated_mlp else "pre")[1]

    @property
    def W_gate(self) -> Tensor | None:
        """[layer, d_model, d_mlp] of a gated MLP, what is activated; None of another one."""
        return self._made("pre")[0] if self.cfg.gated_mlp else None

    @property
    def b_gate(self) -> Tensor | None:
        """[layer, d_mlp] of a gated MLP; None of another one."""
        return self._made("pre")[1] if self.cfg.gated_mlp else None

    @property
    def W_out(self) -> Tensor:
        """[layer, d_mlp, d_model]."""
        return stacked(self.out_of_neurons, self.cfg.n_layers)

    @property
    def b_out(self) -> Tensor:
        """[layer, d_model]."""
        return stacked(lambda layer: self._matrices.out_of_neurons(layer)[1], self.cfg.n_layers)

    @property
    def W_E(self) -> Tensor:
        """[d_vocab, d_model]."""
        return _weight(self._embedding("get_input_embeddings", "W_E"), "W_E").detach()

    @property
    def W_pos(self) -> Tensor:
        """[n_ctx, d_model], where positions are embedded by a table."""
        path = self.table.pos_table
        if path is None:
            raise AttributeError(
                "this model has no W_pos: no table of positions is added to the stream "
                f"(positional_embedding_type is {self.cfg.positional_embedding_type!r})."
            )
        weight = _weight(self.module.get_submodule(path), "W_pos").detach()
        # OPT keeps two rows in front that no position reads.
        extra = 0 if self.cfg.n_ctx is None else weight.shape[0] - self.cfg.n_ctx
        return weight[extra:] if 0 < extra <= 2 else weight

    @property
    def W_E_pos(self) -> Tensor:
        """[d_vocab + n_ctx, d_model]: both tables, one behind the other."""
        return torch.cat([self.W_E, self.W_pos])

    @property
    def W_U(self) -> Tensor:
        """[d_model, d_vocab]."""
        return _weight(self._embedding("get_output_embeddings", "W_U"), "W_U").detach().T

    @property
    def b_U(self) -> Tensor:
        """[d_vocab]."""
        head = self._embedding("get_output_embeddings", "b_U")
        bias = getattr(head, "bias", None)
        if isinstance(bias, Tensor):
            return bias.detach()
        weight = _weight(head, "b_U")
        return weight.new_zeros(weight.shape[0]).detach()

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q @ W_K.T, [layer, head, d_model, d_model], as factors; shared keys are repeated."""
        return FactoredMatrix(self.W_Q, self._repeated(self.W_K).transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """W_V @ W_O, [layer, head, d_model, d_model], as factors; shared values are repeated."""
        return FactoredMatrix(self._repeated(self.W_V), self.W_O)

    def _repeated(self, weight: Tensor) -> Tensor:
        return weight.repeat_interleave(self.cfg.n_heads // weight.shape[1], 1)

    def out_of_heads(self, layer: int) -> Tensor:
        """W_O of one layer."""
        return self._matrices.out_of_heads(layer)[0]

    def out_of_neurons(self, layer: int) -> Tensor:
        """W_out of one layer."""
        return self._matrices.out_of_neurons(layer)[0]

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Tensor:
        """What the biases of attention and MLPs before `layer` add to the stream, [d_model].

        `mlp_input`: and that of the attention of `layer`. Raises ValueError where a bias is normed on its way
        into the stream: there it is another vector at each position.
        """
        total = self.W_E.new_zeros(self.cfg.d_model)
        for number in range(layer + mlp_input):
            total = total + self._constant("attn_out", number)
            if include_mlp_biases and number < layer and not self.cfg.attn_only:
                total = total + self._constant("mlp_out", number)
        return total

    def bias_of(self, kind: str, layer: int) -> Tensor:
        """b_O ("attn_out") or b_out ("mlp_out") of one layer."""
        of = self._matrices
        return (of.out_of_heads if kind == "attn_out" else of.out_of_neurons)(layer)[1]

    def _constant(self, kind: str, layer: int) -> Tensor:
        written, bias = self.table.written(kind, layer), self.bias_of(kind, layer)
        if written.norm is not None and bool(bias.any()):
            raise ValueError(
                f"the bias of {kind!r} in layer {layer} is normed before it is added to the stream, with "
                "another scale at each position. `cache.get_full_resid_decomposition` has it for a run."
            )
        return written.constant(bias, None)

    def tokens_to_residual_directions(self, tokens: Any) -> Tensor:
        """The columns of W_U of tokens, [..., d_model]: what the final norm's output is multiplied with."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        numbers = torch.as_tensor(tokens, device=self.cfg.device)
        if numbers.numel() == 1:
            numbers = numbers.reshape(())
        weight = _weight(self._embedding("get_output_embeddings", "W_U"), "W_U").detach()
        return weight[numbers]

    def to_single_token(self, string: str) -> int:
        """The token of a text that is one."""
        raise NotImplementedError

    def _made(self, kind: str) -> tuple[Tensor, Tensor]:
        made = [self._matrices.made(kind, layer) for layer in range(self.cfg.n_layers)]
        return tuple(stacked(lambda layer, i=i: made[layer][i], len(made)) for i in (0, 1))  # type: ignore[return-value, misc]

    def _embedding(self, method: str, matrix: str) -> nn.Module:
        find = getattr(self.module, method, None)
        found = find() if callable(find) else None
        if not isinstance(found, nn.Module):
            raise AttributeError(
                f"this model has no {matrix}: `{type(self.module).__name__}.{method}()` returns no module."
            )
        return found


def _weight(module: nn.Module, matrix: str) -> Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise AttributeError(f"this model has no {matrix} as one matrix: {type(module).__name__} holds none.")
    return weight
