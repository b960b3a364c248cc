"""Elementwise functions: activations, exp and log, and the gated unit of two inputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from conewise.graph.vjp import GRADIENT, OUTPUT, Vjp
from conewise.ops.op import Op, expect_equal_shapes, expect_gradient

_SLOPE = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


def _relu(x: Any) -> Any:
    return np.maximum(x, 0.0)


def _relu_back(g: Any, y: Any) -> Any:
    expect_gradient(g, np.shape(y))
    return np.where(np.asarray(y) > 0.0, g, np.zeros_like(y))[()]


def _sigmoid(x: Any) -> Any:
    # exp of what is never positive: it cannot overflow.
    small = np.exp(-np.abs(x))
    return (np.where(np.asarray(x) >= 0.0, 1.0, small) / (1.0 + small))[()]


def _sigmoid_back(g: Any, y: Any) -> Any:
    expect_gradient(g, np.shape(y))
    return g * y * (1.0 - y)


def _tanh_back(g: Any, y: Any) -> Any:
    expect_gradient(g, np.shape(y))
    return g * (1.0 - y * y)


def _exp_back(g: Any, y: Any) -> Any:
    expect_gradient(g, np.shape(y))
    return g * y


def _log_back(g: Any, x: Any) -> Any:
    expect_gradient(g, np.shape(x))
    return g / x


def _gelu(x: Any) -> Any:
    return 0.5 * x * (1.0 + np.tanh(_SLOPE * (x + _CUBIC * x * x * x)))


def _gelu_back(g: Any, x: Any) -> Any:
    expect_gradient(g, np.shape(x))
    t = np.tanh(_SLOPE * (x + _CUBIC * x * x * x))
    return g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * _SLOPE * (1.0 + 3.0 * _CUBIC * x * x))


def _silu(x: Any) -> Any:
    return x * _sigmoid(x)


def _silu_back(g: Any, x: Any) -> Any:
    expect_gradient(g, np.shape(x))
    s = _sigmoid(x)
    return g * s * (1.0 + x * (1.0 - s))


def _swiglu(gate: Any, up: Any) -> Any:
    expect_equal_shapes("swiglu", gate, up)
    return _silu(gate) * up


def _swiglu_gate(g: Any, gate: Any, up: Any) -> Any:
    return _silu_back(g, gate) * up


def _swiglu_up(g: Any, gate: Any) -> Any:
    expect_gradient(g, np.shape(gate))
    return g * _silu(gate)


relu = Op("relu", _relu, (Vjp(_relu_back, (GRADIENT, OUTPUT)),))
"""max(x, 0); the gradient at 0 is 0"""

sigmoid = Op("sigmoid", _sigmoid, (Vjp(_sigmoid_back, (GRADIENT, OUTPUT)),))
"""1 / (1 + exp(−x))"""

tanh = Op("tanh", np.tanh, (Vjp(_tanh_back, (GRADIENT, OUTPUT)),))
"""The hyperbolic tangent."""

exp = Op("exp", np.exp, (Vjp(_exp_back, (GRADIENT, OUTPUT)),))
"""eˣ"""

log = Op("log", np.log, (Vjp(_log_back, (GRADIENT, 0)),))
"""The natural logarithm."""

gelu = Op("gelu", _gelu, (Vjp(_gelu_back, (GRADIENT, 0)),))
"""GELU in the form with tanh, which GPT-2 uses"""

silu = Op("silu", _silu, (Vjp(_silu_back, (GRADIENT, 0)),))
"""x · sigmoid(x)"""

swiglu = Op("swiglu", _swiglu, (Vjp(_swiglu_gate, (GRADIENT, 0, 1)), Vjp(_swiglu_up, (GRADIENT, 0))))
"""silu(gate) · up"""
