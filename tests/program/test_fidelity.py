"""A capture says how far the graph is from its module, and leaves nothing on the module when it finds out."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import CaptureError, InexactCaptureWarning, InputMismatchError
from conewise.program.export import FUSED


class Watched(nn.Module):
    """Computes otherwise when it is traced."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor if torch.compiler.is_exporting() else x


class Counting(nn.Module):
    """Writes to a buffer whenever it runs."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls[1:] += 1
        return x + 1


class Depending(Counting):
    """Returns what it has written."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.calls


def test_a_graph_that_is_not_the_module_is_said_to_be_so_with_numbers() -> None:
    example = torch.tensor([[1.0, -4.0], [2.0, 0.5]])
    with pytest.warns(
        InexactCaptureWarning, match="Watched was captured, but the graph is not equal"
    ) as caught:
        model = cw.capture(Watched(1.5), example)
    assert caught[0].filename == __file__
    assert not model.fidelity.bitwise
    assert (model.fidelity.deviation, model.fidelity.relative) == (2.0, 0.5)
    expected = "not equal to the module bit for bit: up to 2 apart on the example, 0.5 of the largest output"
    assert expected in repr(model)
    assert str(model.sites).endswith(f"The graph is {expected}.")
    assert expected in model.sites._repr_html_()
    assert expected in model._repr_html_()


def test_a_last_bit_is_a_difference() -> None:
    with pytest.warns(InexactCaptureWarning, match="up to 1.2e-07 apart"):
        cw.capture(Watched(1 + 2**-23), torch.ones(2, 2))


def test_a_graph_that_is_the_module_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = cw.capture(Watched(1.0), torch.ones(2, 2))
    assert str(model.fidelity) == "equal to the module bit for bit on the example"
    assert "bit for bit" not in repr(model)


def test_buffers_that_the_module_writes_to_are_as_they_were() -> None:
    module = Counting()
    module(torch.ones(2, 3))
    kept, version = module.calls.clone(), module.calls._version
    model = cw.capture(module, torch.ones(2, 3))
    assert model.program.written == ("calls",)
    assert torch.equal(module.calls, kept)
    assert module.calls._version == version
    assert model.fidelity.bitwise
    assert torch.equal(model.run(torch.ones(4, 3)).outputs, torch.full((4, 3), 2.0))


def test_a_module_that_returns_what_it_writes_to_its_buffers_is_refused() -> None:
    module = Depending()
    module(torch.ones(2, 3))
    kept = module.calls.clone()
    with pytest.raises(CaptureError, match="Depending writes to 'calls' whenever it runs"):
        cw.capture(module, torch.ones(2, 3))
    assert torch.equal(module.calls, kept)


def test_inputs_that_the_module_writes_to_are_as_they_were() -> None:
    class Writing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2) + 1

    example = torch.ones(2, 3)
    assert cw.capture(Writing(), example).fidelity.bitwise
    assert torch.equal(example, torch.ones(2, 3))


class Picking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[x]


def test_ids_of_an_example_that_the_module_does_not_know_are_refused_as_those_of_a_run() -> None:
    for wrong in (7, -1):
        with pytest.raises(InputMismatchError, match=rf"holds the id {wrong}, and Embedding knows 5"):
            cw.capture(nn.Embedding(5, 3), torch.tensor([[wrong, 1], [2, 3]]))


def test_an_example_that_the_module_cannot_run_is_said() -> None:
    with pytest.warns(InexactCaptureWarning, match=r"the graph is not compared with the module \(IndexError"):
        model = cw.capture(Picking(), torch.tensor([[7, 1], [2, 3]]))
    assert not model.fidelity.bitwise
    assert model.run(torch.tensor([[4, 1]])).outputs.shape == (1, 2, 3)


class Attending(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.MultiheadAttention):
            return self.layer(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]
        return self.layer(x)  # type: ignore[no-any-return]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.MultiheadAttention(32, 4, batch_first=True),
    "encoder": lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_layers_that_torch_runs_in_one_kernel_are_captured_as_they_are_when_they_can_be_looked_into(
    name: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    module, example = Attending(LAYERS[name]()).to(dtype).eval(), torch.randn(3, 9, 32, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InexactCaptureWarning)
        model = cw.capture(module, example)
    # Whether the two round alike depends on the machine; what is said does not depend on that.
    assert model.fidelity.bitwise == (model.fidelity.reasons != (FUSED,))
    assert torch.backends.mha.get_fastpath_enabled()
    verification = model.verify()
    assert verification, verification
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert cw.capture(module, example).fidelity.bitwise
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
