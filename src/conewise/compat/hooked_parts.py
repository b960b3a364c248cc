"""Parts and sizes of a model under the names of TransformerLens: `model.cfg`, `model.blocks[3].attn.W_Q`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from conewise.compat.hook_points import HookPoint
from conewise.compat.hooked_weights import HookedWeights
from conewise.compat.matrices import Matrices, Norm

Tensor = torch.Tensor


class Part:
    """One part: the hook points and the weights under its path, and the parts inside of it."""

    def __init__(
        self,
        path: str,
        points: Mapping[str, HookPoint],
        weights: Mapping[str, Callable[[], Tensor]],
        parts: Mapping[str, Part | NormPart] | None = None,
    ) -> None:
        self._path, self._points, self._weights, self._parts = path, points, weights, dict(parts or {})

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
        super().__init__(path, points, {"w": lambda: norm.w, "b": lambda: norm.b})
        self._norm = norm

    @property
    def eps(self) -> float:
        """What is added under the root."""
        return self._norm.eps

    def __call__(self, x: Tensor) -> Tensor:
        """The normed stream."""
        return self._norm(x)


class Unembed(Part):
    """The last product: called with the normed stream, it returns logits."""

    def __call__(self, residual: Tensor) -> Tensor:
        """The logits, [..., d_vocab]."""
        return residual @ self._weights["W_U"]() + self._weights["b_U"]()


class Embed(Part):
    """The table of tokens: called with tokens, it returns their rows."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """The rows of W_E, [..., d_model]."""
        return self._weights["W_E"]()[tokens]


class PosEmbed(Part):
    """The table of positions: called with tokens [prompt, pos], it returns the rows of their positions."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """The rows of W_pos, [prompt, pos, d_model]."""
        return self._weights["W_pos"]()[: tokens.shape[-1]].expand(*tokens.shape, -1)


def block(
    layer: int,
    points: Mapping[str, HookPoint],
    matrices: Matrices,
    norms: Mapping[str, Norm],
    *,
    is_gated: bool,
) -> Part:
    """One block: `attn` and `mlp` with their weights, its norms, and the hooks of the stream."""
    path = f"blocks.{layer}"

    def made(kind: str, number: int) -> Callable[[], Tensor]:
        return lambda: matrices.made(kind, layer)[number]

    of_heads: dict[str, Callable[[], Tensor]] = {}
    for kind in "qkv":
        of_heads |= {f"W_{kind.upper()}": made(kind, 0), f"b_{kind.upper()}": made(kind, 1)}
    of_heads |= {
        "W_O": lambda: matrices.out_of_heads(layer)[0],
        "b_O": lambda: matrices.out_of_heads(layer)[1],
    }
    into = "pre_linear" if is_gated else "pre"
    of_neurons: dict[str, Callable[[], Tensor]] = {
        "W_in": made(into, 0),
        "b_in": made(into, 1),
        "W_out": lambda: matrices.out_of_neurons(layer)[0],
        "b_out": lambda: matrices.out_of_neurons(layer)[1],
    }
    if is_gated:
        of_neurons |= {"W_gate": made("pre", 0), "b_gate": made("pre", 1)}
    parts: dict[str, Part | NormPart] = {
        "attn": Part(f"{path}.attn", points, of_heads),
        "mlp": Part(f"{path}.mlp", points, of_neurons),
    }
    for one in ("ln1", "ln1_post", "ln2", "ln2_post"):
        if f"{path}.{one}" in norms:
            parts[one] = NormPart(f"{path}.{one}", points, norms[f"{path}.{one}"])
    return Part(path, points, {}, parts)


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
