"""The figure of the reference on graphs: a recorded wave. `python -m tests.report.figure` writes it anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import conewise as cw
from conewise.report.wave import GraphWave, wave_svg

FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "cone.svg"


def network() -> cw.Graph:
    """Two blocks of a residual network, each with two heads side by side and an MLP; small whole numbers."""
    draw = np.random.default_rng(0)

    def matrix() -> np.ndarray:
        return draw.integers(-1, 2, size=(4, 4)).astype(float)

    graph = cw.Graph()
    stream = graph.source("tokens", draw.integers(-1, 2, size=(3, 4)).astype(float))
    for block in (0, 1):
        heads = []
        for head in (0, 1):
            graph.source(f"W{block}.{head}", matrix(), param=True)
            heads.append(graph.node(f"head{block}.{head}", cw.ops.matmul, [stream, f"W{block}.{head}"]))
        both = graph.node(f"heads{block}", cw.ops.add, heads)
        middle = graph.node(f"mid{block}", cw.ops.add, [stream, both])
        graph.source(f"M{block}", matrix(), param=True)
        hidden = graph.node(f"mlp{block}", cw.ops.matmul, [middle, f"M{block}"])
        active = graph.node(f"relu{block}", cw.ops.relu, [hidden])
        stream = graph.node(f"out{block}", cw.ops.add, [middle, active])
    graph.node("score", cw.ops.sum, [stream])
    return graph


def figure() -> str:
    return wave_svg(GraphWave.record(network(), {"head1.1": np.zeros((3, 4))}, "score"), "head1.1")


if __name__ == "__main__":
    FIGURE.write_text(figure(), encoding="utf-8")
