"""Plans, results and circuits as commands print them: JSON and tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from conewise.arguments import shown_bytes
from conewise.cli.output import add_row, table
from conewise.status import shown_phases
from conewise.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from conewise.circuits.acdc import SearchPlan
    from conewise.cli.folders import FoundCircuit
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


SHOWN = 12
"""How many edges are shown to people."""

CARRY = {
    "resample": "what they do on the corrupted prompt",
    "zero": "nothing",
    "mean": "their mean over prompts and positions",
}
"""What removed edges carry, in words."""


def plan_of_search_json(plan: SearchPlan) -> dict[str, Any]:
    """The plan of a search as JSON has it."""
    return {
        "worlds": plan.worlds,
        "node_evaluations": plan.node_evaluations,
        "stages": [
            {"stage": name, "edges": edges, "node_evaluations": cost} for name, edges, cost in plan.stages
        ],
    }


def circuit_json(found: FoundCircuit, ablation: str) -> dict[str, Any]:
    """A circuit as JSON has it: every edge in graph order, what was measured, how it was found."""
    circuit, scores = found.circuit, found.circuit.scores or {}
    return {
        "method": circuit.method,
        "threshold": circuit.threshold,
        "ablation": ablation,
        "edges": [{"edge": edge, "score": scores.get(edge)} for edge in circuit.edges],
        "nodes": list(circuit.nodes),
        "graph": {
            "writers": len(circuit.graph.writers),
            "readers": len(circuit.graph.readers),
            "edges": circuit.graph.count,
        },
        "evaluation": asdict(found.evaluation),
        "curve": [asdict(point) for point in found.curve.points],
        "provenance": {"command": found.story.command, "conewise": __version__},
    }


def show_circuit(console: Console, found: FoundCircuit, ablation: str, seconds: float) -> None:
    """How it was found, what it does, and its strongest edges."""
    circuit, scores = found.circuit, found.circuit.scores or {}
    at = "" if circuit.threshold is None else f", threshold {circuit.threshold:.4g}"
    console.print(f"  removed edges carry {CARRY[ablation]}", markup=False)
    console.print(f"  metric: {found.story.metric}, at the last position\n", markup=False)
    console.print(f"found by {circuit.method}{at} in {seconds:.3g} s", markup=False)
    console.print(f"{found.evaluation}\n", markup=False)
    strongest = sorted(circuit.edges, key=lambda edge: -abs(scores.get(edge, 0.0)))[:SHOWN]
    grid = table(
        f"The strongest {len(strongest)} of {len(circuit)} edges", ("", "edge", "score"), right=(0, 2)
    )
    for rank, edge in enumerate(strongest, 1):
        score = scores.get(edge)
        add_row(grid, str(rank), edge, "" if score is None else f"{score:+.4f}")
    console.print(grid)


def show_search_plan(console: Console, plan: SearchPlan) -> None:
    """The plan of a search as a table."""
    grid = table(
        f"At most {plan.worlds:,} worlds, one for each edge, and {plan.node_evaluations:,} node evaluations",
        ("stage", "edges", "node evaluations"),
        right=(1, 2),
    )
    for name, edges, cost in plan.stages:
        add_row(grid, name, f"{edges:,}", f"{cost:,}")
    console.print(grid)
    console.print("What nothing reads any more is not computed, so a search takes less.")
