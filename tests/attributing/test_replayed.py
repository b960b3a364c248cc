"""Attributions that are replayed, over a recorder that is no GPU's: each is what is computed, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import conewise as cw
from conewise.attributing import replayed
from conewise.errors import ConewiseError
from conewise.runs import run as own_runs
from tests.circuits.edge_models import inputs_of, module_of
from tests.runs.test_gradients import squares
from tests.runs.test_replayed import Graph

HEADS = cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":")


class Pool:
    """Records actions; the number of replays is counted."""

    def __init__(self, count: list[int]) -> None:
        self._count = count

    def warm(self, action: Callable[[], None]) -> None:
        action()

    def record(self, action: Callable[[], None]) -> Graph:
        return Graph(action, self._count)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let attributions be recorded here; replays of graphs are counted."""
    count = [0]
    monkeypatch.setattr(own_runs, "can_be_recorded", lambda _: True)
    monkeypatch.setattr(replayed, "pool_of", lambda _: Pool(count))
    return count


def models(name: str) -> tuple[cw.Model, cw.Model]:
    """One model whose attributions are computed, and one of the same module whose are replayed."""
    eager, other = (cw.capture(module_of(name), **inputs_of(name, 1)) for _ in range(2))
    vars(eager)["_replayed_runs"] = own_runs.Replays(eager.program, eager.graph)
    vars(eager)["_replayed_runs"]._are_recorded = False
    return eager, other


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize(("method", "sites"), [("atp", HEADS), ("eap", "edges"), ("gim", "edges")])
def test_a_replay_is_what_is_computed_bit_for_bit(
    name: str, method: str, sites: Any, replays: list[int]
) -> None:
    eager, model = models(name)
    for seed in range(4):
        asked: dict[str, Any] = {
            "base": inputs_of(name, 2 * seed),
            "source": inputs_of(name, 2 * seed + 1),
            "metric": [cw.logit_diff(3 + seed, 9), cw.prob(seed)],
            "method": method,
        }
        found, expected = (
            one.attribute(one.edges() if sites == "edges" else sites, **asked).run() for one in (model, eager)
        )
        assert torch.equal(found.per_prompt, expected.per_prompt)
        for which in ("base_per_prompt", "source_per_prompt"):
            assert torch.equal(getattr(found, which), getattr(expected, which))
        assert found.ledger.node_evaluations == expected.ledger.node_evaluations
        assert found.plan.why == expected.plan.why
    assert replays == [3 * (1 + 2)], "one forward and a backward for each metric, from the second on"


def test_a_metric_of_ones_own_and_weights_that_change_are_seen(replays: list[int]) -> None:
    eager, model = models("llama")
    module: Any = model.module

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        asked: dict[str, Any] = {"base": inputs_of("llama", 1), "source": inputs_of("llama", 2)}
        found, expected = (
            one.attribute(one.edges(), **asked, metric=squares, method="eap").run().per_prompt
            for one in (model, eager)
        )
        return found, expected

    weight = module.model.layers[1].self_attn.q_proj.weight
    for factor in (1.0, 1.0, 1.0, 2.0, 0.5):
        with torch.no_grad():
            weight.mul_(factor)
        found, expected = both()
        assert torch.equal(found, expected)
    assert replays == [2 * 2], "what was recorded with other weights is not replayed"


def test_runs_parts_of_several_positions_and_other_sources_are_computed(replays: list[int]) -> None:
    _, model = models("gpt2")
    base, source = inputs_of("gpt2", 1), inputs_of("gpt2", 2)
    for _ in range(3):
        runs: dict[str, Any] = {"base": model.run(**base, keep="all")}
        runs["source"] = model.run(**source, keep="all")
        model.attribute(HEADS, **runs, metric=cw.logit(3)).run()
        model.attribute(HEADS, base=base, source="zero", metric=cw.logit(3)).run()
        several = [cw.site("resid_pre", layer=1, pos=[0, 2])]
        model.attribute(several, base=base, source=source, metric=cw.logit(3)).run()
        model.attribute(HEADS, base=base, source=source, metric=cw.logit(3)).run(max_memory="1GiB")
    assert replays == [0]


def test_a_source_with_nan_is_refused_as_what_is_computed_is(replays: list[int]) -> None:
    eager, model = models("llama")
    asked: dict[str, Any] = {"metric": cw.logit_diff(3, 5), "base": inputs_of("llama", 1)}
    for _ in range(3):
        model.attribute(HEADS, **asked, source=inputs_of("llama", 2)).run()
    weight = model.module.model.embed_tokens.weight
    with torch.no_grad():
        before = weight[29].clone()
        weight[29] = float("nan")
    try:
        broken = inputs_of("llama", 2)
        broken["input_ids"] = torch.full_like(broken["input_ids"], 29)
        for _ in range(3):
            with pytest.raises(ConewiseError, match="NaN") as found:
                model.attribute(HEADS, **asked, source=broken).run()
            with pytest.raises(ConewiseError) as expected:
                eager.attribute(HEADS, **asked, source=broken).run()
            assert str(found.value) == str(expected.value)
    finally:
        with torch.no_grad():
            weight[29] = before
