"""Shares: the work of a sweep, cut before anything runs. A share is some chunks of one batch's plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

PER_WORKER = 8
"""How many shares there are for each worker, where there are chunks enough: the last even out the rest."""


@dataclass(frozen=True, slots=True)
class Share:
    """Chunks of a batch that stand one behind the other, and what they cost, in FLOPs.

    With `worlds`, it is a part of one chunk that did not fit into a worker's memory: so many worlds, from
    `first` on. `job` says of which job it is, where several are run together.
    """

    batch: int
    chunks: tuple[int, ...]
    cost: int
    first: int = 0
    worlds: int | None = None
    job: int | None = None

    @property
    def label(self) -> str:
        """What it is, in words."""
        of = "" if self.job is None else f"group {self.job + 1}, "
        if self.worlds is not None:
            return f"{of}batch {self.batch}, worlds {self.first} to {self.first + self.worlds - 1}"
        if not self.chunks:
            return f"{of}batch {self.batch}, its baselines"
        if len(self.chunks) == 1:
            return f"{of}batch {self.batch}, chunk {self.chunks[0]}"
        return f"{of}batch {self.batch}, chunks {self.chunks[0]} to {self.chunks[-1]}"


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """A chunk of a batch that is to be computed: how many worlds it has, and its FLOPs."""

    batch: int
    chunk: int
    worlds: int
    cost: int
    job: int | None = None


def cut_into_shares(chunks: Sequence[ChunkCost], workers: int, per_worker: int = PER_WORKER) -> list[Share]:
    """Shares of about equal cost, the heaviest first.

    Neighbouring chunks of a batch are put together as long as a share costs no more than its even part of all
    the work, so that stacks stay dense and a baseline is computed for few shares. A chunk is never cut.
    """
    total = sum(one.cost for one in chunks)
    even = total / max(1, workers * per_worker)
    found: list[list[ChunkCost]] = []
    for one in chunks:
        last = found[-1] if found else None
        is_next = last is not None and (last[-1].job, last[-1].batch, last[-1].chunk + 1) == (
            one.job,
            one.batch,
            one.chunk,
        )
        if last is not None and is_next and sum(own.cost for own in last) + one.cost <= even:
            last.append(one)
        else:
            found.append([one])
    shares = [
        Share(own[0].batch, tuple(one.chunk for one in own), sum(one.cost for one in own), job=own[0].job)
        for own in found
    ]
    return sorted(shares, key=lambda share: -share.cost)


def halves(share: Share, first: int, worlds: int) -> tuple[Share, Share]:
    """The two halves of a share of one chunk, or of a part of one: `worlds` of them, from `first` on."""
    left = worlds // 2
    cost = share.cost * left // worlds
    return (
        replace(share, cost=cost, first=first, worlds=left),
        replace(share, cost=share.cost - cost, first=first + left, worlds=worlds - left),
    )
