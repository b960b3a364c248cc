"""An op: a named function over numpy values that knows its own gradients.

The functions at the end are what the ops of this package check their values with.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conewise.errors import GraphError
from conewise.reactive.gradients import GRADIENT, Read, Vjp, Vjps

Params = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Op:
    """A rule with a name, vector-Jacobian products and, where it has some, parameters.

    Called with values it computes: `mul(2.0, 3.0)`. An op that has parameters with defaults is a
    rule as it stands (`softmax`), and called with parameters alone it is the same rule with those
    (`softmax(axis=0)`). Two ops are equal when their names, parameters and arities are.
    `arity` is None when the op takes any number of inputs.
    """

    name: str
    function: Callable[..., Any] = field(compare=False)
    vjps: Vjps = field(compare=False)
    arity: int | None = None
    params: Params = ()
    make: Callable[..., Op] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.arity is None and isinstance(self.vjps, tuple | list):
            object.__setattr__(self, "arity", len(self.vjps))

    def __call__(self, *values: Any, **params: Any) -> Any:
        """The value, or, given parameters alone, the op with those parameters."""
        if params or not values:
            return self._variant(values, params)
        return self.function(*values)

    def _variant(self, values: tuple[Any, ...], params: dict[str, Any]) -> Op:
        if self.make is None:
            has = ", ".join(name for name, _ in self.params)
            raise GraphError(
                f"`{self.name}` was called with {', '.join(params) or 'nothing'}; it takes values only"
                + (f", since its parameters ({has}) are already given." if has else ": it has no parameters.")
            )
        known = dict(self.params)
        if values or not params.keys() <= known.keys():
            raise GraphError(
                f"`{self.name}` takes either values or some of its parameters {', '.join(known)}, by name; "
                f"it got {len(values)} values and {', '.join(params)}. Parameters first give a rule: "
                f"`rule = ops.{self.name}({next(iter(known))}=...)`."
            )
        if not params:
            return self
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
        return replace(self.make(**given), params=tuple((known | given).items()))

    def __repr__(self) -> str:
        if not self.params:
            return self.name
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.params)})"


def parametric(make: Callable[..., Op]) -> Op:
    """The op that `make` gives with its defaults, and that makes others when called with parameters."""
    defaults = getattr(make, "__kwdefaults__", None) or {}
    return replace(make(), params=tuple(defaults.items()), make=make)


@dataclass(frozen=True)
class EachPlace:
    """The vector-Jacobian products of an op of any number of inputs: a function of the place."""

    at: Callable[[int], Vjp]

    def __getitem__(self, place: int) -> Vjp:
        return self.at(place)


# -- what values must be ---------------------------------------------------------------------


def expect_equal_shapes(name: str, *values: Any) -> None:
    """Elementwise ops do not broadcast: no gradient should have to read a value just for its shape."""
    shapes = [np.shape(value) for value in values]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            f"{name} takes values of one shape, and these have {' and '.join(map(str, shapes))}. Nothing is "
            "broadcast: spread a value with `ops.expand(shape)`, or add a bias with `ops.bias_add`."
        )


def expect_gradient(gradient: Any, shape: tuple[int, ...]) -> None:
    """A gradient has the shape of its value; the seed of a loss that is no single number has not."""
    if np.shape(gradient) != shape:
        raise ValueError(
            f"the incoming gradient has the shape {np.shape(gradient)}, and the value that it belongs to "
            f"{shape}. The loss of `gradients` is a single number: end it in `ops.sum` or `ops.mean`, or "
            "give the seed the shape of the loss with `world.set(grads.seed, array)`."
        )


def expect_integers(name: str, what: str, values: Any, below: int) -> None:
    """Indices are integers from 0 up to, and not including, `below`; none counts from the end."""
    found = np.asarray(values)
    if not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"the {what} of {name} are integers, and these are {found.dtype}.")
    if found.size and not (found.min() >= 0 and found.max() < below):
        raise ValueError(
            f"the {what} of {name} lie between 0 and {below - 1}, and these between "
            f"{found.min()} and {found.max()}."
        )


def as_shape(name: str, shape: Any) -> tuple[int, ...]:
    """`shape` as a tuple of integers, if that is what it is."""
    sizes = (shape,) if isinstance(shape, int) else shape
    if not isinstance(sizes, tuple | list) or not all(isinstance(size, int | np.integer) for size in sizes):
        raise GraphError(
            f"`ops.{name}` takes a tuple of integers and gives a rule, as in `ops.{name}((2, 3))`; "
            f"{type(shape).__name__} is none. The value comes from the input of the node that has the rule."
        )
    return tuple(int(size) for size in sizes)


def expect_shape(name: str, value: Any, of: tuple[int, ...] | None) -> None:
    """The shape that an op was told its input has is the one it has."""
    if of is not None and np.shape(value) != of:
        raise ValueError(
            f"this {name} was made for an input of shape {of} (`of=`), and its input has {np.shape(value)}."
        )


# -- Elementwise arithmetic: sums, products and scalings of values of one shape --------------------


Product = tuple[Callable[..., Any], tuple[Read, ...]]
"""A function of the incoming gradient and of the values that are read besides it."""


def elementwise(name: str, function: Callable[..., Any], *products: Product | Vjp) -> Op:
    """The op of values of one shape, with a vector-Jacobian product for each: see `Product`."""

    def forward(*values: Any) -> Any:
        expect_equal_shapes(name, *values)
        return function(*values)

    def vjp(back: Callable[..., Any], reads: tuple[Read, ...]) -> Vjp:
        def pulled(g: Any, *values: Any) -> Any:
            expect_gradient(g, np.shape(values[0]))
            return back(g, *values)

        return Vjp(pulled, (GRADIENT, *reads))

    vjps = tuple(one if isinstance(one, Vjp) else vjp(*one) for one in products)
    return Op(name, function if len(vjps) == 1 else forward, vjps)


SAME = Vjp(lambda g: g, (GRADIENT,))
NEGATIVE = Vjp(operator.neg, (GRADIENT,))


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
    return functools.reduce(operator.add, values)


identity = Op("identity", lambda x: x, (SAME,))
"""The value itself."""

neg = Op("neg", operator.neg, (NEGATIVE,))
"""−x"""

add = elementwise("add", operator.add, SAME, SAME)
"""a + b"""

sub = elementwise("sub", operator.sub, SAME, NEGATIVE)
"""a − b"""

mul = elementwise("mul", operator.mul, (operator.mul, (1,)), (operator.mul, (0,)))
"""a · b, elementwise"""

div = elementwise(
    "div", operator.truediv, (operator.truediv, (1,)), (lambda g, a, b: -(g * a) / (b * b), (0, 1))
)
"""a / b, elementwise"""

square = elementwise("square", lambda x: x * x, (lambda g, x: 2.0 * g * x, (0,)))
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


# -- Matrix products, of two stacks of matrices or of anything with one weight matrix --------------


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
    return g @ np.swapaxes(b, -1, -2)


def _matmul_right(g: Any, a: Any) -> Any:
    expect_gradient(g, (*np.shape(a)[:-1], *np.shape(g)[-1:]))
    return np.swapaxes(a, -1, -2) @ g


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


# -- Shapes: reshape, transpose, expand, slice and concat ------------------------------------------
# Where a gradient needs the shape of an input, it reads the input, and is invalid whenever that is. Told
# the shape beforehand (`of`, `size`, `sizes`), it reads the incoming gradient alone.


def reshape(shape: int | Sequence[int], *, of: Sequence[int] | None = None) -> Op:
    """The op that gives its input another shape; -1 stands for the size that is left over."""
    to = as_shape("reshape", shape)
    origin = None if of is None else as_shape("reshape", of)

    def forward(x: Any) -> Any:
        expect_shape("reshape", x, origin)
        return np.reshape(x, to)

    def back(g: Any, like: tuple[int, ...]) -> Any:
        if np.size(g) != math.prod(like):
            expect_gradient(g, like)
        return np.reshape(g, like)

    return Op("reshape", forward, (_given_shape(back, origin),), params=(("shape", to), ("of", origin)))


def expand(shape: int | Sequence[int], *, of: Sequence[int] | None = None) -> Op:
    """The op that repeats its input to `shape`, by numpy's rules of broadcasting."""
    to = as_shape("expand", shape)
    origin = None if of is None else as_shape("expand", of)

    def forward(x: Any) -> Any:
        expect_shape("expand", x, origin)
        return np.broadcast_to(x, to)

    def back(g: Any, like: tuple[int, ...]) -> Any:
        expect_gradient(g, to)
        ahead = len(to) - len(like)
        repeated = [ahead + axis for axis, size in enumerate(like) if size != to[ahead + axis]]
        return np.sum(g, axis=(*range(ahead), *repeated)).reshape(like)[()]

    return Op("expand", forward, (_given_shape(back, origin),), params=(("shape", to), ("of", origin)))


def _given_shape(back: Any, of: tuple[int, ...] | None) -> Vjp:
    if of is not None:
        return Vjp(lambda g: back(g, of), (GRADIENT,))
    return Vjp(lambda g, x: back(g, np.shape(x)), (GRADIENT, 0))


@parametric
def transpose(*, axes: Sequence[int] | None = None) -> Op:
    """The op that permutes the axes; without `axes` it exchanges the last two."""
    order = None if axes is None else as_shape("transpose", axes)
    back = (
        None if order is None else tuple(int(place) for place in np.argsort([a % len(order) for a in order]))
    )

    def turn(x: Any, order: tuple[int, ...] | None) -> Any:
        if np.ndim(x) < 2 or (order is not None and np.ndim(x) != len(order)):
            asked = "its last two axes" if order is None else f"the axes {order}"
            raise ValueError(f"transpose of {asked} cannot take a value of shape {np.shape(x)}.")
        return np.swapaxes(x, -1, -2) if order is None else np.transpose(x, order)

    return Op("transpose", lambda x: turn(x, order), (Vjp(lambda g: turn(g, back), (GRADIENT,)),))


def slice(  # noqa: A001 - its name everywhere; it is used as `ops.slice`
    *, axis: int, start: int = 0, stop: int | None = None, size: int | None = None
) -> Op:
    """The op that takes the places from `start` up to, and not including, `stop` along an axis.

    Negative places count from the end. `size` is the size of the input along the axis.
    """

    def span(full: int) -> builtins.slice:
        low = start + full if start < 0 else start
        high = full if stop is None else stop + full if stop < 0 else stop
        if not 0 <= low < high <= full:
            raise ValueError(f"slice {start}:{stop} takes nothing, or too much, of an axis of size {full}.")
        return builtins.slice(low, high)

    if size is not None:
        span(size)

    def forward(x: Any) -> Any:
        full = _size(x, axis)
        if size not in (None, full):
            raise ValueError(f"this slice was made for an axis of size {size}, and axis {axis} has {full}.")
        return x[_along(x, axis, span(full))]

    def back(g: Any, full: int) -> Any:
        shape, taken = list(np.shape(g)), span(full)
        if _size(g, axis) != taken.stop - taken.start:
            shape[axis] = taken.stop - taken.start
            expect_gradient(g, tuple(shape))
        shape[axis] = full
        whole = np.zeros(shape, g.dtype)
        whole[_along(whole, axis, taken)] = g
        return whole

    if size is not None:
        vjp = Vjp(lambda g: back(g, size), (GRADIENT,))
    else:
        vjp = Vjp(lambda g, x: back(g, _size(x, axis)), (GRADIENT, 0))
    params = (("axis", axis), ("start", start), ("stop", stop), ("size", size))
    return Op("slice", forward, (vjp,), params=params)


@parametric
def concat(*, axis: int = -1, sizes: Sequence[int] | None = None) -> Op:
    """The op that joins any number of values along an axis. `sizes` are theirs along it, in order."""
    known = None if sizes is None else as_shape("concat", sizes)

    def forward(*values: Any) -> Any:
        found = tuple(_size(value, axis) for value in values)
        if known is not None and found != known:
            raise ValueError(f"this concat was made for the sizes {known}, and its inputs have {found}.")
        return np.concatenate(values, axis)

    def part(g: Any, start: int, size: int) -> Any:
        if _size(g, axis) < start + size:
            raise ValueError(
                f"the incoming gradient has the shape {np.shape(g)}, and the part of it that belongs to this "
                f"input ends at {start + size} of axis {axis}."
            )
        return g[_along(g, axis, builtins.slice(start, start + size))]

    def at(place: int) -> Vjp:
        if known is not None:
            start, size = builtins.sum(known[:place]), known[place]
            return Vjp(lambda g: part(g, start, size), (GRADIENT,))

        # Where the part begins, and how long it is: what stands behind it does not matter.
        def back(g: Any, *values: Any) -> Any:
            *ahead, size = (_size(value, axis) for value in values)
            return part(g, builtins.sum(ahead), size)

        return Vjp(back, (GRADIENT, *range(place + 1)))

    return Op("concat", forward, EachPlace(at), arity=None if known is None else len(known))


def _size(x: Any, axis: int) -> int:
    if not -np.ndim(x) <= axis < np.ndim(x):
        raise ValueError(f"a value of shape {np.shape(x)} has no axis {axis}.")
    return int(np.shape(x)[axis])


def _along(x: Any, axis: int, part: builtins.slice) -> tuple[builtins.slice, ...]:
    index = [builtins.slice(None)] * np.ndim(x)
    index[axis] = part
    return tuple(index)


# -- Reductions: sum and mean, over all axes or some -----------------------------------------------
# Their gradients are the incoming one, repeated to the shape of the input; so they read the input for its
# shape, and its dtype, unless they are told the shape beforehand (`of`).


Axis = int | Sequence[int] | None


def _reduction(name: str, axis: Axis, keepdims: bool, of: Sequence[int] | None) -> Op:
    if not isinstance(axis, int | tuple | list | None):
        raise GraphError(f"the axis of `ops.{name}` is a number, several, or None for all; {axis!r} is not.")
    along = tuple(axis) if isinstance(axis, list) else axis
    shape = None if of is None else as_shape(name, of)
    reduce = np.sum if name == "sum" else np.mean

    def forward(x: Any) -> Any:
        expect_shape(name, x, shape)
        return reduce(x, axis=along, keepdims=keepdims)

    def back(g: Any, like: tuple[int, ...], dtype: Any) -> Any:
        axes = range(len(like)) if along is None else (along,) if isinstance(along, int) else along
        reduced = {place % len(like) for place in axes}
        kept = tuple(1 if place in reduced else size for place, size in enumerate(like))
        left = kept if keepdims else tuple(size for place, size in enumerate(like) if place not in reduced)
        expect_gradient(g, left)
        # The division first, while the gradient is small; a Python float keeps no dtype of its own.
        share = g if name == "sum" else g / math.prod(like[place] for place in reduced)
        return np.full(like, np.reshape(share, kept), dtype)

    if shape is None:
        vjp = Vjp(lambda g, x: back(g, np.shape(x), np.result_type(g, x)), (GRADIENT, 0))
    else:
        vjp = Vjp(lambda g: back(g, shape, None), (GRADIENT,))
    return Op(name, forward, (vjp,))


@parametric
def sum(*, axis: Axis = None, keepdims: bool = False, of: Sequence[int] | None = None) -> Op:  # noqa: A001 - its name everywhere; it is used as `ops.sum`
    """The sum over `axis`, or over all axes."""
    return _reduction("sum", axis, keepdims, of)


@parametric
def mean(*, axis: Axis = None, keepdims: bool = False, of: Sequence[int] | None = None) -> Op:
    """The mean over `axis`, or over all axes."""
    return _reduction("mean", axis, keepdims, of)


# -- Lookup: rows of a table by integer index, as an embedding does --------------------------------


@parametric
def embedding(*, size: int | None = None) -> Op:
    """The rows of a table (rows, d) at integer indices of any shape: table[ids].

    The gradient of the table needs to know how many rows there are. Told so (`size`), it reads the
    indices and the incoming gradient; otherwise the table as well.
    """

    def forward(table: Any, ids: Any) -> Any:
        if np.ndim(table) != 2 or size not in (None, np.shape(table)[0]):
            asked = "rows, d" if size is None else f"{size}, d"
            raise ValueError(f"embedding takes a table of shape ({asked}), and got {np.shape(table)}.")
        expect_integers("embedding", "indices", ids, below=np.shape(table)[0])
        return table[ids]

    def back(g: Any, ids: Any, rows: int) -> Any:
        expect_gradient(g, (*np.shape(ids), *np.shape(g)[-1:]))
        if np.ndim(g) == 0:
            raise ValueError(
                "the incoming gradient of an embedding is a single number; end the loss in a sum."
            )
        table = np.zeros((rows, g.shape[-1]), g.dtype)
        np.add.at(table, ids, g)
        return table

    if size is not None:
        vjp = Vjp(lambda g, ids: back(g, ids, size), (GRADIENT, 1))
    else:
        vjp = Vjp(lambda g, ids, table: back(g, ids, len(table)), (GRADIENT, 1, 0))
    return Op("embedding", forward, (vjp, None))
