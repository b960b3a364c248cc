"""Workers as processes of this machine: several GPUs, or several cores, without a scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

import torch

from conewise.arguments import checked
from conewise.errors import FleetError, describe
from conewise.extras import expect
from conewise.jobs.pool import Pool, WorkerSeat, expect_counts
from conewise.jobs.scheduling import DIED, Done, Failed, Share


@checked
class Processes(Pool):
    """Runs sweeps in processes of this machine: `sweep.run(workers=cw.Processes(devices="cuda:0,cuda:1"))`.

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
        """Start a process."""
        device = self._devices[len(self.seats)] if replaced is None else replaced.device
        named = name + (f" on {device}" if device else "")
        return _Process(named, self._published, device, self._threads, self._memory)

    def ready(self, seats: Sequence[Any]) -> Sequence[WorkerSeat]:
        """Wait until something comes back of some of these processes, or until one has ended."""
        waiting: dict[Any, _Process] = {seat.pipe: seat for seat in seats}
        return [waiting[pipe] for pipe in wait(list(waiting))]


class _Process(WorkerSeat):
    """A process that runs `conewise.jobs.process_worker`, and the pipe to it."""

    def __init__(
        self, name: str, published: Mapping[str, Any], device: str | None, threads: int, memory: int | None
    ) -> None:
        super().__init__(name, published)
        self.device = device
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
