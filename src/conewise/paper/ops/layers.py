"""Elementwise functions: activations, exp and log, and the gated unit of two inputs."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from conewise.paper.ops.op import (
    Op,
    elementwise,
    expect_equal_shapes,
    expect_gradient,
    expect_integers,
    parametric,
    sum_to_last,
)
from conewise.reactive.gradients import GRADIENT, OUTPUT, Vjp

_SLOPE = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


def _sigmoid(x: Any) -> Any:
    # exp of what is never positive: it cannot overflow.
    small = np.exp(-np.abs(x))
    return (np.where(np.asarray(x) >= 0.0, 1.0, small) / (1.0 + small))[()]


def _gelu(x: Any) -> Any:
    return 0.5 * x * (1.0 + np.tanh(_SLOPE * (x + _CUBIC * x * x * x)))


def _gelu_back(g: Any, x: Any) -> Any:
    t = np.tanh(_SLOPE * (x + _CUBIC * x * x * x))
    return g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * _SLOPE * (1.0 + 3.0 * _CUBIC * x * x))


def _silu(x: Any) -> Any:
    return x * _sigmoid(x)


def _silu_back(g: Any, x: Any) -> Any:
    s = _sigmoid(x)
    return g * s * (1.0 + x * (1.0 - s))


relu = elementwise(
    "relu",
    lambda x: np.maximum(x, 0.0),
    (lambda g, y: np.where(np.asarray(y) > 0.0, g, np.zeros_like(y))[()], (OUTPUT,)),
)
"""max(x, 0); the gradient at 0 is 0"""

sigmoid = elementwise("sigmoid", _sigmoid, (lambda g, y: g * y * (1.0 - y), (OUTPUT,)))
"""1 / (1 + exp(−x))"""

tanh = elementwise("tanh", np.tanh, (lambda g, y: g * (1.0 - y * y), (OUTPUT,)))
"""The hyperbolic tangent."""

exp = elementwise("exp", np.exp, (operator.mul, (OUTPUT,)))
"""eˣ"""

log = elementwise("log", np.log, (operator.truediv, (0,)))
"""The natural logarithm."""

gelu = elementwise("gelu", _gelu, (_gelu_back, (0,)))
"""GELU in the form with tanh, which GPT-2 uses"""

silu = elementwise("silu", _silu, (_silu_back, (0,)))
"""x · sigmoid(x)"""

swiglu = elementwise(
    "swiglu",
    lambda gate, up: _silu(gate) * up,
    (lambda g, gate, up: _silu_back(g, gate) * up, (0, 1)),
    (lambda g, gate: g * _silu(gate), (0,)),
)
"""silu(gate) · up"""


# -- Normalisation along the last axis: rmsnorm(x, weight) and layernorm(x, weight, bias) ----------


def _expect_weights(name: str, x: Any, *weights: Any) -> None:
    for weight in weights:
        if np.ndim(weight) != 1 or np.shape(x)[-1:] != np.shape(weight):
            raise ValueError(
                f"{name} takes a value and weights along its last axis; weights of shape {np.shape(weight)} "
                f"do not fit a value of shape {np.shape(x)}."
            )


def _mean(x: Any) -> Any:
    return np.mean(x, axis=-1, keepdims=True)


@parametric
def rmsnorm(*, eps: float = 1e-6) -> Op:
    """The root-mean-square norm x / sqrt(mean(x²) + eps) · weight."""

    def scale(x: Any) -> Any:
        return 1.0 / np.sqrt(_mean(x * x) + eps)

    def forward(x: Any, weight: Any) -> Any:
        _expect_weights("rmsnorm", x, weight)
        return x * scale(x) * weight

    def back(g: Any, x: Any, weight: Any) -> Any:
        expect_gradient(g, np.shape(x))
        r, inner = scale(x), g * weight
        unit = x * r
        return r * (inner - unit * _mean(inner * unit))

    def weigh(g: Any, x: Any) -> Any:
        expect_gradient(g, np.shape(x))
        return sum_to_last(g * (x * scale(x)))

    return Op("rmsnorm", forward, (Vjp(back, (GRADIENT, 0, 1)), Vjp(weigh, (GRADIENT, 0))))


@parametric
def layernorm(*, eps: float = 1e-5) -> Op:
    """The layer norm (x − mean(x)) / sqrt(var(x) + eps) · weight + bias."""

    def unit_and_scale(x: Any) -> tuple[Any, Any]:
        centred = x - _mean(x)
        r = 1.0 / np.sqrt(_mean(centred * centred) + eps)
        return centred * r, r

    def forward(x: Any, weight: Any, bias: Any) -> Any:
        _expect_weights("layernorm", x, weight, bias)
        return unit_and_scale(x)[0] * weight + bias

    def back(g: Any, x: Any, weight: Any) -> Any:
        expect_gradient(g, np.shape(x))
        (unit, r), inner = unit_and_scale(x), g * weight
        return r * (inner - _mean(inner) - unit * _mean(inner * unit))

    def weigh(g: Any, x: Any) -> Any:
        expect_gradient(g, np.shape(x))
        return sum_to_last(g * unit_and_scale(x)[0])

    return Op(
        "layernorm",
        forward,
        (Vjp(back, (GRADIENT, 0, 1)), Vjp(weigh, (GRADIENT, 0)), Vjp(sum_to_last, (GRADIENT,))),
    )


# -- What attention is made of besides products: softmax, the causal mask and rotary positions -----


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
    """Return the keys each query may look at: all for the last query, all but one for that before it, ..."""
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


# -- Loss ------------------------------------------------------------------------------------------
# Losses: mean squared error, and cross-entropy of logits with integer targets. Each is one number.


def _mse(prediction: Any, target: Any) -> Any:
    expect_equal_shapes("mse", prediction, target)
    difference = np.subtract(prediction, target)
    return np.mean(difference * difference)


def _mse_back(g: Any, here: Any, there: Any) -> Any:
    expect_gradient(g, ())
    return g * (2.0 * np.subtract(here, there) / np.size(here))


def _cross_entropy(logits: Any, targets: Any) -> Any:
    shape = np.shape(logits)
    if not shape or shape[:-1] != np.shape(targets):
        raise ValueError(
            f"cross_entropy takes logits (..., classes) and one target for each row of them; logits of shape "
            f"{shape} have targets of shape {shape[:-1]}, not {np.shape(targets)}."
        )
    expect_integers("cross_entropy", "targets", targets, below=shape[-1])
    chosen = np.take_along_axis(log_normalised(logits, -1), np.asarray(targets)[..., None], axis=-1)
    return -np.mean(chosen)


def _cross_entropy_back(g: Any, logits: Any, targets: Any) -> Any:
    expect_gradient(g, ())
    hit = np.asarray(targets)[..., None] == np.arange(np.shape(logits)[-1])
    return g * ((normalised(logits, -1) - hit) / np.size(targets))


mse = Op("mse", _mse, (Vjp(_mse_back, (GRADIENT, 0, 1)), Vjp(_mse_back, (GRADIENT, 1, 0))))
"""mean((prediction − target)²)"""

# Targets are integers: nothing can be differentiated by them.
cross_entropy = Op("cross_entropy", _cross_entropy, (Vjp(_cross_entropy_back, (GRADIENT, 0, 1)), None))
"""The mean over all rows of −log softmax(logits)[target]"""
