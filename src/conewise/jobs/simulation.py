"""Simulation of what workers would take, before any is started."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from conewise.jobs.scheduling import ChunkCost, cut_into_shares
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.running import chunks_of


def shares_of(plans: Sequence[SweepPlan], workers: int) -> list[tuple[int, int]]:
    """The shares of sweeps that are run together, as they would be given out: (batch, FLOPs).

    Batches are counted through all sweeps.
    """
    wanted: list[ChunkCost] = []
    before = 0
    for plan in plans:
        chunks, costs = chunks_of(plan)
        wanted += [
            ChunkCost(before + batch, number, len(one), cost)
            for batch in range(plan.batches)
            for number, (one, cost) in enumerate(zip(chunks, costs, strict=True))
        ]
        before += plan.batches
    return [(share.batch, share.cost) for share in cut_into_shares(wanted, workers)]


ENOUGH = 0.9
"""Workers are worth having as long as their number times the gain of one more is at least so much of it."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of what a fleet does: setting a worker up, a batch's baselines, a FLOP, a share's way there."""

    setup: float
    baseline: float
    flop: float
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Simulated:
    """The time of workers. `makespan`: seconds until all is done; `busy`: those of each worker."""

    workers: int
    makespan: float
    busy: tuple[float, ...]
    setup: float
    baselines: float

    @property
    def balance(self) -> float:
        """The busiest worker over the mean, after it was set up: 1 is even."""
        mean = sum(self.busy) / len(self.busy)
        return max(self.busy) / mean if mean else 1.0


def simulate(shares: Sequence[tuple[int, int]], workers: int, rates: Rates) -> Simulated:
    """Give shares, (batch, FLOPs) in the order in which they are given out, to whoever is free first.

    A worker computes the baselines of a batch once as long as it has shares of the same.
    """
    free = [(rates.setup, number) for number in range(workers)]
    heapq.heapify(free)
    busy, batches, baselines = [0.0] * workers, [-1] * workers, 0.0
    for batch, cost in shares:
        start, number = heapq.heappop(free)
        seconds = rates.share + cost * rates.flop
        if batches[number] != batch:
            seconds += rates.baseline
            baselines += rates.baseline
            batches[number] = batch
        busy[number] += seconds
        heapq.heappush(free, (start + seconds, number))
    return Simulated(workers, max(end for end, _ in free), tuple(busy), rates.setup * workers, baselines)


def worth_having(shares: Sequence[tuple[int, int]], most: int, rates: Rates) -> int:
    """Beyond how many workers, up to `most`, more hardly help: the least that comes near the best span."""
    spans = [simulate(shares, count, rates).makespan for count in range(1, most + 1)]
    best = min(spans)
    return next(count for count, span in enumerate(spans, 1) if best >= ENOUGH * span)
