"""Ops over numpy, each with its vector-Jacobian products, to be used as the rules of a graph.

    g.node("h", ops.matmul, ["x", "w"])
    g.node("q", ops.slice(axis=-1, start=0, stop=4), ["h"])

Elementwise ops take equal shapes, and all ops work in the dtype of their inputs. What each gradient
reads is exactly what it needs, so that a change invalidates no gradient without reason.
"""

from conewise.paper.ops.layers import (
    causal_mask,
    cross_entropy,
    exp,
    gelu,
    layernorm,
    log,
    log_softmax,
    mse,
    relu,
    rmsnorm,
    rope,
    sigmoid,
    silu,
    softmax,
    swiglu,
    tanh,
)
from conewise.paper.ops.op import (
    Op,
    add,
    bias_add,
    concat,
    div,
    embedding,
    expand,
    identity,
    linear,
    matmul,
    mean,
    mul,
    neg,
    reshape,
    scale,
    slice,  # noqa: A004 - used as `ops.slice`
    square,
    sub,
    sum,  # noqa: A004 - used as `ops.sum`
    total,
    transpose,
)
from conewise.reactive.gradients import GRADIENT, OUTPUT, Vjp

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
