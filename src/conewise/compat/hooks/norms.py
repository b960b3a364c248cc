"""Norms as TransformerLens has them: a scale, what is divided by it, and a gain and a bias of the module's.

`Norm` is read off the module that does it, by what it makes of a few numbers: whatever it calls its
weight, and whether it multiplies by it or by one plus it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

Tensor = torch.Tensor

LARGE = 64.0
"""Beside the square of this, no norm's epsilon counts."""
ALIKE = 1e-4
"""How near, beside its largest number, a module's output has to be to what is computed here in its place."""


@dataclass(frozen=True, eq=False)
class Norm:
    """gain · (x − mean) / scale + bias, without the mean where `is_centered` is false.

    `path` is the module's. `before` is the site of the stream that it reads, `after` the node that it makes,
    in whatever form that has.
    """

    path: str
    before: str
    after: str
    module: nn.Module
    is_centered: bool
    eps: float

    @property
    def w(self) -> Tensor:
        """The gain, [d_model]: what the normalised value is multiplied with."""
        x = self._probe()
        return (self._applied(x) - self.b) * self.scale(x) / self.centered(x)

    @property
    def b(self) -> Tensor:
        """The bias, [d_model]; zeros where there is none."""
        return self._applied(torch.zeros_like(self._probe()))

    def centered(self, x: Tensor) -> Tensor:
        """What is divided by the scale."""
        return x - x.mean(-1, keepdim=True) if self.is_centered else x

    def scale(self, x: Tensor) -> Tensor:
        """What it divides by, [..., 1]."""
        found: Tensor = (self.centered(x).square().mean(-1, keepdim=True) + self.eps).sqrt()
        return found

    def affine(self, normalized: Tensor) -> Tensor:
        """What the module makes of a value that is normalised already."""
        return normalized * self.w + self.b

    def __call__(self, x: Tensor) -> Tensor:
        """What the module itself makes of x."""
        return self._applied(x)

    def _probe(self) -> Tensor:
        """Large numbers, of alternating sign: none of them is near 0, centred or not."""
        weight = next(self.module.parameters())
        signs = torch.arange(weight.shape[0], device=weight.device) % 2 * 2 - 1
        return LARGE * signs.to(weight.dtype)

    @torch.no_grad()
    def _applied(self, x: Tensor) -> Tensor:
        found: Tensor = self.module(x)
        return found


@dataclass(frozen=True, eq=False)
class Written:
    """How an output projection gets into the stream: through a norm of its own, times `factor`, plus `shift`.

    Each may be None: then there is none. With the scale that the norm has in a run this is linear, and the
    parts of the projection become parts of what is added to the stream.
    """

    norm: Norm | None = None
    factor: Tensor | None = None
    shift: Tensor | None = None

    def parts(self, parts: Tensor, scale: Tensor | None) -> Tensor:
        """Parts of a projection, [..., d_model], as parts of the stream."""
        if self.norm is not None:
            parts = self.norm.centered(parts) * self.norm.w
        if scale is not None:
            parts = parts / scale
        return parts if self.factor is None else parts * self.factor

    def constant(self, bias: Tensor, scale: Tensor | None) -> Tensor:
        """What is added to the stream where all parts are 0; `bias` is that of the projection."""
        made = self.parts(bias, scale)
        if self.norm is not None:
            made = made + (self.norm.b if self.factor is None else self.norm.b * self.factor)
        return made if self.shift is None else made + self.shift


def norm_of(module: nn.Module, path: str, before: str, after: str) -> Norm | None:
    """The norm that a module is; None where it is none of the two kinds, or has no gain of its own."""
    weights = list(module.parameters())
    eps = next(
        (getattr(module, n) for n in ("eps", "variance_epsilon", "epsilon") if hasattr(module, n)), None
    )
    if not weights or not isinstance(eps, float) or any(weight.ndim != 1 for weight in weights):
        return None
    generator = torch.Generator().manual_seed(0)
    width = weights[0].shape[0]
    probe = (torch.randn(3, width, generator=generator) + 0.5).to(weights[0])
    for is_centered in (True, False):
        norm = Norm(path, before, after, module, is_centered, eps)
        own = norm(probe).float()
        made = norm.affine(norm.centered(probe) / norm.scale(probe)).float()
        if is_alike(made, own, probe.dtype):
            return norm
    return None


def is_alike(made: Tensor, own: Tensor, dtype: torch.dtype) -> bool:
    """True if what is computed here is, up to rounding, what the module makes."""
    allowed = max(ALIKE, 4 * torch.finfo(dtype).eps) * float(own.abs().max())
    return bool((own - made).abs().max() <= allowed)
