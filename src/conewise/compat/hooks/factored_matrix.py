"""A product of two matrices, kept as its factors: A @ B of a small inner width, as QK and OV circuits are."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

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
        """How many dimensions the product has."""
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
