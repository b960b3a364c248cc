"""Jobs: what a fleet is asked for, as its driver sees it. Several are run together."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from conewise.circuits.forwards.forwards import WorldsExecutor
from conewise.fleets.ledger import FleetLedger
from conewise.fleets.outcomes import Done, Failed
from conewise.fleets.payload import Payload
from conewise.fleets.scheduling import Crew, run_shares
from conewise.fleets.shares import ChunkCost, Share, cut_into_shares
from conewise.identity.digests import program_digest
from conewise.runs.captured import Captured


@dataclass(frozen=True, slots=True)
class Work:
    """What workers are told of a job, each once: its model, what is asked, the plan of each batch.

    `asked` is a function and what it is given beside the model: it makes the `WorkerJob` of a worker.
    """

    model: Captured
    asked: Payload
    plans: Mapping[int, str] = field(default_factory=dict)
    key: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def model_key(self) -> str:
        """What the model is known by: one with other weights is another."""
        self.model.expect_program("send this model to workers")
        weights = self.model.weights.contents().whole.numbers
        return hashlib.sha256(f"{program_digest(self.model.program)}{weights}".encode()).hexdigest()


class Job(Protocol):
    """Something that is cut into shares. Its workers are told `work`."""

    work: Work

    def wanted(self) -> tuple[Sequence[ChunkCost], Sequence[Share]]:
        """The chunks that are to be computed, and shares that are given out beside them."""

    def worlds_of(self, share: Share) -> tuple[int, int]:
        """Which worlds of its batch a share of one chunk has: the first, and how many."""

    def done(self, share: Share, found: Done) -> int:
        """Take what came back of a share; how many cells are whole by it."""

    def given_up(self, share: Share, failed: Failed) -> None:
        """A share was not run, and will not be."""


Watch = Callable[[FleetLedger], None]
"""Is given the ledger of a run that begins, to look at meanwhile."""


class Fleet(WorldsExecutor, Protocol):
    """Workers that run jobs beyond this process, and evaluate worlds with removed edges."""

    def run(self, jobs: Sequence[Job], watch: Watch | None = None) -> None:
        """Run all shares of all jobs, together; each job takes what comes back of its own.

        `watch` is given the ledger when they begin.
        """


@dataclass(frozen=True, slots=True)
class Dispatch:
    """How workers are had: how many; `crew` gets them ready for some work, `ended` lets them forget it."""

    workers: int
    crew: Callable[[Sequence[Work]], Crew]
    ended: Callable[[Sequence[Work]], None]


def run_jobs(jobs: Sequence[Job], dispatch: Dispatch, ledger: FleetLedger) -> None:
    """Run several jobs at once: all shares stand in one line, so that no worker waits for the last of a job.

    `ledger` says meanwhile, and afterwards, who did what.
    """
    number = [None] if len(jobs) == 1 else range(len(jobs))
    chunks: list[ChunkCost] = []
    shares: list[Share] = []
    for own, job in zip(number, jobs, strict=True):
        some, beside = job.wanted()
        chunks += [replace(one, job=own) for one in some]
        shares += [replace(one, job=own) for one in beside]
    shares += cut_into_shares(chunks, dispatch.workers)

    def of(share: Share) -> Job:
        return jobs[share.job or 0]

    works = [job.work for job in jobs]
    crew = dispatch.crew(works)
    try:
        run_shares(
            shares,
            crew,
            lambda share: of(share).worlds_of(share),
            lambda share, found: of(share).done(share, found),
            lambda share, failed: of(share).given_up(share, failed),
            ledger,
        )
    finally:
        dispatch.ended(works)
