"""E9: all cones of a transformer in closed form, and the ratio on the clock, at two sizes and on a grid.

    python -m conewise.paper.experiments.e9 --device cuda --full
    python -m conewise.paper.experiments.e9 --device cuda --grid

times both sizes as the paper did, or a grid of widths and lengths, and prints one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

from conewise.paper.experiments.result import (
    Progress,
    Result,
    Row,
    agreed,
    experiment,
    patch_cost,
    rows_of,
    shifted,
    silent,
    versions,
    warm,
)
from conewise.paper.experiments.transformers import (
    PatchedSite,
    Transformer,
    best_device,
    describe_device,
    encoder_style,
    gpt2_style,
    inner_width,
    llama,
    one_thread,
)
from conewise.paper.theory.clocks import Calibration, calibrate, wallclock_ceiling, wallclock_ratio
from conewise.paper.theory.transformers import (
    COMPONENTS,
    blueprint,
    encoder_cone,
    encoder_ratio,
    gpt2_cone,
    gpt2_ratio,
    transformer_cone,
    transformer_ratio,
)
from conewise.program.walk import bitwise_same
from conewise.reactive.world import World
from conewise.sweeps.planning.costs import synchronize
from conewise.threads import gc_paused

SEED, POSITIONS, REPETITIONS = 0, 20, 2


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


SIZES = (
    Size(12, 12, 768, sites="156", predicted="2.145", wallclock="2.121", distance="1.14", cpu_width=192),
    Size(24, 16, 1024, sites="408", predicted="2.073", wallclock="2.101", distance="1.33", cpu_width=256),
)


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture: the function that builds its graph, and its closed forms."""

    name: str
    build: Callable[[int, int], Transformer]
    cone: Callable[..., int]
    ratio: Callable[..., Fraction]


# With heads of two numbers and four positions: the cones are the same.
LLAMA = Family(
    "Llama-style",
    lambda layers, heads: llama(layers, heads, 2 * heads, positions=4, seed=SEED),
    transformer_cone,
    transformer_ratio,
)
OTHERS = (
    Family("GPT-2-style", gpt2_style, gpt2_cone, gpt2_ratio),
    Family("encoder", encoder_style, encoder_cone, encoder_ratio),
)


# -- Cones -----------------------------------------------------------------------------------------


@experiment("Transformer cones, and the ratio on the clock", "torch")
def e9(progress: Progress = silent, sizes: Sequence[Size] = SIZES) -> Result:
    """Count all cones of both sizes, and of other families; then time them on the device that is there.

    Claim: The cone of a head in layer i has 10 + (L−i)(7H+15) nodes, that of an MLP 2 + (L−i)(7H+15), and the
    sweep ratio that follows is 2.145 and 2.073 at the paper's two sizes, where its clock showed 2.121 and
    2.101.

    Compared: every cone and every ratio of counts equals the closed form exactly; patched outputs equal full
    re-runs bit for bit; ratios of times are reported with their distance from the prediction.
    """
    device = best_device()
    counted = [(LLAMA, size.layers, size.heads) for size in sizes]
    counted += [(family, 12, 12) for family in OTHERS]
    work = 2 * len(counted) + 3 * len(sizes)
    done = 0
    rows: list[Row] = []
    with one_thread():
        for family, layers, heads in counted:
            rows.extend(count(family, layers, heads))
            done += 2
            progress(done, work)
        clocks = []
        for size in sizes:
            clocks.append(clock(size, device, full=device != "cpu", repetitions=REPETITIONS))
            rows.extend(clocks[-1].rows())
            done += 3
            progress(done, work)
        if device != "cpu" and len(sizes) == len(SIZES):
            rows.extend(grid(device))
    matches = [row.match for row in rows if row.facts.get("family") == LLAMA.name]
    sites = sum(size.all_sites for size in sizes)
    right = "Llama-style, sites of both sizes with the cone of the closed form"
    printed = [
        Row(right, sites, matches.count(True), "564"),
        Row("Llama-style, cones that differ from the closed form, of 564", 0, matches.count(False), "0"),
    ]
    return Result(
        [*printed, *rows] if len(sizes) == len(SIZES) else rows,
        "\n\n".join([NOTES, *(timed.note for timed in clocks)]),
        SEED,
        versions=describe_device(device),
        series={"clock": [timed.as_dict() for timed in clocks]},
    )


NOTES = """
    Each cone is what the engine recomputed after a patch of that head or MLP and a demand of the readout.
    Cones were counted with heads of two numbers, at four positions: they do not depend on width or length.

    The paper's ρ(L,H) leaves the readout out of N and has it in every cone; the rows called 'readout counted'
    have it in both.

    The clock's full re-run is a demand in a fresh world, which has no forks to look through and is cheaper
    per node than a patched fork. Recomputing all in a fork takes the patches' own path: that ratio shows
    locality alone.

    The paper prints that its clock is 1.14 and 1.33 per cent away from ρ. The second follows from the printed
    2.101. From the printed 2.121 follow 1.11; 1.14 needs the end of what rounds to it, 2.1205.

    GPT-2-style: LayerNorm, fused q, k, v; encoder: LayerNorm after each half. Biases are nodes.
"""


def count(family: Family, layers: int, heads: int) -> list[Row]:
    """Patch every head and every MLP; a row for each cone, and one for each ratio."""
    model = family.build(layers, heads)
    base = warm(model.graph, model.output)
    at, shape = f"{family.name}, {layers} layers, {heads} heads", {"layers": layers, "heads": heads}
    cones = []
    for patched in model.patched:
        cost = patch_cost(base, patched.site, shifted(base, patched.site), model.output)
        assert cost.invalidated == cost.recomputed, "the readout demands the whole cone"
        facts = {"family": family.name, **shape, "layer": patched.layer, "kind": patched.kind}
        predicted = family.cone(**shape, layer=patched.layer, site=patched.kind)
        name = f"{at}, cone of {patched.site}"
        cones.append(Row(name, predicted, cost.recomputed, unit="nodes", detail=True, facts=facts))
    full, total = base.ledger.count("recomputed"), sum(row.measured for row in cones)
    is_llama = family is LLAMA
    size = next((one for one in SIZES if is_llama and (one.layers, one.heads) == (layers, heads)), None)
    ratio = Fraction(len(cones) * (full - 1), int(total))
    right = sum(row.match is True for row in cones)
    with_readout = family.ratio(layers, heads, readout=True), Fraction(len(cones) * full, int(total))
    sites, printed = (size.sites, size.predicted) if size is not None else (None, None)
    facts = {**shape, "nodes": full}
    closed = f"{at}, sites with the cone of the closed form"
    return [
        *(_layers(model, cones, at, layers, heads) if is_llama else ()),
        *(_distances(size, ratio, at) if size is not None else ()),
        Row(closed, layers * (heads + 1), right, sites, facts=facts),
        Row(f"{at}, ρ", family.ratio(layers, heads), ratio, printed, facts=facts),
        *rows_of(at, ("ρ, readout counted", *with_readout), facts=facts),
        *cones,
    ]


def _layers(model: Transformer, cones: Sequence[Row], at: str, layers: int, heads: int) -> list[Row]:
    """Return what the paper prints of a layer: its nodes, parameters among them, its sites, its boundary."""
    graph, where = model.graph, [f"layer{layer}." for layer in range(1, layers + 1)]
    held = [[site for site in graph.sites if site.startswith(layer)] for layer in where]
    nodes = agreed({len(sites) for sites in held})
    parameters = agreed({sum(site in graph.params for site in sites) for sites in held})
    computed = agreed({sum(not graph.is_source(site) for site in sites) for sites in held})
    kinds = [patched.kind for patched in model.patched]
    last = sum(row.measured for row in cones if row.facts["layer"] == layers)
    is_printed = (layers, heads) in {(size.layers, size.heads) for size in SIZES}
    printed = (str(layers * heads), str(layers)) if is_printed else (None, None)
    shape = blueprint("llama", layers, heads)
    of_layer = [site for site, _ in shape.nodes if site.startswith("layers.1.")]
    own = sum(site in shape.params for site in of_layer)
    head, mlp = (transformer_cone(layers, heads, layers, kind) for kind in COMPONENTS)
    end = f"{at}, cones of the last layer together, 10H+2"
    return [
        Row(f"{at}, nodes of each layer, 7H+24", len(of_layer), nodes, str(7 * heads + 24)),
        Row(f"{at}, of which parameters", own, parameters, "9"),
        Row(f"{at}, of which computed, M = 7H+15", len(of_layer) - own, computed, str(7 * heads + 15)),
        Row(f"{at}, heads swept", layers * heads, kinds.count("head"), printed[0]),
        Row(f"{at}, MLPs swept", layers, kinds.count("mlp"), printed[1]),
        Row(end, heads * head + mlp, last, str(10 * heads + 2), unit="nodes"),
    ]


def _distances(size: Size, ratio: Fraction, at: str) -> list[Row]:
    """Return the distance of the paper's clock from ρ, in per cent, as printed and as its clock has it."""
    clock, half = Fraction(size.wallclock), Fraction(1, 2000)

    def distance(of: Fraction, from_: Fraction) -> Fraction:
        return 100 * abs(of / from_ - 1)

    def is_possible(rho: Fraction) -> int:
        allowed = sorted(round(distance(one, rho), 2) for one in (clock - half, clock, clock + half))
        return int(allowed[0] <= Fraction(size.distance) <= allowed[-1])

    far = f"{at}, distance of the paper's clock, {size.wallclock}, from ρ, per cent"
    possible = f"whether {size.wallclock}, within its rounding, can be {size.distance} per cent away"
    given = size.ratio()
    return [
        Row(far, distance(clock, given), distance(clock, ratio), size.distance, exact=False),
        Row(f"{at}, {possible}", is_possible(given), is_possible(ratio)),
    ]


# -- The clock: full re-runs against patches, at one size ------------------------------------------


@dataclass(frozen=True, slots=True)
class Clock:
    """A timed sweep: `spent` has the seconds of each site, a list for each repetition, by what was run.

    "full" are full re-runs in a fresh world; "again" recomputes everything in a fork, as a patch of the
    input does, on the very path of the patches; "patched" are the patches. A head that stands for all heads
    of its layer has its seconds multiplied by their number, its share.
    """

    size: Size
    width: int
    device: str
    positions: int
    nodes: int
    cones: list[int]
    shares: list[int]
    compared: int
    different: int
    spent: dict[str, list[list[float]]] = field(
        default_factory=lambda: {"full": [], "again": [], "patched": []}
    )

    def seconds(self, run: str) -> float:
        """Return the sum over sites of the median over repetitions."""
        return math.fsum(statistics.median(seconds) for seconds in zip(*self.spent[run], strict=True))

    def ratio(self, run: str = "full") -> float:
        """Return ρ: a run over patches. "again" over patches is what locality alone brings."""
        return self.seconds(run) / self.seconds("patched")

    @property
    def note(self) -> str:
        """A description of what was timed."""
        sites, timed = self.size.all_sites, len(self.cones)
        part = f"{timed} of {sites} sites (one head and the MLP of each layer, weighted)"
        paper = "the paper's" if self.width == self.size.width else f"the paper's is {self.size.width}"
        return (
            f"Clock, {self.size.name}: {self.device}, float32, {self.positions} positions, d_model "
            f"{self.width} ({paper}), {f'all {sites} sites' if timed == sites else part}, "
            f"{len(self.spent['full'])} interleaved repetitions."
        )

    def rows(self) -> list[Row]:
        """Return the ratio beside the paper's, and the number of wrong answers."""
        at, size, facts = f"clock, {self.size.name}", self.size, self.as_dict()
        full, again = f"{at}, full re-runs over patches", f"{at}, all recomputed in a fork over patches"
        differ = f"{at}, patched outputs that differ in a bit from a full re-run, of {self.compared}"
        return [
            Row(f"{full}, seconds", size.ratio(), self.ratio(), size.wallclock, exact=False, facts=facts),
            Row(f"{again}, seconds", size.ratio(readout=True), self.ratio("again"), exact=False),
            Row(differ, 0, self.different),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON takes them."""
        prediction = float(self.size.ratio())
        runs = zip(self.spent["full"], self.spent["patched"], strict=True)
        return {
            "layers": self.size.layers,
            "heads": self.size.heads,
            "width": self.width,
            "positions": self.positions,
            "device": self.device,
            "sites": self.size.all_sites,
            "timed_sites": len(self.cones),
            "nodes": self.nodes,
            "ratio": self.ratio(),
            "ratio_all_recomputed_in_a_fork": self.ratio("again"),
            "ratios": [sum(full) / sum(patched) for full, patched in runs],
            "prediction": prediction,
            "prediction_readout_counted": float(self.size.ratio(readout=True)),
            "distance_percent": 100 * (self.ratio() / prediction - 1),
            "paper_ratio": float(self.size.wallclock),
            "full_seconds": self.seconds("full"),
            "all_recomputed_in_a_fork_seconds": self.seconds("again"),
            "patched_seconds": self.seconds("patched"),
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
    width, share = size.width if full else size.cpu_width, {"head": 1 if full else size.heads, "mlp": 1}
    shape = size.layers, size.heads, width
    model = llama(*shape, positions=positions, device=device, seed=SEED, drawn_on=drawn_on)
    sites = [p for p in model.patched if full or p.kind == "mlp" or p.site.endswith(".head0.out")]
    base = warm(model.graph, model.output)
    x, values = base.demand("x"), {one.site: shifted(base, one.site) for one in sites}

    def run(what: str, patched: PatchedSite) -> None:
        with World(model.graph, keep_sites=False) if what == "full" else base.fork() as world:
            if what == "again":
                world.set("x", x)
            elif what == "patched":
                world.patch(patched.site, values[patched.site])
            world.demand(model.output)

    looked_at = sites[:: -(-len(sites) // (compared or len(sites)))]
    timed = Clock(
        size,
        width,
        describe_device(device)["device"],
        positions,
        model.computed,
        cones=[transformer_cone(size.layers, size.heads, p.layer, p.kind) for p in sites],
        shares=[share[p.kind] for p in sites],
        compared=len(looked_at),
        different=sum(not _agrees(model, base, p.site, values[p.site]) for p in looked_at),
    )
    for patched in sites[:: max(1, len(sites) // 10)]:
        for what in timed.spent:
            run(what, patched)
    shuffled, order = random.Random(SEED), list(range(len(sites)))
    for repetition in range(repetitions):
        shuffled.shuffle(order)
        spent = {what: [0.0] * len(sites) for what in timed.spent}
        gc.collect()
        with gc_paused():
            for step, number in enumerate(order):
                for what in list(spent) if (step + repetition) % 2 else reversed(spent):
                    synchronize(model.device)
                    started = time.perf_counter()
                    run(what, sites[number])
                    synchronize(model.device)
                    spent[what][number] = timed.shares[number] * (time.perf_counter() - started)
        for what, seconds in spent.items():
            timed.spent[what].append(seconds)
        progress(repetition + 1, repetitions)
    return timed


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
    of: dict[str, Any] = {
        "full": False,
        "repetitions": repetitions,
        "positions": length,
        "drawn_on": device,
        "compared": 4,
    }
    *seen, last = timed = [
        clock(Size(layers, heads, width, "", "", "", "", width), device, **of) for layers in (*depths, judged)
    ]
    samples: list[tuple[float, float, float]] = []
    fresh: list[float] = []
    for one in seen:
        for number, (cone, share) in enumerate(zip(one.cones, one.shares, strict=True)):
            full, again, patched = (
                statistics.median(times[number] for times in runs) / share for runs in one.spent.values()
            )
            samples += [(cone, one.nodes, patched), (one.nodes, one.nodes, again)]
            fresh.append(full / one.nodes)
    fitted = calibrate(samples)
    cones = [cone for cone, share in zip(last.cones, last.shares, strict=True) for _ in range(share)]
    assert fitted.intercept is not None
    constants = max(fitted.a.value, LEAST), max(fitted.beta.value, 0.0), max(fitted.intercept.value, 0.0)
    return Point(
        width,
        length,
        fitted,
        statistics.median(fresh),
        last.ratio(),
        last.ratio("again"),
        float(wallclock_ratio(cones, last.nodes, *constants)),
        by_work(judged, heads, width, length),
        float(wallclock_ratio(cones, last.nodes, 1, 0)),
        sum(one.compared for one in timed),
        sum(one.different for one in timed),
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
    compared, wrong = sum(one.compared for one in points), sum(one.different for one in points)
    points.sort(key=lambda one: (one.width, one.length))
    differ = f"clock, patched outputs that differ in a bit from a full re-run, of {compared}"
    return [*(one.row(cheapest) for one in points), Row(differ, 0, wrong)]


COLUMNS: dict[str, str] = {
    "d_model": "{width}",
    "positions": "{length}",
    "a, µs": "{a_us:.1f}",
    "fresh, µs": "{fresh_us:.1f}",
    "β/a (95 %)": "{beta_over_a:.4f} ({beta_over_a_interval[0]:.4f} to {beta_over_a_interval[1]:.4f})",
    "full re-run / patch": "{ratio:.3f}",
    "β = 0": "{by_counts_alone:.3f}",
    "distance": "{distance_percent:+.1f} %",
    "one path": "{ratio_all_recomputed_in_a_fork:.3f}",
    "corollary": "{by_corollary:.3f}",
    "by work": "{by_work:.3f}",
    "in the band": "{band[0]:.3f} to {band[1]:.3f}: {judged}",
}
"""The columns of the table of a grid, by their headings."""


def table(rows: Sequence[Row]) -> list[str]:
    """Return the points as a table in Markdown."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS)]
    for row in rows:
        if row.band is not None:
            facts = {**row.facts, "band": row.band, "judged": "yes" if row.match else "no"}
            lines.append([column.format(**facts) for column in COLUMNS.values()])
    return [f"| {' | '.join(line)} |" for line in lines]


def main(arguments: Sequence[str] | None = None) -> int:
    """Time both sizes, or the grid, on a device, and write one JSON object to the standard output.

    The grid is shown as a table too, and the exit status is 1 where a clock lies outside of its band.
    """
    parser = argparse.ArgumentParser(prog="python -m conewise.paper.experiments.e9", description=main.__doc__)
    parser.add_argument("--device", default=best_device(), help="a torch device, such as cuda or cpu")
    parser.add_argument("--full", action="store_true", help="the paper's widths, and every site")
    parser.add_argument("--grid", action="store_true", help="widths and lengths, each fitted and judged")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no point of the grid later")
    parser.add_argument("--repetitions", type=int, help="interleaved repetitions (3; of the grid 2)")
    chosen = parser.parse_args(arguments)
    started = time.perf_counter()

    def tell(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    def told(what: str) -> Progress:
        return lambda done, total: tell(f"{what} {done} of {total}")

    found: dict[str, Any]
    if chosen.grid:
        rows = grid(
            chosen.device,
            told("grid: point"),
            seconds=chosen.seconds,
            tell=lambda one: tell(json.dumps(one.as_dict())),
            repetitions=chosen.repetitions or 2,
        )
        tell("\n".join(table(rows)))
        what, found = "grid of clocks", {"rows": [row.as_dict() for row in rows]}
        failed = any(row.match is False for row in rows)
    else:
        how = {"full": chosen.full, "repetitions": chosen.repetitions or 3}
        clocks = [
            clock(size, chosen.device, **how, progress=told(f"{size.name}: repetition")) for size in SIZES
        ]
        notes = [timed.note for timed in clocks]
        what, found = "wall clock", {"sizes": [timed.as_dict() for timed in clocks], "notes": notes}
        failed = any(timed.different for timed in clocks)
    report = {
        "experiment": f"e9, {what}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions("torch") | describe_device(chosen.device),
        "seconds": round(time.perf_counter() - started, 1),
        **found,
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
