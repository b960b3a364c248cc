"""Kernels that are loaded at a capture: each is tried on small values, and nothing is done on a CPU."""

from __future__ import annotations

import pytest
import torch

import conewise as cw
from conewise.program.records import ATTENTION
from conewise.sweeps.execution import wavefront as kernels
from conewise.sweeps.execution.wavefront import load_kernels
from conewise.sweeps.planning.fusing import find_fusions
from conewise.sweeps.planning.planner import facts_of
from tests.sweeps.tiny import tiny


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_fused_kernel_is_tried_on_small_values(name: str) -> None:
    program = tiny(name).program
    fusions = find_fusions(program, torch.device("cuda"))
    assert fusions
    for fusion in fusions:
        found = fusion.rule(*kernels._inputs(program, fusion.inputs))
        assert found.dtype == program.record_of[fusion.node].dtype


class Attending(torch.nn.Module):
    """Two heads that attend in the two layers of a model."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            heads = value.unflatten(-1, (2, 4)).transpose(1, 2)  # type: ignore[no-untyped-call]
            found = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
            value = value + found.transpose(1, 2).flatten(2)
        return value


def test_on_a_gpu_all_kinds_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, done = cw.capture(Attending(), torch.randn(2, 5, 8)), list[str]()
    facts = facts_of(model)
    monkeypatch.setattr(kernels, "_LOADED", set())
    monkeypatch.setattr(kernels, "_fill", lambda *_: done.append("fills"))
    monkeypatch.setattr(kernels, "_attend", lambda _, record: done.append(record.op))
    load_kernels(model)
    assert done == []
    monkeypatch.setattr(kernels, "device_and_dtype", lambda _: (torch.device("cuda"), facts.dtype))
    for _ in range(2):
        load_kernels(model)
        assert sorted(done) == sorted(["fills", ATTENTION])
