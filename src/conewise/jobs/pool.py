"""A pool of workers, which knows who has which model and job; processes and Ray are its two transports.

Processes of this machine are here: several GPUs, or several cores, without a scheduler.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

import torch

from conewise.arguments import as_bytes, checked
from conewise.circuits.masked_forward import Forward
from conewise.circuits.question import CircuitQuestion
from conewise.errors import FleetError, describe
from conewise.extras import expect
from conewise.jobs.payload import Work, recipe_of
from conewise.jobs.scheduling import DIED, Done, Failed, FleetLedger, Share
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
        """Wait until one of these workers returns something; return the workers that did."""

    def expect_room(self, count: int) -> None:
        """Raise FleetError if there is no room for this many additional workers."""
        del count

    def put(self, given: Any) -> Any:
        """Store an object for the workers, and return its key."""
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
        """Replace a worker that died."""
        seat.end()
        own = self._seat(seat)
        own.begin(self._works)
        self.seats[self.seats.index(seat)] = own
        return own

    def close(self) -> None:
        """Stop all workers."""
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


# -- processes of this machine -----------------------------------------------------------------------


@checked
class Processes(Pool):
    """Run sweeps in processes of this machine: `sweep.run(workers=cw.Processes(devices="cuda:0,cuda:1"))`.

    There is one worker for each of `devices`; without them, there are `workers` workers on the model's
    device. Each has `threads` threads. `max_memory` limits the memory of one worker's chunks; a share that
    exceeds it is split in half. With `model`, a folder or a name, workers load the weights from there (`load`
    are further arguments of `cw.load`); else the module is sent to them.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        devices: str | Sequence[str | torch.device] | None = None,
        threads: int = 1,
        max_memory: int | str | None = None,
        model: str | None = None,
        load: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, load, max_memory)
        if isinstance(devices, str):
            devices = devices.split(",")
        for one in devices or ():
            if not isinstance(one, str | torch.device):
                raise FleetError(f"devices are names such as 'cuda:0', not {describe(one)}.")
        chosen: list[str | None] = [str(one).strip() for one in devices] if devices is not None else []
        expect_counts(workers=workers, threads=threads)
        if devices is not None and (not chosen or not all(one and "\0" not in one for one in chosen)):
            raise FleetError(f"devices are names such as 'cuda:0', and {devices!r} has none or an empty one.")
        if workers is not None and chosen and workers != len(chosen):
            raise FleetError(f"there is one worker for each device: {len(chosen)}, not {workers}.")
        expect("workers")
        self._devices = chosen or [None] * (workers or 2)
        self._threads = threads

    @property
    def workers(self) -> int:
        """Return the number of workers."""
        return len(self._devices)

    def __del__(self) -> None:
        if hasattr(self, "_devices"):  # not where it was refused
            self.close()

    def new_seat(self, name: str, replaced: Any = None) -> WorkerSeat:
        """Start a worker process."""
        device = self._devices[len(self.seats)] if replaced is None else replaced.device
        named = name + (f" on {device}" if device else "")
        return _Process(named, self._published, device, self._threads, self._memory)

    def ready(self, seats: Sequence[Any]) -> Sequence[WorkerSeat]:
        """Wait until something comes back of some of these processes, or until one has ended."""
        waiting: dict[Any, _Process] = {seat.pipe: seat for seat in seats}
        return [waiting[pipe] for pipe in wait(list(waiting))]


class _Process(WorkerSeat):
    """A process that runs `worker.main`, and the pipe to it."""

    def __init__(
        self, name: str, published: Mapping[str, Any], device: str | None, threads: int, memory: int | None
    ) -> None:
        super().__init__(name, published)
        self.device = device
        self.pipe, theirs = Pipe()
        # Ctrl-C is the driver's, which ends its workers.
        own_path = (
            f"import signal, sys; signal.signal(2, signal.SIG_IGN); sys.path[:] = {[*map(str, sys.path)]}"
        )
        options = (theirs.fileno(), device, threads, memory)
        main = f"from conewise.jobs.worker import main; main(*{options})"
        # -P: else the current folder, where anything may lie, would stand first in the path.
        flags = [*subprocess._args_from_interpreter_flags(), "-P"]  # type: ignore[attr-defined]
        self.process = subprocess.Popen(
            [sys.executable, *flags, "-c", f"{own_path}; {main}"],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def call(self, method: str, *given: Any) -> None:
        """Send a call; one to a process that is gone is noticed when a share is waited for."""
        try:
            self.pipe.send((method, given))
        except OSError:
            return

    def run(self, key: str, share: Share) -> None:
        """Send a share."""
        self.call("run", key, share)

    def outcome(self) -> Done | Failed:
        """Return what came back."""
        try:
            is_set_up, found = self.pipe.recv()
        except (EOFError, OSError):
            code = self.process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            return Failed(DIED, f"its process ended with {how}")
        if not is_set_up:
            raise FleetError(f"{self.name} could not be set up: {found}")
        outcome: Done | Failed = found
        return outcome

    def end(self) -> None:
        """End the process."""
        self.pipe.close()
        self.process.kill()
        self.process.wait()
