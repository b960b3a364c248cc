"""Sweeps with products in bfloat16 parts. They are for CUDA; here the parts are multiplied by the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.model import Model
from conewise.program import split_products
from conewise.program.tensors import SPLIT
from conewise.sweeps import sweep as sweeps
from conewise.sweeps.execution.growth import watching
from conewise.sweeps.planning import costs
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.sweep import Sweep
from tests.sweeps.tiny import LENGTH, VOCABULARY, tiny

SPLIT_PAYS = costs.split_pays


@pytest.fixture(autouse=True)
def _on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "expect_precision", lambda *_: None)
    monkeypatch.setattr(costs, "split_pays", lambda rows, inner, columns: rows >= 2 * LENGTH)


def sweep_of(model: Model, precision: str | None = SPLIT, sites: Any = None) -> Sweep:
    torch.manual_seed(1)
    base, source = (model.run(input_ids=torch.randint(0, VOCABULARY, (1, LENGTH))) for _ in range(2))
    sites = cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":") if sites is None else sites
    return model.sweep(sites, base=base, source=source, metric=cw.logit_diff(3, 5), precision=precision)


def split_nodes(plan: SweepPlan) -> set[str]:
    assert plan.compiled is not None
    return {step.node for one in plan.compiled.programs for step in one.steps if step.kernel == SPLIT}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_split_sweep_is_as_exact_as_float32(name: str) -> None:
    model = tiny(name)
    facts_of(model).split_weights.clear()
    sweep, plain = sweep_of(model), sweep_of(model, None).run()
    result = sweep.run()
    torch.testing.assert_close(result.per_prompt, plain.per_prompt, rtol=1e-5, atol=1e-5)
    assert not torch.equal(result.per_prompt, plain.per_prompt)
    ops = {model.program.record_of[node].op for node in split_nodes(result.plan)}
    assert ops == ({"addmm"} if name == "gpt2" else {"linear"})
    assert not split_nodes(plain.plan)
    check = result.verify(n=8)
    assert check.passed
    assert check.reference == "float64"
    assert result.provenance["precision"] == SPLIT
    again = sweep.run()
    assert torch.equal(again.per_prompt, result.per_prompt)


def test_a_wrong_part_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    facts_of(model).split_weights.clear()
    monkeypatch.setattr(split_products, "sums_of", lambda inner: ((3 * inner, 2 * inner, inner),))
    facts_of(model).executors.clear()
    result = sweep_of(model).run()
    assert not result.verify(n=8).passed
    facts_of(model).split_weights.clear()
    facts_of(model).executors.clear()


def test_weights_are_split_once_and_forgotten_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = tiny("gpt2"), []

    def counted(weight: Tensor) -> Any:
        made.append(weight)
        return split_products.split_weight(weight)

    facts = facts_of(model)
    facts.split_weights.clear()
    monkeypatch.setattr(costs, "split_weight", counted)
    sweep = sweep_of(model)
    first = sweep.run()
    count = len(made)
    assert count == len(split_nodes(first.plan))
    sweep_of(model, sites=cw.sites("attn_out", layer=":")).run()
    assert len(made) == count
    weight: Any = model.module.get_parameter("transformer.h.2.mlp.c_proj.weight")
    with torch.no_grad():
        weight *= 2
    try:
        other = sweep_of(model).run()
        assert len(made) > count
        plain = sweep_of(model, None).run()
        torch.testing.assert_close(other.per_prompt, plain.per_prompt, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(other.per_prompt, first.per_prompt)
    finally:
        with torch.no_grad():
            weight /= 2


def test_the_plan_says_what_is_split_and_what_it_takes() -> None:
    model = tiny("gpt2")
    plan, plain = sweep_of(model).plan(), sweep_of(model, None).plan()
    nodes = split_nodes(plan)
    sources = model.program.source_values
    weights = {n for node in nodes for n in model.program.record_of[node].inputs if n in sources}
    kept = sum(split_products.weight_bytes(*sources[n].shape) for n in weights if sources[n].dim() == 2)
    assert f"; {len(nodes)} products in bfloat16 parts, for which weights take" in plan.why
    assert plan.peak_bytes >= plain.peak_bytes + kept
    assert SweepPlan.from_json(plan.to_json()).compiled == plan.compiled
    cut = sweep_of(model).plan(max_memory=plan.peak_bytes - 1)
    assert len(cut.chunks) > 1
    assert cut.peak_bytes < plan.peak_bytes


def test_parts_of_weights_count_at_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made before worlds are computed, and are not planned for again: the budget has both."""
    given: list[tuple[int, int | None]] = []

    def noting(devices: Any, planned: int, budget: int | None = None) -> Any:
        given.append((planned, budget))
        return watching(devices, planned, budget)

    monkeypatch.setattr("conewise.sweeps.running.watching", noting)
    model = tiny("gpt2")
    facts_of(model).split_weights.clear()
    facts_of(model).executors.clear()
    sweep = sweep_of(model)
    plan = sweep.plan(max_memory="1GiB")
    sources = model.program.source_values
    weights = {n for node in split_nodes(plan) for n in model.program.record_of[node].inputs if n in sources}
    kept = sum(split_products.weight_bytes(*sources[n].shape) for n in weights if sources[n].dim() == 2)
    for _ in range(2):
        peak = sweep.run(max_memory="1GiB").ledger.peak_bytes
        assert given.pop() == (plan.peak_bytes - kept, (1 << 30) - kept)
        assert peak is None or peak >= kept
    sweep_of(model, None).run(max_memory="1GiB")
    assert given.pop()[1] == 1 << 30


def test_a_value_is_split_once_for_all_that_multiply_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = tiny("llama"), []

    def counted(value: Tensor) -> Any:
        made.append(tuple(value.shape))
        return split_products.split_factor(value)

    monkeypatch.setattr(costs, "split_factor", counted)
    result = sweep_of(model, sites=cw.sites("resid_pre", layer=":")).run()
    split = split_nodes(result.plan)
    assert len(made) < len(split)
    assert not facts_of(model).split_weights._last
    value, weight = torch.randn(4, 8), torch.randn(8, 8)
    weights = costs.SplitWeights(model.program)
    parts = split_products.split_weight(weight)
    assert parts is not None
    first = weights._product(value, parts, None)
    value[2] += 1  # another value in the same memory
    second = weights._product(value, parts, None)
    assert not torch.equal(first[2], second[2])
    torch.testing.assert_close(second, value @ weight)
    assert len(weights._last) == 1
    del value
    assert not weights._last


def test_small_products_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "split_pays", lambda *_: False)
    model = tiny("gpt2")
    result, plain = (
        sweep_of(model, precision, cw.sites("resid_mid", layer=":")).run() for precision in (SPLIT, None)
    )
    assert result.plan.why.endswith("no product is large enough to be split")
    assert result.plan.peak_bytes == plain.plan.peak_bytes
    assert torch.equal(result.per_prompt, plain.per_prompt)


def test_a_weight_that_cannot_be_split_is_multiplied_as_it_is() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 5, bias=False)
            with torch.no_grad():
                self.last.weight[2, 3] = -torch.inf

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.first(x).relu() + 1)
            return out.softmax(-1)

    torch.manual_seed(0)
    model = cw.capture(Masked().eval(), torch.randn(2, LENGTH, 8))
    base, source = model.run(torch.randn(2, LENGTH, 8)), model.run(torch.randn(2, LENGTH, 8))

    def run(precision: str | None) -> Tensor:
        return (
            model.sweep(
                "first", base=base, source=source, metric=lambda out: out[..., 0].sum(1), precision=precision
            )
            .run()
            .per_prompt
        )

    assert torch.isfinite(run(SPLIT)).all()
    torch.testing.assert_close(run(SPLIT), run(None))


class Products(nn.Module):
    """A product with a weight in each way to write one; and one of two values, which stays."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 8))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.tanh() @ self.weight
        flat = torch.mm(wide.flatten(0, 1), self.other)
        added = torch.addmm(self.bias, flat @ self.weight, self.other)
        plain = nn.functional.linear(added, self.weight.t())
        square: Tensor = nn.functional.linear(plain, self.other.t(), self.bias).view(x.shape)
        return square @ square.transpose(1, 2)


def test_every_way_to_write_a_product_with_a_weight() -> None:
    torch.manual_seed(0)
    model = cw.capture(Products().eval(), torch.randn(2, LENGTH, 8))
    base, source = model.run(torch.randn(2, LENGTH, 8)), model.run(torch.randn(2, LENGTH, 8))

    def sweep(precision: str | None) -> Sweep:
        site = next(record.name for record in model.program.records if record.op == "tanh")
        return model.sweep(
            site, base=base, source=source, metric=lambda out: out.sum((1, 2)), precision=precision
        )

    result, plain = sweep(SPLIT).run(), sweep(None).run()
    split = sorted(model.program.record_of[node].op for node in split_nodes(result.plan))
    assert split == ["addmm", "matmul", "matmul", "mm"]  # a weight that is turned first is none
    torch.testing.assert_close(result.per_prompt, plain.per_prompt, rtol=1e-5, atol=1e-5)


def test_splitting_pays_for_large_products() -> None:
    pays = SPLIT_PAYS
    assert pays(128 * 408, 1024, 4096)
    assert pays(128 * 408, 4096, 1024)
    assert not pays(20, 1024, 4096)
    assert not pays(128 * 408, 64, 4096)
    assert not pays(128 * 408, 1024, 2)
    assert not pays(128 * 408, 1023, 4096)
