"""Reductions: sum and mean, over all axes or some.

Their gradients are the incoming one, repeated to the shape of the input; so they read the input
for its shape, and its dtype, unless they are told the shape beforehand (`of`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from conewise.graph.vjp import GRADIENT, Vjp
from conewise.ops.op import Op, as_shape, expect_gradient, expect_shape, parametric
from conewise.ops.shape import checked_axis

Axis = int | Sequence[int] | None


def _reduction(name: str, axis: Axis, keepdims: bool, of: Sequence[int] | None) -> Op:
    along = checked_axis(name, axis)
    shape = None if of is None else as_shape(name, of)
    reduce = np.sum if name == "sum" else np.mean

    def forward(x: Any) -> Any:
        expect_shape(name, x, shape)
        return reduce(x, axis=along, keepdims=keepdims)

    def back(g: Any, like: tuple[int, ...], dtype: Any) -> Any:
        reduced = _reduced(along, len(like))
        kept = tuple(1 if place in reduced else size for place, size in enumerate(like))
        left = kept if keepdims else tuple(size for place, size in enumerate(like) if place not in reduced)
        expect_gradient(g, left)
        # The division first, while the gradient is small; a Python float keeps no dtype of its own.
        share = g if name == "sum" else g / math.prod(like[place] for place in reduced)
        return np.full(like, np.reshape(share, kept), dtype)

    if shape is None:
        vjp = Vjp(lambda g, x: back(g, np.shape(x), np.result_type(g, x)), (GRADIENT, 0))
    else:
        vjp = Vjp(lambda g: back(g, shape, None), (GRADIENT,))
    return Op(name, forward, (vjp,))


def _reduced(axis: int | tuple[int, ...] | None, ndim: int) -> frozenset[int]:
    if axis is None:
        return frozenset(range(ndim))
    return frozenset(place % ndim for place in ((axis,) if isinstance(axis, int) else axis))


@parametric
def sum(*, axis: Axis = None, keepdims: bool = False, of: Sequence[int] | None = None) -> Op:  # noqa: A001 - its name everywhere; it is used as `ops.sum`
    """The sum over `axis`, or over all axes."""
    return _reduction("sum", axis, keepdims, of)


@parametric
def mean(*, axis: Axis = None, keepdims: bool = False, of: Sequence[int] | None = None) -> Op:
    """The mean over `axis`, or over all axes."""
    return _reduction("mean", axis, keepdims, of)
