"""An op: a named function over numpy values that knows its own gradients.

The functions at the end are what the ops of this package check their values with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conewise.errors import GraphError
from conewise.graph.vjp import Vjp, Vjps

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
