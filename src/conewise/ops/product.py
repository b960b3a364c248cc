"""Matrix products, of two stacks of matrices or of anything with one weight matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from conewise.graph.vjp import GRADIENT, Vjp
from conewise.ops.op import Op, expect_gradient


def _turned(x: Any) -> Any:
    return np.swapaxes(x, -1, -2)


def _matmul(a: Any, b: Any) -> Any:
    left, right = np.shape(a), np.shape(b)
    if len(left) < 2 or left[:-2] != right[:-2] or left[-1:] != right[-2:-1]:
        raise ValueError(
            f"matmul takes (..., n, k) and (..., k, m) with the same leading axes, and got {left} and "
            f"{right}. For one weight matrix and a value with any leading axes use `ops.linear`."
        )
    return a @ b


def _matmul_left(g: Any, b: Any) -> Any:
    # The rows are those of `a`, which is not read: they are taken as they come.
    rows = np.shape(g)[-2:-1]
    expect_gradient(g, (*np.shape(b)[:-2], *rows, np.shape(b)[-1]))
    return g @ _turned(b)


def _matmul_right(g: Any, a: Any) -> Any:
    expect_gradient(g, (*np.shape(a)[:-1], *np.shape(g)[-1:]))
    return _turned(a) @ g


def _linear(x: Any, weight: Any) -> Any:
    if np.ndim(weight) != 2 or np.shape(x)[-1:] != np.shape(weight)[:1]:
        raise ValueError(
            f"linear takes (..., k) and one weight matrix (k, m), and got {np.shape(x)} and "
            f"{np.shape(weight)}. For two stacks of matrices use `ops.matmul`."
        )
    return x @ weight


def _linear_left(g: Any, weight: Any) -> Any:
    expect_gradient(g, (*np.shape(g)[:-1], np.shape(weight)[1]))
    return g @ weight.T


def _linear_right(g: Any, x: Any) -> Any:
    expect_gradient(g, (*np.shape(x)[:-1], *np.shape(g)[-1:]))
    if np.ndim(g) == 0:
        expect_gradient(g, np.shape(x))
    return x.reshape(-1, x.shape[-1]).T @ g.reshape(-1, g.shape[-1])


# Two ops and not one that broadcasts: from (B, n, k) and (B, n, m) alone, the gradient of the right
# side could not know whether it is (k, m) or (B, k, m), and would have to read that side for it.
matmul = Op("matmul", _matmul, (Vjp(_matmul_left, (GRADIENT, 1)), Vjp(_matmul_right, (GRADIENT, 0))))
"""a @ b, for two matrices or for two stacks of them with the same leading axes"""

linear = Op("linear", _linear, (Vjp(_linear_left, (GRADIENT, 1)), Vjp(_linear_right, (GRADIENT, 0))))
"""x @ w, for one weight matrix w and a value with any leading axes"""
