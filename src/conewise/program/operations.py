"""Kinds of operations, by their bare names."""

from __future__ import annotations

POINTWISE = frozenset(
    {
        "add", "sub", "rsub", "mul", "div", "neg", "pow", "rsqrt", "sqrt", "exp", "log", "square",
        "reciprocal", "abs", "sign", "floor", "ceil", "round", "clamp", "clamp_min", "clamp_max",
        "minimum", "maximum", "gelu", "silu", "relu", "tanh", "sigmoid", "softplus", "elu", "leaky_relu",
        "hardtanh", "mish", "erf", "sin", "cos", "where", "masked_fill", "eq", "ne", "lt", "le", "gt",
        "ge", "__and__", "__or__", "logical_and", "logical_or", "logical_not", "bitwise_and",
        "bitwise_or", "bitwise_not", "to", "_to_copy", "type_as", "contiguous", "clone", "alias",
        "detach", "lift_fresh_copy",
    }
)  # fmt: skip
NORMS = frozenset({"layer_norm", "rms_norm"})
VIEWS = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten"})
MOVES = frozenset({"transpose", "permute", "t", "unsqueeze", "squeeze", "expand"})
PICKS = frozenset({"slice", "select", "narrow"})
SUMS = frozenset({"mean", "sum", "amax", "amin", "logsumexp"})
SOFTMAX = frozenset({"softmax", "_softmax", "log_softmax", "_log_softmax"})
SPLITS = frozenset({"split", "split_with_sizes", "chunk"})
CONCATENATIONS = frozenset({"cat", "concat", "concatenate"})
ATTENTION = "scaled_dot_product_attention"

TURNS = frozenset({"transpose", "permute", "t", "numpy_T", "mT", "swapaxes"})
"""Moves that put the dimensions into another order."""
