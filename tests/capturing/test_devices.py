"""Weights that are not where they are used: refused with what to do. Hooks that move values: captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import CaptureError
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


def test_offloaded_weights_are_refused_by_name_of_who_did_it(module: nn.Module) -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    accelerate.cpu_offload(module, torch.device("cpu"))
    assert module(torch.ones(2, 4)).shape == (2, 4)
    with pytest.raises(CaptureError, match="They were offloaded by accelerate"):
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
