"""A budget is a promise: what torch allocates and reserves on a device stays under it, run after run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conewise.sweeps.result import Result
from tests.gpu.scenes import DEVICE, Scene, deviation, gpt2, llama, needs_cuda, numbers, pair

pytestmark = needs_cuda

WITHIN = 0.05
"""How far the measured peak may be from the predicted one."""

LENGTH, PROMPTS = 128, 4
MODELS: dict[str, Any] = {
    "gpt2": lambda: gpt2(layers=8, heads=12, width=768),
    "llama in bfloat16": lambda: llama(layers=8, heads=16, kv=4, width=1024, dtype=torch.bfloat16),
}


@pytest.fixture(params=MODELS)
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    yield Scene(MODELS[request.param]())
    gc.collect()
    torch.cuda.empty_cache()


def held() -> int:
    """What torch has of the device, with nothing kept that could be given back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    return torch.cuda.memory_reserved(DEVICE)


def run_often(scene: Scene, budget: int | None, *, times: int) -> list[Result]:
    """The same pair so many times; its runs and the memory that kernels keep are there before."""
    asked = pair(1, length=LENGTH, prompts=PROMPTS)
    base, source = scene.model.run(input_ids=asked.base), scene.model.run(input_ids=asked.source)
    sweep = scene.model.sweep(scene.sites, base=base, source=source, metric=asked.metric)
    floor, results = held(), []
    for number in range(times):
        result = sweep.run(evaluator="wavefront", max_memory=budget, progress=False)
        results.append(result)
        peak, predicted = result.ledger.peak_bytes, result.plan.peak_bytes
        assert peak is not None
        assert abs(peak / predicted - 1) <= WITHIN, (number, peak, predicted)
        reserved = torch.cuda.max_memory_reserved(DEVICE) - floor
        assert budget is None or reserved <= budget, (number, reserved, budget)
    return results


def test_the_measured_peak_is_the_predicted_one(scene: Scene) -> None:
    run_often(scene, None, times=10)


def test_runs_of_one_pass_stay_under_their_budget(scene: Scene) -> None:
    """Half as much again as is needed: enough for blocks of the allocator, too little for a second copy."""
    asked = pair(1, length=LENGTH, prompts=PROMPTS)
    needed = scene.sweep(asked).plan(evaluator="wavefront").peak_bytes
    results = run_often(scene, int(1.5 * needed), times=10)
    assert {len(one.plan.chunks) for one in results} == {1}


@pytest.mark.parametrize("part", [2, 4])
def test_several_passes_stay_under_their_budget(scene: Scene, part: int) -> None:
    asked = pair(1, length=LENGTH, prompts=PROMPTS)
    needed = scene.sweep(asked).plan(evaluator="wavefront").peak_bytes
    first, *others = run_often(scene, needed // part, times=10)
    assert len(first.plan.chunks) > 1
    assert first.plan.peak_bytes <= needed // part
    for other in others:
        assert deviation(numbers(other), numbers(first)) < 2e-2


def test_new_pairs_take_no_more_than_the_first(scene: Scene) -> None:
    """What is kept for one pair is used for the next: nothing grows with the pairs that were swept."""
    budget = 2 * scene.sweep(pair(0, length=LENGTH, prompts=PROMPTS)).plan(evaluator="wavefront").peak_bytes
    for seed in range(3):
        scene.values(pair(seed, length=LENGTH, prompts=PROMPTS), evaluator="wavefront", max_memory=budget)
    before = torch.cuda.memory_allocated(DEVICE)
    floor = held()
    for seed in range(3, 13):
        result = scene.sweep(pair(seed, length=LENGTH, prompts=PROMPTS)).run(
            evaluator="wavefront", max_memory=budget, progress=False
        )
        peak, reserved = result.ledger.peak_bytes, result.ledger.reserved_bytes
        assert peak is not None
        assert reserved is not None
        assert abs(peak / result.plan.peak_bytes - 1) <= WITHIN
        assert reserved <= budget
    del result
    gc.collect()
    assert torch.cuda.memory_allocated(DEVICE) <= before + (1 << 20)
    assert held() <= floor + budget


def test_parts_of_weights_are_planned_and_measured_at_every_run() -> None:
    scene = Scene(gpt2(layers=8, heads=12, width=768))
    budget = int(
        1.5 * scene.sweep(pair(0, length=LENGTH, prompts=PROMPTS), precision="split").plan().peak_bytes
    )
    for seed in range(4):
        asked = pair(seed, length=LENGTH, prompts=PROMPTS)
        result = scene.sweep(asked, precision="split").run(
            evaluator="wavefront", max_memory=budget, progress=False
        )
        peak, reserved, predicted = (
            result.ledger.peak_bytes,
            result.ledger.reserved_bytes,
            result.plan.peak_bytes,
        )
        assert peak is not None
        assert reserved is not None
        assert abs(peak / predicted - 1) <= WITHIN, (seed, peak, predicted)
        assert reserved <= budget, (seed, reserved, budget)


def held_by_tensors() -> int:
    """What torch has of the device, without the memory that cuBLAS keeps for each stream."""
    clear: Any = torch._C
    clear._cuda_clearCublasWorkspaces()
    return held()


def test_a_swept_model_that_is_dropped_leaves_nothing_on_the_device() -> None:
    floor = held_by_tensors()
    scene = Scene(gpt2(width=256))
    for seed in range(4):
        scene.values(pair(seed))
    del scene
    assert held_by_tensors() <= floor + (4 << 20)
