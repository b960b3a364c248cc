"""Verification passes on what is right, and fails on what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.checks import verify as reference
from conewise.errors import InexactCaptureWarning
from conewise.model import Model
from conewise.program.export import Sampler
from tests.program.zoo import ZOO
from tests.sweeps.captured import inputs, small


def fresh(name: str = "gpt2") -> Model:
    return cw.capture(ZOO[name].make("sdpa"), **ZOO[name].example(1, 12))


def test_it_says_what_was_checked() -> None:
    verification = small().verify()
    assert verification
    assert str(verification).startswith("passed: 6 random inputs, 1 outputs each\n  the graph equals")
    assert verification.worst == 0.0
    assert verification.row_deviation is not None
    assert verification.row_deviation <= verification.row_tolerance == 100 * torch.finfo(torch.float32).eps


CORRUPTIONS: dict[str, Callable[..., Callable[..., Any]]] = {
    "other": lambda rule: lambda *values: rule(*values) * 1.001,
    "one rounding": lambda rule: lambda *values: torch.nextafter(rule(*values), torch.tensor(9e9)),
    "not a number": lambda rule: lambda *values: rule(*values) * float("nan"),
}


@pytest.mark.parametrize("kind", list(CORRUPTIONS))
@pytest.mark.parametrize("place", [("mlp_out", 1), "lm_head"])
def test_a_wrong_rule_is_found(place: Any, kind: str) -> None:
    model = fresh()
    node = model.locate(place).node
    model.graph.redefine(node, CORRUPTIONS[kind](model.graph.rule(node)))
    verification = model.verify()
    assert not verification
    assert not verification.bitwise
    assert verification.worst > 0
    assert str(verification).startswith("FAILED")
    assert "the graph differs from the module by up to" in str(verification)


def test_a_rule_that_mixes_the_rows_of_a_batch_is_found() -> None:
    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0, keepdim=True)

    verification = cw.capture(Mixing(), torch.randn(3, 4)).verify()
    assert verification.bitwise
    assert verification.row_deviation is not None
    assert verification.row_deviation > verification.row_tolerance
    assert not verification.ok
    assert "a row of a batch differs from the row alone" in str(verification)


def test_padding_that_leaks_is_found() -> None:
    """BERT with its mask thrown away: right bit for bit, but a padded row is not the row alone."""

    class Leaking(nn.Module):
        def __init__(self, bert: nn.Module) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            return self.bert(input_ids=input_ids, attention_mask=torch.ones_like(attention_mask))

    leaking = Leaking(ZOO["bert"].make("sdpa")).eval()
    found = cw.capture(leaking, **ZOO["bert"].example(2, 12)).verify()
    assert found.bitwise
    assert not found.ok
    assert small("bert").verify().ok


def test_random_inputs_are_like_the_example_and_differ_by_seed() -> None:
    model = small("bert")
    sampler = Sampler(model.signature, model.program, model.module)
    one, other = (sampler.draw(seed, batch=5, length=9).kwargs for seed in (0, 1))
    assert one["input_ids"].shape == one["attention_mask"].shape == (5, 9)
    assert not torch.equal(one["input_ids"], other["input_ids"])
    assert torch.equal(one["input_ids"], sampler.draw(0, batch=5, length=9).kwargs["input_ids"])
    assert one["attention_mask"].dtype == torch.int64
    assert (one["attention_mask"].diff(dim=1) <= 0).all()
    assert set(one["attention_mask"].unique().tolist()) == {0, 1}


def test_inputs_of_fixed_size_keep_it() -> None:
    class Table(nn.Module):
        def forward(self, x: Tensor, table: Tensor, scale: float) -> Tensor:
            return x @ table * scale

    model = cw.capture(Table(), torch.randn(4, 3), torch.randn(3, 5), 2.0)
    assert model.verify()
    run = model.run(torch.ones(6, 3), torch.ones(3, 5), 2.0)
    assert run.outputs.shape == (6, 5)


def test_a_batch_that_cannot_vary_is_said() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(3, 2, 2).sum(0)

    verification = cw.capture(Fixed(), torch.randn(3, 4)).verify()
    assert verification
    assert verification.row_deviation is None
    assert "the batch is fixed in this capture" in str(verification)


def test_a_length_that_cannot_vary_is_said() -> None:
    model = cw.capture(ZOO["mamba"].make(""), **inputs("mamba"))
    verification = model.verify(n=1)
    assert verification
    assert "the sequence length is fixed in this capture" in str(verification)


# -- half precision, and graphs that round otherwise -----------------------------------------------


class Leaking(nn.Module):
    """A little of every row is in every other one."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share, self.layer = share, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        return x + self.share * x.mean(0, keepdim=True)


@pytest.mark.parametrize(("share", "holds"), [(0.0, True), (0.03, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_in_half_precision_are_held_against_a_higher_one(
    share: float, holds: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    found = cw.capture(Leaking(share).to(dtype).eval(), torch.randn(3, 16, dtype=dtype)).verify()
    assert found.bitwise
    assert found.row_deviation is not None
    assert found.row_tolerance < 0.03
    assert found.ok == holds


class Traced(nn.Module):
    """Sums in another order when it is traced, and then is wrong by as many machine epsilons as is said.

    It has many outputs: how far rounding takes the furthest of few is chance.
    """

    def __init__(self, wrong: int) -> None:
        super().__init__()
        self.wrong, self.layer = wrong, nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            out: Tensor = self.layer(x)
            return out
        left, right = self.layer.weight.chunk(2, 1)
        found = self.layer.bias + x[:, :32] @ left.T + x[:, 32:] @ right.T
        return found * (1 + self.wrong * torch.finfo(x.dtype).eps) if self.wrong else found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("wrong", "holds"), [(0, True), (20, False)])
def test_a_graph_that_rounds_otherwise_passes_and_one_that_is_wrong_does_not(
    wrong: int, holds: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    with pytest.warns(InexactCaptureWarning):
        model = cw.capture(Traced(wrong).to(dtype).eval(), torch.randn(3, 64, dtype=dtype))
    found = model.verify()
    assert not found.bitwise
    assert found.may_round
    assert found.ok == holds
    assert (found.excess <= 1) == holds
    assert "bit for bit" not in str(found).splitlines()[1]
    assert "of what rounding errors like the module's own would allow" in str(found)
    assert "at capture it was not equal to the module bit for bit" in str(found)


def test_without_a_reference_a_graph_that_differs_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "memory_free", lambda device: 100)
    with pytest.warns(InexactCaptureWarning):
        model = cw.capture(Traced(0).eval(), torch.randn(3, 64))
    found = model.verify()
    assert not found
    assert "there was no higher precision to compare with: a copy in float64 takes" in str(found)
    half = cw.capture(Leaking(0.0).bfloat16().eval(), torch.randn(3, 16, dtype=torch.bfloat16)).verify()
    assert half.bitwise
    assert half.row_deviation is None
    assert "there was no higher precision" in str(half)


def test_a_reference_is_a_copy_with_all_that_is_shared_shared() -> None:
    module = ZOO["gpt2"].make("sdpa", torch.bfloat16)
    made = reference.reference_of(module, torch.bfloat16)
    weights = [*module.parameters(), *module.buffers()]
    assert {one.dtype for one in weights} == {torch.bfloat16}
    assert {one.dtype for one in made.module.parameters()} == {torch.float32}
    assert made.module.get_submodule("lm_head").weight is made.module.get_submodule("transformer.wte").weight
    ours = {one.data_ptr() for one in weights}
    assert ours.isdisjoint(one.data_ptr() for one in made.module.parameters())
    for name, one in module.named_parameters():
        assert torch.equal(made.module.get_parameter(name), one.float())


def test_a_module_that_cannot_be_copied_has_no_reference() -> None:
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("there is only one of me")

    with pytest.raises(reference.NoReferenceError, match=r"cannot be copied \(TypeError: there is only one"):
        reference.reference_of(Stubborn(2, 2), torch.float32)
    with pytest.raises(reference.NoReferenceError, match="no precision above float64"):
        reference.reference_of(nn.Linear(2, 2).double(), torch.float64)
