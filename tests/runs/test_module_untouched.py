"""The user's module is read, never written: not by capture, runs, patches or verification."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import PatchError
from tests.program.zoo import ZOO
from tests.runs.state import assert_untouched, state_of
from tests.sweeps.captured import inputs


@pytest.mark.parametrize("name", ["gpt2", "skips", "two_and_two", "albert"])
def test_nothing_is_left_on_the_module(name: str) -> None:
    case = ZOO[name]
    module = case.make(case.attention[0])
    given, other = inputs(name), inputs(name, seed=2)
    before = state_of(module)
    model = cw.capture(module, **given)
    assert_untouched(module, before)
    run, source = model.run(**given), model.run(**other, keep=[])
    place = next(iter(model.sites)).name
    with run.fork() as world:
        world.patch(place, source)
        _ = world.outputs
        with pytest.raises(PatchError):
            world.patch(place, "nothing")
    assert_untouched(module, before)
    assert model.verify()
    _ = str(model.sites), repr(model), model.sites.to_dataframe()
    assert_untouched(module, before)


def test_random_numbers_go_on_as_if_nothing_had_been() -> None:
    module, given = ZOO["gpt2"].make("sdpa"), inputs()
    torch.manual_seed(7)
    expected = torch.randn(3)
    torch.manual_seed(7)
    cw.capture(module, **given).verify()
    assert torch.equal(torch.randn(3), expected)


def test_a_refused_capture_leaves_nothing_either() -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x) if x.sum() > 0 else x
            return out

    module = Choosing()
    before = state_of(module)
    with pytest.raises(cw.ConewiseError):
        cw.capture(module, torch.ones(3, 2))
    assert_untouched(module, before)


def test_a_module_in_training_is_refused_where_it_would_draw_and_stays_in_training() -> None:
    module = ZOO["gpt2"].make("sdpa").train()
    with pytest.raises(cw.ConewiseError, match=r"Call `module.eval\(\)` first"):
        cw.capture(module, **inputs())
    assert module.training
    mlp = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).train()
    assert cw.capture(mlp, torch.ones(3, 2)).verify()
    assert mlp.training


def test_tied_weights_are_one_source() -> None:
    module = ZOO["gpt2"].make("sdpa")
    weight = module.get_submodule("lm_head").weight
    assert weight is module.get_submodule("transformer.wte").weight
    model = cw.capture(module, **inputs())
    tied = [source for source in model.program.sources if source.value is weight]
    assert len(tied) == 1
    readers = model.graph.consumers(tied[0].name)
    assert len(readers) == 2


def test_a_frozen_module_and_one_that_wants_gradients_give_the_same() -> None:
    module, given = ZOO["gpt2"].make("sdpa"), inputs()
    logits = cw.capture(module, **given).run(**given).logits
    assert all(p.requires_grad and p.grad is None for p in module.parameters())
    frozen = module.requires_grad_(False)
    assert torch.equal(cw.capture(frozen, **given).run(**given).logits, logits)
