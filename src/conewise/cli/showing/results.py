"""Plans and results as commands show them: JSON and tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from conewise.amounts import shown_bytes
from conewise.cli.terminal.output import add_row, table
from conewise.phases import shown_phases
from conewise.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from conewise.report.story import Story
    from conewise.sweeps.planning.plan import SweepPlan
    from conewise.sweeps.result import Result


def plan_json(plan: SweepPlan) -> dict[str, Any]:
    """A plan as JSON has it."""
    return {**plan.costs(), "chunks": list(plan.chunks), "ratio": plan.ratio}


def result_json(result: Result, story: Story) -> dict[str, Any]:
    """A result as JSON has it: every cell, strongest first, and what it cost."""
    source = None if result.source is None else float(result.source[0])
    base = float(result.base[0])
    span = None if source is None else source - base
    cells = [
        {
            "site": cell.name,
            "kind": cell.kind,
            "layer": cell.at.get("layer"),
            "head": cell.at.get("head", cell.at.get("kv_head")),
            "pos": cell.at.get("pos"),
            "value": value,
            "effect": effect,
            "normalised": effect / span if span else None,
        }
        for cell, effect, value in result.strongest(count=len(result.cells))
    ]
    check = result.verification
    return {
        "base": base,
        "source": source,
        "method": result.method or None,
        "cells": cells,
        "plan": plan_json(result.plan),
        "measured": asdict(result.ledger),
        "full_forwards": {"timed": story.forwards_timed, "seconds": story.forward_seconds},
        "verification": None if check is None else {**asdict(check), "ok": check.ok, "passed": check.passed},
        "provenance": {
            "command": story.command,
            "conewise": __version__,
            "versions": dict(result.provenance["versions"]),
        },
    }


def show_plan(console: Console, plan: SweepPlan) -> None:
    """A plan as a table."""
    grid = table("What it would cost", ("", ""))
    grid.show_header = False
    for label, value in plan.rows():
        add_row(grid, label, value)
    console.print(grid)


def show_result(console: Console, result: Result, story: Story, top: int, unit: str = "site") -> None:
    """The strongest sites, or what else one `unit` is, what they cost, and how they were checked."""
    base = float(result.base[0])
    source = None if result.source is None else float(result.source[0])
    span = None if source is None else source - base
    ends = "" if source is None else f", in the source {source:.4g}"
    console.print(f"{result.metrics[0]} in the base {base:.4g}{ends}\n", markup=False)
    if result.method:
        console.print(f"Approximate: {result.method}.\n", markup=False)
    columns = ["", unit, "effect", *(["of base → source"] if span else []), "value"]
    cells = len(result.cells)
    grid = table(f"The strongest {min(top, cells)} of {cells} {unit}s", columns, right=(0, 2, 3, 4))
    for rank, (cell, effect, value) in enumerate(result.strongest(count=top), 1):
        share = [f"{effect / span:+.1%}"] if span else []
        add_row(grid, str(rank), cell.name, f"{effect:+.4f}", *share, f"{value:.4f}")
    console.print(grid)
    show_cost(console, result, story)


def show_cost(console: Console, result: Result, story: Story | None) -> None:
    """What was predicted, what was counted, and how long full re-runs would take."""
    plan, ledger = result.plan, result.ledger
    same = plan.node_evaluations == ledger.node_evaluations
    console.print(
        f"{ledger.node_evaluations:,} node evaluations, "
        + ("as planned" if same else f"{plan.node_evaluations:,} were planned")
        + f"; full re-runs take {plan.full_evaluations:,} (ρ = {plan.ratio:.2f})"
    )
    resumed = f", {ledger.resumed} cells of it kept from before" if ledger.resumed else ""
    console.print(f"{ledger.seconds:.3g} s as {plan.evaluator}{resumed}")
    if ledger.phases:
        console.print(f"of it {shown_phases(ledger.phases)}")
    if ledger.peak_bytes is not None:
        planned, taken = shown_bytes(plan.peak_bytes), shown_bytes(ledger.peak_bytes)
        console.print(f"{taken} of memory at most beside the model and the baseline, {planned} planned")
    if story is not None and story.forward_seconds and ledger.seconds and not ledger.resumed:
        full = story.forward_seconds * plan.worlds
        console.print(
            f"{plan.worlds:,} full forwards would take {full:.3g} s, {full / ledger.seconds:.2g} times that "
            f"({story.forwards_timed} were timed: {story.forward_seconds:.3g} s each)"
        )
    if result.verification is not None:
        console.print(f"verification {result.verification}")
