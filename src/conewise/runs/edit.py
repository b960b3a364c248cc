"""An edit: one patch of a part of a site's value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from conewise.locations.located import Located
from conewise.locations.places import Place
from conewise.program.tensors import Tensor, same_bits

Part = Tensor | Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """One patch: which part of a site's value, and what takes its place."""

    place: Place
    found: Located
    part: Part

    @property
    def node(self) -> str:
        """The node of the graph at which the engine has to do something else."""
        result = self.found.result
        return self.found.node if result is None else result.projection.name

    @property
    def covers(self) -> bool:
        """Whether nothing of what would have been there is left."""
        return isinstance(self.part, Tensor) and not self.place.part and self.found.result is None

    @property
    def described(self) -> str:
        """What takes the part's place, in words."""
        if isinstance(self.part, Tensor):
            return f"a tensor of shape {tuple(self.part.shape)}"
        return f"the function {getattr(self.part, '__name__', self.part)}"

    def applied(self, value: Tensor, sizes: tuple[int, ...], idle: set[Edit] | None = None) -> Tensor:
        """A copy of `value` with the part replaced; the edit is in `idle` when that changes nothing.

        Where torch records, gradients go through it.
        """
        present = self.found.read(value, sizes)
        # A copy: what the function writes to must not be the cached value.
        part = self.part if isinstance(self.part, Tensor) else self.part(present.clone())
        self.found.expect(part, present, self.place)
        if idle is not None:
            (idle.add if same_bits(part, present) else idle.discard)(self)
        return self.found.view.replace(value, self.found.part, part, sizes)


def of_values(edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """Those that change the value of their node, and not what is computed from it."""
    return tuple(edit for edit in edits if edit.found.result is None)


def applied_in_turn(
    edits: tuple[Edit, ...], value: Tensor, sizes: tuple[int, ...], idle: set[Edit]
) -> Tensor:
    """A copy of `value` with the parts replaced, one after another.

    A plain function of its arguments: a rule that held its world would keep it from being dropped.
    """
    for edit in edits:
        value = edit.applied(value, sizes, idle)
    return value
