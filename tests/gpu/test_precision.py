"""How exactly a CUDA device multiplies: as asked for, and never more roughly than that."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from conewise.errors import SweepError
from conewise.program.walk import Interpreter
from conewise.sweeps.planning.fusing import find_fusions
from tests.gpu.scenes import DEVICE, Scene, deviation, gpt2, llama, needs_cuda, numbers, pair

pytestmark = needs_cuda

FLOAT32, TF32 = 2e-5, 1e-2
"""How far products of float32 and of TF32 may be from the exact ones, of the largest value."""


def wide() -> Any:
    """Products that are wide enough for any way of multiplying to be worth it."""
    return llama(layers=4, heads=16, kv=16, width=1024)


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene(wide())


@pytest.fixture(scope="module")
def exact(scene: Scene) -> Scene:
    return Scene(copy.deepcopy(scene.module).double())


def test_tf32_is_used_where_it_is_asked_for_and_nowhere_else(scene: Scene, exact: Scene) -> None:
    for seed in range(3):
        asked = pair(seed, length=64)
        truth = exact.values(asked)
        plain, rough = scene.values(asked), scene.values(asked, precision="tf32")
        assert deviation(plain, truth) < FLOAT32
        assert 10 * deviation(plain, truth) < deviation(rough, truth) < TF32
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.equal(scene.values(asked), plain)


def test_a_product_in_parts_has_the_error_of_float32(scene: Scene, exact: Scene) -> None:
    errors = []
    for seed in range(3):
        asked = pair(seed, length=64, prompts=2)
        truth = exact.values(asked)
        plain, parts = scene.values(asked), scene.values(asked, precision="split")
        assert not torch.equal(parts, plain), "no product was split"
        errors.append((deviation(parts, truth), deviation(plain, truth)))
    assert max(parts for parts, _ in errors) <= 2 * max(plain for _, plain in errors), errors
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_product_in_parts_is_checked_by_the_module(scene: Scene) -> None:
    result = scene.sweep(pair(1, length=64), precision="split").run(progress=False)
    check = result.verify(n=12)
    assert check, str(check)
    assert check.tolerance < TF32


def test_the_parts_of_weights_are_those_of_the_weights_that_are_there() -> None:
    scene = Scene(wide())
    for seed in range(3):
        scene.values(pair(seed, length=64), precision="split")
    for layer in scene.module.model.layers:
        layer.mlp.down_proj.weight.data.mul_(1.5)
    asked = pair(3, length=64)
    found = scene.values(asked, precision="split")
    assert deviation(found, scene.values(asked, evaluator="serial")) < FLOAT32


def test_only_float32_is_split() -> None:
    scene = Scene(llama(dtype=torch.bfloat16))
    with pytest.raises(SweepError, match="float32"):
        scene.values(pair(1), precision="split")


@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
@pytest.mark.parametrize("prompts", [1, 4])
def test_the_columns_of_a_few_tokens_are_those_of_all_logits(make: Any, prompts: int) -> None:
    """A logit difference multiplies by the columns of its tokens alone, a function of the logits by all."""
    scene = Scene(make())
    for seed in range(4):
        asked = pair(seed, prompts=prompts)
        few = scene.values(asked)

        def of_all(outputs: Any, asked: Any = asked) -> torch.Tensor:
            logits: torch.Tensor = outputs.logits[:, -1]
            return logits[:, asked.answer] - logits[:, asked.wrong]

        whole = numbers(scene.sweep(asked, metric=of_all).run(progress=False))
        assert deviation(few, whole) < FLOAT32


@pytest.mark.parametrize("width", [64, 256, 1024, 1280])
def test_narrow_products_with_a_bias_are_those_of_the_module(width: int) -> None:
    """Up to 1,024 columns a bias may be added afterwards; rows on both sides of that limit too."""
    scene = Scene(gpt2(layers=2, width=width))
    for length in (3, 40):
        asked = pair(length, length=length)
        assert deviation(scene.values(asked), scene.values(asked, evaluator="serial")) < FLOAT32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms_of_one_kernel_are_those_that_are_written_out(dtype: torch.dtype) -> None:
    """The module rounds where it casts, and one kernel rounds once: they differ by that last rounding."""
    scene = Scene(llama(dtype=dtype))
    program = scene.model.program
    norms = [one for one in find_fusions(program, DEVICE) if len(one.inputs) == 2]
    assert len(norms) == 2 * scene.module.config.num_hidden_layers + 1
    values = Interpreter(program).values({"input_ids": pair(1, prompts=3).base})
    step = torch.finfo(dtype).eps
    for norm in norms:
        fused = norm.rule(*(values[name] for name in norm.inputs))
        written: torch.Tensor = values[norm.node]
        assert fused.dtype == written.dtype == dtype
        difference = (fused.double() - written.double()).abs()
        allowed = 2 * step * written.double().abs() + step * written.double().abs().mean()
        assert bool((difference <= allowed).all()), float((difference / allowed).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cells_of_half_precision_are_those_of_the_module(dtype: torch.dtype) -> None:
    scene = Scene(llama(dtype=dtype))
    for seed in range(3):
        scene.values(pair(seed))
    result = scene.sweep(pair(3)).run(evaluator="wavefront", progress=False)
    check = result.verify(n=len(result.cells))
    assert check, str(check)
