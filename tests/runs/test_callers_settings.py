"""The caller's autocast, default device and gradient mode: numbers are the same inside and outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.compat.transformer_lens import HookedModel
from tests.sweeps.tiny import prompts, tiny

METRIC = cw.logit_diff(5, 9)
HEADS = cw.sites("z", layer=":", head=":")
ASKED: dict[str, Any] = {
    "base": {"input_ids": prompts(2, 1)},
    "source": {"input_ids": prompts(2, 2)},
    "metric": METRIC,
}


@cache
def circuit() -> cw.Circuit:
    found: cw.Circuit = tiny("llama").sweep(tiny("llama").edges(), **ASKED).run().circuit(top=30)
    return found


@cache
def run() -> Any:
    return tiny("llama").run(input_ids=prompts(2, 1))


def patched() -> Tensor:
    world = run().fork()
    world.patch(("mlp_out", 0), "zero")
    found: Tensor = world.logits
    return found


def mixed(value: Tensor) -> Tensor:
    return value @ torch.full((value.shape[-1], value.shape[-1]), 0.1, device=value.device)


JOBS: dict[str, Callable[[], object]] = {
    "capture": lambda: (
        cw.capture(tiny("llama").module, input_ids=prompts(1)).run(input_ids=prompts(1)).logits
    ),
    "run": lambda: tiny("llama").run(input_ids=prompts(2)).logits,
    "fork": patched,
    "sweep": lambda: tiny("llama").sweep(HEADS, **ASKED).run(verify=2).values,
    "serial": lambda: tiny("llama").sweep(HEADS, **ASKED).run(evaluator="serial").values,
    "function": lambda: tiny("llama").sweep([("mlp_out", 1)], **{**ASKED, "source": mixed}).run().values,
    "edges": lambda: tiny("llama").sweep(["a0.h1->m1"], **ASKED).run().values,
    "evaluation": lambda: circuit().evaluate(**ASKED).circuit,
    "search": lambda: [str(one) for one in tiny("llama").find_circuit(**ASKED, threshold=1.0).run().edges],
    "attribution": lambda: tiny("llama").attribute(HEADS, **ASKED).run().values,
    "gradients": lambda: run().gradients(METRIC, [("z", 1)])["z", 1],
    "decomposition": lambda: run().decompose().tensor,
    "logits": lambda: run().logit_attribution(METRIC).tensor,
    "trace": lambda: tiny("llama").causal_trace(prompts(1), subject=[1], metric=METRIC, n=2).run().values,
    "splice": lambda: (
        tiny("llama").splice(("resid_post", 1), encode=mixed, decode=mixed).run(input_ids=prompts(1)).logits
    ),
    "text": lambda: tiny("llama").generate(prompts(1), 4, patches={("mlp_out", 0): mixed}).ids,
    "hooks": lambda: HookedModel(tiny("llama")).run_with_hooks(
        prompts(1), fwd_hooks=[("blocks.1.hook_mlp_out", lambda value, hook: mixed(value))]
    ),
}


@pytest.mark.parametrize("job", list(JOBS))
def test_autocast_changes_no_number_and_is_as_it_was_afterwards(job: str) -> None:
    outside = JOBS[job]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = JOBS[job]()
        assert torch.is_autocast_enabled("cpu")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert_same(inside, outside)


@pytest.mark.parametrize("job", list(JOBS))
def test_a_default_device_changes_no_number_and_is_as_it_was_afterwards(job: str) -> None:
    """A tensor on the device "meta" has no numbers: whatever is made there cannot be read."""
    outside = JOBS[job]()
    with torch.device("meta"):
        inside = JOBS[job]()
        assert torch.ones(1).is_meta
    assert_same(inside, outside)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("job", list(JOBS))
def test_a_mode_without_gradients_changes_no_number(job: str, mode: Callable[[], Any]) -> None:
    outside = JOBS[job]()
    with mode():
        inside = JOBS[job]()
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert_same(inside, outside)
    assert_same(JOBS[job](), outside)


def test_what_a_module_makes_lies_where_its_caller_has_it() -> None:
    """A check runs the module, which lays a tensor out on the default device of its caller."""
    seen = []

    class Noting(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_exporting():
                seen.append(torch.get_default_device().type)
            return x * 2

    model = cw.capture(Noting(), torch.ones(2, 3))
    assert set(seen) == {"cpu"}
    seen.clear()
    with torch.device("meta"):
        assert model.verify(n=1).ok
    assert set(seen) == {"meta"}


def test_metrics_and_saved_results_under_a_default_device(tmp_path: Path) -> None:
    result = tiny("llama").sweep(HEADS, **ASKED).run()
    with torch.device("meta"):
        found = (
            tiny("llama").sweep(HEADS, **{**ASKED, "metric": cw.logit_diff([5, 5], 9, pos=[-1, -1])}).run()
        )
        saved = found.save(tmp_path / "saved")
        again = cw.open(saved)
        assert isinstance(again, cw.Result)
        assert torch.equal(found.values, result.values)
        assert torch.equal(again.values, result.values)
        assert torch.equal(again.statistics().low, result.statistics().low)


def assert_same(inside: object, outside: object) -> None:
    if isinstance(outside, Tensor):
        assert isinstance(inside, Tensor)
        assert inside.dtype == outside.dtype
        assert torch.equal(inside, outside)
    else:
        assert inside == outside
