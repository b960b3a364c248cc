"""The plan of a sweep: a value without tensors that says what will be computed, and at what cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from conewise.amounts import shown_bytes
from conewise.markup import table


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What a sweep will do.

    `node_evaluations` counts a node once for each world that computes it: the ledger of the run counts the
    same. `full_evaluations` is what full re-runs would compute, `ratio` (ρ) their quotient. `launches` counts
    each node once for each chunk, and a chain that one kernel computes as one. These counts and `flops` are
    those of all batches, `worlds` and `chunks` those of one. `peak_bytes` is what the run takes at most
    beside the model and the baseline; the ledger has what was measured. `seconds` is an estimate.
    """

    worlds: int
    batches: int
    node_evaluations: int
    full_evaluations: int
    launches: int
    flops: int
    full_flops: int
    peak_bytes: int
    max_memory: int | None
    chunks: tuple[int, ...]
    evaluator: str
    why: str
    seconds: float | None

    @property
    def ratio(self) -> float:
        """ρ: full re-runs over the sweep, in node evaluations."""
        return self.full_evaluations / self.node_evaluations if self.node_evaluations else float("inf")

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps({**asdict(self), "ratio": self.ratio}, indent=2)

    def rows(self) -> list[tuple[str, str]]:
        """The plan as lines of a table."""
        return [
            (
                "worlds",
                f"{self.worlds:,}" + (f", for each of {self.batches} batches" if self.batches > 1 else ""),
            ),
            ("node evaluations", f"{self.node_evaluations:,}"),
            ("full re-runs", f"{self.full_evaluations:,} (ρ = {self.ratio:.3f})"),
            ("kernel launches", f"{self.launches:,}"),
            ("FLOPs", f"{self.flops:.3g} (full re-runs {self.full_flops:.3g})"),
            (
                "peak memory",
                shown_bytes(self.peak_bytes)
                + (f" of {shown_bytes(self.max_memory)}" if self.max_memory else ""),
            ),
            (
                "chunks",
                f"{len(self.chunks)}" + (f" of up to {max(self.chunks)} worlds" if self.chunks else ""),
            ),
            ("evaluator", f"{self.evaluator}: {self.why}"),
            ("estimated time", "not calibrated" if self.seconds is None else f"{self.seconds:.2g} s"),
        ]

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.rows())
        return "\n".join(f"{label:<{width}}  {value}" for label, value in self.rows())

    def __repr__(self) -> str:
        batches = f" for each of {self.batches} batches" if self.batches > 1 else ""
        seconds = "" if self.seconds is None else f", about {self.seconds:.2g} s"
        return (
            f"SweepPlan of {self.worlds:,} worlds{batches}: {self.node_evaluations:,} node evaluations "
            f"(ρ = {self.ratio:.3f}), {self.flops:.3g} FLOPs, peak {shown_bytes(self.peak_bytes)}, "
            f"{self.evaluator}{seconds}"
        )

    def _repr_html_(self) -> str:
        return table(self.rows())


def of_batches(plans: Sequence[SweepPlan]) -> SweepPlan:
    """The plan of a run, from one for each batch that takes all others to be like it.

    `chunks` are those of the batch that is cut most.
    """
    count = len(plans)
    if count == 1:
        return plans[0]
    seconds = [plan.seconds for plan in plans if plan.seconds is not None]
    return replace(
        plans[0],
        node_evaluations=sum(plan.node_evaluations for plan in plans) // count,
        full_evaluations=sum(plan.full_evaluations for plan in plans) // count,
        launches=sum(plan.launches for plan in plans) // count,
        flops=sum(plan.flops for plan in plans) // count,
        full_flops=sum(plan.full_flops for plan in plans) // count,
        peak_bytes=max(plan.peak_bytes for plan in plans),
        chunks=max((plan.chunks for plan in plans), key=len),
        seconds=sum(seconds) / count if len(seconds) == count else None,
    )


def as_json(value: Any) -> str:
    """Any plain value as JSON, keys sorted: equal values have equal text."""
    return json.dumps(value, sort_keys=True, default=str)
