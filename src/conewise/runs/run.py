"""A run: the baseline world of a captured model for one input; a run's fork is where patches are made."""

from __future__ import annotations

from collections.abc import Mapping

from conewise.errors import WeightsChangedError
from conewise.markup import heading, table
from conewise.program.streaming import described_fields
from conewise.program.tensors import Tensor
from conewise.program.weights import Contents, Sums
from conewise.reactive.world import World
from conewise.runs.captured import Captured
from conewise.runs.reading import Reading


class Run(Reading):
    """The baseline for one input. It never changes; another input is another run."""

    def __init__(
        self, model: Captured, world: World | None, sizes: tuple[int, ...], inputs: Mapping[str, Tensor]
    ) -> None:
        super().__init__(model, world, sizes)
        self._inputs = inputs
        self._changed = ""
        if world is not None:
            self._begin()

    def _begin(self) -> None:
        """Note what the weights and the inputs hold now: the values are of these."""
        self._weights = self.model.weights.contents()
        self._lend(list(self._inputs), list(self._inputs.values()))

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """What the run was given, by name."""
        return self._inputs

    @property
    def made_with(self) -> Contents:
        """What the weights held when the run was computed."""
        return self._weights

    def _check_bits(self, weights: Contents | None = None) -> None:
        super()._check_bits(weights)
        if weights is None:
            self._expect_same(self._weights.glance, self.model.weights.glance())
        else:
            self._expect_same(self._weights.whole, weights.whole)

    def _expect_same(self, old: Sums, new: Sums) -> None:
        if not self._changed and old != new:
            # Forks may hold values of both: the run stays refused, even if the weights are put back.
            self._changed = self.model.weights.changed(old, new)
        if self._changed:
            raise WeightsChangedError(
                f"the weights of {self.model.name} were written to after this run: {self._changed}. Its "
                "values are those of the old weights: run again, `model.run(...)`."
            )

    def _check_lent(self) -> None:
        super()._check_lent()
        self._expect_same(self._weights.writes, self.model.weights.writes())
        self.model.weights.expect_captured()

    def __repr__(self) -> str:
        given = ", ".join(f"{name} {tuple(value.shape)}" for name, value in self.inputs.items())
        return f"Run of {self.model.name} on {given}"

    def _repr_html_(self) -> str:
        rows = [(name, str(tuple(value.shape)), str(value.dtype)) for name, value in self.inputs.items()]
        known = heading(
            "", f"Outputs: {described_fields(self.model.program)}. A site's value: run[kind, layer]"
        )
        return heading(f"Run of {self.model.name}") + table(rows, ("input", "shape", "dtype")) + known
