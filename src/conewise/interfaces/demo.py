"""`make demo`: the wave of one patch on a small graph, then the paper's claims, with a page to look at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from conewise.engine.world import World
from conewise.frontends import ops
from conewise.graph.graph import Graph
from conewise.interfaces.drawing import cone_picture

OUT = Path("demo-report")


def small_network() -> Graph:
    """Two blocks of a residual network, each with two heads side by side and an MLP."""
    draw = np.random.default_rng(0)

    def matrix() -> np.ndarray:
        return draw.normal(size=(8, 8)) / 3

    graph = Graph()
    stream = graph.source("tokens", draw.normal(size=(5, 8)))
    for block in (0, 1):
        heads = []
        for head in (0, 1):
            graph.source(f"W{block}.{head}", matrix(), param=True)
            name = graph.node(f"head{block}.{head}", ops.matmul, [stream, f"W{block}.{head}"])
            heads.append(name)
        both = graph.node(f"heads{block}", ops.add, heads)
        middle = graph.node(f"mid{block}", ops.add, [stream, both])
        graph.source(f"M{block}", matrix(), param=True)
        hidden = graph.node(f"mlp{block}", ops.matmul, [middle, f"M{block}"])
        active = graph.node(f"relu{block}", ops.relu, [hidden])
        stream = graph.node(f"out{block}", ops.add, [middle, active])
    graph.node("score", ops.sum, [stream])
    return graph


def main() -> None:
    """Show one patch in numbers and as a picture; then reproduce the paper."""
    console = Console()
    graph = small_network()
    base = World(graph)
    score = float(base.demand("score"))
    table = Table(title=f"Patch one site, demand the score (baseline {score:.4f})")
    for column in ("site set to zero", "score", "recomputed", "reused as it was", "a full run computes"):
        table.add_column(column, justify="right" if column != "site set to zero" else "left")
    for site in ("head0.0", "relu0", "head1.1", "relu1"):
        with base.fork() as world:
            world.patch(site, np.zeros_like(base[site]))
            changed = float(world.demand("score"))
            ledger = world.ledger
            table.add_row(
                site,
                f"{changed:.4f}",
                str(len(ledger.recomputed)),
                str(len(ledger.reused)),
                str(len(graph.computed)),
            )
    console.print(table)
    OUT.mkdir(exist_ok=True)
    picture = OUT / "cone.svg"
    picture.write_text(cone_picture(graph, "head1.1"), encoding="utf-8")
    console.print(f"The cone of head1.1 is drawn in {picture}\n")


if __name__ == "__main__":
    main()
