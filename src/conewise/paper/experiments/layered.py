"""Layered graphs, built for real: the sweep ratio (E4), its collapse in training (E5), and long skips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from conewise.paper import ops
from conewise.paper.experiments.result import (
    Number,
    Progress,
    Result,
    Row,
    experiment,
    patch_cost,
    patch_wave,
    rows_of,
    silent,
    sweep,
    tracked,
    warm,
)
from conewise.paper.theory.backward import joint_ratio, training_ratio
from conewise.paper.theory.profiles import (
    SkipKind,
    incomparable_pairs,
    skip_layers,
    skip_limits,
    skip_ratio,
    skip_training_ratio,
)
from conewise.paper.theory.sweeps import limit_ratio, sweep_ratio
from conewise.reactive.gradients import gradients
from conewise.reactive.graph import Graph, Site
from conewise.reactive.table import Rule

Profile = Literal["output-heavy", "input-heavy"]
PROFILES: tuple[Profile, ...] = ("output-heavy", "input-heavy")
INDICES = (0.0, 0.5, 1.0, 2.0)
TOTAL = 4000


@dataclass(frozen=True, slots=True)
class Layered:
    """A graph of layers, the site that is patched in each, and the node that is demanded."""

    graph: Graph
    sites: tuple[Site, ...]
    output: Site

    @property
    def size(self) -> int:
        """N: the nodes that one full run computes, the terminal one included."""
        return len(self.graph) - len(self.graph.sources)


def relu(x: float) -> float:
    """Return x or 0: the paper's unary op."""
    return x if x > 0.0 else 0.0  # noqa: FURB136  # a call less, ten million times


def mean(*values: float) -> float:
    """Return the mean of the inputs: it keeps numbers in range however long the chain."""
    return sum(values) / len(values)


def profile_weights(layers: int, q: float, profile: Profile, total: int = TOTAL) -> list[int]:
    """w_j = max(1, round(total · p_j / Σp)), p_j = j^q or (L+1−j)^q, rounded half to even."""
    powers = [float(j) ** q for j in range(1, layers + 1)]
    if profile == "input-heavy":
        powers.reverse()
    scale = total / sum(powers)
    return [max(1, round(scale * power)) for power in powers]


def sequential(weights: Sequence[int]) -> Layered:
    """Build one chain of unary nodes: layer j has w_j of them, its last is its site; then a terminal node."""
    graph = Graph()
    last, sites = graph.source("x", 1.0), []
    for layer, weight in enumerate(weights, start=1):
        for step in range(weight):
            last = graph.node(f"layer{layer}.{step}", relu, [last])
        sites.append(last)
    return Layered(graph, tuple(sites), graph.node("output", relu, [last]))


def branched(weights: Sequence[int], unary: Rule = relu, fold: Rule = mean, x: Any = 1.0) -> Layered:
    """Build layers of w_j parallel branches of the last aggregate, folded one by one; then a terminal node.

    The site of a layer is its first branch: the other branches are neither above nor below it.
    """
    graph = Graph()
    last, sites = graph.source("x", x), []
    for layer, weight in enumerate(weights, start=1):
        branches = [graph.node(f"layer{layer}.branch{b}", unary, [last]) for b in range(weight)]
        sites.append(branches[0])
        last = branches[0]
        for step, branch in enumerate(branches[1:], start=1):
            last = graph.node(f"layer{layer}.fold{step}", fold, [last, branch])
    return Layered(graph, tuple(sites), graph.node("output", unary, [last]))


def count(layered: Layered, step: int = 1) -> tuple[int, Fraction, Fraction]:
    """Patch every site; returns the nodes of a full run, ρ, and ρ_train by the paper's count.

    ρ is full runs over descendants, which the engine recomputes; ρ_train over ancestors, found by a reverse
    walk, the site and descendants. Every `step`-th patch is demanded; of the others the nodes are counted
    that it invalidates.
    """
    graph, descendants, ancestors = layered.graph, 0, 0
    base = warm(graph, layered.output)
    sources = set(graph.sources)
    for number, site in enumerate(layered.sites):
        if number % step == 0:
            cost = patch_cost(base, site, 2.0, layered.output)
            assert cost.invalidated == cost.recomputed, "the output demands all that a layer reaches"
            descendants += cost.recomputed
        else:
            descendants += patch_wave(base, site, 2.0)
        ancestors += len(set(graph.upstream(site)) - sources)
    full, swept = base.ledger.count("recomputed"), len(layered.sites)
    training = Fraction(swept * full, descendants + ancestors + swept)
    return full, Fraction(swept * full, descendants), training


def profiles(
    depths: Sequence[int], row: Callable[[float, Profile, int], Row], progress: Progress, rest: int = 0
) -> tuple[list[Row], int, int]:
    """Return a row for every index, profile and depth; and the work that is done, of all, `rest` included."""
    cases = [(q, profile, L) for profile in PROFILES for q in INDICES for L in depths]
    work, done, rows = sum(L for *_, L in cases) + rest, 0, []
    for q, profile, L in cases:
        rows.append(row(q, profile, L))
        done += L
        progress(done, work)
    return rows, done, work


# -- E4: the ratio of an exhaustive sweep depends on where the weight of a network lies ------------

E4_DEPTHS = (20, 40, 80, 160, 320)

# The figures that the paper prints: measured ratios, and the limits beside them.
PAPER: dict[tuple[float, Profile, int], str] = {
    (0.0, "output-heavy", 320): "2.0057",
    (0.5, "output-heavy", 320): "1.6722",
    (1.0, "output-heavy", 320): "1.5064",
    (2.0, "output-heavy", 320): "1.3471",
    (0.0, "input-heavy", 320): "2.0057",
    (0.5, "input-heavy", 320): "2.5057",
    (1.0, "input-heavy", 320): "3.0004",
    (2.0, "input-heavy", 320): "3.9247",
    (1.0, "input-heavy", 20): "3.1585",
}
PAPER_LIMITS: dict[tuple[float, Profile], str] = {
    (0.0, "output-heavy"): "2.0000",
    (0.5, "output-heavy"): "1.6667",
    (1.0, "output-heavy"): "1.5000",
    (2.0, "output-heavy"): "1.3333",
    (0.0, "input-heavy"): "2.0",
    (0.5, "input-heavy"): "2.5",
    (1.0, "input-heavy"): "3.0",
    (2.0, "input-heavy"): "4.0",
}


@experiment("The sweep ratio under non-uniform cost profiles")
def e4(progress: Progress = silent, depths: tuple[int, ...] = E4_DEPTHS) -> Result:
    """Patch and demand each site of every index, profile and depth of the paper.

    Claim (Theorem "aggregate sweep ratio"): Full re-runs of every site cost ρ times what their cones cost; ρ
    tends to (q+2)/(q+1) when layers grow like j^q towards the output, and to q+2 when they grow towards the
    input.

    Compared: ρ from the ledger equals the closed form at finite L, as fractions, and the paper in every
    printed digit; the limits equal the paper's predicted ones in every printed digit.
    """
    worlds = differences = 0

    def row(q: float, profile: Profile, L: int) -> Row:
        nonlocal worlds, differences
        weights = profile_weights(L, q, profile)
        layered = sequential(weights)
        swept = sweep(layered.graph, layered.sites, layered.output)
        assert all(cost.value == 2.0 for cost in swept.costs), "a chain of relu passes a positive patch on"
        worlds += L
        differences += sum(cost.invalidated != cost.recomputed for cost in swept.costs)
        return Row(
            f"ρ, {profile}, q = {q:g}, L = {L}",
            sweep_ratio(weights, terminal=1),
            swept.ratio,
            PAPER.get((q, profile, L)),
            facts={
                "q": q,
                "profile": profile,
                "L": L,
                "nodes": swept.full,
                "limit": float(limit_ratio(q, profile)),
                "paper_limit": float(PAPER_LIMITS[q, profile]),
            },
        )

    ratios, *_ = profiles(depths, row, progress)
    sizes = [row.facts["nodes"] for row in ratios]
    different = f"of {worlds} worlds, those that recomputed another number of nodes than was invalidated"
    rows = [*ratios, Row(different, 0, differences), *_limits(ratios), *_nearing(ratios, depths)]
    size, how = f"nodes of a graph, about {TOTAL}", dict[str, Any](exact=False, unit="nodes")
    rows.append(Row(f"{size}, the fewest", None, min(sizes), str(TOTAL), **how))
    rows.append(Row(f"{size}, the most", None, max(sizes), str(TOTAL), **how))
    return Result(
        rows,
        """
        Every site of every graph was patched in a fork of a warm world and the output demanded; ρ is L
        times the nodes of a full run over the nodes recomputed.

        Each graph is a chain of about 4,000 unary nodes with one terminal node, which counts; the site of
        a layer is its last node.

        Beside each limit stands the ratio measured at the greatest depth. For q = 2 it moves away from
        the limit again between L = 160 and L = 320: there the lightest layers would have less than one
        node, and are rounded up to one.
        """,
    )


def _limits(rows: Sequence[Row]) -> list[Row]:
    """Return the paper's column of predictions: limits, each beside the ratio at the greatest depth."""
    deepest = {(row.facts["q"], row.facts["profile"]): row for row in rows}
    return [
        Row(
            f"limit of ρ, {profile}, q = {q:g}; measured: at L = {row.facts['L']}",
            limit_ratio(q, profile),
            row.measured,
            PAPER_LIMITS[q, profile],
            paper_predicts=True,
            facts={"q": q, "profile": profile},
        )
        for (q, profile), row in deepest.items()
    ]


def _nearing(rows: Sequence[Row], depths: Sequence[int]) -> list[Row]:
    """Count the profiles that are nearer to their limit at the greatest depth than at a smaller one."""
    lines: dict[tuple[float, Profile], dict[int, Row]] = {}
    for row in rows:
        lines.setdefault((row.facts["q"], row.facts["profile"]), {})[row.facts["L"]] = row

    def gap(value: Number | None, case: tuple[float, Profile]) -> Fraction:
        return abs(Fraction(value or 0) - Fraction(limit_ratio(*case)))

    found = []
    for before in dict.fromkeys((depths[0], depths[-2])) if len(depths) > 1 else ():
        counts = [
            sum(
                gap(getattr(line[depths[-1]], kind), case) < gap(getattr(line[before], kind), case)
                for case, line in lines.items()
            )
            for kind in ("predicted", "measured")
        ]
        name = f"of {len(lines)} profiles, those nearer to the limit at L = {depths[-1]} than at L = {before}"
        found.append(Row(name, counts[0], counts[1]))
    return found


# -- E5: under backpropagation the advantage of a sweep collapses, by the paper's count ------------

E5_DEPTHS = (10, 20, 40, 80, 160)
JOINT_DEPTHS, JOINT_TOTAL = (5, 10, 20, 40, 80), 400
PAPER_TRAINING = {10: "1.0526", 20: "1.0256", 40: "1.0126", 80: "1.0062", 160: "1.0031"}


@experiment("Training-mode collapse")
def e5(
    progress: Progress = silent, depths: tuple[int, ...] = E5_DEPTHS, joint: tuple[int, ...] = JOINT_DEPTHS
) -> Result:
    """Count descendants by the ledger and ancestors by a walk, for every index, profile and depth.

    Claim (Corollary "training-mode locality collapse"): Counting ancestors, site and descendants, as the
    paper does for a sweep under backpropagation, ρ_train tends to 1 whatever the cost profile, where each
    site is comparable with every other layer.

    Compared: ρ_train counted on the graph equals the closed form, as fractions, and the paper in every
    printed digit; the exact ratios on joint graphs equal the theory's.
    """

    def row(q: float, profile: Profile, L: int) -> Row:
        weights = profile_weights(L, q, profile)
        full, forward, training = count(branched(weights), step=1 if L <= 40 else 4)
        return Row(
            f"ρ_train, {profile}, q = {q:g}, L = {L}",
            training_ratio([2 * w - 1 for w in weights], local=weights, terminal=1),
            training,
            PAPER_TRAINING[L],
            facts={
                "count": "paper",
                "q": q,
                "profile": profile,
                "L": L,
                "nodes": full,
                "forward_ratio": float(forward),
            },
        )

    rows, done, work = profiles(depths, row, progress, rest=sum(joint))
    for L in joint:
        rows.append(joint_row(L))
        done += L
        progress(done, work)
    return Result(
        rows,
        """
        Descendants are the nodes that the engine invalidated and recomputed after a patch of the site;
        ancestors are found by a reverse walk over the graph's inputs (graph.upstream), sources not
        counted. In graphs deeper than 40 layers every fourth patch was demanded, and of the others the
        invalidated nodes were counted.

        The paper's count is of ancestors, the site and descendants. The ancestors are where the gradient
        depends on the Jacobian at the site. The gradients that change are others: the rows of the joint
        graph count those exactly.
        """,
    )


def joint_row(layers: int) -> Row:
    """Sweep a graph that holds both passes, reading the loss and the gradient at the input.

    Gradients are nodes like any other, so the engine's ledger counts what really has to be
    computed again: what is below a site in the forward pass, and every gradient that reads a changed value.
    """
    weights = profile_weights(layers, 0.0, "output-heavy", JOINT_TOTAL)
    layered = branched(weights, unary=ops.tanh, fold=ops.add, x=np.float64(0.5))
    graph = layered.graph
    graph.source("target", np.float64(1.0))
    loss = graph.node("loss", ops.mse, [layered.output, "target"])
    forward = len(graph.computed)
    demand = (loss, gradients(graph, loss, "x")["x"])
    swept = sweep(graph, layered.sites, demand, np.float64(0.25))
    facts = {"count": "exact", "q": 0.0, "profile": "uniform", "L": layers}
    return Row(
        f"exact ρ of forward and backward pass, L = {layers}",
        joint_ratio(graph, layered.sites, demand),
        swept.ratio,
        facts={**facts, "nodes": swept.full, "forward_nodes": forward},
    )


# -- Long skips: the ratios move from the collapse to the forward limit and past it ----------------

LAYERS, WEIGHT = 96, 4
SPANS = (1, 2, 4, 8)
PERIODS = (8, 24, 48, 72, 96)


@experiment("Long skips, from the collapse to the forward limit and past it")
def skips(progress: Progress = silent, layers: int = LAYERS, periods: tuple[int, ...] = PERIODS) -> Result:
    """Patch and demand each layer's site under bypassing skips of every span and period, and added ones.

    In a stack cut into periods of m layers, whose layers read the one k layers back, y is (m/L)(1 − 1/k) for
    whole periods.

    Claim (open in the paper): With y the chance that two layers are parallel, ρ tends to 2/(1−y) and ρ_train
    to 1/(1−y); skips that pass no layer by change neither.

    Compared: every ratio counted on the graph equals the closed form exactly; the paper prints none.
    """
    weights = [WEIGHT] * layers
    plain = sweep_ratio(weights, terminal=1), training_ratio(weights, terminal=1)
    cases: list[tuple[SkipKind, int, int]] = [
        ("bypassing", span, every) for span in SPANS for every in (periods if span > 1 else periods[:1])
    ]
    rows: list[Row] = []
    for kind, span, every in tracked([*cases, *(("added", 4, every) for every in periods)], progress):
        _, *counted = count(skipping(layers, span, every, kind))
        facts = {"kind": kind, "span": span, "every": every, "L": layers, "y": 0.0}
        at, predicted, limits = f"added, span {span}, every {every}", plain, None
        if kind == "bypassing":
            at = f"bypassing, span {span}, period {every}"
            predicted = (
                skip_ratio(weights, span, every, terminal=1),
                skip_training_ratio(weights, span, every, terminal=1),
            )
            limits = skip_limits(Fraction(every, layers), span)
            facts |= {
                "y": 1 - 1 / float(limits[1]),
                "parallel_pairs": incomparable_pairs(layers, span, every),
            }
        for place, ratio in enumerate(("ρ", "ρ_train")):
            limit = {} if limits is None else {"limit": float(limits[place])}
            figure = (ratio, predicted[place], counted[place])
            rows += rows_of(at, figure, facts={**facts, "ratio": ratio, **limit})
    curve = sorted(skip_limits(Fraction(step, 100)) for step in range(94))
    return Result(
        rows,
        f"""
        {layers} layers of {WEIGHT} nodes and one terminal node. Bypassing: within a period, a layer reads
        only the layer `span` before it. Added: every layer reads the one before, and some read one
        further back as well.

        ρ from what the engine recomputed after a patch of each layer's last node; ρ_train adds the
        ancestors, by a reverse walk, and is the paper's count.

        Where periods keep a bounded length, y tends to 0 with depth, and ρ_train still collapses to 1.
        """,
        series={
            "y": [1 - 1 / float(training) for _, training in curve],
            "forward": [float(forward) for forward, _ in curve],
            "training": [float(training) for _, training in curve],
        },
    )


def skipping(layers: int, span: int, every: int, kind: SkipKind) -> Layered:
    """Build a chain of nodes per layer, whose first adds the last nodes of all that the layer reads."""
    reads: dict[int, list[int]] = {}
    for source, reader in skip_layers(layers, span, every, kind):
        reads.setdefault(reader, []).append(source)
    graph = Graph()
    ends = {0: graph.source("x", 1.0)}
    for layer in range(1, layers + 1):
        last = graph.node(f"layer{layer}.0", mean, [ends[source] for source in reads[layer]])
        for step in range(1, WEIGHT):
            last = graph.node(f"layer{layer}.{step}", relu, [last])
        ends[layer] = last
    output = graph.node("output", mean, [ends[source] for source in reads[layers + 1]])
    return Layered(graph, tuple(ends[layer] for layer in range(1, layers + 1)), output)
