"""A circuit with scores and a curve, for the tests of its page."""

from __future__ import annotations

import numpy as np

from conewise.circuits.circuit import Circuit
from conewise.circuits.circuit_data import levels, stops
from conewise.report.circuit import Curve, CurvePoint
from conewise.report.story import Story, TokenizedPair
from tests.circuits.graphs import graph

HOSTILE = "</script><img src=x onerror=alert(1)>"


def drawn_circuit(*, layers: int = 4, heads: int = 4, kv_heads: int | None = 2, top: int = 24) -> Circuit:
    """The top edges of random scores, some of them large."""
    whole = graph(layers, heads, kv_heads=kv_heads)
    draw = np.random.default_rng(7)
    sizes = draw.normal(size=whole.count) * np.exp(draw.normal(size=whole.count))
    scores = dict(zip(whole.edges, map(float, sizes), strict=True))
    return Circuit.from_scores(whole, scores, top=top, of=HOSTILE)


def drawn_curve(circuit: Circuit) -> Curve:
    """A curve that rises with the number of edges."""
    level = levels(circuit.graph, circuit.score_array())
    found = stops(level, 12, 4 * len(circuit))
    last = found[-1][1]
    points = tuple(
        CurvePoint(threshold, edges, float(np.log1p(edges) / np.log1p(last))) for threshold, edges in found
    )
    return Curve(points, "logit_diff <b>", faithfulness=0.7)


def circuit_story() -> Story:
    """Two prompts, hostile ones."""
    pair = TokenizedPair(
        clean=f"Mary {HOSTILE}",
        corrupted="John",
        clean_tokens=("Mary", HOSTILE),
        corrupted_tokens=("John", HOSTILE),
        answers=(" Mary",),
        wrong_answers=(" John",),
    )
    return Story(
        model=f"tiny {HOSTILE}",
        prompts=(pair, pair, pair),
        base="clean",
        source="corrupted",
        metric="the logit of right less wrong",
        command="conewise circuit tiny",
        seed=3,
    )
