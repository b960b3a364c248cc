"""Verification passes on what is right, and fails on what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.frontends.torch.sampling import Sampler
from conewise.workloads.model import Model
from tests.frontends.torch.zoo import ZOO
from tests.workloads.captured import inputs, small


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
    verification = model.verify(samples=1)
    assert verification
    assert "the sequence length is fixed in this capture" in str(verification)
