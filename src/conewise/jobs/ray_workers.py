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

from conewise.arguments import checked
from conewise.errors import FleetError
from conewise.extras import expect, needs
from conewise.jobs.pool import Pool, WorkerSeat, expect_counts
from conewise.jobs.scheduling import DIED, Done, Failed, Share
from conewise.jobs.worker import Worker

LOOPBACK = "127.0.0.1"
OLDEST = (2, 52)
"""The first Ray whose clusters ask for a token."""
PATIENCE = 30.0
"""Seconds that are waited for others to let go of what workers need."""


@checked
class Ray(Pool):
    """Run sweeps on Ray workers: `sweep.run(workers=cw.Ray(workers=4))`.

    `address` is that of a cluster ("auto" finds the one of this machine, "ray://head:10001" another); None
    starts a local cluster, which ends with `close` or with the process. A local cluster listens on the
    loopback address only, and runs nothing without a token that only this process and its workers have.

    `workers` is their number, by default one for each GPU, or for each core. Each gets `gpus_per_worker` and
    `cpus_per_worker`, and computes with as many threads. `max_memory` limits the memory of one worker's
    chunks; a share that exceeds it is split in half. With `model`, a folder or a name, each worker loads the
    weights from there (`load` are further arguments of `cw.load`); else the module is put into Ray's object
    store, once.

    Your own cluster runs code for anyone who can reach it, unless it requires a token: keep it in a private
    network.
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
        amounts: dict[str, object] = {"gpus_per_worker": gpus_per_worker, "cpus_per_worker": cpus_per_worker}
        for name, given in amounts.items():
            if isinstance(given, bool) or not isinstance(given, int | float) or given < 0:
                raise FleetError(f"{name} is a number of 0 or more, not {given!r}.")
        expect_counts(workers=workers)
        super().__init__(model, load, max_memory)
        expect("ray")
        self._address, self._gpus, self._cpus = address, gpus_per_worker, cpus_per_worker
        self._asked = workers
        self._ray: Any = None
        self._own_cluster = ExitStack()

    # -- the cluster -------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        """Return the number of workers."""
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
        """Stop all workers, and the local cluster if one was started for them."""
        if self._ray is None:
            return
        super().close()
        self._ray = None
        self._own_cluster.close()
        atexit.unregister(self.close)

    # -- the workers -------------------------------------------------------------------------------

    def put(self, given: Any) -> Any:
        """Put something into Ray's object store."""
        return self._connected().put(given)

    def expect_room(self, count: int) -> None:
        """Raise FleetError if a cluster has no room for this many workers; they would wait silently."""
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

    def ready(self, seats: Sequence[Any]) -> Sequence[WorkerSeat]:
        """Wait until something comes back of one of these actors."""
        waiting: dict[Any, _Actor] = {seat.pending: seat for seat in seats}
        found, _ = self._ray.wait(list(waiting), num_returns=1)
        return [waiting[one] for one in found]

    def new_seat(self, name: str, replaced: Any = None) -> WorkerSeat:
        """Start an actor."""
        del replaced
        ray, threads = self._ray, max(1, int(self._cpus))
        actor = ray.remote(Worker).options(
            num_cpus=self._cpus,
            num_gpus=self._gpus,
            max_restarts=0,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
        )
        device = "cuda" if self._gpus else None
        return _Actor(ray, name, actor.remote(device, threads, self._memory), self._published)


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
    """Return the configuration of workers: `path` goes before their own `sys.path`.

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

    def run(self, key: str, share: Share) -> None:
        """Ask for a share."""
        self.pending = self._actor.run.remote(key, share)

    def outcome(self) -> Done | Failed:
        """Return what came back of the share that is done."""
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
            raise FleetError(f"{self.name} could not be set up: {error.cause or error}") from error
        return outcome

    def end(self) -> None:
        """Let the actor go."""
        self._ray.kill(self._actor, no_restart=True)
