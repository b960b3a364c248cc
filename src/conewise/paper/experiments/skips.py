"""Long skips: how the ratios move from the collapse to the forward limit and past it, open in the paper.

Claim: in a stack cut into periods of m layers, whose layers read the one k layers back, two layers are
parallel with a chance y, which is (m/L)(1 − 1/k) for whole periods; in the limit ρ is 2/(1−y) and ρ_train
1/(1−y). A skip that is added beside the stack, and passes no layer by, changes neither.
"""

from __future__ import annotations

import time
from fractions import Fraction

from conewise.paper.experiments.e4 import Layered, relu
from conewise.paper.experiments.result import Progress, Result, Row, patch_cost, silent, versions, warm
from conewise.paper.theory.backward import training_ratio
from conewise.paper.theory.profiles import (
    SkipKind,
    incomparable_pairs,
    skip_layers,
    skip_limits,
    skip_ratio,
    skip_training_ratio,
)
from conewise.paper.theory.sweeps import sweep_ratio
from conewise.reactive.graph import Graph

LAYERS, WEIGHT = 96, 4
SPANS = (1, 2, 4, 8)
PERIODS = (8, 24, 48, 72, 96)


def run(progress: Progress = silent, layers: int = LAYERS, periods: tuple[int, ...] = PERIODS) -> Result:
    """Bypassing skips of every span and period, and added ones; each layer's site patched and demanded."""
    started = time.perf_counter()
    weights = [WEIGHT] * layers
    rows: list[Row] = []
    cases = [(span, every) for span in SPANS for every in (periods if span > 1 else periods[:1])]
    work = len(cases) + len(periods)
    for done, (span, every) in enumerate(cases, start=1):
        forward, training = count(build(layers, span, every, "bypassing"))
        share = Fraction(every, layers)
        limits = skip_limits(share, span)
        facts = {
            "kind": "bypassing",
            "span": span,
            "every": every,
            "L": layers,
            "y": 1 - 1 / float(limits[1]),
            "parallel_pairs": incomparable_pairs(layers, span, every),
        }
        at = f"bypassing, span {span}, period {every}"
        predicted = skip_ratio(weights, span, every, terminal=1)
        rows.append(
            Row(f"{at}, ρ", None, predicted, forward, facts=facts | {"ratio": "ρ", "limit": float(limits[0])})
        )
        predicted = skip_training_ratio(weights, span, every, terminal=1)
        rows.append(
            Row(
                f"{at}, ρ_train",
                None,
                predicted,
                training,
                facts=facts | {"ratio": "ρ_train", "limit": float(limits[1])},
            )
        )
        progress(done, work)
    for done, every in enumerate(periods, start=len(cases) + 1):
        forward, training = count(build(layers, 4, every, "added"))
        facts = {"kind": "added", "span": 4, "every": every, "L": layers, "y": 0.0}
        at = f"added, span 4, every {every}"
        plain = sweep_ratio(weights, terminal=1), training_ratio(weights, terminal=1)
        rows.append(Row(f"{at}, ρ", None, plain[0], forward, facts=facts | {"ratio": "ρ"}))
        rows.append(Row(f"{at}, ρ_train", None, plain[1], training, facts=facts | {"ratio": "ρ_train"}))
        progress(done, work)
    curve = sorted(skip_limits(Fraction(step, 100)) for step in range(94))
    return Result(
        name="skips",
        title="Long skips, from the collapse to the forward limit and past it",
        claim=(
            "With y the chance that two layers are parallel, ρ tends to 2/(1−y) and ρ_train to 1/(1−y); "
            "skips that pass no layer by change neither."
        ),
        rows=rows,
        compared="every ratio counted on the graph equals the closed form exactly; the paper prints none",
        notes=(
            (
                f"{layers} layers of {WEIGHT} nodes and one terminal node. Bypassing: within a period, a "
                "layer reads only the layer `span` before it. Added: every layer reads the one before, and "
                "some read one further back as well."
            ),
            (
                "ρ from what the engine recomputed after a patch of each layer's last node; ρ_train adds the "
                "ancestors, by a reverse walk, and is the paper's count."
            ),
            "Where periods keep a bounded length, y tends to 0 with depth, and ρ_train still collapses to 1.",
        ),
        seconds=time.perf_counter() - started,
        versions=versions(),
        series={
            "y": [1 - 1 / float(training) for _, training in curve],
            "forward": [float(forward) for forward, _ in curve],
            "training": [float(training) for _, training in curve],
        },
    )


def build(layers: int, span: int, every: int, kind: SkipKind) -> Layered:
    """The real graph: a chain of nodes per layer, whose first adds the last nodes of all that it reads."""
    reads: dict[int, list[int]] = {}
    for source, reader in skip_layers(layers, span, every, kind):
        reads.setdefault(reader, []).append(source)
    graph = Graph()
    ends = {0: graph.source("x", 1.0)}
    for layer in range(1, layers + 1):
        last = graph.node(f"layer{layer}.0", _mean, [ends[source] for source in reads[layer]])
        for step in range(1, WEIGHT):
            last = graph.node(f"layer{layer}.{step}", relu, [last])
        ends[layer] = last
    output = graph.node("output", _mean, [ends[source] for source in reads[layers + 1]])
    return Layered(graph, tuple(ends[layer] for layer in range(1, layers + 1)), output)


def count(layered: Layered) -> tuple[Fraction, Fraction]:
    """ρ and ρ_train: descendants as the engine recomputed them, ancestors by a reverse walk."""
    graph, descendants, ancestors = layered.graph, 0, 0
    base = warm(graph, layered.output)
    sources = set(graph.sources)
    for site in layered.sites:
        cost = patch_cost(base, site, 2.0, layered.output)
        assert cost.invalidated == cost.recomputed, "the output demands all that a layer reaches"
        descendants += cost.recomputed
        ancestors += len(set(graph.upstream(site)) - sources)
    sites, full = len(layered.sites), base.ledger.count("recomputed")
    return Fraction(sites * full, descendants), Fraction(sites * full, descendants + sites + ancestors)


def _mean(*values: float) -> float:
    return sum(values) / len(values)
