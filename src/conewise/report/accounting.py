"""The cost of a result, for pages and terminals: predicted, measured, and that of full re-runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conewise.arguments import shown_bytes
from conewise.report.story import Story
from conewise.status import shown_phases
from conewise.sweeps.storage.result_data import ResultData

WAS_BUSY = (
    "These times vary a lot: the machine was busy with other things, so do not trust the speed. "
    "The counts are exact."
)
"""A remark on speeds, where forwards of one kind took very different times."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A number that was counted, and True if it is the one that was predicted."""

    text: str
    agrees: bool

    def __str__(self) -> str:
        return f"{self.text} {'✓' if self.agrees else '✗'}"


Row = list[str | Counted]
"""A row of a table; its first text is what the row is about."""


def full_seconds(result: ResultData, story: Story | None) -> float | None:
    """Return the seconds of a full forward for each world, from those that were timed; None without them."""
    if story is None or not story.forwards_timed or story.forward_seconds is None or result.ledger.resumed:
        return None
    return story.forward_seconds * result.plan.worlds


def saved_shares(result: ResultData, story: Story | None) -> dict[str, float]:
    """Return the cost of the sweep as a share of full re-runs: for the figure beside the accounting."""
    plan, ledger = result.plan, result.ledger
    shares: dict[str, tuple[float, float]] = {
        "node evaluations": (ledger.node_evaluations, plan.full_evaluations),
        "FLOPs": (plan.flops, plan.full_flops),
        "seconds": (ledger.seconds, full_seconds(result, story) or 0.0),
    }
    return {name: done / full for name, (done, full) in shares.items() if full}


def accounting(result: ResultData, story: Story | None) -> dict[str, Any]:
    """Return the table of what was predicted, measured, and would be spent by a full re-run for each site."""
    plan, ledger = result.plan, result.ledger
    full = full_seconds(result, story)
    rows: list[Row] = [
        _counted("node evaluations", plan.node_evaluations, ledger.node_evaluations, plan.full_evaluations),
        _counted("kernel launches", plan.launches, ledger.launches, plan.full_evaluations),
        ["FLOPs", f"{plan.flops:.4g}", "–", f"{plan.full_flops:.4g}", _times(plan.full_flops, plan.flops)],
        ["peak memory", shown_bytes(plan.peak_bytes), _taken(ledger.peak_bytes), "–", ""],
        [
            "seconds",
            "–" if plan.seconds is None else f"{plan.seconds:.3g}",
            f"{ledger.seconds:.3g}",
            "–" if full is None else f"{full:.3g}",
            "" if full is None else _times(full, ledger.seconds),
        ],
    ]
    notes = [f"{plan.evaluator}: {plan.why}." if plan.why else f"{plan.evaluator}."]
    notes.append(
        f"{plan.worlds:,} worlds in {len(plan.chunks):,} {'pass' if len(plan.chunks) == 1 else 'passes'}."
    )
    if ledger.phases:
        notes.append(f"Of the measured seconds: {shown_phases(ledger.phases)}.")
    if story is not None and full is not None:
        least, most = story.forward_range or (None, None)
        between = "" if least is None else f" ({least:.3g} to {most:.3g} s)"
        notes.append(
            f"The time of full re-runs is that of {plan.worlds:,} forwards at "
            f"{story.forward_seconds or 0:.3g} s each, the mean of {story.forwards_timed} that were "
            f"timed{between}."
        )
        notes += [WAS_BUSY] if story.was_busy else []
    else:
        notes.append("No full forward was timed, so there is no measured speed to compare with.")
    if ledger.resumed:
        notes.append(
            f"{ledger.resumed:,} cells were resumed from an earlier run: the seconds are not all of it."
        )
    notes.append("FLOPs are computed from the plan, and were not measured.")
    notes.append(_of_memory(result))
    heads = ["", "predicted", "measured", "full re-runs", "saved"]
    return {"heads": heads, "rows": rows, "notes": [note[:1].upper() + note[1:] for note in notes]}


def _taken(amount: int | None) -> str:
    return "–" if amount is None else shown_bytes(amount)


def _of_memory(result: ResultData) -> str:
    """Return what was measured of memory, in words."""
    beside, ledger = "Peak memory is what the run takes beside the model and the baseline", result.ledger
    if ledger.peak_bytes is None:
        return f"{beside}; it was not measured."
    if ledger.reserved_bytes is None:
        return f"{beside}; measured is what the process grew by meanwhile, some of it for reasons of its own."
    reserved = f"torch's allocator then had {shown_bytes(ledger.reserved_bytes)} more of the GPU than before"
    return f"{beside}; measured is what tensors took on the GPU; {reserved}."


def _counted(name: str, predicted: int, measured: int, full: int) -> Row:
    counted = Counted(f"{measured:,}", predicted == measured)
    return [name, f"{predicted:,}", counted, f"{full:,}", _times(full, measured)]


def _times(full: float, done: float) -> str:
    return f"{full / done:.2f}×" if done else "–"
