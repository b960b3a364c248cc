"""The forward of worlds with removed edges by workers: each batch of worlds is cut into a part for each.

The driver decides, and no worker knows what was decided but by what it is told with its part. So one that
takes another's place goes on as if it had been there from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from conewise.circuits.forwards.forwards import Asked
from conewise.circuits.forwards.masked_forward import Forward, Mask, Numbers
from conewise.errors import FleetError
from conewise.fleets.jobs import Dispatch, Work
from conewise.fleets.ledger import FleetLedger
from conewise.fleets.outcomes import Done, Failed
from conewise.fleets.payload import packed
from conewise.fleets.scheduling import Crew, run_shares
from conewise.fleets.shares import Share
from conewise.fleets.worlds_job import Bits, WorldsJob, WorldsShare


@contextmanager
def fleet_forward(asked: Asked, own: Forward, dispatch: Dispatch, ledger: FleetLedger) -> Iterator[Forward]:
    """The forward of what is asked by workers that are had for it, and then forget it."""
    given = {
        "base": asked.base,
        "source": asked.source,
        "metric": asked.metric,
        "ablation": asked.ablation,
        "max_memory": asked.max_memory,
    }
    work = Work(asked.model, packed((WorldsJob, given), asked.model))
    crew = dispatch.crew([work])
    try:
        yield FleetForward(own, crew, dispatch.workers, ledger)
    finally:
        dispatch.ended([work])


class FleetForward:
    """Evaluates batches by workers; `own` is the forward of this process.

    That one begins, and computes single worlds anew from the base: where a change is too close to a
    threshold, what decides is computed here, as without workers. Batches are as large as without workers:
    wider ones hardly decide more, since they end at the first wrong guess. Each is cut into as many parts as
    there are workers, of neighbouring worlds; so one worker evaluates what a local search does, bit for bit,
    unless memory is so short that candidates are evaluated alone. A part that does not fit into a worker is
    halved, and those behind it are as small; at the next stage, where worlds take less, twice as large ones
    are tried.
    """

    def __init__(self, own: Forward, crew: Crew, workers: int, ledger: FleetLedger) -> None:
        self._own, self._crew, self._workers, self.ledger = own, crew, workers, ledger
        self.stages, self.moved, self.epsilon = own.stages, own.moved, own.epsilon
        self.node_evaluations = own.node_evaluations
        self._removed: Mask = np.zeros(own.shape, dtype=bool)
        self._batches = 0
        self._fits: int | None = None

    # -- as this process has it --------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        """How many readers and writers there are."""
        return self._own.shape

    @property
    def few(self) -> int:
        """How many worlds take hardly longer than one does."""
        return self._own.few

    def most(self, stage: int, removed: Mask | None = None) -> int:
        """How many worlds fit into the memory of all workers at once."""
        each = self._own.most(stage, self._removed if removed is None else removed)
        if self._fits is not None:
            self._fits *= 2
            each = min(each, self._fits)
        return each * self._workers

    def begin(self, removed: Mask) -> Numbers:
        """Let a world be the current one; its metric is computed here."""
        self._removed = removed.copy()
        return self._here(self._own.begin, removed)

    def _here(self, compute: Callable[[Mask], Numbers], removed: Mask) -> Numbers:
        before = self._own.node_evaluations
        found = compute(removed)
        self.node_evaluations += self._own.node_evaluations - before
        return found

    # -- by workers --------------------------------------------------------------------------------

    def values(self, removed: Mask) -> Numbers:
        """[world, prompt] of worlds computed from the base; that of one world alone is computed here."""
        if len(removed) < 2:
            return self._here(self._own.values, removed)
        return self._evaluated(None, removed)

    def below(self, stage: int, removed: Mask) -> Numbers:
        """[world, prompt] of worlds that are the current one but for edges into one stage."""
        return self._evaluated(stage, removed)

    def adopt(self, stage: int, removed: Mask) -> None:
        """Let a world be the current one: workers are told with their next parts."""
        self._removed[self.stages[stage].rows] = removed

    def _evaluated(self, stage: int | None, removed: Mask) -> Numbers:
        if not self._crew.seats:
            raise FleetError("the workers were closed in the middle of a search for a circuit.")
        current, worlds = Bits.of(self._removed), len(removed)
        shares: list[Share] = []
        for first, count in cuts(worlds, self._workers, self._fits):
            some = Bits.of(removed[first : first + count])
            shares.append(
                WorldsShare(self._batches, (0,), count, first, count, None, first, stage, some, current)
            )
        self._batches += 1
        found: dict[int, Numbers] = {}
        failed: list[tuple[Share, Failed]] = []

        def done(share: Share, outcome: Done) -> int:
            (found[share.first],) = outcome.rows
            self.node_evaluations += outcome.node_evaluations
            return len(found[share.first])

        own = FleetLedger()
        run_shares(shares, self._crew, _worlds_of, done, lambda share, why: failed.append((share, why)), own)
        self.ledger.add(own)
        if failed:
            share, why = failed[0]
            raise FleetError(f"{share.label} could not be evaluated by a worker: {why.said}")
        if own.halved:
            self._fits = min(map(len, found.values()))
        return np.concatenate([found[first] for first in sorted(found)])


def cuts(worlds: int, workers: int, most: int | None = None) -> list[tuple[int, int]]:
    """So many worlds cut into parts for workers, each as (first, how many): even ones, none above `most`."""
    parts = min(worlds, max(workers, -(-worlds // most) if most else 0))
    ends = [worlds * (part + 1) // parts for part in range(parts)]
    return [(first, end - first) for first, end in zip([0, *ends], ends, strict=False)]


def _worlds_of(share: Share) -> tuple[int, int]:
    assert share.worlds is not None
    return share.first, share.worlds
