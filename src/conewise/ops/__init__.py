"""Ops over numpy, each with its vector-Jacobian products, to be used as the rules of a graph.

    g.node("h", ops.matmul, ["x", "w"])
    g.node("q", ops.slice(axis=-1, start=0, stop=4), ["h"])

Elementwise ops take equal shapes, and all ops work in the dtype of their inputs. What each gradient
reads is exactly what it needs, so that a change invalidates no gradient without reason.
"""

from conewise.graph.vjp import GRADIENT, OUTPUT, Vjp
from conewise.ops.activation import exp, gelu, log, relu, sigmoid, silu, swiglu, tanh
from conewise.ops.arithmetic import (
    add,
    bias_add,
    div,
    identity,
    mul,
    neg,
    scale,
    square,
    sub,
    total,
)
from conewise.ops.attention import causal_mask, log_softmax, rope, softmax
from conewise.ops.lookup import embedding
from conewise.ops.loss import cross_entropy, mse
from conewise.ops.norm import layernorm, rmsnorm
from conewise.ops.op import Op
from conewise.ops.product import linear, matmul
from conewise.ops.reduction import mean, sum  # noqa: A004 - used as `ops.sum`
from conewise.ops.shape import concat, expand, reshape, slice, transpose  # noqa: A004 - `ops.slice`

__all__ = [
    "GRADIENT",
    "OUTPUT",
    "Op",
    "Vjp",
    "add",
    "bias_add",
    "causal_mask",
    "concat",
    "cross_entropy",
    "div",
    "embedding",
    "exp",
    "expand",
    "gelu",
    "identity",
    "layernorm",
    "linear",
    "log",
    "log_softmax",
    "matmul",
    "mean",
    "mse",
    "mul",
    "neg",
    "relu",
    "reshape",
    "rmsnorm",
    "rope",
    "scale",
    "sigmoid",
    "silu",
    "slice",
    "softmax",
    "square",
    "sub",
    "sum",
    "swiglu",
    "tanh",
    "total",
    "transpose",
]
