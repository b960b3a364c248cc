"""Workers as processes of this machine: several GPUs, or several cores, without a scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from conewise.arguments import as_bytes, checked
from conewise.circuits.forwards import Asked
from conewise.circuits.masked_forward import Forward
from conewise.errors import FleetError, describe
from conewise.extras import expect
from conewise.jobs.scheduling import (
    DIED,
    Crew,
    Dispatch,
    Done,
    Failed,
    FleetLedger,
    Job,
    Published,
    Share,
    Watch,
    Work,
    WorkerSeat,
    expect_counts,
    run_jobs,
)
from conewise.jobs.search_job import fleet_forward


class Turn:
    """Whether workers are taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have the workers meanwhile. Raises FleetError where they are taken: by a progress function, say."""
        if not self._lock.acquire(blocking=False):
            raise FleetError(
                "these workers are in the middle of another sweep or search. Give others, or wait until that "
                "has ended."
            )
        try:
            yield
        finally:
            self._lock.release()


@checked
class Processes:
    """Runs sweeps in processes of this machine: `sweep.run(executor=cw.Processes(devices="cuda:0,cuda:1"))`.

    There is one worker for each of `devices`; without them, `workers` that compute where the model is. Each
    has `threads` threads. `max_memory` is what the chunks of one worker may take; a share that takes more is
    cut in half. With `model`, a folder or a name, workers load the weights from there (`load` is what
    `cw.load` is given beside); else they are sent the module.
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
        self._seats: list[_Process] = []
        self._published = Published(model, load or {})
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
        if load and model is None:
            raise FleetError("`load` says how workers load `model`, which was not given.")
        expect("workers")
        self._devices = chosen or [None] * (workers or 2)
        self._threads, self._memory = threads, as_bytes(max_memory)
        self._count = 0
        self._turn = Turn()
        self.ledger = FleetLedger()
        """What the last sweep took, by worker."""

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return len(self._devices)

    def close(self) -> None:
        """End all processes."""
        for seat in self._seats:
            seat.end()
        self._seats.clear()
        self._published.clear()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_published"):  # not where it was refused
            self.close()

    def run(self, jobs: Sequence[Job], watch: Watch | None = None) -> None:
        """Run some jobs together; see `conewise.jobs.scheduling.Fleet`."""
        with self._dispatch() as dispatch:
            if watch is not None:
                watch(self.ledger)
            run_jobs(jobs, dispatch, self.ledger)

    @contextmanager
    def forward(self, asked: Asked, own: Forward) -> Iterator[Forward]:
        """Worlds with removed edges by workers; see `conewise.jobs.search_job`."""
        with self._dispatch() as dispatch, fleet_forward(asked, own, dispatch, self.ledger) as forward:
            yield forward

    @contextmanager
    def _dispatch(self) -> Iterator[Dispatch]:
        """Workers for one who asks; where that fails while they are at work, they end."""
        with self._turn.taken():
            self.ledger = FleetLedger()
            try:
                yield Dispatch(self.workers, self._crew, self._ended)
            except BaseException:
                if any(seat.is_out for seat in self._seats):
                    self.close()
                raise

    def _crew(self, works: Sequence[Work]) -> Crew:
        """Workers that have the models of some work."""
        published = self._published.begin(works, lambda given: given, self._forget_model)
        for device in self._devices[len(self._seats) :]:
            self._seats.append(self._seat(device))
        for seat in self._seats:
            seat.begin(published)
        return _ProcessCrew(self, published, self._seats)

    def _forget_model(self, key: str) -> None:
        for seat in self._seats:
            seat.forget_model(key)

    def _ended(self, works: Sequence[Work]) -> None:
        """Forget some work."""
        self._published.end(works)
        for seat in self._seats:
            seat.forget(works)

    def _seat(self, device: str | None) -> _Process:
        self._count += 1
        named = f"worker {self._count}" + (f" on {device}" if device else "")
        return _Process(named, self._published.by_key, device, self._threads, self._memory)


class _Process(WorkerSeat):
    """A process that runs `conewise.jobs.process_worker`, and the pipe to it."""

    def __init__(
        self, name: str, published: Mapping[str, Any], device: str | None, threads: int, memory: int | None
    ) -> None:
        super().__init__(name, published)
        self.device, self.is_out = device, False
        self.pipe, theirs = Pipe()
        options = [str(theirs.fileno()), device or "", str(threads), str(memory or "")]
        own_path = f"import sys; sys.path[:] = {[*map(str, sys.path)]}"
        main = f"from conewise.jobs.process_worker import main; main({options})"
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
        self.is_out = True
        self.call("run", key, share)

    def outcome(self) -> Done | Failed:
        """What came back."""
        self.is_out = False
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


class _ProcessCrew:
    def __init__(self, fleet: Processes, works: Sequence[tuple[Work, str]], seats: list[_Process]) -> None:
        self._fleet, self._works, self._seats = fleet, works, seats

    @property
    def seats(self) -> Sequence[_Process]:
        """All seats."""
        return self._seats

    def wait(self) -> list[tuple[Any, Done | Failed]]:
        """Wait until a share comes back."""
        waiting: dict[Connection, _Process] = {seat.pipe: seat for seat in self._seats if seat.is_out}
        return [(waiting[pipe], waiting[pipe].outcome()) for pipe in wait(list(waiting))]  # type: ignore[index]

    def replace(self, seat: Any) -> _Process:
        """Another process in the place of one that ended."""
        seat.end()
        own = self._fleet._seat(seat.device)
        own.begin(self._works)
        self._seats[self._seats.index(seat)] = own
        return own
