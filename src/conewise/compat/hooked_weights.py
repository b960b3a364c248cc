"""Weights, parts and sizes under TransformerLens's names: `model.W_Q`, `model.blocks[3]`, `model.cfg`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from conewise.compat.hook_points import HookPoint
from conewise.compat.hook_table import BIASES, HookTable
from conewise.compat.matrices import FactoredMatrix, Matrices, Norm, stacked
from conewise.runs.run import Run


class HookedConfig:
    """Sizes read off the captured graph in a short run, and off the module's settings where it has none.

    A name that is not here is looked for in these: `cfg.rope_theta` is `model.module.config.rope_theta`.
    """

    def __init__(self, table: HookTable, probe: Run, tokenizer: Any, name: str) -> None:
        module: Any = table.model.module
        self.own: Any = getattr(module, "config", None)
        """The module's own settings."""
        kinds, norms, weight = table.model.site_table.kinds, table.norms, next(module.parameters())
        norm, final = norms.get("blocks.0.ln1") or norms.get("ln_final"), norms.get("ln_final")
        self.n_layers = table.n_layers
        self.d_model: int = probe.read(("resid_pre", 0)).shape[-1]
        self.n_heads, self.d_head = map(int, probe.read(("z", 0)).shape[-2:])
        shared = probe.read(("k", 0)).shape[-2] if "k" in kinds else self.n_heads
        self.n_key_value_heads: int | None = None if shared == self.n_heads else shared
        self.d_mlp: int | None = probe.read(("post", 0)).shape[-1] if "post" in kinds else None
        self.d_vocab_out: int = probe.logits.shape[-1]
        self.d_vocab: int = self._setting("vocab_size") or self.d_vocab_out
        self.n_ctx: int | None = self._setting("max_position_embeddings", "n_positions", "n_ctx")
        self.act_fn: str | None = self._setting("activation_function", "hidden_act", "hidden_activation")
        self.attn_only = "mlp_out" not in kinds
        self.gated_mlp = "pre_linear" in kinds
        self.parallel_attn_mlp = "mlp_out" in kinds and "resid_mid" not in kinds
        self.normalization_type = None if norm is None else "LN" if norm.is_centered else "RMS"
        self.final_rms = final is not None and not final.is_centered
        self.eps = None if norm is None else norm.eps
        has_rotary = "rotary" if "rot_q" in kinds else "other"
        self.positional_embedding_type = has_rotary if table.pos_embed is None else "standard"
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = weight.dtype
        self.model_name = name
        self.tokenizer_name: str | None = getattr(tokenizer, "name_or_path", None)
        self.original_architecture = type(module).__name__
        self.default_prepend_bos, self.tokenizer_prepends_bos = True, False
        self.use_attn_result = self.use_hook_mlp_in = self.use_split_qkv_input = self.use_attn_in = False
        self.n_devices = 1
        self.output_logits_soft_cap: float = self._setting("final_logit_softcapping") or -1.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "own":
            raise AttributeError(name)
        if self.own is not None and hasattr(self.own, name):
            return getattr(self.own, name)
        raise AttributeError(f"the configuration has no {name!r}, and neither has the module's own.")

    def __repr__(self) -> str:
        return f"HookedConfig({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def _setting(self, *names: str) -> Any:
        """The first of these names that the module's settings have, or None."""
        found = (getattr(self.own, name, None) for name in names)
        return next((value for value in found if value is not None), None)

    @property
    def d_attn(self) -> int:
        """The width of all heads together."""
        return self.n_heads * self.d_head

    def to_dict(self) -> dict[str, Any]:
        """The names that are here, without the module's own settings."""
        return {name: value for name, value in vars(self).items() if name != "own"}


Tensor = torch.Tensor


class Part:
    """One part: the hook points and the weights under its path, and the parts inside of it.

    One with a `function` is called as that.
    """

    def __init__(
        self,
        path: str,
        points: Mapping[str, HookPoint],
        weights: Mapping[str, Callable[[], Tensor]],
        parts: Mapping[str, Part] | None = None,
        function: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._path, self._points, self._weights, self._parts = path, points, weights, dict(parts or {})
        self._function = function

    def __call__(self, given: Tensor) -> Tensor:
        """Return what the part makes of a stream, or of tokens."""
        if self._function is None:
            raise TypeError(f"{self._path} is not computed by itself: it has weights, and hook points.")
        return self._function(given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._parts:
            return self._parts[name]
        if name in self._weights:
            return self._weights[name]()
        if f"{self._path}.{name}" in self._points:
            return self._points[f"{self._path}.{name}"]
        raise AttributeError(f"{self._path} has no {name!r}; it has {', '.join(dir(self))}.")

    def __dir__(self) -> list[str]:
        prefix = f"{self._path}."
        own = [name.removeprefix(prefix) for name in self._points if name.startswith(prefix)]
        return [*self._parts, *self._weights, *(name for name in own if "." not in name)]

    def __repr__(self) -> str:
        return f"{self._path}: {', '.join(dir(self))}"


class NormPart(Part):
    """A norm: called with a stream, it is the module's own; `w` and `b` are its gain and bias."""

    def __init__(self, path: str, points: Mapping[str, HookPoint], norm: Norm) -> None:
        super().__init__(path, points, {"w": lambda: norm.w, "b": lambda: norm.b}, function=norm)
        self._norm = norm

    @property
    def eps(self) -> float:
        """The number that is added under the root."""
        return self._norm.eps


def layer_weights(matrices: Matrices, layer: int, *, is_gated: bool) -> dict[str, Callable[[], Tensor]]:
    """Return the weights and biases of one block by name, each read when it is called for."""
    pairs = {
        "Q": partial(matrices.made, "q", layer),
        "K": partial(matrices.made, "k", layer),
        "V": partial(matrices.made, "v", layer),
        "O": partial(matrices.out_of_heads, layer),
        "in": partial(matrices.made, "pre_linear" if is_gated else "pre", layer),
        "out": partial(matrices.out_of_neurons, layer),
    }
    if is_gated:
        pairs["gate"] = partial(matrices.made, "pre", layer)

    def one(name: str, number: int) -> Callable[[], Tensor]:
        return lambda: pairs[name]()[number]

    return {f"{letter}_{name}": one(name, number) for name in pairs for number, letter in enumerate("Wb")}


IN_ATTENTION = frozenset({f"{letter}_{name}" for letter in "Wb" for name in "QKVO"})


def _stacked(name: str, shape: str) -> Any:
    """Return the property of a weight that every block has, stacked; `shape` is its description."""
    return property(lambda self: stacked(partial(self.weight, name), self.cfg.n_layers), doc=f"{shape}.")


class HookedWeights:
    """The module's own weights, layer first; nothing is folded into them, and biases that are none are zeros.

    They are copies: writing to them changes no model. Keys and values have their own heads where several
    heads of queries share them. A weight that the model has not is an AttributeError that says why.
    """

    cfg: HookedConfig
    module: Any
    table: HookTable
    hook_dict: dict[str, HookPoint]
    _matrices: Matrices

    W_Q = _stacked("W_Q", "[layer, head, d_model, d_head]")
    W_K = _stacked("W_K", "[layer, head, d_model, d_head], of the heads of keys")
    W_V = _stacked("W_V", "[layer, head, d_model, d_head], of the heads of values")
    W_O = _stacked("W_O", "[layer, head, d_head, d_model]")
    b_Q = _stacked("b_Q", "[layer, head, d_head]")
    b_K = _stacked("b_K", "[layer, head, d_head], of the heads of keys")
    b_V = _stacked("b_V", "[layer, head, d_head], of the heads of values")
    b_O = _stacked("b_O", "[layer, d_model]")
    W_in = _stacked("W_in", "[layer, d_model, d_mlp]; of a gated MLP, what is not activated")
    b_in = _stacked("b_in", "[layer, d_mlp]")
    W_out = _stacked("W_out", "[layer, d_mlp, d_model]")
    b_out = _stacked("b_out", "[layer, d_model]")

    @property
    def W_gate(self) -> Tensor | None:
        """The gate weights of a gated MLP, [layer, d_model, d_mlp]; None for other MLPs."""
        return self._of_gate("W_gate")

    @property
    def b_gate(self) -> Tensor | None:
        """The gate biases of a gated MLP, [layer, d_mlp]; None for other MLPs."""
        return self._of_gate("b_gate")

    def _of_gate(self, name: str) -> Tensor | None:
        return stacked(partial(self.weight, name), self.cfg.n_layers) if self.cfg.gated_mlp else None

    def weight(self, name: str, layer: int) -> Tensor:
        """Return a weight or a bias of one block: `weight("W_Q", 3)`."""
        return layer_weights(self._matrices, layer, is_gated=self.cfg.gated_mlp)[name]()

    @property
    def W_E(self) -> Tensor:
        """The token embedding, [d_vocab, d_model]."""
        return _weight(self._embedding("get_input_embeddings", "W_E"), "W_E").detach()

    @property
    def W_pos(self) -> Tensor:
        """The positional embedding table, [n_ctx, d_model], if the model has one."""
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
        """The token and positional embeddings, concatenated: [d_vocab + n_ctx, d_model]."""
        return torch.cat([self.W_E, self.W_pos])

    @property
    def W_U(self) -> Tensor:
        """The unembedding, [d_model, d_vocab]."""
        return _weight(self._embedding("get_output_embeddings", "W_U"), "W_U").detach().T

    @property
    def b_U(self) -> Tensor:
        """The unembedding's bias, [d_vocab]."""
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

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Tensor:
        """Return what the biases of attention and MLPs before `layer` add to the stream, [d_model].

        `mlp_input`: and that of the attention of `layer`. Raises ValueError where a bias is normed on its way
        into the stream: there it is another vector at each position.
        """
        total = self.W_E.new_zeros(self.cfg.d_model)
        for number in range(layer + mlp_input):
            total = total + self._constant("attn_out", number)
            if include_mlp_biases and number < layer and not self.cfg.attn_only:
                total = total + self._constant("mlp_out", number)
        return total

    def _constant(self, kind: str, layer: int) -> Tensor:
        written, bias = self.table.written(kind, layer), self.weight(BIASES[kind], layer)
        if written.norm is not None and bool(bias.any()):
            raise ValueError(
                f"the bias of {kind!r} in layer {layer} is normed before it is added to the stream, with "
                "another scale at each position. `cache.get_full_resid_decomposition` has it for a run."
            )
        return written.constant(bias, None)

    def _embedding(self, method: str, matrix: str) -> nn.Module:
        find = getattr(self.module, method, None)
        found = find() if callable(find) else None
        if not isinstance(found, nn.Module):
            raise AttributeError(
                f"this model has no {matrix}: `{type(self.module).__name__}.{method}()` returns no module."
            )
        return found

    # -- parts by their paths ----------------------------------------------------------------------

    @cached_property
    def blocks(self) -> list[Part]:
        """The blocks: `model.blocks[3].attn.W_Q`, `model.blocks[3].hook_resid_pre`."""
        return [self._block(layer) for layer in range(self.cfg.n_layers)]

    def _block(self, layer: int) -> Part:
        """Return one block: `attn` and `mlp` with their weights, its norms, and the hooks of the stream."""
        path, points, norms = f"blocks.{layer}", self.hook_dict, self.table.norms
        weights = layer_weights(self._matrices, layer, is_gated=self.cfg.gated_mlp)
        of_heads = {name: read for name, read in weights.items() if name in IN_ATTENTION}
        of_neurons = {name: read for name, read in weights.items() if name not in IN_ATTENTION}
        parts: dict[str, Part] = {
            "attn": Part(f"{path}.attn", points, of_heads),
            "mlp": Part(f"{path}.mlp", points, of_neurons),
        }
        for name in ("ln1", "ln1_post", "ln2", "ln2_post"):
            where = f"{path}.{name}"
            if where in norms:
                parts[name] = NormPart(where, points, norms[where])
        return Part(path, points, {}, parts)

    @property
    def ln_final(self) -> NormPart:
        """The norm before the unembedding; call it with a stream."""
        norm = self.table.norms.get("ln_final")
        if norm is None:
            raise AttributeError("this model has no ln_final: no norm reads the end of its stream.")
        return NormPart("ln_final", self.hook_dict, norm)

    @property
    def unembed(self) -> Part:
        """The unembedding: called with the normed stream, it returns logits [..., d_vocab]."""
        weights = {"W_U": lambda: self.W_U, "b_U": lambda: self.b_U}
        return Part("unembed", self.hook_dict, weights, function=lambda x: x @ self.W_U + self.b_U)

    @property
    def embed(self) -> Part:
        """The token embedding: called with tokens, it returns their rows of W_E, [..., d_model]."""
        return Part("embed", self.hook_dict, {"W_E": lambda: self.W_E}, function=lambda of: self.W_E[of])

    @property
    def pos_embed(self) -> Part:
        """The positional embedding: called with tokens [prompt, pos], it returns their positions' rows."""

        def rows(tokens: Tensor) -> Tensor:
            return self.W_pos[: tokens.shape[-1]].expand(*tokens.shape, -1)

        return Part("pos_embed", self.hook_dict, {"W_pos": lambda: self.W_pos}, function=rows)

    @property
    def all_head_labels(self) -> list[str]:
        """The labels of all heads: L0H0, L0H1, ..."""
        return [f"L{layer}H{head}" for layer in range(self.cfg.n_layers) for head in range(self.cfg.n_heads)]


def _weight(module: nn.Module, matrix: str) -> Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise AttributeError(f"this model has no {matrix} as one matrix: {type(module).__name__} holds none.")
    return weight
