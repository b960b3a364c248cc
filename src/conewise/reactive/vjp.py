"""Vector-Jacobian products: what a rule brings along so that its gradients can be nodes of a graph.

`gradients` reads them; the ops of `ops` have them, and any other rule may.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from conewise.errors import GradientError
from conewise.reactive.graph import arity

Read = Literal["gradient", "output"] | int

GRADIENT: Final = "gradient"
"""Read the gradient of the loss at the rule's output."""

OUTPUT: Final = "output"
"""Read the value that the rule computed. The value of input k is read as the number k."""


@dataclass(frozen=True, slots=True)
class Vjp:
    """The gradient of the loss at one input of a rule, as `function` of the values that `reads` lists.

    The gradient becomes an ordinary node with exactly these inputs. So `reads` decides what
    invalidates it: whatever is listed without need makes it stale without need, and what the
    function takes from anywhere else makes it wrong.
    """

    function: Callable[..., Any]
    reads: tuple[Read, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", tuple(self.reads))
        for read in self.reads:
            if read not in (GRADIENT, OUTPUT) and not (type(read) is int and read >= 0):
                raise GradientError(
                    f"a vector-Jacobian product cannot read {read!r}. It reads GRADIENT, OUTPUT, or the "
                    "number of an input, from 0."
                )
        least, most = arity(self.function)
        if not least <= len(self.reads) <= most:
            raise GradientError(
                f"this vector-Jacobian product reads {len(self.reads)} values "
                f"({', '.join(map(str, self.reads))}), and its function does not take that many. "
                "List one read for each argument, in order."
            )


class Vjps(Protocol):
    """One `Vjp` for each input, or None where the rule is not differentiable in that input.

    A tuple will do. A rule of any number of inputs answers for each index that it is asked about.
    """

    def __getitem__(self, index: int, /) -> Vjp | None:
        """The vector-Jacobian product of the input at `index`."""


class Differentiable(Protocol):
    """A rule that can be differentiated."""

    @property
    def vjps(self) -> Vjps:
        """What `gradients` makes nodes of."""


def vjps_of(rule: object) -> Vjps | None:
    """The vector-Jacobian products of a rule, if it is `Differentiable`."""
    vjps: Vjps | None = getattr(rule, "vjps", None)
    return vjps
