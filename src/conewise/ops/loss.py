"""Losses: mean squared error, and cross-entropy of logits with integer targets. Each is one number."""

from __future__ import annotations

from typing import Any

import numpy as np

from conewise.graph.vjp import GRADIENT, Vjp
from conewise.ops.attention import log_normalised, normalised
from conewise.ops.op import Op, expect_equal_shapes, expect_gradient, expect_integers


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
