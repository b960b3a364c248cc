"""Cells with sources of their own on a CUDA device: stacked and one by one they have the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import conewise as cw
from conewise.errors import PatchError
from tests.gpu.scenes import DEVICE, deviation, gpt2, llama, needs_cuda, numbers, pair

pytestmark = needs_cuda

ROUNDING = 2e-5
"""How far batched kernels of float32 may be from single ones, of the largest value."""

MODELS = {"gpt2": gpt2, "llama": llama}


def cells(model: Any, source: Any, width: int, seed: int) -> list[Any]:
    """Values, vectors that are added, functions, runs and numbers, at several layers and positions."""
    random = torch.Generator().manual_seed(seed)
    vector = torch.randn(width, generator=random)  # `cw.add` brings it to the site's device
    row = torch.randn(width, generator=random).to(DEVICE)
    return [
        *(cw.cell(("resid_post", layer), source=cw.add(vector, 0.5 + layer)) for layer in range(2)),
        *(
            cw.cell(cw.site("mlp_out", layer=1, pos=pos), source=row, label=f"row {pos}")
            for pos in (0, 3, -1)
        ),
        cw.cell(("mlp_out", 0), source=0.25),
        cw.cell(("mlp_out", 0), source="mean"),
        cw.cell(("mlp_out", 2), source=lambda part: part * 2, label="twice"),
        cw.cell(cw.site("z", layer=1, head=2), source=source),
        [("mlp_out", 0), cw.cell(("resid_post", 1), source=cw.add(vector, -1.0))],
    ]


@pytest.mark.parametrize("name", MODELS)
def test_stacked_worlds_are_those_one_by_one(name: str) -> None:
    """Several runs, with other values each: what was recorded or kept for one is not put in for another."""
    module = MODELS[name]()
    asked = pair(0)
    model = cw.capture(module, input_ids=asked.base)
    width = model.run(input_ids=asked.base)["resid_post", 0].shape[-1]
    for seed in range(4):
        asked = pair(seed)
        source = model.run(input_ids=asked.source)
        sweep = model.sweep(
            cells(model, source, width, seed),
            base={"input_ids": asked.base},
            source={"input_ids": asked.source},
            metric=asked.metric,
        )
        found = [numbers(sweep.run(evaluator="wavefront", progress=False)) for _ in range(3)]
        alone = numbers(sweep.run(evaluator="serial", progress=False))
        for one in found:
            assert deviation(one, alone) < ROUNDING


def test_a_value_that_lies_elsewhere_is_refused() -> None:
    asked = pair(0)
    model = cw.capture(gpt2(), input_ids=asked.base)
    width = model.run(input_ids=asked.base)["resid_post", 0].shape[-1]
    with pytest.raises(PatchError, match="Move it first"):
        model.sweep(
            cw.cell(("resid_post", 0), source=torch.zeros(width)),
            base={"input_ids": asked.base},
            metric=asked.metric,
        )


def test_pairs_and_every_coefficient_in_chunks() -> None:
    asked = pair(1, prompts=3)
    model = cw.capture(gpt2(), input_ids=asked.base)
    heads = cw.pairs(cw.sites("z", layer=":", head=":"), singles=True)
    sweep = model.sweep(heads, base={"input_ids": asked.base}, source="zero", metric=asked.metric)
    budget = sweep.plan().peak_bytes // 3
    found = sweep.run(max_memory=budget, progress=False)
    assert len(found.plan.chunks) > 1
    assert deviation(numbers(found), numbers(sweep.run(evaluator="serial", progress=False))) < ROUNDING
