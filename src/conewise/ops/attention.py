"""What attention is made of besides products: softmax, the causal mask and rotary positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from conewise.graph.vjp import GRADIENT, OUTPUT, Vjp
from conewise.ops.op import Op, expect_gradient, parametric


def log_normalised(x: Any, axis: int) -> Any:
    """The logarithm of exp(x) / Σ exp(x) along an axis."""
    shifted = x - np.max(x, axis=axis, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))


def normalised(x: Any, axis: int) -> Any:
    """The quotient exp(x) / Σ exp(x) along an axis."""
    raised = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return raised / np.sum(raised, axis=axis, keepdims=True)


@parametric
def softmax(*, axis: int = -1) -> Op:
    """exp(x) / Σ exp(x) along an axis."""

    def back(g: Any, y: Any) -> Any:
        expect_gradient(g, np.shape(y))
        return y * (g - np.sum(g * y, axis=axis, keepdims=True))

    return Op("softmax", lambda x: normalised(x, axis), (Vjp(back, (GRADIENT, OUTPUT)),))


@parametric
def log_softmax(*, axis: int = -1) -> Op:
    """The logarithm of the softmax along an axis."""

    def back(g: Any, y: Any) -> Any:
        expect_gradient(g, np.shape(y))
        return g - np.exp(y) * np.sum(g, axis=axis, keepdims=True)

    return Op("log_softmax", lambda x: log_normalised(x, axis), (Vjp(back, (GRADIENT, OUTPUT)),))


def _visible(scores: Any) -> Any:
    """Which key each query may look at: the last query at all keys, the one before at all but one, ..."""
    shape = np.shape(scores)
    if len(shape) < 2 or shape[-2] > shape[-1]:
        raise ValueError(
            f"causal_mask takes scores (..., queries, keys) with no more queries than keys, and got {shape}."
        )
    return np.tri(shape[-2], shape[-1], shape[-1] - shape[-2], dtype=bool)


causal_mask = Op(
    "causal_mask",
    lambda x: np.where(_visible(x), x, -np.inf),
    (Vjp(lambda g: np.where(_visible(g), g, 0.0), (GRADIENT,)),),
)
"""Scores (..., queries, keys) with −∞ where a query would look ahead; the last query sees every key"""


@parametric
def rope(*, base: float = 10_000.0, heads: int = 1, start: int = 0) -> Op:
    """Rotary positions: x of shape (..., T, heads · d), each head's halves turned against each other.

    Place j of the first half and place j of the second are turned by the angle position · base^(−2j/d);
    positions count from `start` along the second axis from the end.
    """

    def turn(x: Any, sign: float) -> Any:
        shape = np.shape(x)
        if len(shape) < 2 or shape[-1] % (2 * heads):
            raise ValueError(
                f"rope takes (..., positions, heads · d), here with {heads} heads of an even size d, "
                f"and got the shape {shape}."
            )
        half = shape[-1] // (2 * heads)
        turns = np.outer(np.arange(start, start + shape[-2]), base ** (-np.arange(half) / half))
        cos = np.cos(turns)[:, None, :].astype(x.dtype)
        sin = (sign * np.sin(turns))[:, None, :].astype(x.dtype)
        halves = x.reshape(*shape[:-1], heads, 2, half)
        first, second = halves[..., 0, :], halves[..., 1, :]
        turned = np.stack([first * cos - second * sin, second * cos + first * sin], axis=-2)
        return turned.reshape(shape)

    # A rotation's transpose is the rotation back: of the incoming gradient alone.
    return Op("rope", lambda x: turn(x, 1.0), (Vjp(lambda g: turn(g, -1.0), (GRADIENT,)),))
