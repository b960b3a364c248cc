"""Steps that meet at one value: what each of them acts on, against plain arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import SurgeryError
from conewise.model import Model


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """A sum, whose first term others may read too."""
        total: Tensor = x + self.linear(x)
        return total


class Network(nn.Module):
    """A network that reads what goes into a residual block, and what comes out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Residual(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both, projected."""
        x = self.first(x)
        total: Tensor = self.last(self.inner(x) + x * x)
        return total


class Counting(nn.Module):
    """A linear that counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """What the linear makes of it."""
        self.calls += 1
        made: Tensor = self.linear(x)
        return made


X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
EXAMPLE = torch.linspace(-2, 1, 20, dtype=torch.float64).reshape(5, 4)


@pytest.fixture(scope="module")
def module() -> Network:
    torch.manual_seed(5)
    return Network().double()


@pytest.fixture(scope="module")
def model(module: Network) -> Model:
    return cw.capture(module, x=EXAMPLE)


def expect(surgery: cw.Surgery, model: Model, wanted: Tensor) -> None:
    """The operated model, its module, and the module made of it, compute this."""
    operated = surgery.apply(model)
    with torch.no_grad():
        found = operated.run(x=X).outputs, operated.module(X), operated.to_module()(X)
    for one in found:
        torch.testing.assert_close(one, wanted, rtol=1e-12, atol=1e-12)


def step(x: Tensor) -> Tensor:
    return 3 * torch.tanh(x)


@torch.no_grad()
def test_what_is_behind_a_pruned_block_is_not_what_is_in_front_of_it(module: Network, model: Model) -> None:
    pruned, x = cw.Surgery().prune("inner.linear"), module.first(X)
    expect(pruned.graft("inner", step), model, module.last(step(x) + x * x))
    expect(pruned.redefine("inner/add", lambda a, b: 2 * a + b), model, module.last(2 * x + x * x))
    operated = pruned.apply(model)
    with operated.run(x=X).fork() as world:
        world.patch("inner", "zero")
        torch.testing.assert_close(world.outputs, module.last(x * x))


@torch.no_grad()
def test_grafts_on_one_edge_stand_one_behind_the_other(module: Network, model: Model) -> None:
    surgery = cw.Surgery()
    for reader in ("inner/add", "inner.linear"):
        surgery = surgery.graft(("first", reader), step).graft(("first", reader), torch.sigmoid)
    x = module.first(X)
    behind = torch.sigmoid(step(x))
    expect(surgery, model, module.last(behind + module.inner.linear(behind) + x * x))


def test_edges_with_different_grafts_are_named_one_by_one(model: Model) -> None:
    surgery = cw.Surgery().graft(("first", "inner.linear"), step).graft(("first", "inner"), step)
    with pytest.raises(SurgeryError, match=r"several edges.*inner/add, inner.linear/linear. Name one"):
        surgery.apply(model)


def test_a_name_that_means_another_value_by_now_is_not_redefined() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Residual(), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            total: Tensor = self.last(self.inner(torch.sin(x)))
            return total

    chain = cw.capture(Chain().double(), x=EXAMPLE)
    surgery = cw.Surgery().prune("inner.linear")
    assert "inner/add" not in surgery.apply(chain).program.record_of
    with pytest.raises(SurgeryError, match="no site 'inner/add'"):
        surgery.redefine("inner/add", torch.add).apply(chain)


@torch.no_grad()
def test_modules_and_blocks_that_count_their_calls_are_as_they_were(module: Network, model: Model) -> None:
    block, host = Counting().double(), Counting().double()
    expect(
        cw.Surgery().graft("inner", block),
        model,
        module.last(block.linear(module.inner(module.first(X))) + module.first(X) ** 2),
    )
    calls = block.calls.clone()
    operated = cw.Surgery().graft("inner", block).redefine("first", Counting().double()).apply(model)
    assert operated.verify(n=1)
    assert torch.equal(block.calls, calls)
    counted = (
        cw.Surgery().graft("linear", step).redefine("linear", torch.tanh).apply(cw.capture(host, x=EXAMPLE))
    )
    assert counted.verify(n=1)
    assert host.calls == 0


REFUSED: dict[str, tuple[Callable[[cw.Surgery], cw.Surgery], str]] = {
    "a block that writes zeros to zeros": (
        lambda s: s.graft("first", nn.ReLU(inplace=True)),
        "writes to what",
    ),
    "no number": (lambda s: s.prune("first", value=float("nan")), "NaN"),
    "a tensor with no number": (lambda s: s.prune("first", value=X[0] * float("nan")), "NaN"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused(model: Model, case: str) -> None:
    make, says = REFUSED[case]
    with pytest.raises(SurgeryError, match=says):
        make(cw.Surgery()).apply(model)
