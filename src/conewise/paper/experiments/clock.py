"""The clock of E9: full re-runs against patches of a Llama-style transformer, at one size and on a grid."""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

from conewise.paper.experiments.result import Progress, Row, shifted, silent, warm
from conewise.paper.experiments.transformers import (
    PatchedSite,
    Transformer,
    describe_device,
    inner_width,
    llama,
    one_thread,
)
from conewise.paper.theory.clocks import Calibration, calibrate, wallclock_ceiling, wallclock_ratio
from conewise.paper.theory.transformers import transformer_cone, transformer_ratio
from conewise.program.walk import bitwise_same
from conewise.reactive.world import World
from conewise.sweeps.planning.costs import synchronize
from conewise.threads import gc_paused

SEED = 0
POSITIONS = 20


@dataclass(frozen=True, slots=True)
class Size:
    """A transformer of the paper: its shape, and the figures that the paper prints of it."""

    layers: int
    heads: int
    width: int
    sites: str
    predicted: str
    wallclock: str
    distance: str
    cpu_width: int

    @property
    def name(self) -> str:
        """The size in words."""
        return f"{self.layers} layers, {self.heads} heads"

    @property
    def all_sites(self) -> int:
        """The number of its heads and MLPs."""
        return self.layers * (self.heads + 1)

    def ratio(self, *, readout: bool = False) -> Fraction:
        """The closed form of its sweep ratio."""
        return transformer_ratio(self.layers, self.heads, readout=readout)


@dataclass(frozen=True, slots=True)
class Clock:
    """A timed sweep: the seconds that were spent on each site, a list for each repetition.

    `full` are full re-runs in a fresh world; `again` recompute everything in a fork, as a patch of the
    input does, on the very path of the patches; `patched` are the patches.
    A head that stands for all heads of its layer has its seconds multiplied by their number, its share.
    """

    size: Size
    width: int
    device: str
    timed_sites: int
    nodes: int
    compared: int
    different: int
    positions: int = POSITIONS
    cones: list[int] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)
    full: list[list[float]] = field(default_factory=list)
    again: list[list[float]] = field(default_factory=list)
    patched: list[list[float]] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """ρ: full over patched, for each repetition."""
        return [sum(full) / sum(patched) for full, patched in zip(self.full, self.patched, strict=True)]

    @property
    def ratio(self) -> float:
        """Full over patched, where each site has its median over the repetitions."""
        return _typical(self.full) / _typical(self.patched)

    @property
    def ratio_again(self) -> float:
        """Everything recomputed in a fork over patched: what locality alone brings."""
        return _typical(self.again) / _typical(self.patched)

    @property
    def note(self) -> str:
        """A description of what was timed."""
        sites = self.size.all_sites
        sample = (
            f"all {sites} sites"
            if self.timed_sites == sites
            else f"{self.timed_sites} of {sites} sites (one head and the MLP of each layer, weighted)"
        )
        paper = "the paper's" if self.width == self.size.width else f"the paper's is {self.size.width}"
        return (
            f"Clock, {self.size.name}: {self.device}, float32, {self.positions} positions, d_model "
            f"{self.width} ({paper}), {sample}, {len(self.full)} interleaved repetitions."
        )

    def rows(self) -> list[Row]:
        """Return the ratio beside the paper's, and the number of wrong answers."""
        at, size = f"clock, {self.size.name}", self.size
        again = "all recomputed in a fork over patches, seconds"
        differ = f"patched outputs that differ in a bit from a full re-run, of {self.compared}"
        return [
            Row(
                f"{at}, full re-runs over patches, seconds",
                size.ratio(),
                self.ratio,
                size.wallclock,
                exact=False,
                facts=self.as_dict(),
            ),
            Row(f"{at}, {again}", size.ratio(readout=True), self.ratio_again, exact=False),
            Row(f"{at}, {differ}", 0, self.different),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON takes them."""
        prediction = float(self.size.ratio())
        return {
            "layers": self.size.layers,
            "heads": self.size.heads,
            "width": self.width,
            "positions": self.positions,
            "device": self.device,
            "sites": self.size.all_sites,
            "timed_sites": self.timed_sites,
            "nodes": self.nodes,
            "ratio": self.ratio,
            "ratio_all_recomputed_in_a_fork": self.ratio_again,
            "ratios": self.ratios,
            "prediction": prediction,
            "prediction_readout_counted": float(self.size.ratio(readout=True)),
            "distance_percent": 100 * (self.ratio / prediction - 1),
            "paper_ratio": float(self.size.wallclock),
            "full_seconds": _typical(self.full),
            "all_recomputed_in_a_fork_seconds": _typical(self.again),
            "patched_seconds": _typical(self.patched),
            "outputs_compared": self.compared,
            "outputs_different": self.different,
        }


@one_thread()
def clock(
    size: Size,
    device: str,
    *,
    full: bool,
    repetitions: int,
    progress: Progress = silent,
    positions: int = POSITIONS,
    drawn_on: str = "cpu",
    compared: int | None = None,
) -> Clock:
    """Time full re-runs against patches through the engine, on one CPU thread or on an accelerator.

    `full`: the paper's width and every site. Else the narrow width, one head and the MLP of each layer,
    a head's time taken for all heads of its layer. A full re-run is a demand of the readout in a fresh
    world; a patch is a fork, the patch and the demand; between the two stands a fork in which the input is
    set again, so that all is recomputed. They are timed site by site, one after the other, in an order
    that changes; the device is waited for before and after each. Outputs are compared at all sites, or
    at so many of them.
    """
    width = size.width if full else size.cpu_width
    shape = size.layers, size.heads, width
    model = llama(*shape, positions=positions, device=device, seed=SEED, drawn_on=drawn_on)
    sites = list(model.patched)
    if not full:
        sites = [p for p in sites if p.kind == "mlp" or p.site.endswith(".head0.out")]
    share = {"head": 1 if full else size.heads, "mlp": 1}
    base = warm(model.graph, model.output)
    x = base.demand("x")
    values = {patched.site: shifted(base, patched.site) for patched in sites}

    def run_fully() -> None:
        with World(model.graph, keep_sites=False) as world:
            world.demand(model.output)

    def run_again() -> None:
        with base.fork() as world:
            world.set("x", x)
            world.demand(model.output)

    def run_patched(patched: PatchedSite) -> None:
        with base.fork() as world:
            world.patch(patched.site, values[patched.site])
            world.demand(model.output)

    looked_at = sites[:: -(-len(sites) // (compared or len(sites)))]
    timed = Clock(
        size,
        width,
        describe_device(device)["device"],
        timed_sites=len(sites),
        nodes=model.computed,
        compared=len(looked_at),
        different=sum(not _agrees(model, base, p.site, values[p.site]) for p in looked_at),
        positions=positions,
        cones=[transformer_cone(size.layers, size.heads, p.layer, p.kind) for p in sites],
        shares=[share[p.kind] for p in sites],
    )
    for patched in sites[:: max(1, len(sites) // 10)]:
        run_fully()
        run_again()
        run_patched(patched)
    shuffled, order = random.Random(SEED), list(range(len(sites)))
    for repetition in range(repetitions):
        shuffled.shuffle(order)
        spent = {name: [0.0] * len(sites) for name in ("full", "again", "patched")}
        gc.collect()
        with gc_paused():
            for step, number in enumerate(order):
                patched = sites[number]
                tasks: dict[str, Callable[[], None]] = {
                    "full": run_fully,
                    "again": run_again,
                    "patched": partial(run_patched, patched),
                }
                for name in list(tasks) if (step + repetition) % 2 else reversed(tasks):
                    spent[name][number] = share[patched.kind] * _seconds(model, tasks[name])
        timed.full.append(spent["full"])
        timed.again.append(spent["again"])
        timed.patched.append(spent["patched"])
        progress(repetition + 1, repetitions)
    return timed


def _typical(repetitions: list[list[float]]) -> float:
    """Return the sum over sites of the median over repetitions."""
    return math.fsum(statistics.median(seconds) for seconds in zip(*repetitions, strict=True))


def _seconds(model: Transformer, task: Callable[[], None]) -> float:
    synchronize(model.device)
    started = time.perf_counter()
    task()
    synchronize(model.device)
    return time.perf_counter() - started


def _agrees(model: Transformer, base: World, site: str, value: Any) -> bool:
    """True if a patched fork answers bit for bit what a full run does that overwrites the site's value.

    The full run computes every node, the site's own value included; the ledger shows it.
    """
    with base.fork() as fork, World(model.graph, keep_sites=False) as fresh:
        fork.patch(site, value)
        fresh.patch(site, lambda _: value)
        same = bitwise_same(fork.demand(model.output), fresh.demand(model.output))
        return same and fresh.ledger.count("recomputed") == model.computed


# -- The grid of widths and lengths: where the cost beside the nodes stops mattering ------------------

WIDTHS, LENGTHS, HEADS = (256, 768, 1536, 3072), (20, 128, 512, 2048), 8
DEPTHS, JUDGED = (2, 4, 8), 12
"""Constants are fitted to models of these depths, and judged at another one, which no fit has seen."""
BAND = 0.05
"""The clock has to lie so near the corollary's ratio where launches bound it. Where work does, which no
node has as much of as another, it has to lie between the ratios of counts and of work, or so near them."""
LEAST = 1e-12
BOUND = 1.5
"""Launches bind where a node takes at most so many times what it takes at the cheapest point."""


@dataclass(frozen=True, slots=True)
class Point:
    """One width and length: the clock of the judged depth, and the constants from the other depths.

    `fresh` is what a node costs in a fresh world, `ratio` the paper's (a fresh run over a patch), `again`
    that of one path for both. That is predicted: as `counts` by the corollary with the constants, as `work`
    by multiplications alone, as `plain` by the corollary without any cost beside the nodes.
    """

    width: int
    length: int
    fitted: Calibration
    fresh: float
    ratio: float
    again: float
    counts: float
    work: float
    plain: float
    compared: int
    different: int

    @property
    def a(self) -> float:
        """The seconds that a node takes, by the fit; next to nothing where noise has put it below."""
        return max(self.fitted.a.value, LEAST)

    @property
    def share(self) -> float:
        """The most that β takes off the limit of 2, by the upper end of its interval, as a share of it."""
        return 1 - float(wallclock_ceiling(self.a, max(self.fitted.beta.high, 0.0))) / 2

    def row(self, cheapest: float) -> Row:
        """Judge the clock; `cheapest` is the least that a node takes in the grid."""
        is_bound = self.a <= BOUND * cheapest
        ends = (self.counts,) if is_bound else (self.counts, self.work)
        return Row(
            f"clock, d_model {self.width}, {self.length} positions, all recomputed over patches",
            self.counts,
            self.again,
            exact=False,
            band=(min(ends) * (1 - BAND), max(ends) * (1 + BAND)),
            facts={"grid": True, "bound_by": "launches" if is_bound else "work", **self.as_dict()},
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON takes them."""
        fitted = self.fitted
        assert fitted.intercept is not None
        return {
            "width": self.width,
            "length": self.length,
            "a_us": 1e6 * fitted.a.value,
            "fresh_us": 1e6 * self.fresh,
            "beta_over_a": fitted.beta.value / self.a,
            "beta_over_a_interval": [fitted.beta.low / self.a, fitted.beta.high / self.a],
            "intercept_us": 1e6 * fitted.intercept.value,
            "r_squared": fitted.r_squared,
            "ratio": self.ratio,
            "ratio_all_recomputed_in_a_fork": self.again,
            "by_corollary": self.counts,
            "by_work": self.work,
            "by_counts_alone": self.plain,
            "distance_percent": 100 * (self.ratio / self.plain - 1),
            "most_that_beta_takes_percent": 100 * self.share,
            "outputs_compared": self.compared,
            "outputs_different": self.different,
        }


def point(
    width: int,
    length: int,
    device: str,
    *,
    depths: Sequence[int] = DEPTHS,
    judged: int = JUDGED,
    heads: int = HEADS,
    repetitions: int = 2,
) -> Point:
    """Time all depths at one width and length, fit the constants to `depths`, predict the `judged` one."""

    def timed(layers: int) -> Clock:
        size = Size(layers, heads, width, "", "", "", "", width)
        return clock(
            size,
            device,
            full=False,
            repetitions=repetitions,
            positions=length,
            drawn_on=device,
            compared=4,
        )

    seen, last = [timed(layers) for layers in depths], timed(judged)
    samples: list[tuple[float, float, float]] = []
    fresh: list[float] = []
    for one in seen:
        for number, (cone, share) in enumerate(zip(one.cones, one.shares, strict=True)):
            for reach, spent in ((cone, one.patched), (one.nodes, one.again)):
                seconds = statistics.median(run[number] for run in spent) / share
                samples.append((reach, one.nodes, seconds))
            fresh.append(statistics.median(run[number] for run in one.full) / share / one.nodes)
    fitted = calibrate(samples)
    cones = [cone for cone, share in zip(last.cones, last.shares, strict=True) for _ in range(share)]
    constants = max(fitted.a.value, LEAST), max(fitted.beta.value, 0.0)
    assert fitted.intercept is not None
    return Point(
        width,
        length,
        fitted,
        statistics.median(fresh),
        last.ratio,
        last.ratio_again,
        float(wallclock_ratio(cones, last.nodes, *constants, max(fitted.intercept.value, 0.0))),
        by_work(judged, heads, width, length),
        float(wallclock_ratio(cones, last.nodes, 1, 0)),
        sum(one.compared for one in (*seen, last)),
        sum(one.different for one in (*seen, last)),
    )


def by_work(layers: int, heads: int, width: int, length: int) -> float:
    """The ratio of a sweep over all heads and MLPs in multiplications of products alone."""
    behind_a_head = length * (width * width + 3 * width * inner_width(width))
    layer = behind_a_head + 3 * length * width * width + 2 * length * length * width
    deeper = sum((layers - i) * layer for i in range(1, layers + 1))
    patched = (heads + 1) * deeper + layers * heads * behind_a_head
    return layers * (heads + 1) * layers * layer / patched


def grid(
    device: str,
    progress: Progress = silent,
    *,
    widths: Sequence[int] = WIDTHS,
    lengths: Sequence[int] = LENGTHS,
    seconds: float = math.inf,
    tell: Callable[[Point], object] = lambda _: None,
    **how: Any,
) -> list[Row]:
    """Time all points, those with the least work first, and judge each.

    After `seconds` no further point is begun. `tell` is given each point as soon as it is timed.
    """
    points: list[Point] = []
    started = time.perf_counter()
    asked = sorted(itertools.product(widths, lengths), key=lambda at: at[0] ** 2 * at[1])
    for width, length in asked:
        if points and time.perf_counter() - started > seconds:
            break
        points.append(point(width, length, device, **how))
        tell(points[-1])
        progress(len(points), len(asked))
    cheapest = min(one.a for one in points)
    wrong = sum(one.different for one in points)
    compared = sum(one.compared for one in points)
    points.sort(key=lambda one: (one.width, one.length))
    return [
        *(one.row(cheapest) for one in points),
        Row(f"clock, patched outputs that differ in a bit from a full re-run, of {compared}", 0, wrong),
    ]


def table(rows: Sequence[Row]) -> list[str]:
    """Return the points as a table in Markdown."""
    lines = [
        (
            "| d_model | positions | a, µs | fresh, µs | β/a (95 %) | full re-run / patch | β = 0 | "
            "distance | one path | corollary | by work | in the band |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if (at := row.facts) and row.band is not None:
            low, high = at["beta_over_a_interval"]
            lines.append(
                f"| {at['width']} | {at['length']} | {at['a_us']:.1f} | {at['fresh_us']:.1f} | "
                f"{at['beta_over_a']:.4f} ({low:.4f} to {high:.4f}) | {at['ratio']:.3f} | "
                f"{at['by_counts_alone']:.3f} | {at['distance_percent']:+.1f} % | "
                f"{at['ratio_all_recomputed_in_a_fork']:.3f} | {at['by_corollary']:.3f} | "
                f"{at['by_work']:.3f} | "
                f"{row.band[0]:.3f} to {row.band[1]:.3f}: {'yes' if row.match else 'no'} |"
            )
    return lines
