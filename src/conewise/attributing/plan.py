"""The plan of an attribution: what it will take, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from conewise.amounts import shown_bytes
from conewise.attributing.costs import Counts
from conewise.markup import table


@dataclass(frozen=True, slots=True)
class AttributionPlan:
    """What an attribution takes: `forwards` and `backwards` are passes that are recorded, each over a part.

    Base and source are computed beside them, where they are inputs and not runs. `node_evaluations` counts a
    node once for each pass that computes it and once for each backward pass through it, as the ledger of the
    result does. `pieces` are how many times some prompts are computed together: as many as there are batches,
    more where `max_memory` cuts these into `prompts_at_once`. `peak_bytes` is the most that is held at once,
    beside the model and the runs that were given: when it is first asked for, the passes are rehearsed over
    tensors without numbers.
    """

    method: str
    cells: int
    batches: int
    pieces: int
    prompts_at_once: int | None
    max_memory: int | None
    counts: Counts
    _peak: Callable[[], int] = field(repr=False, compare=False)

    @property
    def forwards(self) -> int:
        """Recorded forward passes, all batches together."""
        return self.counts.forwards

    @property
    def backwards(self) -> int:
        """Backward passes."""
        return self.counts.backwards

    @property
    def node_evaluations(self) -> int:
        """Nodes that passes compute, or go back through."""
        return self.counts.node_evaluations

    @property
    def flops(self) -> int:
        """FLOPs of the passes."""
        return self.counts.flops

    @property
    def peak_bytes(self) -> int:
        """The most that is held at a time."""
        return self._peak()

    def rows(self) -> list[tuple[str, str]]:
        """The plan as lines of a table."""
        batches = (
            f"{self.batches:,}"
            if self.pieces == self.batches
            else f"{self.batches:,} in {self.pieces:,} pieces"
        )
        at_once = f", up to {self.prompts_at_once:,} prompts at a time" if self.prompts_at_once else ""
        budget = f" of {shown_bytes(self.max_memory)}" if self.max_memory else ""
        return [
            ("method", self.method),
            ("cells", f"{self.cells:,}"),
            ("batches", batches + at_once),
            (
                "passes",
                f"{counted_words(self.forwards, 'forward')}, {counted_words(self.backwards, 'backward')}",
            ),
            ("node evaluations", f"{self.node_evaluations:,}"),
            ("FLOPs", f"{self.flops:.3g}"),
            ("peak memory", f"{shown_bytes(self.peak_bytes)}{budget}"),
        ]

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.rows())
        return "\n".join(f"{label:<{width}}  {value}" for label, value in self.rows())

    def _repr_html_(self) -> str:
        return table(self.rows())


def counted_words(count: int, what: str) -> str:
    """So many passes, in words."""
    return f"{count:,} {what} pass{'' if count == 1 else 'es'}"
