"""What a run of a sweep did, counted while it did it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

PHASES = ("weights", "planning", "baselines", "passes", "storing")
"""The phases of a run; what is none of them is `phases.REST`."""


@dataclass(slots=True)
class SweepLedger:
    """What a run of a sweep did: counted while it did it.

    `peak_bytes` is the most that the process grew by while chunks were computed, on a GPU the most that
    tensors took there, beyond what was held before; `reserved_bytes` is how much more torch's allocator then
    had from a GPU. Parts of weights count at every run, though they are made once. Of a model that is spread
    over several devices, both are sums over its GPUs. None where nothing was computed or measured.

    `phases` has the seconds by phase; together they are `seconds`. It is empty in results that were saved
    before there were any. `weights`: reading their bits. `planning`: finding or compiling the plan.
    `baselines`: computing base and source, and their metrics. `passes`: computing the worlds, and their
    metrics. `storing`: reading and writing the folder `out`. `other`: the rest. Phases are what the host
    waited for: a GPU is given baselines, passes and the last reading of the weights one behind the other, and
    the passes wait for most of it.
    """

    node_evaluations: int = 0
    launches: int = 0
    resumed: int = 0
    seconds: float = 0.0
    compute_seconds: float = 0.0
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    phases: dict[str, float] = field(default_factory=dict)

    def note_memory(self, peak: int | None, reserved: int | None, kept: int = 0) -> None:
        """Keep the most that was taken, beside what was kept of it already: parts of weights."""
        self.peak_bytes = most([self.peak_bytes, None if peak is None else peak + kept])
        self.reserved_bytes = most([self.reserved_bytes, None if reserved is None else reserved + kept])


def most(amounts: Iterable[int | None]) -> int | None:
    """The largest of those that are known; None where none is."""
    return max((amount for amount in amounts if amount is not None), default=None)
