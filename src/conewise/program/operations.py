"""Kinds of operations, by their bare names: the one table that is asked what kind an operation is."""

from __future__ import annotations

# -- one element, one row, one dimension -------------------------------------------------------

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
"""Each element of the value is made of the elements in its place alone, operands broadcast."""

ELEMENTWISE = POINTWISE | {
    "multiply", "divide", "floor_divide", "remainder", "float", "copy", "relu6", "selu", "celu", "hardswish",
    "hardsigmoid", "prelu", "log_sigmoid", "softsign", "threshold",
}  # fmt: skip
"""The pointwise operations and their rarer spellings, which torch tags as pointwise or not."""

ADDITIONS = frozenset({"add", "sub", "rsub"})
SCALINGS = frozenset({"mul", "div", "multiply"})
NORMS = frozenset({"layer_norm", "rms_norm"})
PROBABILITIES = frozenset({"softmax", "_softmax"})
SOFTMAX = PROBABILITIES | {"log_softmax", "_log_softmax"}
TRIANGLES = frozenset({"tril", "triu"})
REDUCTIONS = frozenset({"mean", "sum", "amax", "amin", "logsumexp"})
STATISTICS = REDUCTIONS | {"var", "std", "linalg_vector_norm", "norm"}
"""The reductions, and those that norms are written with."""

CHOICES = frozenset({"topk", "argmax", "max"})
"""Operations by which a router chooses experts."""

ALONG_ONE_DIMENSION = SOFTMAX | CHOICES | {"sort", "argsort", "cumsum", "argmin", "min"}
"""Operations that mix the entries along one dimension, the last one unless they say another."""

# -- products ----------------------------------------------------------------------------------

PLAIN_PRODUCTS = frozenset({"linear", "mm", "matmul", "bmm"})
BIASED_PRODUCTS = frozenset({"addmm", "baddbmm"})
"""Products whose first argument is what is added; the factors come behind it."""

PRODUCTS = PLAIN_PRODUCTS | BIASED_PRODUCTS
CONTRACTIONS = PRODUCTS | {"einsum"}
CONVOLUTIONS = frozenset(
    {"conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d"}
)
RECURRENT = frozenset({"gru", "lstm", "rnn_tanh", "rnn_relu"})
ATTENTION = "scaled_dot_product_attention"

# -- other forms of the same numbers -----------------------------------------------------------

CASTS = frozenset({"to", "_to_copy"})
RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten"})
PERMUTATIONS = frozenset({"transpose", "permute", "t", "numpy_T", "mT", "swapaxes"})
"""The same dimensions in another order."""

DIMENSION_MOVES = frozenset({"transpose", "permute", "t", "unsqueeze", "squeeze", "expand"})
"""Operations that permute dimensions, add or drop one of size 1, or broadcast along it."""

COPIES = frozenset({"contiguous", "clone"})
REARRANGEMENTS = RESHAPES | PERMUTATIONS | DIMENSION_MOVES | COPIES | {"expand_as", "movedim"}
"""Operations that move values without mixing or dropping any."""

NUMBER_KEEPING = REARRANGEMENTS | CASTS | {"type_as", "float"}
"""Operations that return the numbers that they are given, rearranged or in another precision."""

TOKEN_KEEPING = frozenset(
    {"view", "reshape", "_to_copy", "to", "clone", "alias", "detach", "contiguous", "unsqueeze"}
)
"""Operations between token ids and the embedding that looks them up, which leave the ids in their order."""

# -- parts, and parts put together -------------------------------------------------------------

SPLITS = frozenset({"split", "split_with_sizes", "chunk"})
SLICES = frozenset({"slice", "select", "narrow"})
SELECTIONS = SPLITS | SLICES | {"unbind", "getitem", "tensor_split", "index", "index_select"}
"""Operations that take a part of a value."""

LOOKUPS = frozenset({"index", "index_select", "gather", "embedding"})
"""Operations that take rows by number."""

CONCATENATIONS = frozenset({"cat", "concat", "concatenate"})
PADS = frozenset({"pad", "constant_pad_nd"})
COUNTS = frozenset({"histc", "bincount"})
DISPATCHES = frozenset(
    {
        "index", "index_select", "index_put", "index_add", "gather", "scatter", "scatter_add", "one_hot",
        "repeat", "repeat_interleave", "zeros_like", "empty_like", "full_like", "ones_like", "new_zeros",
        "new_empty", "new_ones", "sum", "stack",
    }
)  # fmt: skip
"""Operations that hand rows to experts, in the order that a router chose, and put them back."""

AXIS_KEEPING = SPLITS | PADS | {"slice", "narrow", "cat", "getitem", "index", "index_select"}
"""Operations after which a dimension of another length is still the axis that it was."""

# -- what they do with memory, and with sums ---------------------------------------------------

ALLOCATING = PRODUCTS | NORMS | SOFTMAX | REDUCTIONS | {"embedding", "cat"}
"""Operations whose values are newly allocated, and contiguous."""

MAYBE_ALIASING = frozenset({"to", "_to_copy", "type_as", "contiguous", "alias", "detach", "lift_fresh_copy"})
"""Pointwise operations that may return an alias of what they read."""

LINEAR = NUMBER_KEEPING | SELECTIONS | CONCATENATIONS | {"add", "sub", "neg", "sum", "mean", "stack", "copy"}
"""Operations that are linear in what varies; `mul` and `div` are where one operand does not vary."""
