"""Locality, counted edge by edge and timed over sizes: a wave costs O(|V⁺| + |E⁺|), whatever the graph."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from conewise.paper.experiments.result import (
    Progress,
    Result,
    Row,
    experiment,
    scanning,
    silent,
    tracked,
    trimmed_median,
    warm,
)
from conewise.paper.theory.clocks import Estimate, Fit, least_squares
from conewise.paper.theory.sweeps import Touched, demand_size, wave_size
from conewise.reactive.graph import Graph, Site
from conewise.reactive.world import World
from conewise.threads import gc_paused

SIZES = (500, 2_000, 8_000)
DEGREES = (1, 2, 4, 8)
SITES, WINDOW, ROUNDS = 10, 16, 9
SEED = 0

SMALL = 100
"""Waves that touch less take the time of a patch, whatever they touch."""


@dataclass(frozen=True, slots=True)
class Wave:
    """A patch: what theory predicts that its wave, and the demand after it, touch, and what was counted."""

    size: int
    degree: int
    site: Site
    predicted: Touched
    touched: Touched
    demand: Touched
    looked_at: Touched
    elsewhere: int
    milliseconds: float


@experiment("What a wave touches, and how long it takes")
def locality(progress: Progress = silent, sizes: tuple[int, ...] = SIZES, rounds: int = ROUNDS) -> Result:
    """Send waves through random graphs of each size and density: counted by an instrument, then timed.

    Claim (Theorem "structural locality"): A wave looks at 1 + |V⁺| nodes and follows |E⁺| + d(s) edges, each
    once, and takes time in proportion; a demand goes through stale nodes and no others, however large the
    graph.

    Compared: nodes looked at and edges followed, counted by an instrument on the graph's own lists, equal the
    closed form exactly. Times are reported with the quality of the fit; they are not judged.
    """
    cases = list(product(sizes, DEGREES))
    waves = [wave for case in tracked(cases, progress) for wave in _waves(*case, rounds)]
    details = [
        Row(
            f"{wave.size} nodes of {wave.degree} inputs, patch of {wave.site}, nodes and edges touched",
            wave.predicted.total,
            wave.touched.total,
            detail=True,
            facts={
                "nodes": wave.size,
                "degree": wave.degree,
                "nodes_touched": wave.touched.nodes,
                "edges_followed": wave.touched.edges,
                "milliseconds": wave.milliseconds,
            },
        )
        for wave in waves
    ]
    fitted, line = _times(waves)
    return Result(
        [*_counts(waves), *fitted, *details],
        f"""
        Graphs of {sizes[0]:,} to {sizes[-1]:,} nodes, each of which reads 1, 2, 4 or 8 of the {WINDOW} before
        it, at random. In each, {SITES} sites from the first node to the last were patched in a fork of a warm
        world; the wave is timed, and the demand after it is not.

        The instrument stands in for the graph's lists of readers and of inputs, and counts each look at a
        node and each edge that is read; the engine does not know of it. Times are taken without it, of the
        processor alone: the median of the faster half of {rounds} patches each, sites in turns.

        E⁺ are the edges inside of the cone, d(s) the readers of s, at most |V⁺| of them.
        """,
        SEED,
        series={
            "touched": [wave.touched.total for wave in waves],
            "milliseconds": [wave.milliseconds for wave in waves],
            "degree": [wave.degree for wave in waves],
            "line": [coefficient.value for coefficient in line.coefficients],
        },
    )


def windowed(size: int, degree: int, seed: int = SEED) -> Graph:
    """Build a random graph: each of `size` nodes reads `degree` different ones of the 16 before it."""
    chosen = random.Random(f"{seed} {size} {degree}")
    graph = Graph()
    sites = [graph.source("x", 1.0)]
    for number in range(size):
        before = sites[-WINDOW:]
        reads = chosen.sample(before, min(degree, len(before)))
        sites.append(graph.node(f"n{number}", _mean, reads))
    return graph


def _mean(*values: float) -> float:
    return sum(values) / len(values)


def _waves(size: int, degree: int, rounds: int) -> list[Wave]:
    graph = windowed(size, degree)
    sites = [f"n{round((size - 1) * k / (SITES - 1))}" for k in range(SITES)]
    base = warm(graph, graph.computed)
    times: dict[Site, list[float]] = {site: [] for site in sites}
    gc.collect()
    with gc_paused():
        for _ in range(rounds):
            for site in sites:
                with base.fork() as world:
                    # Of this thread alone: a wave of milliseconds is not charged for what else runs.
                    started = time.thread_time()
                    world.patch(site, 2.0)
                    times[site].append(1e3 * (time.thread_time() - started))
    return [_counted(base, size, degree, site, trimmed_median(times[site], trim=0.5)) for site in sites]


def _counted(base: World, size: int, degree: int, site: Site, milliseconds: float) -> Wave:
    graph = base.graph
    cone = graph.cone(site)
    with base.fork() as world, scanning(graph) as scan:
        world.patch(site, 2.0)
        touched = scan.down.touched
        scan.clear()
        world.plan(cone)
        looked_at = scan.up.touched
        scan.clear()
        world.demand(cone)
        elsewhere = set(scan.up.nodes) - set(graph.numbers(cone))
    return Wave(
        size,
        degree,
        site,
        wave_size(graph, site),
        touched,
        demand_size(graph, site, cone),
        looked_at,
        len(elsewhere),
        milliseconds,
    )


def _counts(waves: Sequence[Wave]) -> list[Row]:
    """Return the totals of each density, and of the demands."""
    rows: list[Row] = []

    def add(at: str, predicted: list[Touched], touched: list[Touched]) -> None:
        for unit, doing in (("nodes", "nodes looked at"), ("edges", "edges followed")):
            one, other = (sum(getattr(each, unit) for each in those) for those in (predicted, touched))
            rows.append(Row(f"{at}, {doing}", one, other, unit=unit))

    for degree in dict.fromkeys(wave.degree for wave in waves):
        those = [wave for wave in waves if wave.degree == degree]
        at = f"{len(those)} waves through nodes of {degree} input{'s' if degree > 1 else ''}"
        add(at, [wave.predicted for wave in those], [wave.touched for wave in those])
    at = f"{len(waves)} demands of all that is stale, to decide"
    add(at, [wave.demand for wave in waves], [wave.looked_at for wave in waves])
    name = f"{len(waves)} demands, nodes looked at that are not stale"
    return [*rows, Row(name, 0, sum(wave.elsewhere for wave in waves), unit="nodes")]


def _times(waves: Sequence[Wave]) -> tuple[list[Row], Fit]:
    """Fit one slope for nodes and edges, one for each, what the graph's size adds, and the power."""
    times = [wave.milliseconds for wave in waves]
    line = least_squares([(wave.touched.total, 1.0) for wave in waves], times)
    columns = [(wave.touched.nodes, wave.touched.edges, wave.size, 1.0) for wave in waves]
    apart = least_squares(columns, times)
    large = [wave for wave in waves if wave.touched.total > SMALL]
    power = least_squares(
        [(math.log(wave.touched.total), 1.0) for wave in large],
        [math.log(wave.milliseconds) for wave in large],
    )
    node, edge, idle, _ = apart.coefficients
    above = f"power of nodes and edges touched that time grows with, above {SMALL} of them"

    def fitted(name: str, estimate: Estimate, unit: str = "ms", times: float = 1.0) -> Row:
        facts = {"low": times * estimate.low, "high": times * estimate.high}
        return Row(name, None, times * estimate.value, exact=False, unit=unit, facts=facts)

    return [
        fitted("a wave, per 1,000 nodes and edges touched", line.coefficients[0], times=1e3),
        fitted("a wave, fixed", line.coefficients[1]),
        Row("R² of time against nodes and edges touched", None, line.r_squared, exact=False),
        fitted("a wave, per 1,000 nodes looked at", node, times=1e3),
        fitted("a wave, per 1,000 edges followed", edge, times=1e3),
        fitted("a wave, per 1,000 nodes of the graph that it does not touch", idle, times=1e3),
        Row("R² with the three apart", None, apart.r_squared, exact=False),
        fitted(above, power.coefficients[0], ""),
    ], line
