"""Normalisation along the last axis: rmsnorm(x, weight) and layernorm(x, weight, bias)."""

from __future__ import annotations

from typing import Any

import numpy as np

from conewise.graph.vjp import GRADIENT, Vjp
from conewise.ops.arithmetic import sum_to_last
from conewise.ops.op import Op, expect_gradient, parametric


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
