"""A result's verification: the module itself, run with hooks, and what a wrong number does to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import SweepError
from conewise.frontends.torch.hooking import HookedModule, boundaries
from conewise.workloads.model import Model
from conewise.workloads.result import Result
from tests.workloads.small import model as small_model
from tests.workloads.small import prompts, sweep_over


def hooks_on(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


@pytest.fixture(scope="module")
def captured() -> Model:
    return small_model()


@pytest.fixture(scope="module")
def result(captured: Model) -> Result:
    return sweep_over(captured).run(evaluator="wavefront")


def test_heads_and_mlps_are_checked_with_hooks(captured: Model, result: Result) -> None:
    check = result.verify(n=1000)
    assert check.ok
    assert bool(check)
    assert (check.cells, check.hooked, check.interpreted) == (6, 6, 0)
    assert str(check).startswith("passed: 6 random cells against full forwards, 6 with hooks on the module")
    assert hooks_on(captured.module) == 0


def test_a_serial_result_has_to_be_equal_bit_for_bit(captured: Model) -> None:
    serial = sweep_over(captured).run(evaluator="serial")
    check = serial.verify(n=6)
    assert (check.tolerance, check.largest_deviation) == (0.0, 0.0)
    nudged = serial.per_prompt.clone()
    nudged[0, 3, 1] += 1e-6
    assert not replace(serial, per_prompt=nudged).verify(n=6).ok


@pytest.mark.parametrize("what", ["table", "per_prompt"])
@pytest.mark.parametrize("cell", range(6))
def test_one_wrong_value_fails(result: Result, what: str, cell: int) -> None:
    wrong = getattr(result, what).clone()
    wrong[0, cell] *= 1.01
    check = replace(result, **{what: wrong}).verify(n=6)
    assert not check.ok
    assert str(check).startswith("FAILED")


def test_nan_in_a_result_fails(result: Result) -> None:
    wrong = result.per_prompt.clone()
    wrong[0, 2] = torch.nan
    assert not replace(result, per_prompt=wrong).verify(n=6).ok


def test_random_cells_are_the_same_for_a_seed_and_cover_all_in_time(result: Result) -> None:
    assert result.verify(n=2, seed=3) == result.verify(n=2, seed=3)
    wrong = result.per_prompt.clone()
    wrong[0, 4] += 1
    corrupted = replace(result, per_prompt=wrong)
    found = [corrupted.verify(n=2, seed=seed).ok for seed in range(12)]
    assert True in found
    assert False in found


def test_the_number_of_cells_is_at_least_one(result: Result) -> None:
    with pytest.raises(SweepError, match="0 cells to verify; give at least 1"):
        result.verify(n=0)


def test_a_run_can_verify_itself(captured: Model) -> None:
    result = sweep_over(captured).run(verify=3)
    assert result.verification is not None
    assert result.verification.cells == 3
    assert result.verification.ok


def test_sites_that_no_module_shows_are_interpreted_and_said_so(captured: Model) -> None:
    result = sweep_over(captured, cw.sites("q", layer=":", head=":") + cw.sites("resid_pre", layer=1)).run()
    check = result.verify(n=10)
    assert check.ok
    assert (check.cells, check.hooked, check.interpreted) == (5, 1, 4)
    assert "4 operation by operation (no module shows the site)" in str(check)


KINDS = {
    "hooked": ("resid_pre", "attn_out", "z", "pre", "post", "mlp_out"),
    "interpreted": ("q", "k", "v", "resid_mid"),
}


@pytest.mark.parametrize("kind", KINDS["hooked"])
def test_what_lies_at_a_module_is_hooked_there(captured: Model, kind: str) -> None:
    check = sweep_over(captured, cw.sites(kind, layer=":", pos=":3")).run().verify(n=6)
    assert check.ok
    assert check.hooked == 6


@pytest.mark.parametrize("kind", KINDS["interpreted"])
def test_what_lies_inside_of_a_module_is_interpreted(captured: Model, kind: str) -> None:
    check = sweep_over(captured, cw.sites(kind, layer=":", pos=":2")).run().verify(n=4)
    assert check.ok
    assert check.interpreted == 4


def negated(present: Tensor) -> Tensor:
    return -present


@pytest.mark.parametrize("source", ["zero", "mean", negated, cw.noise(0.3), cw.add(torch.ones(16), 0.5)])
def test_every_intervention_several_places_and_metrics(captured: Model, source: Any) -> None:
    sites = [
        (cw.site("resid_pre", layer=0, pos=2), cw.site("mlp_out", layer=0), cw.site("resid_post", layer=1)),
        (cw.site("mlp_out", layer=1, pos=[1, 3]), cw.site("attn_out", layer=1)),
    ]
    sweep = sweep_over(captured, sites, source=source, metric=[cw.logit_diff(3, 4), cw.prob(2)])
    for evaluator in ("serial", "wavefront"):
        check = sweep.run(evaluator=evaluator).verify(n=2)
        assert check.ok, (evaluator, check)
        assert check.hooked == 2


def test_several_batches_are_all_checked(captured: Model) -> None:
    base = [{"input_ids": prompts(seed, count)} for seed, count in ((1, 2), (5, 3))]
    source = [{"input_ids": prompts(seed, count)} for seed, count in ((2, 2), (6, 3))]
    result = sweep_over(captured, base=base, source=source).run()
    assert result.verify(n=6).ok
    late = result.per_prompt.clone()
    late[0, 0, -1] += 0.5
    assert not replace(result, per_prompt=late).verify(n=6).ok


def test_patches_of_the_base_stand_in_every_cell(captured: Model) -> None:
    run, source = captured.run(input_ids=prompts(1, 2)), captured.run(input_ids=prompts(2, 2))
    with run.fork() as base:
        base.patch(cw.site("resid_pre", layer=1, pos=3), source)
        base.patch(cw.site("mlp_out", layer=0), negated)
        sweep = sweep_over(captured, base=base, source=source)
        for evaluator in ("serial", "wavefront"):
            check = sweep.run(evaluator=evaluator).verify(n=6)
            assert check.ok, (evaluator, check)


def test_a_layer_that_is_called_twice_is_hooked_at_the_right_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.layer(torch.tanh(self.layer(x))))
            return out

    torch.manual_seed(0)
    model = cw.capture(Twice().eval(), torch.randn(2, 4))
    base, source = model.run(torch.randn(2, 4)), model.run(torch.randn(2, 4))
    sites = ["layer", "layer@1", "layer@1.input"]
    check = model.sweep(sites, base=base, source=source, metric=lambda y: y.sum(-1)).run().verify(n=3)
    assert (check.ok, check.hooked) == (True, 3)


def test_a_value_that_is_read_beside_the_module_is_not_hooked_at_its_input() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            out: Tensor = self.layer(y) + y
            return out

    torch.manual_seed(0)
    model = cw.capture(Beside().eval(), torch.randn(2, 4))
    assert list(boundaries(model.program, "mul")) == []
    base, source = model.run(torch.randn(2, 4)), model.run(torch.randn(2, 4))
    check = model.sweep(["mul"], base=base, source=source, metric=lambda y: y.sum(-1)).run().verify(n=1)
    assert (check.ok, check.interpreted) == (True, 1)


def test_no_hook_is_left_when_something_raises(captured: Model) -> None:
    module = HookedModule(captured.module, captured.program, captured.signature)
    given = {"input_ids": prompts(1, 2)}
    base = captured.run(**given)
    node = captured.locate(("mlp_out", 0)).node
    (hook,) = module.find(dict(zip([node], base.demand([node]), strict=True)), given).values()

    def fail(_: Tensor) -> Tensor:
        raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        module.outputs(given, {hook: fail})
    assert hooks_on(captured.module) == 0
    assert not captured.module.training


def test_a_module_whose_weights_changed_since_is_noticed(captured: Model, result: Result) -> None:
    weight = captured.module.transformer.h[1].mlp.c_proj.weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.mul_(1.5)
        with pytest.raises(cw.ConewiseError, match=r"weights of .* were written to"):
            result.verify(n=6)
    finally:
        with torch.no_grad():
            weight.copy_(kept)
