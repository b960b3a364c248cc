"""The clock of E9: full re-runs against patches of a Llama-style transformer, through the engine."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from conewise.engine.world import World
from conewise.experiments.measure import shifted, warm
from conewise.experiments.paper.llama import Llama, describe_device, llama, one_thread, same_bits
from conewise.experiments.paper.transformers import PatchedSite
from conewise.experiments.result import Progress, Row, silent
from conewise.theory.profiles.transformers import transformer_ratio

SEED = 0
POSITIONS = 20


@dataclass(frozen=True, slots=True)
class Size:
    """A transformer of the paper: what it was, and what the paper prints of it."""

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


def llama_sites(model: Llama) -> list[PatchedSite]:
    """Every head and every MLP of a model."""
    return [
        patched
        for layer, (heads, mlp) in enumerate(zip(model.heads, model.mlps, strict=True), start=1)
        for patched in (*(PatchedSite(head, layer, "head") for head in heads), PatchedSite(mlp, layer, "mlp"))
    ]


@dataclass(frozen=True, slots=True)
class Clock:
    """A timed sweep: the seconds that were spent on each site, a list for each repetition.

    `full` are full re-runs in a fresh world; `again` recompute everything in a fork, as a patch of the
    input does, on the very path of the patches; `patched` are the patches.
    A head that stands for all heads of its layer has its seconds multiplied by their number.
    """

    size: Size
    width: int
    device: str
    timed_sites: int
    nodes: int
    full: list[list[float]] = field(default_factory=list)
    again: list[list[float]] = field(default_factory=list)
    patched: list[list[float]] = field(default_factory=list)
    compared: int = 0
    different: int = 0

    @property
    def ratios(self) -> list[float]:
        """Full over patched, for each repetition."""
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
    def distance(self) -> float:
        """How far the ratio is from the prediction, in per cent of it."""
        return 100 * (self.ratio / float(transformer_ratio(self.size.layers, self.size.heads)) - 1)

    @property
    def note(self) -> str:
        """What was timed, in words."""
        sites = self.size.layers * (self.size.heads + 1)
        sample = (
            f"all {sites} sites"
            if self.timed_sites == sites
            else f"{self.timed_sites} of {sites} sites (one head and the MLP of each layer, weighted)"
        )
        paper = "the paper's" if self.width == self.size.width else f"the paper's is {self.size.width}"
        return (
            f"Clock, {self.size.name}: {self.device}, float32, {POSITIONS} positions, d_model {self.width} "
            f"({paper}), {sample}, {len(self.full)} interleaved repetitions."
        )

    def rows(self) -> list[Row]:
        """The ratio beside the paper's, and whether the answers were right."""
        at = f"clock, {self.size.name}"
        return [
            Row(
                name=f"{at}, full re-runs over patches, seconds",
                paper=self.size.wallclock,
                predicted=transformer_ratio(self.size.layers, self.size.heads),
                measured=self.ratio,
                exact=False,
                facts=self.as_dict(),
            ),
            Row(
                name=f"{at}, all recomputed in a fork over patches, seconds",
                paper=None,
                predicted=transformer_ratio(self.size.layers, self.size.heads, readout=True),
                measured=self.ratio_again,
                exact=False,
            ),
            Row(
                name=f"{at}, patched outputs that differ in a bit from a full re-run, of {self.compared}",
                paper=None,
                predicted=0,
                measured=self.different,
            ),
        ]

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON takes them."""
        return {
            "layers": self.size.layers,
            "heads": self.size.heads,
            "width": self.width,
            "positions": POSITIONS,
            "device": self.device,
            "sites": self.size.layers * (self.size.heads + 1),
            "timed_sites": self.timed_sites,
            "nodes": self.nodes,
            "ratio": self.ratio,
            "ratio_all_recomputed_in_a_fork": self.ratio_again,
            "ratios": self.ratios,
            "prediction": float(transformer_ratio(self.size.layers, self.size.heads)),
            "prediction_readout_counted": float(
                transformer_ratio(self.size.layers, self.size.heads, readout=True)
            ),
            "distance_percent": self.distance,
            "paper_ratio": float(self.size.wallclock),
            "full_seconds": _typical(self.full),
            "all_recomputed_in_a_fork_seconds": _typical(self.again),
            "patched_seconds": _typical(self.patched),
            "outputs_compared": self.compared,
            "outputs_different": self.different,
        }


@one_thread()
def clock(size: Size, device: str, *, full: bool, repetitions: int, progress: Progress = silent) -> Clock:
    """Time full re-runs against patches through the engine, on one CPU thread or on an accelerator.

    `full`: the paper's width and every site. Else the narrow width, one head and the MLP of each layer,
    a head's time taken for all heads of its layer. A full re-run is a demand of the readout in a fresh
    world; a patch is a fork, the patch and the demand; between the two stands a fork in which the input is
    set again, so that all is recomputed. They are timed site by site, one after the other, in an order
    that changes; the device is waited for before and after each.
    """
    width = size.width if full else size.cpu_width
    model = llama(size.layers, size.heads, width, positions=POSITIONS, device=device, seed=SEED)
    sites = llama_sites(model)
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

    timed = Clock(
        size,
        width,
        describe_device(device)["device"],
        timed_sites=len(sites),
        nodes=model.computed,
        compared=len(sites),
        different=sum(not _agrees(model, base, p.site, values[p.site]) for p in sites),
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
        gc.disable()
        try:
            for step, number in enumerate(order):
                patched = sites[number]
                tasks: dict[str, Callable[[], None]] = {
                    "full": run_fully,
                    "again": run_again,
                    "patched": partial(run_patched, patched),
                }
                for name in list(tasks) if (step + repetition) % 2 else reversed(tasks):
                    spent[name][number] = share[patched.kind] * _seconds(model, tasks[name])
        finally:
            gc.enable()
        timed.full.append(spent["full"])
        timed.again.append(spent["again"])
        timed.patched.append(spent["patched"])
        progress(repetition + 1, repetitions)
    return timed


def _typical(repetitions: list[list[float]]) -> float:
    """The sum over sites of the median over repetitions."""
    return math.fsum(statistics.median(seconds) for seconds in zip(*repetitions, strict=True))


def _seconds(model: Llama, task: Callable[[], None]) -> float:
    model.synchronize()
    started = time.perf_counter()
    task()
    model.synchronize()
    return time.perf_counter() - started


def _agrees(model: Llama, base: World, site: str, value: Any) -> bool:
    """Whether a patched fork answers bit for bit what a full run does that overwrites the site's value.

    The full run computes every node, the site's own value included; the ledger shows it.
    """
    with base.fork() as fork, World(model.graph, keep_sites=False) as fresh:
        fork.patch(site, value)
        fresh.patch(site, lambda _: value)
        same = same_bits(fork.demand(model.output), fresh.demand(model.output))
        return same and fresh.ledger.count("recomputed") == model.computed
