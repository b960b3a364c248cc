"""Decompositions, attributions and lenses by plain hooks on a module: written from the definitions alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.circuits.hook_oracle import HookOracle


class PlainHooks:
    """What a module wrote into its stream in one forward; what its norm and unembedding make of it."""

    def __init__(self, module: Any, **inputs: Tensor) -> None:
        self.module = module
        self.oracle = HookOracle(module)
        self.seen = self.oracle.forward(**inputs)
        self.norm: Any = self.oracle.final_norm
        self.unembed: nn.Linear = module.get_output_embeddings()
        config = module.config
        self.cap = getattr(config, "final_logit_softcapping", None)

    @property
    def stream(self) -> Tensor:
        """What the final norm reads."""
        return self.seen.streams["logits"]

    @property
    def parts(self) -> dict[str, Tensor]:
        """By writer: heads without biases, MLPs, the embedding."""
        return self.seen.parts

    def through_norm(self, part: Tensor) -> Tensor:
        """A part behind the final norm without its bias, with the scale of the whole stream."""
        stream, norm = self.stream, self.norm
        if isinstance(norm, nn.LayerNorm):
            scale = torch.rsqrt(stream.var(-1, correction=0, keepdim=True) + norm.eps)
            centred: Tensor = (part - part.mean(-1, keepdim=True)) * scale * norm.weight
            return centred
        eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        scale = torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + eps)
        weight: Tensor = 1 + norm.weight if type(norm).__name__ == "Gemma2RMSNorm" else norm.weight
        return part * scale * weight

    def logit_diff_of(self, part: Tensor, answer: int, wrong: int) -> Tensor:
        """What a part adds to logit(answer) − logit(wrong) at every position, [prompt, pos]."""
        normed, weight = self.through_norm(part), self.unembed.weight
        if self.cap is None:
            return normed @ (weight[answer] - weight[wrong])
        raw = self.unembed(self.norm(self.stream))
        factor = self.cap * torch.tanh(raw / self.cap) / raw
        right, other = (normed @ weight[token] * factor[..., token] for token in (answer, wrong))
        found: Tensor = right - other
        return found

    @torch.no_grad()
    def lens(self, stream: Tensor) -> Tensor:
        """The logits of a stream: final norm, unembedding, cap."""
        logits: Tensor = self.unembed(self.norm(stream))
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)
