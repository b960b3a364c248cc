"""A worker: it has models of its own, keeps the jobs that it was told of, and runs shares of them.

It is the same class in a process of this machine, where `main` reads its calls, and as an actor of Ray.
"""

from __future__ import annotations

import time
import warnings
from multiprocessing.connection import Connection

import torch

from conewise.errors import ConewiseError, NoEffectWarning
from conewise.jobs.payload import Payload, Recipe, prepared, unpacked
from conewise.jobs.scheduling import MEMORY, OWN, Done, Failed, Share, WorkerJob
from conewise.runs.captured import Captured


class Worker:
    """Runs shares.

    `device` is where its models go, None for the driver's; `memory` is all that chunks may take.
    """

    def __init__(
        self, device: str | None = None, threads: int | None = None, memory: int | None = None
    ) -> None:
        self.device, self.memory = device, memory
        if threads is not None:
            torch.set_num_threads(threads)
        self._models: dict[str, Captured] = {}
        self._jobs: dict[str, WorkerJob] = {}
        self._at: WorkerJob | None = None

    def prepare(self, key: str, recipe: Recipe) -> None:
        """Load and capture a model, once."""
        if key not in self._models:
            self._models[key] = prepared(recipe, self.device)

    def forget_model(self, key: str) -> None:
        """Let go of a model."""
        self._models.pop(key, None)

    def know_job(self, key: str, model: str, payload: Payload) -> None:
        """Be told of a job, and of which model it is."""
        if key not in self._jobs:
            own = self._models[model]
            where = None if self.device is None else torch.device(self.device)
            make, asked = unpacked(payload, own, where)
            self._jobs[key] = make(own, **asked)

    def know_plan(self, key: str, batch: int, text: str) -> None:
        """Be told the plan of a batch."""
        self._jobs[key].know_plan(batch, text)

    def forget(self, key: str) -> None:
        """Forget a job that has ended."""
        ended = self._jobs.pop(key, None)
        if ended is not None:
            ended.rest()
        if ended is self._at:
            self._at = None

    def run(self, key: str, share: Share) -> Done | Failed:
        """Run a share. What goes wrong with it is returned, not raised."""
        started, job = time.perf_counter(), self._jobs[key]
        if self._at is not None and self._at is not job:
            self._at.rest()
        self._at = job
        try:
            lack = job.lacking(share, self.memory)
            if lack:
                return Failed(MEMORY, lack)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoEffectWarning)  # a sweep has cells without effect
                found = job.run(share, self.memory)
            found.ledger.compute_seconds = time.perf_counter() - started
            return found
        except (MemoryError, torch.OutOfMemoryError) as error:
            job.rest()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return Failed(MEMORY, str(error) or type(error).__name__)
        except Exception as error:  # noqa: BLE001  # it ends this share, and leaves the others running
            is_ours = isinstance(error, ConewiseError)
            said = str(error) if is_ours else f"{type(error).__name__}: {error}"
            return Failed(OWN, said, type(error).__name__)


def main(number: int, device: str | None, threads: int, memory: int | None) -> None:
    """Carry out the calls of a driver, from the pipe of this `number`, until that is closed."""
    pipe: Connection = Connection(number)
    worker = Worker(device, threads, memory)
    while True:
        try:
            method, given = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            found = getattr(worker, method)(*given)
        except Exception as error:  # noqa: BLE001  # the driver says it
            pipe.send((False, f"{type(error).__name__}: {error}"))
            return
        if method == "run":
            pipe.send((True, found))
