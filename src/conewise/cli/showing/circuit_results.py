"""Circuits and plans of searches as commands show them: JSON and tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from conewise.cli.terminal.output import add_row, table
from conewise.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from conewise.circuits.search.acdc import SearchPlan
    from conewise.cli.folders.circuit_folder import FoundCircuit

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
