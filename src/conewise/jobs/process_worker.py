"""The process of a worker. It reads calls from the pipe of its driver until that is closed."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection


def main(words: list[str]) -> None:
    """Do what the driver says until it is gone; `words` are the pipe's number, device, threads and memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's, which ends its workers
    number, device, threads, memory = words
    pipe: Connection = Connection(int(number))
    os.environ["OMP_NUM_THREADS"] = threads
    from conewise.jobs.worker import Worker  # noqa: PLC0415  # torch reads the threads when it is imported

    worker = Worker(device or None, int(threads), int(memory) if memory else None)
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
