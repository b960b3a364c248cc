"""Kernels of the operations of a pass, where torch has several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from conewise.errors import ConewiseError
from conewise.jobs.digests import device_and_dtype
from conewise.program.records import ATTENTION, Program, Record
from conewise.program.tensors import Tensor, multiplying, without_cudnn_attention
from conewise.runs.captured import Captured
from conewise.sweeps.execution.fills import nan_flags
from conewise.sweeps.planning.planner import ModelFacts, facts_of


@contextmanager
def kernels_of_passes(device: torch.device, precision: str | None) -> Iterator[None]:
    """Products in a precision, attention without cuDNN."""
    with multiplying(precision), without_cudnn_attention(device):
        yield


# ------------------------------------------------------------------------------------------
# Kernels that passes use and a module does not: a CUDA device loads them when the module is captured.
#
# A kernel is loaded at its first use, which takes milliseconds, and may wait for all that the device is at
# work on. In the first sweep of a process that would come to as much as a small sweep takes.

SIZE = 16
"""Stands for a size that varies from run to run."""

_LOADED: set[tuple[Any, ...]] = set()
"""Kernels that this process loaded, by what they are for, with the device, the dtype and the width."""


@torch.no_grad()
def load_kernels(model: Captured) -> None:
    """Let the device of a model load the kernels of its passes; nothing happens on a CPU."""
    device, dtype = device_and_dtype(model.program)
    if device.type != "cuda" or len(model.program.devices) > 1:
        return
    try:
        facts = facts_of(model)
    except ConewiseError:
        return  # a sweep says what cannot be swept
    wanted: dict[tuple[Any, ...], Any] = {("fills", device, dtype): lambda: _fill(device, dtype)}
    for fusion in facts.fusions:
        rule = getattr(fusion.rule, "func", fusion.rule)
        of = facts.program.record_of[fusion.node].dtype
        wanted.setdefault((rule, device, of), lambda f=fusion: f.rule(*_inputs(facts.program, f.inputs)))
    for record in facts.program.records:
        if record.op == ATTENTION:
            width = (record.shape or ())[-1:]
            wanted.setdefault((ATTENTION, device, record.dtype, width), lambda r=record: _attend(facts, r))
    for key in wanted.keys() - _LOADED:
        _LOADED.add(key)
        try:
            with kernels_of_passes(device, None):
                wanted[key]()
        except Exception:  # noqa: BLE001  # what cannot be tried like this is loaded when it is used
            continue


def _fill(device: torch.device, dtype: torch.dtype) -> None:
    """Bring stacks to their worlds, and put something into them."""
    stack, at = torch.ones(4, 8, 64, device=device, dtype=dtype), torch.tensor([2, 0], device=device)
    stack[at, at] = stack[at, at]
    torch.cat([stack.index_select(0, at), stack.expand(4, 8, 64)]).repeat(2, 1, 1)
    nan_flags([stack])


def _attend(facts: ModelFacts, record: Record) -> None:
    """Attention of a stack: keys and values are repeated for the queries that share them."""
    (query,) = _inputs(facts.program, record.inputs[:1])
    torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)


def _inputs(program: Program, names: tuple[str, ...]) -> list[Tensor]:
    """Small tensors in place of values; weights are there."""
    found = []
    for name in names:
        if name in program.source_values:
            found.append(program.source_values[name])
            continue
        record = program.record_of[name]
        shape = [size if isinstance(size, int) else SIZE for size in record.shape or ()]
        found.append(torch.ones(shape, dtype=record.dtype, device=record.device))
    return found
