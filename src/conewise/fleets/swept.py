"""What a fleet has to know of a sweep. Sweeps stand above this room, so that `sweep.run` can import it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from conewise.locations.selectors import Cell
from conewise.runs.captured import Captured
from conewise.sweeps.execution.batch import Batch
from conewise.sweeps.planning.spec import SweepSpec


class Swept(Protocol):
    """A sweep."""

    model: Captured
    spec: SweepSpec

    @property
    def cells(self) -> Sequence[Cell]:
        """Its cells."""

    @property
    def batches(self) -> int:
        """How many baselines there are."""

    def batch(self, number: int) -> Batch:
        """One of the baselines, and what is put into it."""

    def asked(self) -> dict[str, Any]:
        """What it was given, as its class takes it beside the model."""
