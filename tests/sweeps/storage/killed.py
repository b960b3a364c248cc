"""A sweep that is killed again and again: `python -m tests.sweeps.storage.killed FOLDER KILLS SEED`.

Loading torch takes seconds, so it is done once, in a process that computes nothing: it forks those that
run the sweep, and kills them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import conewise as cw
from conewise.sweeps.sweep import Sweep
from tests.sweeps.small import model, prompts, slow_metric, sweep_over

BUDGET = "30KiB"


def slow_sweep() -> Sweep:
    """Two batches, several chunks each: heads at every position."""
    return sweep_over(
        model(),
        cw.sites("z", layer=":", head=":", pos=":"),
        base=[{"input_ids": prompts(seed, 2)} for seed in (1, 3)],
        source=[{"input_ids": prompts(seed, 2)} for seed in (2, 4)],
        metric=slow_metric,
    )


def killed_run(sweep: Sweep, folder: Path, seconds: float) -> bool:
    """Run the sweep in a process of its own, and kill it after a while; whether it was still running."""
    child = os.fork()
    if not child:
        sweep.run(out=folder, resume=True, max_memory=BUDGET)
        os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


if __name__ == "__main__":
    torch.set_num_threads(1)
    slow, (place, kills, seed) = slow_sweep(), sys.argv[1:]
    slow.plan(), slow.provenance()  # known once, so that the forks begin to compute at once
    started = time.perf_counter()
    slow.run(max_memory=BUDGET)
    whole = time.perf_counter() - started  # a busy machine takes its time, and so do the kills
    moments = random.Random(seed)
    killed = [killed_run(slow, Path(place), moments.uniform(0.0, 0.3) * whole) for _ in range(int(kills))]
    sys.stdout.write(json.dumps(killed))
