"""Edits: a part of a site's value, replaced by a tensor or by a function of it.

This is the one place that applies them: forks, gradients, generation, hooks of other libraries and checks
call it. `sweeps/execution/fills.py` is the vectorised form, which writes into stacks of worlds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from conewise.locations.located import Located
from conewise.locations.places import Place
from conewise.program.tensors import Tensor, same_bits

Part = Tensor | Callable[[Tensor], Tensor]


def new_part(part: Part, present: Tensor, found: Located, place: Place) -> Tensor:
    """Return what replaces `present`: the tensor `part`, or the result of the function `part`.

    A function gets a copy, which it may write to. Raise PatchError where the shape, dtype or device differs.
    """
    made = part if isinstance(part, Tensor) else part(present.clone())
    found.expect(made, present, place)
    return made


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """One patch: a part of a site's value, and what replaces it."""

    place: Place
    found: Located
    part: Part

    @property
    def node(self) -> str:
        """The node of the graph whose value or rule the edit changes."""
        result = self.found.result
        return self.found.node if result is None else result.projection.name

    @property
    def covers(self) -> bool:
        """True if nothing of the node's own value is left."""
        return isinstance(self.part, Tensor) and not self.place.part and self.found.result is None

    @property
    def described(self) -> str:
        """What replaces the part, in words."""
        if isinstance(self.part, Tensor):
            return f"a tensor of shape {tuple(self.part.shape)}"
        return f"the function {getattr(self.part, '__name__', self.part)}"

    def applied(self, value: Tensor, sizes: tuple[int, ...], idle: set[Edit] | None = None) -> Tensor:
        """Return a copy of `value` with the part replaced; add the edit to `idle` if that changes nothing.

        Where torch records, gradients go through it.
        """
        present = self.found.read(value, sizes)
        part = new_part(self.part, present, self.found, self.place)
        if idle is not None:
            (idle.add if same_bits(part, present) else idle.discard)(self)
        return self.found.view.replace(value, self.found.part, part, sizes)


def of_values(edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """Return the edits that change the value of their node, and not what is computed from it."""
    return tuple(edit for edit in edits if edit.found.result is None)


def applied_in_turn(
    edits: Iterable[Edit], value: Tensor, sizes: tuple[int, ...], idle: set[Edit] | None = None
) -> Tensor:
    """Return a copy of `value` with the parts replaced, one after another.

    A plain function of its arguments: a rule that held its world would keep it from being dropped.
    """
    for edit in edits:
        value = edit.applied(value, sizes, idle)
    return value
