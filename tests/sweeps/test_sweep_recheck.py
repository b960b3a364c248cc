"""A result's verification: the module itself, run with hooks, and what a wrong number does to it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.checks import verify as reference
from conewise.checks.hooking import HookedModule, _nearest, boundaries
from conewise.checks.verify import MULTIPLE
from conewise.errors import InexactCaptureWarning, SweepError, UnhookedWarning
from conewise.model import Model
from conewise.program.tensors import cell_tolerance
from conewise.sweeps.result import Result
from conewise.sweeps.sweep import Sweep
from tests.program.zoo import ZOO
from tests.sweeps.small import model as small_model
from tests.sweeps.small import prompts, sweep_over


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
    assert check.passed
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
    shown = r"4 of 5 cells were compared with the captured program alone.*: q\[layer=0, head=0\], "
    with pytest.warns(UnhookedWarning, match=shown) as caught:
        check = result.verify(n=10)
    assert caught[0].filename == __file__
    assert check.ok
    assert not check.passed
    assert not check
    assert (check.cells, check.hooked, check.interpreted) == (5, 1, 4)
    alone = "4 against the captured program alone, operation by operation (no module shows the site)"
    assert str(check).startswith("passed in part: 5 random cells against full forwards, 1 with hooks on the")
    assert alone in str(check)


def test_what_the_module_never_saw_is_not_said_to_have_passed(captured: Model) -> None:
    result = sweep_over(captured, cw.sites("q", layer=":", head=":")).run()
    with pytest.warns(UnhookedWarning, match="4 of 4 cells"):
        check = result.verify()
    assert check.ok
    assert not check.passed
    assert str(check).startswith("not checked by the module: 4 random cells agree with the captured program")
    wrong = result.per_prompt.clone()
    wrong[0, 1] *= 1.01
    with pytest.warns(UnhookedWarning):
        failed = replace(result, per_prompt=wrong).verify()
    assert not failed.ok
    assert str(failed).startswith("FAILED: 4 random cells against full forwards, 4 against the captured")


def test_the_base_is_checked_too(captured: Model, result: Result) -> None:
    assert result.base_per_prompt is not None
    assert not replace(result, base_per_prompt=result.base_per_prompt * 1.01).verify(n=1)


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
    with pytest.warns(UnhookedWarning):
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
    sites = ["layer#0", "layer#1", "layer#1.input", "layer"]
    check = model.sweep(sites, base=base, source=source, metric=lambda y: y.sum(-1)).run().verify(n=4)
    assert (check.ok, check.hooked) == (True, 4)


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
    with pytest.warns(UnhookedWarning):
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


# -- half precision ------------------------------------------------------------------------------


@cache
def half(name: str, dtype: torch.dtype) -> Result:
    """Heads and MLPs of a small model in half precision, as a wavefront."""
    case = ZOO[name]
    model = cw.capture(case.make("sdpa", dtype), **case.example(1, 12, dtype))
    torch.manual_seed(3)
    base, source = (model.run(**case.example(2, 12, dtype)) for _ in range(2))
    sites = cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":")
    made: Result = model.sweep(sites, base=base, source=source, metric=cw.logit_diff(3, 4)).run()
    assert made.plan.evaluator == "wavefront"
    return made


EVERY_HALF = [("gpt2", torch.bfloat16), ("llama", torch.float16), ("bert", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), EVERY_HALF)
@pytest.mark.parametrize("n", [1, 100])
def test_half_precision_is_held_against_a_more_precise_module(name: str, dtype: torch.dtype, n: int) -> None:
    check = half(name, dtype).verify(n=n)
    assert check.passed, check
    assert check.reference == "float32"
    assert check.own_error is not None
    eps = torch.finfo(dtype).eps
    assert eps / 100 < check.own_error < 10 * eps
    assert check.tolerance == pytest.approx(MULTIPLE * check.own_error + eps / 2)
    assert "of the largest value from the module in float32, where the module's own forwards are" in str(
        check
    )


@pytest.mark.parametrize(("name", "dtype"), EVERY_HALF)
@pytest.mark.parametrize("share", [0.05, -0.05])
def test_an_error_of_a_twentieth_is_found_in_half_precision(
    name: str, dtype: torch.dtype, share: float
) -> None:
    result = half(name, dtype)
    for cell in range(0, len(result.cells), 3):
        wrong = result.per_prompt.clone()
        wrong[0, cell, cell % 2] += share * float(wrong.abs().max())
        check = replace(result, per_prompt=wrong).verify(n=100)
        assert not check.ok, (cell, str(check))
        assert str(check).startswith("FAILED")


def test_serial_results_in_half_precision_are_equal_bit_for_bit() -> None:
    sweep = half("llama", torch.bfloat16).sweep
    assert sweep is not None
    check = sweep.run(evaluator="serial").verify(n=3)
    assert (check.passed, check.tolerance, check.reference) == (True, 0.0, "")


STEER = cw.add(torch.ones(64, dtype=torch.bfloat16), 0.5)


@pytest.mark.parametrize("source", ["zero", "mean", negated, cw.noise(0.3), STEER])
def test_every_intervention_is_lifted_to_the_reference(source: Any) -> None:
    sweep = half("llama", torch.bfloat16).sweep
    assert sweep is not None
    base = sweep.batch(0).base
    sites = cw.sites("mlp_out", layer=":", pos=[1, 3])
    result = Sweep(sweep.model, sites, base=base, source=source, metric=cw.logit_diff(3, 4)).run()
    assert result.verify(n=2).passed


def test_what_cannot_be_held_against_anything_is_not_said_to_have_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = half("gpt2", torch.bfloat16)
    monkeypatch.setattr(reference, "memory_free", lambda device: 1000)
    check = result.verify(n=2)
    assert not check.ok
    assert not check.passed
    assert str(check).startswith(
        "NOT CHECKED: 2 random cells against full forwards, 2 with hooks on the module"
    )
    assert "a copy in float32 takes 0.0 GB, and there are 0.0 GB on cpu free" in str(check)


def test_a_function_that_insists_on_its_precision_is_said() -> None:
    def halved(present: Tensor) -> Tensor:
        return (present / 2).to(torch.bfloat16)

    sweep = half("gpt2", torch.bfloat16).sweep
    assert sweep is not None
    sites, base = cw.sites("mlp_out", layer=":"), sweep.batch(0).base
    result = Sweep(sweep.model, sites, base=base, source=halved, metric=cw.logit_diff(3, 4)).run()
    check = result.verify(n=1)
    assert not check.ok
    assert "in a higher precision the module raises PatchError" in check.unchecked


# -- modules that are not their graphs -----------------------------------------------------------


class Rounding(nn.Module):
    """Attention-like: what it hands to `out` is rounded otherwise when it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h = h * (1 + 2**-22) if torch.compiler.is_exporting() else h
        found: Tensor = self.out(torch.tanh(h))
        return found


@pytest.mark.parametrize("evaluator", ["serial", "wavefront"])
def test_hooks_are_found_by_structure_where_values_differ_in_their_last_bits(evaluator: str) -> None:
    """As with attention on a GPU: no value of the module is the graph's, and yet hooks are found."""
    torch.manual_seed(0)
    with pytest.warns(InexactCaptureWarning):
        model = cw.capture(Rounding().eval(), torch.randn(2, 8))
    base, source = model.run(torch.randn(2, 8)), model.run(torch.randn(2, 8))
    sweep = model.sweep(["inner", "out.input"], base=base, source=source, metric=lambda y: y.sum(-1))
    result = sweep.run(evaluator=evaluator)
    check = result.verify()
    assert check.passed, check
    assert (check.hooked, check.interpreted) == (2, 0)
    assert check.tolerance == cell_tolerance(torch.float32)
    wrong = result.per_prompt.clone()
    wrong[0, 0, 0] += 1e-3 * float(wrong.abs().max())
    assert not replace(result, per_prompt=wrong).verify().ok


def test_a_tensor_among_several_alike_is_the_nearest_by_far() -> None:
    value = torch.tensor([1.0, -2.0, 3.0])
    near, far, other = value * (1 + 1e-6), -value, torch.ones(3)
    assert _nearest([far, near, other], value) == 1
    assert _nearest(["x", torch.ones(4), near], value) == 2
    assert _nearest([near, near.clone()], value) is None
    assert _nearest([value, value * (1 + 1e-6)], value) == 0
    assert _nearest([far, other], value) is None
    assert _nearest([torch.ones(4)], value) is None
    assert _nearest([near.double()], value) is None
    assert _nearest([torch.full((3,), torch.nan)], torch.full((3,), torch.nan)) == 0
