"""Shapes: reshape, transpose, expand, slice and concat.

Where a gradient needs the shape of an input, it reads the input, and is invalid whenever that is.
Told the shape beforehand (`of`, `size`, `sizes`), it reads the incoming gradient alone.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from conewise.errors import GraphError
from conewise.graph.vjp import GRADIENT, Vjp
from conewise.ops.op import EachPlace, Op, as_shape, expect_gradient, expect_shape, parametric


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
    return Op("slice", forward, (vjp,), params=_params(axis=axis, start=start, stop=stop, size=size))


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


def _params(**params: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(params.items())


def checked_axis(name: str, axis: int | Sequence[int] | None) -> int | tuple[int, ...] | None:
    """An axis, several, or None for all of them."""
    if axis is None or isinstance(axis, int):
        return axis
    if isinstance(axis, tuple | list):
        return tuple(axis)
    raise GraphError(f"the axis of `ops.{name}` is a number, several, or None for all; {axis!r} is not.")
