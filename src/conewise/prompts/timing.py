"""What a full forward by the module itself takes, in seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from conewise.checks.hooking import HookedModule
from conewise.program.tensors import Tensor
from conewise.runs.captured import Captured
from conewise.sweeps.planning.model_facts import facts_of
from conewise.sweeps.planning.shapes.costs import synchronize


def forward_seconds(model: Captured, inputs: Sequence[Mapping[str, Tensor]], times: int) -> float:
    """What one full forward of all `inputs` takes: the mean of so many, after one."""
    device = facts_of(model).device
    module = HookedModule(model.module, model.program, model.signature)
    started = 0.0
    for number in range(times + 1):
        if number == 1:  # the first is not counted: kernels are chosen and memory is taken in it
            started = time.perf_counter()
        for one in inputs:
            module.outputs(one, {})
        synchronize(device)
    return (time.perf_counter() - started) / times
