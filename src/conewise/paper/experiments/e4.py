"""The layered graphs of the paper's E4 and E5, built for real: a chain of layers, and layers with width."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from conewise.paper.experiments.result import (
    Number,
    Progress,
    Result,
    Row,
    patch_cost,
    silent,
    versions,
    warm,
)
from conewise.paper.theory.sweeps import limit_ratio, sweep_ratio
from conewise.reactive.graph import Graph, Site
from conewise.reactive.table import Rule

Profile = Literal["output-heavy", "input-heavy"]
PROFILES: tuple[Profile, ...] = ("output-heavy", "input-heavy")


@dataclass(frozen=True, slots=True)
class Layered:
    """A graph of layers, the site that is patched in each, and the node that is demanded."""

    graph: Graph
    sites: tuple[Site, ...]
    output: Site

    @property
    def size(self) -> int:
        """N: how many nodes one full run computes, the terminal one included."""
        return len(self.graph) - len(self.graph.sources)


def relu(x: float) -> float:
    """The paper's unary op."""
    return x if x > 0.0 else 0.0  # noqa: FURB136  # a call less, ten million times


def mean(x: float, y: float) -> float:
    """A fold of two branches that keeps numbers in range however long the chain."""
    return (x + y) / 2


def profile_weights(layers: int, q: float, profile: Profile, total: int = 4000) -> list[int]:
    """w_j = max(1, round(total · p_j / Σp)), p_j = j^q or (L+1−j)^q, rounded half to even."""
    powers = [float(j) ** q for j in range(1, layers + 1)]
    if profile == "input-heavy":
        powers.reverse()
    scale = total / sum(powers)
    return [max(1, round(scale * power)) for power in powers]


def sequential(weights: Sequence[int]) -> Layered:
    """One chain of unary nodes: layer j has w_j of them, its last is its site; then a terminal node."""
    graph = Graph()
    last, sites = graph.source("x", 1.0), []
    for layer, weight in enumerate(weights, start=1):
        for step in range(weight):
            last = graph.node(f"layer{layer}.{step}", relu, [last])
        sites.append(last)
    return Layered(graph, tuple(sites), graph.node("output", relu, [last]))


def branched(weights: Sequence[int], unary: Rule = relu, fold: Rule = mean, x: Any = 1.0) -> Layered:
    """Layer j is w_j parallel branches of the previous aggregate, folded one by one; then a terminal node.

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


# -- E4: the ratio of an exhaustive sweep depends on where the weight of a network lies ------------
# Claim (Theorem "aggregate sweep ratio"): full re-runs of all sites cost ρ times what the cones do, and ρ
# tends to (q+2)/(q+1) when layers grow like j^q towards the output, to q+2 when they grow towards the
# input.


INDICES = (0.0, 0.5, 1.0, 2.0)
DEPTHS = (20, 40, 80, 160, 320)
TOTAL = 4000

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


def run(progress: Progress = silent, depths: tuple[int, ...] = DEPTHS) -> Result:
    """Every index, profile and depth of the paper, each site of each graph patched and demanded."""
    started = time.perf_counter()
    cases = [(q, profile, L) for profile in PROFILES for q in INDICES for L in depths]
    work, done, rows = sum(L for *_, L in cases), 0, []
    worlds = differences = 0
    for q, profile, L in cases:
        weights = profile_weights(L, q, profile, TOTAL)
        layered = sequential(weights)
        base = warm(layered.graph, layered.output)
        costs = [patch_cost(base, site, 2.0, layered.output) for site in layered.sites]
        assert all(cost.value == 2.0 for cost in costs), "a chain of relu passes a positive patch on"
        worlds += len(costs)
        differences += sum(cost.invalidated != cost.recomputed for cost in costs)
        full = base.ledger.count("recomputed")
        rows.append(
            Row(
                name=f"ρ, {profile}, q = {q:g}, L = {L}",
                paper=PAPER.get((q, profile, L)),
                predicted=sweep_ratio(weights, terminal=1),
                measured=Fraction(L * full, sum(cost.recomputed for cost in costs)),
                facts={
                    "q": q,
                    "profile": profile,
                    "L": L,
                    "nodes": full,
                    "limit": float(limit_ratio(q, profile)),
                    "paper_limit": float(PAPER_LIMITS[q, profile]),
                },
            )
        )
        done += L
        progress(done, work)
    rows.append(
        Row(
            name=f"of {worlds} worlds, those that recomputed another number of nodes than was invalidated",
            paper=None,
            predicted=0,
            measured=differences,
        )
    )
    sizes = [row.facts["nodes"] for row in rows if "limit" in row.facts]
    rows += [*_limits(rows), *_nearing(rows, depths)]
    rows += [
        Row(f"nodes of a graph, about {TOTAL}, {which}", str(TOTAL), None, size, exact=False, unit="nodes")
        for which, size in (("the fewest", min(sizes)), ("the most", max(sizes)))
    ]
    return Result(
        name="e4",
        title="The sweep ratio under non-uniform cost profiles",
        claim=(
            "Full re-runs of every site cost ρ times what their cones cost; ρ tends to (q+2)/(q+1) when "
            "layers grow like j^q towards the output, and to q+2 when they grow towards the input."
        ),
        rows=rows,
        compared=(
            "ρ from the ledger equals the closed form at finite L, as fractions, and the paper in every "
            "printed digit; the limits equal the paper's predicted ones in every printed digit"
        ),
        notes=(
            (
                "Every site of every graph was patched in a fork of a warm world and the output demanded; "
                "ρ is L times the nodes of a full run over the nodes recomputed."
            ),
            (
                "Each graph is a chain of about 4,000 unary nodes with one terminal node, which counts; the "
                "site of a layer is its last node."
            ),
            (
                "Beside each limit stands the ratio measured at the greatest depth. For q = 2 it moves away "
                "from the limit again between L = 160 and L = 320: there the lightest layers would have less "
                "than one node, and are rounded up to one."
            ),
        ),
        seconds=time.perf_counter() - started,
        versions=versions(),
    )


def _limits(rows: Sequence[Row]) -> list[Row]:
    """The paper's column of predictions: limits, each beside the ratio at the greatest depth."""
    deepest = {(row.facts["q"], row.facts["profile"]): row for row in rows if "limit" in row.facts}
    return [
        Row(
            name=f"limit of ρ, {profile}, q = {q:g}; measured: at L = {row.facts['L']}",
            paper=PAPER_LIMITS[q, profile],
            predicted=limit_ratio(q, profile),
            measured=row.measured,
            paper_predicts=True,
            facts={"q": q, "profile": profile},
        )
        for (q, profile), row in deepest.items()
    ]


def _nearing(rows: Sequence[Row], depths: Sequence[int]) -> list[Row]:
    """How many of the profiles are nearer to their limit at the greatest depth than at a smaller one."""
    lines: dict[tuple[float, Profile], dict[int, Row]] = {}
    for row in rows:
        if "limit" in row.facts:
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
        found.append(Row(name, None, counts[0], counts[1]))
    return found
