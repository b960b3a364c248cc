"""A pool of workers, which knows who has which model and job; processes and Ray are its two transports."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from conewise.arguments import as_bytes
from conewise.circuits.masked_forward import Forward
from conewise.circuits.question import CircuitQuestion
from conewise.errors import FleetError
from conewise.jobs.payload import Work, recipe_of
from conewise.jobs.scheduling import Done, Failed, FleetLedger, Share
from conewise.jobs.search_job import FleetForward, work_of

KEPT = 2
"""The number of models that workers keep, beside those that they are at work with."""


class WorkerSeat(ABC):
    """The driver's end of one worker: tells it all that a share needs, each once, and gives it shares.

    `published` has what was put where workers find it, by key. Calls are carried out in the order in which
    they are made. `is_out`: it has a share.
    """

    is_out = False

    def __init__(self, name: str, published: Mapping[str, Any]) -> None:
        self.name, self._published = name, published
        self._told: set[Any] = set()
        self._works: Sequence[tuple[Work, str]] = ()

    @abstractmethod
    def call(self, method: str, *given: Any) -> None:
        """Have the worker do something, and do not wait for it."""

    @abstractmethod
    def run(self, key: str, share: Share) -> None:
        """Have the worker run a share; something comes back of it."""

    @abstractmethod
    def outcome(self) -> Done | Failed:
        """Return what came back of the share. Raises FleetError where the worker could not be set up."""

    @abstractmethod
    def end(self) -> None:
        """End the worker."""

    def begin(self, works: Sequence[tuple[Work, str]]) -> None:
        """Tell it of the models of some work, by their keys: all that comes behind the shares of one."""
        self._works = works
        for _, model in works:
            if model not in self._told:
                self.call("prepare", model, self._published[model])
                self._told.add(model)

    def submit(self, share: Share) -> None:
        """Give it a share, and tell it before what it does not know of its job."""
        work, model = self._works[share.job or 0]
        if (work.key,) not in self._told:
            self.call("know_job", work.key, model, self._published[work.key])
            self._told.add((work.key,))
        if share.batch in work.plans and (work.key, share.batch) not in self._told:
            self.call("know_plan", work.key, share.batch, work.plans[share.batch])
            self._told.add((work.key, share.batch))
        self.run(work.key, share)
        self.is_out = True

    def forget(self, works: Sequence[Work]) -> None:
        """Let it forget jobs that have ended."""
        for work in works:
            if (work.key,) in self._told:
                self.call("forget", work.key)
        self._works, keys = (), {work.key for work in works}
        self._told = {one for one in self._told if not (isinstance(one, tuple) and one[0] in keys)}

    def forget_model(self, key: str) -> None:
        """Let it forget a model."""
        if key in self._told:
            self._told.discard(key)
            self.call("forget_model", key)


class Pool(ABC):
    """Workers that compute shares of jobs, and worlds with removed edges, beyond this process.

    They are started when they are first asked for something, and kept until `close`. With `model`, a folder
    or a name, they load the weights from there; `load` is what `cw.load` is given beside.
    """

    seats: list[Any]

    def __init__(
        self, model: str | None, load: Mapping[str, Any] | None, max_memory: int | str | None
    ) -> None:
        if load and model is None:
            raise FleetError("`load` says how workers load `model`, which was not given.")
        self.seats = []
        self._source, self._how, self._memory = model, dict(load or {}), as_bytes(max_memory)
        self._published: dict[str, Any] = {}
        self._models: list[str] = []
        self._works: list[tuple[Work, str]] = []
        self._lock = threading.Lock()
        self._count = 0
        self.ledger = FleetLedger()
        """The ledger of the last job, by worker."""

    # -- what a transport provides -------------------------------------------------------------

    @property
    @abstractmethod
    def workers(self) -> int:
        """Return the number of workers."""

    @abstractmethod
    def new_seat(self, name: str, replaced: Any = None) -> WorkerSeat:
        """Start a worker, in the place of one that died where it is given."""

    @abstractmethod
    def ready(self, seats: Sequence[Any]) -> Sequence[WorkerSeat]:
        """Wait until something comes back of some of these workers; return those of which it does."""

    def expect_room(self, count: int) -> None:
        """Raise FleetError where there is no room for so many workers more."""
        del count

    def put(self, given: Any) -> Any:
        """Put something where workers find it; return what they find it by."""
        return given

    # -- what it is asked for ------------------------------------------------------------------

    @contextmanager
    def at_work(self, works: Sequence[Work]) -> Iterator[FleetLedger]:
        """Have the workers for some work, with its models ready; they forget it at the end.

        Yields the ledger of what they do. Raises FleetError where they are taken: by a progress function,
        say. Where an error ends it while some of them compute, they end too: what they send is of no use.
        """
        if not self._lock.acquire(blocking=False):
            raise FleetError(
                "these workers are in the middle of another sweep or search. Give others, or wait until that "
                "has ended."
            )
        try:
            self.ledger = FleetLedger()
            try:
                self._publish(works)
                self.expect_room(self.workers - len(self.seats))
                while len(self.seats) < self.workers:
                    self.seats.append(self._seat())
                for seat in self.seats:
                    seat.begin(self._works)
                yield self.ledger
            except BaseException:
                if any(seat.is_out for seat in self.seats):
                    self.end_workers()
                raise
            finally:
                self._works = []
                for work in works:
                    self._published.pop(work.key, None)
                for seat in self.seats:
                    seat.forget(works)
        finally:
            self._lock.release()

    @contextmanager
    def forward(self, question: CircuitQuestion, own: Forward) -> Iterator[Forward]:
        """Evaluate worlds with removed edges; see `conewise.jobs.search_job`."""
        with self.at_work([work_of(question)]) as ledger:
            yield FleetForward(own, self, self.workers, ledger)

    def wait(self) -> list[tuple[Any, Done | Failed]]:
        """Wait until a share comes back."""
        found: list[tuple[Any, Done | Failed]] = []
        for seat in self.ready([seat for seat in self.seats if seat.is_out]):
            found.append((seat, seat.outcome()))
            seat.is_out = False
        return found

    def replace(self, seat: Any) -> WorkerSeat:
        """Put another worker in the place of one that died."""
        seat.end()
        own = self._seat(seat)
        own.begin(self._works)
        self.seats[self.seats.index(seat)] = own
        return own

    def close(self) -> None:
        """End all workers."""
        self.end_workers()
        self._published.clear()
        self._models.clear()

    def end_workers(self) -> None:
        """End all workers; others are started when something is asked for."""
        for seat in self.seats:
            seat.end()
        self.seats.clear()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()

    def _seat(self, replaced: Any = None) -> WorkerSeat:
        self._count += 1
        return self.new_seat(f"worker {self._count}", replaced)

    def _publish(self, works: Sequence[Work]) -> None:
        """Publish some work, each with the key of its model. Models that have long been idle are dropped."""
        known = {id(work.model): work.model_key for work in {id(one.model): one for one in works}.values()}
        self._works = [(work, known[id(work.model)]) for work in works]
        for work, key in self._works:
            if key not in self._published:
                self._published[key] = self.put(recipe_of(work.model, self._source, **self._how))
            self._published[work.key] = self.put(work.asked)
        used = list(dict.fromkeys(key for _, key in self._works))
        idle = [one for one in self._models if one not in used]
        for key in idle[: max(0, len(idle) - KEPT)]:
            del self._published[key]
            for seat in self.seats:
                seat.forget_model(key)
        self._models = [*idle[max(0, len(idle) - KEPT) :], *used]


def expect_counts(**given: object) -> None:
    """Raise FleetError where something that was given is no whole number of 1 or more."""
    for name, count in given.items():
        is_count = isinstance(count, int) and not isinstance(count, bool) and 0 < count < 1 << 16
        if count is not None and not is_count:
            raise FleetError(f"{name} is a number of 1 or more, not {count!r}.")
