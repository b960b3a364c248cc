"""A place found in a model: the node, the view of its value, and which part is meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conewise.errors import PatchError, describe
from conewise.locations.head_result import HeadResult
from conewise.locations.places import Place
from conewise.locations.sites import Site
from conewise.program.records import Program
from conewise.program.tensors import Tensor, mean_of
from conewise.structure.axes.padding import shown_entries
from conewise.structure.axes.views import View


@dataclass(frozen=True, slots=True)
class Located:
    """A place found in a model: the node, the view of its value, and which part is meant."""

    site: Site
    view: View
    part: Mapping[str, Any]

    @property
    def node(self) -> str:
        """The node of the graph whose value it is, or from which it is computed."""
        return self.site.node

    @property
    def result(self) -> HeadResult | None:
        """How it is computed, where no node holds it."""
        return self.site.result

    @property
    def z_view(self) -> View:
        """The view of the node's own value, where the site is computed from it."""
        assert self.site.view is not None
        return self.site.view

    @property
    def part_axes(self) -> tuple[str, ...]:
        """The axes that are left of the part: those that no single number selects."""
        return tuple(axis for axis in self.view.axes if not isinstance(self.part.get(axis), int))

    def read(self, value: Tensor, sizes: Sequence[int]) -> Tensor:
        """The part that is meant of the node's value, in natural axes."""
        return self.view.read(value, self.part, sizes)

    def mean(
        self,
        value: Tensor,
        sizes: Sequence[int],
        place: Place,
        program: Program,
        inputs: Mapping[str, Tensor],
    ) -> Tensor:
        """The site's mean over batch and positions, at every place of the part that is meant.

        Positions that the attention mask among the `inputs` hides are left out.
        """
        present = self.view.present(value, sizes)
        try:
            shown = mean_of(present, self.view.axes, self.shown(present, program, inputs))
        except ValueError as error:
            raise PatchError(
                f"{place} has no mean over batch and positions: it holds {error}. Give the value itself."
            ) from None
        plain = View(self.view.axes, tuple((axis,) for axis in self.view.axes), {})
        return plain.read(shown, self.part).clone()

    def shown(self, present: Tensor, program: Program, inputs: Mapping[str, Tensor]) -> Tensor | None:
        """Which entries of the whole site, in natural axes, are no padding: see `shown_entries`."""
        is_cross, stack = self.site.kind.startswith("cross_"), self.site.stack or self.site.name
        return shown_entries(
            program, inputs, self.view.axes, present.shape, self.node, stack, is_cross=is_cross
        )

    def is_same_place(self, other: Located) -> bool:
        """Whether both are the same part of the same site, whatever name it was found by."""
        return self.site is other.site and dict(self.part) == dict(other.part)

    def expect(self, part: object, present: Tensor, place: Place) -> None:
        """Refuse a part of another shape, dtype or device: nothing is cast, moved or broadcast."""
        if isinstance(part, Tensor):
            made = part.shape, part.dtype, part.device, part.layout
            if made == (present.shape, present.dtype, present.device, present.layout):
                return
        expected = f"shape {tuple(present.shape)}, {present.dtype}, on {present.device}"
        axes = ", ".join(self.part_axes)
        if not isinstance(part, Tensor):
            raise PatchError(
                f"the function for {place} returned {describe(part)}; it has to return a tensor of "
                f"{expected} ({axes})."
            )
        if part.layout is not present.layout:
            raise PatchError(f"the value for {place} is {part.layout}; give a dense tensor, `.to_dense()`.")
        raise PatchError(
            f"the value for {place} has shape {tuple(part.shape)}, {part.dtype}, on {part.device}; the "
            f"place has {expected} ({axes}). Convert it first: nothing is cast, moved or broadcast."
        )
