"""Weights on a CUDA device that change between two runs: however they are written to, it is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conewise.errors import WeightsChangedError
from tests.gpu.scenes import Scene, deviation, gpt2, needs_cuda, pair

pytestmark = needs_cuda

ROUNDING = 2e-5


def data_write(module: Any) -> None:
    module.transformer.h[1].mlp.c_fc.weight.data.mul_(2)


def one_number(module: Any) -> None:
    module.transformer.h[1].mlp.c_fc.weight.data[3, 5] += 1


def counted(module: Any) -> None:
    with torch.no_grad():
        module.transformer.h[1].mlp.c_fc.weight.mul_(1.5)


def exchanged(module: Any) -> None:
    rows = module.transformer.h[2].attn.c_proj.weight.data
    rows[[1, 4]] = rows[[4, 1]]


def norm_write(module: Any) -> None:
    module.transformer.ln_f.weight.data[7] *= 3


def bias_write(module: Any) -> None:
    module.transformer.h[0].attn.c_attn.bias.data[2] = 7.0


def unembedding_write(module: Any) -> None:
    module.lm_head.weight.data.neg_()


def other_data(module: Any) -> None:
    weight = module.transformer.h[1].mlp.c_proj.weight
    weight.data = torch.randn_like(weight.data)


WRITES = [
    data_write,
    one_number,
    counted,
    exchanged,
    norm_write,
    bias_write,
    unembedding_write,
    other_data,
]


@pytest.fixture
def scene() -> Scene:
    """A scene of which one shape was swept until it is replayed."""
    scene = Scene(gpt2())
    for seed in range(4):
        scene.values(pair(seed))
    return scene


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_new_pair_is_swept_with_the_weights_that_are_there(
    scene: Scene, write: Callable[[Any], None]
) -> None:
    asked = pair(4)
    before = scene.values(asked)
    write(scene.module)
    expected = Scene(scene.module).values(asked, evaluator="serial")
    assert deviation(before, expected) > 10 * ROUNDING
    for _ in range(3):
        assert deviation(scene.values(asked), expected) < ROUNDING


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_runs_that_were_made_before_are_refused(scene: Scene, write: Callable[[Any], None]) -> None:
    asked = pair(4)
    base, source = scene.model.run(input_ids=asked.base), scene.model.run(input_ids=asked.source)
    sweep = scene.model.sweep(scene.sites, base=base, source=source, metric=asked.metric)
    sweep.run(progress=False)
    write(scene.module)
    with pytest.raises(WeightsChangedError):
        sweep.run(progress=False)


def test_replaced_weights_are_to_be_captured_again(scene: Scene) -> None:
    projection = scene.module.transformer.h[1].mlp.c_fc
    projection.weight = nn.Parameter(projection.weight.detach() * 2)
    with pytest.raises(WeightsChangedError, match="captur"):
        scene.values(pair(4))
    again = Scene(scene.module)
    asked = pair(4)
    assert deviation(again.values(asked), again.values(asked, evaluator="serial")) < ROUNDING
