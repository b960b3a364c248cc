"""Weights that are elsewhere, or no plain tensors: refused. Hooks that move values, wrappers: captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import conewise as cw
from conewise.errors import CaptureError
from tests.program.zoo import ZOO
from tests.runs.state import assert_untouched, state_of


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu())
        return out


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return Two().eval()


def test_weights_without_values_are_refused(module: nn.Module) -> None:
    module.second = nn.Linear(4, 4, device="meta")
    with pytest.raises(CaptureError) as refused:
        cw.capture(module, torch.ones(2, 4))
    text = str(refused.value)
    assert "2 of the 4 weights of Two have no values: 'second.weight', 'second.bias' lie on the meta" in text
    assert "Nothing was loaded into them" in text
    assert "`device_map='cpu'`" in text


def test_a_module_without_values_is_captured_with_inputs_that_have_none_either(module: nn.Module) -> None:
    with pytest.warns(cw.errors.InexactCaptureWarning, match="meta device"):
        model = cw.capture(module.to("meta"), torch.ones(2, 4, device="meta"))
    assert model.program.devices == (torch.device("meta"),)


def test_inputs_that_lie_elsewhere_are_refused(module: nn.Module) -> None:
    with pytest.raises(CaptureError, match="lie on meta, and its weights on cpu") as refused:
        cw.capture(module, torch.ones(2, 4, device="meta"))
    assert "`inputs.to('cpu')`" in str(refused.value)


def test_weights_that_were_offloaded_for_several_devices_are_refused(module: nn.Module) -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    accelerate.cpu_offload(module, torch.device("cpu"))
    module.second._hf_hook.hooks[-1].execution_device = "meta"  # type: ignore[union-attr]
    with pytest.raises(
        CaptureError, match="offloaded by accelerate for cpu, meta, and weights stream to one"
    ):
        cw.capture(module, torch.ones(2, 4))


def test_a_module_that_accelerate_dispatched_is_captured_with_its_hooks(module: nn.Module) -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    where = {"first": "cpu", "second": "cpu"}
    accelerate.dispatch_model(module, where, main_device="cpu", force_hooks=True)
    before = state_of(module)
    model = cw.capture(module, torch.ones(2, 4))
    assert model.fidelity.bitwise
    assert model.verify()
    assert model.program.devices == (torch.device("cpu"),)
    assert_untouched(module, before)


def test_weights_that_wrap_other_tensors_are_refused(module: nn.Module) -> None:
    weight = module.get_parameter("second.weight").detach()
    module.second.weight = nn.Parameter(TwoTensor(weight, weight))  # type: ignore[no-untyped-call, union-attr]
    with pytest.raises(
        CaptureError, match=r"weight 'second.weight' of Two is a .*TwoTensor, which wraps other"
    ):
        cw.capture(module, torch.ones(2, 4))


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        lambda module: torch.compile(module, backend="eager"),
        lambda module: torch.compile(nn.DataParallel(module), backend="eager"),
    ],
)
def test_wrappers_stand_for_the_module_inside(wrap: Any) -> None:
    module = ZOO["llama"].make("sdpa")
    model = cw.capture(wrap(module), **ZOO["llama"].example(1, 6))
    assert model.module is module
    assert model.sites.layers("z")
    assert cw.Model(wrap(module), (), ZOO["llama"].example(1, 6)).module is module


class Adapted(nn.Module):
    """As PEFT wraps a model: all that `forward` gets is handed on, and a part is known by two paths."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.base_model = inner
        self.embeddings = inner.get_input_embeddings()  # type: ignore[operator]
        self.config = inner.config

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


def test_a_model_inside_an_adapter_is_checked_by_its_modules() -> None:
    inputs = ZOO["llama"].example(2, 6)
    model = cw.capture(Adapted(ZOO["llama"].make("sdpa")).eval(), **inputs)
    base, source = model.run(**inputs), model.run(**ZOO["llama"].example(2, 6))
    for sites in (cw.sites("mlp_out", layer=":"), cw.sites("z", layer=":", head=0)):
        check = model.sweep(sites, base=base, source=source, metric=cw.logit_diff(1, 2)).run().verify()
        assert (check.ok, check.hooked) == (True, 3)
    assert {site.name for site in model.sites} >= {"embeddings", "base_model.model.layers.2.mlp"}


def test_hooks_act_on_a_module_that_was_compiled_in_its_place() -> None:
    module, inputs = ZOO["llama"].make("sdpa"), ZOO["llama"].example(2, 6)
    module.compile(backend="eager")
    with torch.no_grad():
        module(**inputs)
    model = cw.capture(module, **inputs)
    base, source = model.run(**inputs), model.run(**ZOO["llama"].example(2, 6))
    sites = cw.sites("mlp_out", layer=":")
    check = model.sweep(sites, base=base, source=source, metric=cw.logit_diff(1, 2)).run().verify()
    assert (check.ok, check.hooked) == (True, 3)
