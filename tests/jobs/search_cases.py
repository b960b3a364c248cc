"""Searches for circuits by workers: a crew in this process, and what is compared."""

from __future__ import annotations

import json
import pickle
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from conewise.circuits.circuit import Circuit
from conewise.circuits.masked_forward import Forward, Numbers
from conewise.circuits.question import CircuitQuestion
from conewise.circuits.replaced_parts import Mask
from conewise.jobs.pool import Pool, WorkerSeat
from conewise.jobs.scheduling import DIED, MEMORY, OWN, Done, Failed, FleetLedger, Share
from conewise.jobs.search_job import FleetForward, WorldsJob
from conewise.jobs.store import FILE
from conewise.model import Model
from tests.jobs.fleet_cases import METRIC, ids

THRESHOLD = 0.001
"""Of the small model's edges, a tenth is kept."""

Fault = Callable[[str, Share], Failed | None]


def asked_of(model: Model, **other: Any) -> dict[str, Any]:
    runs = {"base": model.run(input_ids=ids(1)), "source": model.run(input_ids=ids(2))}
    return {**runs, "metric": METRIC, "threshold": THRESHOLD, **other}


def decided(circuit: Circuit) -> list[tuple[str, bool]]:
    return [(one.edge, one.kept) for one in circuit.log]


def changes(circuit: Circuit) -> torch.Tensor:
    return torch.tensor([one.change for one in circuit.log], dtype=torch.float64)


def stored_decisions(folder: Path) -> int:
    """How many decisions are stored of a search."""
    with closing(sqlite3.connect(folder / FILE)) as connection:
        return sum(json.loads(shape)[0] for (shape,) in connection.execute("SELECT shape FROM chunks"))


class Here(Pool):
    """Workers in this process: an executor whose shares travel as bytes, and fail as `fault` says."""

    workers = 0

    def __init__(self, workers: int, fault: Fault | None = None, memory: int | None = None) -> None:
        super().__init__(None, None, None)
        self.workers, self._fault, self._memory = workers, fault, memory
        self.ledger = FleetLedger()
        self.given: list[tuple[str, int]] = []
        self.begun = 0
        self._count = 0

    def new_seat(self, name: str, replaced: Any = None) -> WorkerSeat:
        raise NotImplementedError

    def ready(self, seats: Sequence[Any]) -> Sequence[WorkerSeat]:
        raise NotImplementedError

    @contextmanager
    def forward(self, question: CircuitQuestion, own: Forward) -> Iterator[Forward]:
        self._given = {
            "base": question.base,
            "source": question.carried,
            "metric": question.metric,
            "max_memory": question.max_memory,
        }
        self._model = question.model
        self.seats: list[_Seat] = [self._own_seat() for _ in range(self.workers)]
        begin = own.begin

        def counted(removed: Mask) -> Numbers:
            before = own.node_evaluations
            found = begin(removed)
            self.begun += own.node_evaluations - before
            return found

        own.begin = counted  # type: ignore[method-assign]
        yield FleetForward(own, self, self.workers, self.ledger)
        for seat in self.seats:
            seat.job.rest()

    def _own_seat(self) -> _Seat:
        self._count += 1
        return _Seat(f"worker {self._count}", WorldsJob(self._model, **self._given))

    def wait(self) -> list[tuple[Any, Done | Failed]]:
        """The last that was given a share is done first."""
        seat = [one for one in self.seats if one.share is not None][-1]
        share, seat.share = seat.share, None
        assert share is not None
        self.given.append((seat.name, share.worlds or 0))
        failed = None if self._fault is None else self._fault(seat.name, share)
        if failed is not None:
            return [(seat, failed)]
        try:
            return [(seat, seat.job.run(share, self._memory))]
        except MemoryError as error:
            seat.job.rest()
            return [(seat, Failed(MEMORY, str(error)))]
        except Exception as error:  # noqa: BLE001
            return [(seat, Failed(OWN, str(error)))]

    def replace(self, seat: Any) -> Any:
        own = self._own_seat()
        self.seats[self.seats.index(seat)] = own
        return own


class _Seat:
    def __init__(self, name: str, job: WorldsJob) -> None:
        self.name, self.job = name, job
        self.share: Share | None = None

    def submit(self, share: Share) -> None:
        assert self.share is None
        self.share = pickle.loads(pickle.dumps(share))


def dying(every: int) -> Fault:
    """Every so many shares, the worker that has it dies."""
    count = 0

    def fault(name: str, share: Share) -> Failed | None:
        nonlocal count
        count += 1
        return Failed(DIED, "killed") if count % every == 0 else None

    return fault


def too_large(most: int) -> Fault:
    """More worlds than so many do not fit."""

    def fault(name: str, share: Share) -> Failed | None:
        return Failed(MEMORY, "too large") if (share.worlds or 0) > most else None

    return fault
