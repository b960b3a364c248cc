"""`python -m benchmarks.exact_or_approximate`: gradients beside exact effects on SmolLM2, for the docs.

AtP, AtP* and IG over all heads and MLPs, EAP and EAP-IG over all edges, on pairs of prompts of two tasks.
Of nodes every effect is computed exactly. Of edges it is those that are largest by a method, and a sample of
all at random. Some cells are computed again by hooks on the module.

It takes about half an hour of one core. Pieces are kept in the folder `--work` as they are done: stop it at
any time, and start it again. At the end it writes the numbers (`numbers.json` beside this script) and the
picture (`docs/figures/exact-or-approximate.svg`), and prints the tables of the page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.exact_or_approximate.agreement import compared, of_a_sample
from benchmarks.exact_or_approximate.experiment import NODE_METHODS, Experiment, Sizes
from benchmarks.exact_or_approximate.picture import Panel, picture
from benchmarks.exact_or_approximate.pieces import Effects
from benchmarks.exact_or_approximate.tables import said, tables, titled
from benchmarks.exact_or_approximate.tasks import TASKS

ROOT = Path(__file__).parents[2]
NUMBERS = Path(__file__).parent / "numbers.json"
TITLES = {"ioi": "indirect object", "greater-than": "greater than"}
PICTURE = ROOT / "docs/figures/exact-or-approximate.svg"


def panel(method: str, numbers: dict[str, Any], approx: Effects, exact: Effects) -> Panel:
    """Effects by a method beside the exact ones of the same cells and prompts."""
    same = exact.of_prompts(slice(0, approx.per_prompt.shape[-1]))
    return Panel(titled(method), said(numbers), same.names, approx.at(same.names), same.mean)


def measured(experiment: Experiment) -> tuple[dict[str, Any], list[Panel]]:
    """All that is said of a task, and its panels; what is missing is computed."""
    pieces, sizes = experiment.pieces, experiment.sizes
    of_nodes = {method: experiment.nodes(method) for method in NODE_METHODS}
    of_edges = experiment.by_gradients()
    nodes, edges = experiment.nodes("exact"), experiment.some_exact()
    drawn, picked = experiment.drawn(), experiment.picked()
    found: dict[str, Any] = {
        "behaviour": pieces.facts("behaviour", experiment.behaviour),
        "verified": pieces.facts("verified", experiment.verified),
        "nodes": {
            method: compared(effects, nodes, method, sizes.node_ranks) for method, effects in of_nodes.items()
        },
        "edges": {
            method: of_a_sample(effects, edges, drawn, picked, method, sizes.edge_ranks)
            for method, effects in of_edges.items()
        },
    }
    off_most = [name for name, _, _ in found["nodes"]["atp"]["worst"][:3]]
    found["curves"] = pieces.facts("curves", lambda: experiment.curves(off_most))
    found["hybrid"] = pieces.facts("hybrid", experiment.hybrid)
    panels = [
        panel(method, found[kind][method], effects, exact)
        for kind, exact, by_method in (("nodes", nodes, of_nodes), ("edges", edges, of_edges))
        for method, effects in by_method.items()
    ]
    return found, panels


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute what is missing, write numbers and picture, print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--work", type=Path, required=True, help="the folder in which pieces are kept")
    parser.add_argument("--numbers", type=Path, default=NUMBERS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    given = parser.parse_args(arguments)
    experiments = [Experiment(given.model, task, given.work, Sizes()) for task in given.tasks]
    stages = (
        Experiment.methods,
        Experiment.largest,
        Experiment.sample,
        Experiment.integrated,
    )
    for stage in stages:
        for experiment in experiments:
            stage(experiment)
    found = {one.task.name: measured(one) for one in experiments}
    numbers = {task: numbers for task, (numbers, _) in found.items()}
    given.numbers.write_text(json.dumps(numbers, indent=1) + "\n", "utf-8")
    rows = [
        (f"{TITLES[task]}, {kind}", some)
        for task, (_, panels) in found.items()
        for kind, some in (("nodes", panels[: len(NODE_METHODS)]), ("edges", panels[len(NODE_METHODS) :]))
    ]
    given.picture.write_text(picture(rows), "utf-8")
    for name, table in tables(numbers).items():
        print(f"{name}\n\n{table}\n")


if __name__ == "__main__":
    main()
