"""Weights that are elsewhere or packed: refused. Hooks that move values, wrappers, quantised: captured."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import CaptureError, WeightsChangedError
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
    vars(module.get_submodule("second"))["_hf_hook"].execution_device = torch.device("meta")
    with pytest.raises(CaptureError, match="offloaded by accelerate for cpu, meta, and weights stream"):
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


class Int8(Tensor):
    """A weight as torchao's: whole numbers and a scale for each row, by which `linear` multiplies."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Int8:
        made: Int8 = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)
        made.numbers, made.scale = numbers, scale
        return made

    @classmethod
    def of(cls, weight: Tensor) -> Int8:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Int8:
        return cls(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, *bias = args
            found = (x @ weight.numbers.to(x.dtype).t()) * weight.scale.t()
            return found + bias[0] if bias and bias[0] is not None else found
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in {torch.ops.aten.detach, torch.ops.aten.alias, torch.ops.aten.clone}:
            return cls(*(func(one, **(kwargs or {})) for one in (args[0].numbers, args[0].scale)))
        raise NotImplementedError(func)


def test_quantised_weights_that_wrap_others_are_computed_with_as_they_are() -> None:
    module = ZOO["llama"].make("sdpa")
    for part in list(module.modules()):
        if isinstance(part, nn.Linear):
            part.weight = nn.Parameter(Int8.of(part.weight.detach()), requires_grad=False)
    inputs, other = ZOO["llama"].example(1, 6), ZOO["llama"].example(1, 6)
    other["input_ids"] = (other["input_ids"] + 1) % 7

    model = cw.capture(module, **ZOO["llama"].example(2, 6))

    assert model.fidelity.bitwise
    assert model.verify()
    sweep = model.sweep(
        cw.sites("z", layer=":", head=":"), base=inputs, source=other, metric=cw.logit_diff(3, 5)
    )
    result = sweep.run(evaluator="wavefront")
    assert torch.allclose(result.values, sweep.run(evaluator="serial").values, atol=1e-5)
    assert result.verify(n=2)
    with torch.no_grad():
        weight: Any = next(part for part in module.modules() if isinstance(part, nn.Linear)).weight
        weight.numbers[0, 0] += 1
    with pytest.raises(WeightsChangedError, match="were written to after"):
        result.verify(n=2)


def test_weights_that_nothing_shows_are_refused_by_the_name_of_who_made_them(module: nn.Module) -> None:
    quantise: Any = torch.ao.quantization.quantize_dynamic
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = quantise(module, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(
        CaptureError, match=r"'first' of Two is a torch.ao.*torchao, whose weights are tensors"
    ):
        cw.capture(packed, torch.ones(2, 4))


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
