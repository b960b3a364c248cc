"""Workers as actors of Ray: on this machine, or on all machines of a cluster."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from conewise.arguments import as_bytes, checked
from conewise.circuits.forwards import Asked
from conewise.circuits.masked_forward import Forward
from conewise.errors import FleetError
from conewise.extras import expect, needs
from conewise.jobs.processes import Turn
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
    is_number,
    run_jobs,
)
from conewise.jobs.search_job import fleet_forward
from conewise.jobs.worker import Worker

LOOPBACK = "127.0.0.1"
OLDEST = (2, 52)
"""The first Ray whose clusters ask for a token."""
PATIENCE = 30.0
"""Seconds that are waited for others to let go of what workers need."""


@checked
class Ray:
    """Runs sweeps on workers of Ray: `sweep.run(executor=cw.Ray(workers=4))`.

    `address` is that of a cluster ("auto" finds the one of this machine, "ray://head:10001" another); None
    starts a local one, and ends it with `close` or with the process. That one listens on the loopback
    address alone, and runs nothing without a token that only this process and its workers have.
    `workers` is how many there are, by default one for each GPU, or for each core. Each gets
    `gpus_per_worker` and `cpus_per_worker`, and computes with as many threads. `max_memory` is what the
    chunks of one worker may take; a share that takes more is cut in half. With `model`, a folder or a name,
    each worker loads the weights from there (`load` is what `cw.load` is given beside); else the module is
    put into Ray's object store, once.

    A cluster of yours runs code for whoever can reach it, if it asks for no token: keep it in a network of
    your own.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        gpus_per_worker: float = 0,
        cpus_per_worker: float = 1,
        max_memory: int | str | None = None,
        model: str | None = None,
        load: Mapping[str, Any] | None = None,
    ) -> None:
        for name, given in (("gpus_per_worker", gpus_per_worker), ("cpus_per_worker", cpus_per_worker)):
            if not is_number(given) or given < 0:
                raise FleetError(f"{name} is a number of 0 or more, not {given!r}.")
        expect_counts(workers=workers)
        if load and model is None:
            raise FleetError("`load` says how workers load `model`, which was not given.")
        expect("ray")
        self._address, self._gpus, self._cpus = address, gpus_per_worker, cpus_per_worker
        self._asked, self._memory = workers, as_bytes(max_memory)
        self._published = Published(model, load or {})
        self._ray: Any = None
        self._own_cluster = ExitStack()
        self._seats: list[_Actor] = []
        self._count = 0
        self._turn = Turn()
        self.ledger = FleetLedger()
        """What the last sweep took, by worker."""

    # -- the cluster -------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        """How many workers there are."""
        if self._asked is not None:
            return self._asked
        found = self._connected().cluster_resources()
        if self._gpus:
            return max(1, int(found.get("GPU", 0) // self._gpus))
        return max(1, int(found.get("CPU", 1) // (self._cpus or 1)))

    def _connected(self) -> Any:
        if self._ray is None:
            with needs("ray"):
                import ray  # noqa: PLC0415  # where such workers are asked for
            if not ray.is_initialized():
                try:
                    self._start(ray)
                except FleetError:
                    raise
                except Exception as error:
                    where = f"at {self._address!r}" if self._address else "on this machine"
                    raise FleetError(
                        f"no cluster of Ray {where} ({type(error).__name__}: {error}). Start one with "
                        "`ray start --head`, or leave `address` out to have one for this process alone."
                    ) from error
            self._ray = ray
        return self._ray

    def _start(self, ray: Any) -> None:
        if self._address is not None:
            # The script's folder is Ray's to add; the current one is in the driver's path or in no path.
            here = str(Path.cwd())
            ray.init(
                address=self._address,
                log_to_driver=False,
                ignore_reinit_error=True,
                job_config=_job_config(ray, [here] if {"", here}.intersection(sys.path) else []),
            )
            return
        count = (
            None if self._asked is None else max(os.cpu_count() or 1, int(self._asked * self._cpus + 0.999))
        )
        with ExitStack() as started:
            folder = started.enter_context(_private(ray))
            started.callback(ray.shutdown)
            ray.init(
                address="local",
                num_cpus=count,
                include_dashboard=False,
                _node_ip_address=LOOPBACK,
                _temp_dir=folder,
                log_to_driver=False,
                job_config=_job_config(ray, [str(Path(one).absolute()) for one in sys.path]),
            )
            address = ray.util.get_node_ip_address()
            if address != LOOPBACK:
                raise FleetError(
                    f"Ray {ray.__version__} listens on {address}, not on {LOOPBACK} alone as a cluster that "
                    "`cw.Ray()` starts has to: it was ended. Install another version of Ray, or start a "
                    'cluster with `ray start --head` and join it: `cw.Ray("auto")`.'
                )
            self._own_cluster = started.pop_all()
        atexit.register(self.close)

    def close(self) -> None:
        """Let all workers go; a local cluster that was started for them ends."""
        if self._ray is None:
            return
        self._end_seats()
        self._published.clear()
        self._ray = None
        self._own_cluster.close()
        atexit.unregister(self.close)

    def _end_seats(self) -> None:
        for seat in self._seats:
            seat.end()
        self._seats.clear()

    def __enter__(self) -> Ray:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()

    # -- sweeps ------------------------------------------------------------------------------------

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
            self._connected()
            self.ledger = FleetLedger()
            try:
                yield Dispatch(self.workers, self._crew, self._ended)
            except BaseException:
                if any(seat.is_out for seat in self._seats):
                    self._end_seats()
                raise

    def _crew(self, works: Sequence[Work]) -> Crew:
        """Workers that have the models of some work."""
        published = self._published.begin(works, self._ray.put, self._forget_model)
        self._expect_room(self.workers - len(self._seats))
        while len(self._seats) < self.workers:
            self._seats.append(self._seat())
        for seat in self._seats:
            seat.begin(published)
        return _RayCrew(self, published, self._seats)

    def _forget_model(self, key: str) -> None:
        for seat in self._seats:
            seat.forget_model(key)

    def _ended(self, works: Sequence[Work]) -> None:
        """Forget some work."""
        self._published.end(works)
        for seat in self._seats:
            seat.forget(works)

    def _expect_room(self, count: int) -> None:
        """Raise FleetError where a cluster has no room for so many workers: they would wait unseen."""
        wanted = {"CPU": count * self._cpus, "GPU": count * self._gpus}
        until = time.monotonic() + PATIENCE
        while True:
            free = self._ray.available_resources()
            lacking = [kind for kind, amount in wanted.items() if amount and free.get(kind, 0) < amount]
            if not lacking:
                return
            if time.monotonic() > until:
                kind, total = lacking[0], self._ray.cluster_resources().get(lacking[0], 0)
                raise FleetError(
                    f"{count} workers need {wanted[kind]:g} of the cluster's {total:g} {kind}s, and "
                    f"{free.get(kind, 0):g} are free. Close other fleets, or give fewer workers or a smaller "
                    f"{kind.lower()}s_per_worker."
                )
            time.sleep(0.2)

    def _seat(self) -> _Actor:
        ray, threads = self._ray, max(1, int(self._cpus))
        actor = ray.remote(Worker).options(
            num_cpus=self._cpus,
            num_gpus=self._gpus,
            max_restarts=0,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
        )
        device = "cuda" if self._gpus else None
        self._count += 1
        handle = actor.remote(device, threads, self._memory)
        return _Actor(ray, f"worker {self._count}", handle, self._published.by_key)


@contextmanager
def _private(ray: Any) -> Iterator[str]:
    """Let `ray.init` start a cluster that nobody else can reach or use; yields a folder for its files.

    Ray replaces a loopback address by one that others can reach, but on platforms without clusters. So it is
    told that this is one. Its own folder, /tmp/ray, is open to all users, and so is the token that it would
    leave in the home folder; both are made anew here.
    """
    if tuple(map(int, ray.__version__.split(".")[:2])) < OLDEST:
        raise FleetError(
            f"Ray {ray.__version__} is installed, whose clusters run code for whoever reaches them. "
            f"`cw.Ray()` needs {'.'.join(map(str, OLDEST))} or later, which asks for a token: "
            "pip install --upgrade 'conewise[ray]'."
        )
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        raise FleetError(
            f"RAY_AUTH_MODE is {mode!r}, and a cluster that `cw.Ray()` starts runs nothing without a token. "
            'Unset it, or start a cluster with `ray start --head` and join it: `cw.Ray("auto")`.'
        )
    ray_constants = ray._private.ray_constants

    def read_again() -> None:
        """Have Ray read the mode and the token again: it reads them once for each process."""
        ray._raylet.Config.initialize("")
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()

    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": os.environ.get("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"),
    }
    before = {name: os.environ.get(name) for name in settings}
    had_clusters = ray_constants.ENABLE_RAY_CLUSTER
    # Paths of sockets are short: TMPDIR may be too long. Ray opens the folder that it gets to all.
    folder = tempfile.mkdtemp(prefix="conewise-", dir="/tmp" if Path("/tmp").is_dir() else None)
    try:
        os.environ.update(settings)
        ray_constants.ENABLE_RAY_CLUSTER = False
        read_again()
        yield f"{folder}/ray"
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = had_clusters
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        read_again()
        shutil.rmtree(folder, ignore_errors=True)


def _job_config(ray: Any, path: Sequence[str]) -> Any:
    """What workers are told: `path` goes before their own `sys.path`.

    Ray would put the driver's current folder there too, which need not be in the driver's own path: whatever
    lies in a downloaded folder would be imported. It leaves that to clients who say that they look after it.
    """
    return ray.job_config.JobConfig(_client_job=True, _py_driver_sys_path=[*reversed(path)])


class _Actor(WorkerSeat):
    """An actor, and what was asked of it."""

    def __init__(self, ray: Any, name: str, actor: Any, published: Mapping[str, Any]) -> None:
        super().__init__(name, published)
        self._ray, self._actor = ray, actor
        self.pending: Any = None
        self._calls: list[Any] = []

    def call(self, method: str, *given: Any) -> None:
        """Ask the actor for something; what comes of it is looked at with the next share."""
        self._calls.append(getattr(self._actor, method).remote(*given))

    @property
    def is_out(self) -> bool:
        """Whether something comes back."""
        return self.pending is not None

    def run(self, key: str, share: Share) -> None:
        """Ask for a share."""
        self.pending = self._actor.run.remote(key, share)

    def outcome(self) -> Done | Failed:
        """What came back of the share that is done."""
        found, self.pending = self.pending, None
        exceptions = self._ray.exceptions
        try:
            for one in self._calls:
                self._ray.get(one)
            self._calls.clear()
            outcome: Done | Failed = self._ray.get(found)
        except (
            exceptions.RayActorError,
            exceptions.OutOfMemoryError,
            exceptions.WorkerCrashedError,
        ) as error:
            return Failed(DIED, str(error).strip().splitlines()[0])
        except exceptions.RayTaskError as error:
            self.pending = found  # it is of no use any more: whoever asked ends it
            raise FleetError(f"{self.name} could not be set up: {error.cause or error}") from error
        return outcome

    def end(self) -> None:
        """Let the actor go."""
        self._ray.kill(self._actor, no_restart=True)


class _RayCrew:
    def __init__(self, fleet: Ray, works: Sequence[tuple[Work, str]], seats: list[_Actor]) -> None:
        self._fleet, self._works, self._seats = fleet, works, seats

    @property
    def seats(self) -> Sequence[_Actor]:
        """All seats."""
        return self._seats

    def wait(self) -> list[tuple[Any, Done | Failed]]:
        """Wait until a share comes back."""
        waiting = {seat.pending: seat for seat in self._seats if seat.is_out}
        ready, _ = self._fleet._ray.wait(list(waiting), num_returns=1)
        return [(waiting[one], waiting[one].outcome()) for one in ready]

    def replace(self, seat: Any) -> _Actor:
        """Another worker in the place of one that died."""
        own = self._fleet._seat()
        own.begin(self._works)
        self._seats[self._seats.index(seat)] = own
        return own
