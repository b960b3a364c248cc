"""Elementwise arithmetic: sums, products and scalings of values of one shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from conewise.errors import GraphError
from conewise.graph.vjp import GRADIENT, Vjp
from conewise.ops.op import EachPlace, Op, expect_equal_shapes, expect_gradient


def _same(value: Any) -> Any:
    return value


def _negative(value: Any) -> Any:
    return -value


def _times(g: Any, other: Any) -> Any:
    expect_gradient(g, np.shape(other))
    return g * other


SAME = Vjp(_same, (GRADIENT,))
NEGATIVE = Vjp(_negative, (GRADIENT,))


def _add(a: Any, b: Any) -> Any:
    expect_equal_shapes("add", a, b)
    return a + b


def _sub(a: Any, b: Any) -> Any:
    expect_equal_shapes("sub", a, b)
    return a - b


def _mul(a: Any, b: Any) -> Any:
    expect_equal_shapes("mul", a, b)
    return a * b


def _div(a: Any, b: Any) -> Any:
    expect_equal_shapes("div", a, b)
    return a / b


def _div_below(g: Any, a: Any, b: Any) -> Any:
    expect_gradient(g, np.shape(b))
    return -(g * a) / (b * b)


def _div_above(g: Any, b: Any) -> Any:
    expect_gradient(g, np.shape(b))
    return g / b


def _square(x: Any) -> Any:
    return x * x


def _square_back(g: Any, x: Any) -> Any:
    expect_gradient(g, np.shape(x))
    return 2.0 * g * x


def _bias_add(x: Any, bias: Any) -> Any:
    if np.ndim(bias) != 1 or np.shape(x)[-1:] != np.shape(bias):
        raise ValueError(
            f"bias_add takes a value and a bias along its last axis; a bias of shape {np.shape(bias)} does "
            f"not fit a value of shape {np.shape(x)}."
        )
    return x + bias


def sum_to_last(g: Any) -> Any:
    """The gradient of what is repeated along all axes but the last."""
    if np.ndim(g) == 0:
        raise ValueError(
            "the incoming gradient is a single number, and the value that it belongs to has axes. The loss "
            "of `gradients` is a single number: end it in `ops.sum` or `ops.mean`."
        )
    return g.reshape(-1, g.shape[-1]).sum(axis=0)


def _total(*values: Any) -> Any:
    expect_equal_shapes("total", *values)
    first, *rest = values
    for value in rest:
        first = first + value
    return first


identity = Op("identity", _same, (SAME,))
"""The value itself."""

neg = Op("neg", _negative, (NEGATIVE,))
"""−x"""

add = Op("add", _add, (SAME, SAME))
"""a + b"""

sub = Op("sub", _sub, (SAME, NEGATIVE))
"""a − b"""

mul = Op("mul", _mul, (Vjp(_times, (GRADIENT, 1)), Vjp(_times, (GRADIENT, 0))))
"""a · b, elementwise"""

div = Op("div", _div, (Vjp(_div_above, (GRADIENT, 1)), Vjp(_div_below, (GRADIENT, 0, 1))))
"""a / b, elementwise"""

square = Op("square", _square, (Vjp(_square_back, (GRADIENT, 0)),))
"""x²"""

# The bias has one axis, so its gradient needs no shape but that of the incoming one.
bias_add = Op("bias_add", _bias_add, (SAME, Vjp(sum_to_last, (GRADIENT,))))
"""x + b, with b repeated along all axes of x but the last"""

total = Op("total", _total, EachPlace(lambda _: SAME))
"""The sum of any number of values of one shape."""


def scale(factor: float) -> Op:
    """The op factor · x."""
    if not isinstance(factor, int | float | np.integer | np.floating):
        raise GraphError(
            f"`ops.scale` takes a number and gives a rule, as in `ops.scale(0.5)`; {type(factor).__name__} "
            "is no number. For the product of two values use `ops.mul`."
        )
    # A Python float takes on the dtype of what it multiplies; a numpy one would impose its own.
    by = float(factor)

    def times(x: Any) -> Any:
        return x * by

    return Op("scale", times, (Vjp(times, (GRADIENT,)),), params=(("factor", by),))
