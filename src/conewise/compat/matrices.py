"""W_Q and its like: weights, norms and products of weights in the layout of TransformerLens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from conewise.anatomy.attention import projection_above, through_layout, weight_of
from conewise.anatomy.places import Place
from conewise.anatomy.wiring import Wiring
from conewise.errors import MissingSiteError
from conewise.model import Model
from conewise.program.records import Record, Ref
from conewise.runs.run import Run

Tensor = torch.Tensor


class FactoredMatrix:
    """A @ B, with A [..., left, inner] and B [..., inner, right]; what is in front is broadcast."""

    def __init__(self, A: Tensor, B: Tensor) -> None:  # the names that it has there
        if A.shape[-1] != B.shape[-2]:
            raise ValueError(
                f"the factors {tuple(A.shape)} and {tuple(B.shape)} do not go together: the last size of the "
                "first is to be the second last of the other."
            )
        lead = (A[..., :1, :1] * B[..., :1, :1]).shape[:-2]
        self.A, self.B = A.expand(*lead, *A.shape[-2:]), B.expand(*lead, *B.shape[-2:])
        self.ldim, self.mdim, self.rdim = A.shape[-2], A.shape[-1], B.shape[-1]

    @property
    def shape(self) -> torch.Size:
        """The shape of the product."""
        return torch.Size((*self.A.shape[:-1], self.rdim))

    @property
    def ndim(self) -> int:
        """The number of dimensions of the product."""
        return len(self.shape)

    @property
    def AB(self) -> Tensor:
        """The product itself."""
        return self.A @ self.B

    @property
    def BA(self) -> Tensor:
        """The product in the other order; left and right have to be as wide."""
        if self.ldim != self.rdim:
            raise AssertionError(f"B @ A is for square products, and this one is {self.ldim} × {self.rdim}.")
        return self.B @ self.A

    @property
    def T(self) -> FactoredMatrix:
        """The transposed product."""
        return FactoredMatrix(self.B.transpose(-2, -1), self.A.transpose(-2, -1))

    def __matmul__(self, other: Any) -> Any:
        """The product with a matrix or with another of these, as factors; with a vector, a tensor."""
        if isinstance(other, FactoredMatrix):
            return (self @ other.A) @ other.B
        if other.ndim < 2:
            return (self.A @ (self.B @ other[..., None]))[..., 0]
        if self.rdim > self.mdim:
            return FactoredMatrix(self.A, self.B @ other)
        return FactoredMatrix(self.AB, other)

    def __rmatmul__(self, other: Tensor) -> Any:
        """A matrix or a vector times this product."""
        if other.ndim < 2:
            return ((other[..., None, :] @ self.A) @ self.B)[..., 0, :]
        if self.ldim > self.mdim:
            return FactoredMatrix(other @ self.A, self.B)
        return FactoredMatrix(other, self.AB)

    def __mul__(self, scalar: Any) -> FactoredMatrix:
        return FactoredMatrix(self.A * scalar, self.B)

    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> FactoredMatrix:
        """Along what is in front, and along left and right; these stay as dimensions when one is taken."""
        entries = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in entries:
            at = entries.index(Ellipsis)
            entries[at : at + 1] = [slice(None)] * (self.ndim - len(entries) + 1)
        lead = self.ndim - 2
        front, inner = tuple(entries[:lead]), [_kept(one) for one in entries[lead:]]
        inner += [slice(None)] * (2 - len(inner))
        left, right = inner
        return FactoredMatrix(self.A[front][..., left, :], self.B[front][..., right])

    @cached_property
    def _svd(self) -> tuple[Tensor, Tensor, Tensor]:
        ua, sa, va = torch.linalg.svd(self.A, full_matrices=False)
        ub, sb, vb = torch.linalg.svd(self.B, full_matrices=False)
        u, s, v = torch.linalg.svd((sa[..., :, None] * (va @ ub)) * sb[..., None, :], full_matrices=False)
        return ua @ u, s, v @ vb

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """U [..., left, inner], S [..., inner] and V [..., right, inner]: A @ B is U · S @ V.T."""
        u, s, vh = self._svd
        return u, s, vh.transpose(-2, -1)

    @property
    def U(self) -> Tensor:
        """The left singular vectors, [..., left, inner]."""
        return self._svd[0]

    @property
    def S(self) -> Tensor:
        """The singular values, [..., inner]."""
        return self._svd[1]

    @property
    def V(self) -> Tensor:
        """The right singular vectors, [..., right, inner]."""
        return self.svd()[2]

    @property
    def Vh(self) -> Tensor:
        """The right singular vectors, as TransformerLens has them under this name: [..., right, inner]."""
        return self.V

    @property
    def eigenvalues(self) -> Tensor:
        """The eigenvalues of a square product that are not 0 by its rank; complex."""
        found: Tensor = torch.linalg.eig(self.BA).eigenvalues
        return found

    def norm(self) -> Tensor:
        """The root of the sum of squares."""
        return self.S.square().sum(-1).sqrt()

    def make_even(self) -> FactoredMatrix:
        """The same product, with the singular values shared evenly by both factors."""
        u, s, vh = self._svd
        root = s.sqrt()
        return FactoredMatrix(u * root[..., None, :], root[..., :, None] * vh)

    def collapse_l(self) -> Tensor:
        """S · V.T, [..., inner, right]: has the same products of columns as A @ B."""
        return self._svd[1][..., :, None] * self._svd[2]

    def collapse_r(self) -> Tensor:
        """U · S, [..., left, inner]: has the same products of rows as A @ B."""
        return self._svd[0] * self._svd[1][..., None, :]

    def unsqueeze(self, k: int) -> FactoredMatrix:
        """With a dimension of size 1 in front."""
        return FactoredMatrix(self.A.unsqueeze(k), self.B.unsqueeze(k))

    def get_corner(self, k: int = 3) -> Tensor:
        """The first k rows and columns of the product."""
        return self.A[..., :k, :] @ self.B[..., :k]

    def __repr__(self) -> str:
        return f"FactoredMatrix: Shape({tuple(self.shape)}), Hidden Dim({self.mdim})"


def _kept(index: Any) -> Any:
    """A number as a slice of one, so that the dimension stays."""
    if isinstance(index, int) and not isinstance(index, bool):
        return slice(index, None if index == -1 else index + 1)
    return index


DIGITS = 128
"""Numbers of outputs are sent in digits of this base, which every float type holds exactly."""


class Matrices:
    """The weights of each layer, by what they make: `made("q", 3)`, and what reads z and post.

    `probe()` is a run of the model, with the weights that it has now.
    """

    def __init__(self, model: Model, probe: Callable[[], Run]) -> None:
        self.model, self.probe = model, probe
        self._known: dict[tuple[str, int], tuple[Record, Tensor]] = {}

    @cached_property
    def _wiring(self) -> Wiring:
        return Wiring(self.model.program)

    def made(self, kind: str, layer: int) -> tuple[Tensor, Tensor]:
        """The weight that makes q, k, v, pre or pre_linear, and its bias (zeros where there is none).

        [head, d_model, d_head] and [head, d_head] for heads, [d_model, d_mlp] and [d_mlp] for neurons.
        """
        record, numbers = self._projection(kind, layer)
        weight, bias = self._of(record)
        flat = numbers.reshape(-1)
        columns = weight[:, flat].reshape(weight.shape[0], *numbers.shape)
        return columns.movedim(0, -2), bias[flat].reshape(numbers.shape)

    def out_of_heads(self, layer: int) -> tuple[Tensor, Tensor]:
        """W_O of a layer, [head, d_head, d_model], and its bias."""
        with _named("W_O", layer):
            heads, width = self.probe().read(Place("z", layer)).shape[-2:]
            weight, bias = self._of(self.head_projection(layer))
        return weight.reshape(heads, width, -1), bias

    def out_of_neurons(self, layer: int) -> tuple[Tensor, Tensor]:
        """W_out of a layer, [d_mlp, d_model], and its bias."""
        return self._of(self.neuron_projection(layer))

    def head_projection(self, layer: int) -> Record:
        """The product of z with W_O. Raises AttributeError where there is none."""
        with _named("W_O", layer):
            found = self.model.site_table.find("result", layer)
        assert found.result is not None
        return found.result.projection

    def neuron_projection(self, layer: int) -> Record:
        """The product of neurons with W_out. Raises AttributeError where there is none."""
        with _named("W_out", layer):
            node = self.model.site_table.find("post", layer).node
        for reader, _ in through_layout(self._wiring, node, None):
            if self._wiring.is_linear(reader):
                return reader
        raise AttributeError(f"layer {layer} has no W_out: nothing multiplies its neurons with one matrix.")

    def _projection(self, kind: str, layer: int) -> tuple[Record, Tensor]:
        """The projection that a site's value comes out of, and which of its outputs is where."""
        if (kind, layer) not in self._known:
            with _named(_WRITTEN[kind], layer):
                node = self.model.site_table.find(kind, layer).node
            record = projection_above(self._wiring, node)
            if record is None:
                raise AttributeError(
                    f"layer {layer} has no {_WRITTEN[kind]}: {kind!r} does not come out of one projection."
                )
            self._known[kind, layer] = record, self._numbers(record, Place(kind, layer))
        return self._known[kind, layer]

    def _numbers(self, record: Record, place: Place) -> Tensor:
        probe = self.probe()
        (value,) = probe.demand([record.name])
        outputs = value.shape[-1]
        numbers, power = torch.zeros((), dtype=torch.long, device=value.device), 1
        while power < outputs:
            digit = (torch.arange(outputs, device=value.device) // power) % DIGITS
            with probe.fork() as world:
                world.patch(record.name, digit.to(value.dtype).expand_as(value).contiguous())
                numbers = numbers + power * world.read(place)[0, 0].round().long()
            power *= DIGITS
        return numbers

    def _of(self, record: Record) -> tuple[Tensor, Tensor]:
        """The weight of a projection as [in, out], and its bias."""
        found = weight_of(self._wiring, record)
        if found is None:
            raise AttributeError(f"the weight of {record.name!r} ({record.op}) is not known as one matrix.")
        name, out_in = found
        weight = self._value(name)
        weight = weight.T if out_in else weight
        at = {"linear": 2, "addmm": 0}.get(record.op)
        given: Any = record.args[at] if at is not None and at < len(record.args) else None
        given = record.kwargs.get("bias", given) if record.op == "linear" else given
        bias = self._value(given.name) if isinstance(given, Ref) else weight.new_zeros(weight.shape[1])
        return weight, bias

    def _value(self, name: str) -> Tensor:
        sources = self.model.program.source_values
        value = sources[name] if name in sources else self.probe().demand([name])[0]
        found: Tensor = value.detach()
        return found


_WRITTEN = {"q": "W_Q", "k": "W_K", "v": "W_V", "pre": "W_in", "pre_linear": "W_in"}


@contextmanager
def _named(matrix: str, layer: int) -> Iterator[None]:
    """Errors of a site that is not there, as those of a matrix that is not there."""
    try:
        yield
    except MissingSiteError as error:
        raise AttributeError(f"layer {layer} has no {matrix}: {error}") from error


def stacked(of_layer: Callable[[int], Tensor], layers: int) -> Tensor:
    """One tensor for all layers, the layer first. Raises AttributeError where these differ in shape."""
    parts = [of_layer(layer) for layer in range(layers)]
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) > 1:
        raise AttributeError(
            f"the layers differ in shape ({', '.join(map(str, sorted(shapes)))}), so there is no stack of "
            "them. Read them layer by layer: `model.blocks[0].attn.W_Q`."
        )
    return torch.stack(parts)


LARGE = 64.0
"""Beside the square of this, no norm's epsilon counts."""
ALIKE = 1e-4
"""The largest deviation of a module's output from what is computed here, as a share of its largest number."""


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
        """Return what is divided by the scale."""
        return x - x.mean(-1, keepdim=True) if self.is_centered else x

    def scale(self, x: Tensor) -> Tensor:
        """Return what it divides by, [..., 1]."""
        found: Tensor = (self.centered(x).square().mean(-1, keepdim=True) + self.eps).sqrt()
        return found

    def affine(self, normalized: Tensor) -> Tensor:
        """Return what the module makes of a value that is normalised already."""
        return normalized * self.w + self.b

    def __call__(self, x: Tensor) -> Tensor:
        """Return what the module itself makes of x."""
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
    """The way of an output projection into the stream: through a norm, times `factor`, plus `shift`.

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
        """Return what is added to the stream where all parts are 0; `bias` is that of the projection."""
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
    probe = (torch.randn(3, width, generator=generator, device="cpu") + 0.5).to(weights[0])
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
