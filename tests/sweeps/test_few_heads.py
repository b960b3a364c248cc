"""Models with one head, or one key for all heads: the axis is there, and parts are patched by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.model import Model
from tests.anatomy.made import LENGTH, WORDS, Heads, Mlp, OneHead, OneKey, norm, pre_norm, stacked
from tests.sweeps.captured import hooked

ONE: dict[str, Callable[[], nn.Module]] = {
    "fused": lambda: Heads(1),
    "eager": lambda: Heads(1, fused=False),
    "no dimension": lambda: OneHead("eager"),
    "no dimension, fused": lambda: OneHead("fused"),
    "no dimension, einsum": lambda: OneHead("einsum"),
}


def captured(attention: Callable[[], nn.Module]) -> Model:
    module = stacked(pre_norm, 1, ln1=norm, attn=attention, ln2=norm, mlp=Mlp)
    return cw.capture(module, ids=ids(0))


def ids(seed: int) -> Tensor:
    return torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def seen(model: Model, way: str, path: str, given: Tensor) -> Tensor:
    with torch.no_grad(), hooked(model.module, way, path, lambda value: value) as values:
        model.module(given)
    return values[0]


@pytest.mark.parametrize("form", ONE)
def test_one_head_is_an_axis_of_length_one(form: str) -> None:
    model = captured(ONE[form])
    run = model.run(ids=ids(1))
    for kind, way, part in (("q", "out", "q"), ("k", "out", "k"), ("v", "out", "v"), ("z", "in", "o")):
        value, expected = run[kind, 0], seen(model, way, f"layers.0.attn.{part}", ids(1))
        assert value.shape == (2, LENGTH, 1, 16)
        assert torch.equal(value[:, :, 0], expected.reshape(2, LENGTH, 16))
        assert torch.equal(run[cw.site(kind, layer=0, head=0)], value[:, :, 0])
    if "pattern" in model.sites.kinds:
        assert run["pattern", 0].shape == run["attn_scores", 0].shape == (2, 1, LENGTH, LENGTH)
        torch.testing.assert_close(run["pattern", 0], run["attn_scores", 0].softmax(-1))
        weighed = run["pattern", 0][:, 0] @ run["v", 0][:, :, 0]
        torch.testing.assert_close(weighed, run["z", 0][:, :, 0])
    assert run["result", 0].shape == (2, LENGTH, 1, 16)
    bias = model.module.get_parameter("layers.0.attn.o.bias")
    torch.testing.assert_close(run["result", 0][:, :, 0] + bias, run["attn_out", 0])


@pytest.mark.parametrize("form", ["eager", "no dimension"])
def test_one_head_is_patched_and_swept_by_its_number(form: str) -> None:
    model = captured(ONE[form])
    base, source = model.run(ids=ids(1)), model.run(ids=ids(2))
    place = cw.site("z", layer=0, head=0, pos=slice(2, 5))
    part = source[place].clone()

    def change(value: Tensor) -> Tensor:
        value.view(2, LENGTH, 1, 16)[:, 2:5, 0] = part
        return value

    with torch.no_grad(), hooked(model.module, "in", "layers.0.attn.o", change):
        expected = model.module(ids(1))
    with base.fork() as world:
        world.patch(place, source)
        assert torch.equal(world.outputs, expected)
    with base.fork() as world:
        world.patch(cw.site("result", layer=0, head=0), "zero")
        with base.fork() as other:
            other.patch(cw.site("z", layer=0, head=0), "zero")
            torch.testing.assert_close(world.outputs, other.outputs, atol=1e-5, rtol=1e-4)

    kinds: list[Any] = [cw.sites(kind, layer=":", head=":") for kind in ("z", "q", "pattern")]
    for sites in kinds:
        sweep = model.sweep(sites, base=base, source=source, metric=cw.logit_diff(3, 5, pos=-1))
        result = sweep.run()
        assert result.values.shape == (1, 1)
        torch.testing.assert_close(result.values, sweep.run(evaluator="serial").values)
        if sites.name != "pattern":  # which no module shows
            assert result.verify(n=2).ok


@pytest.mark.parametrize("beside", [False, True])
def test_one_key_for_all_heads_is_one_kv_head(beside: bool) -> None:
    model = captured(lambda: OneKey(beside=beside))
    run = model.run(ids=ids(1))
    for kind, way, part in (("q", "out", "q"), ("z", "in", "o")):
        expected = seen(model, way, f"layers.0.attn.{part}", ids(1))
        assert torch.equal(run[kind, 0], expected.reshape(2, LENGTH, 4, 4))
    for kind in ("k", "v"):
        expected = seen(model, "out", f"layers.0.attn.{kind}", ids(1))
        assert torch.equal(run[kind, 0], expected.reshape(2, LENGTH, 1, 4))
        assert model.sites.shape_of(model.locate((kind, 0)).site) == "[batch, pos, kv_head=1, d_head=4]"
    assert run["pattern", 0].shape == (2, 4, LENGTH, LENGTH)
    weighed = torch.einsum("bhqk,bkd->bqhd", run["pattern", 0], run["v", 0][:, :, 0])
    torch.testing.assert_close(weighed, run["z", 0])
    sweep = model.sweep(
        cw.sites("pattern", layer=0, head=":"),
        base=run,
        source=model.run(ids=ids(2)),
        metric=cw.logit(3, pos=-1),
    )
    result = sweep.run()
    assert result.values.shape == (4,)
    torch.testing.assert_close(result.values, sweep.run(evaluator="serial").values)
