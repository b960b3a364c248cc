"""Attribution in pieces: plans that say what is counted, memory budgets, runs that go on, several lengths."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.attributing.pieces import Method
from conewise.attributing.work import Work
from conewise.errors import SweepError
from conewise.program.rehearsal import is_rehearsal
from conewise.runs import run
from conewise.runs.metric_words import logit_diff, prob
from tests.circuits.edge_models import inputs_of, model_of, module_of, run_of
from tests.runs.test_gradients import squares

HEADS = cw.sites("z", layer=":", head=":")
METHODS = [
    ("atp", HEADS, None),
    ("atp*", HEADS + cw.sites("q", layer=":", head=":") + cw.sites("k", layer=1), None),
    ("ig", cw.sites("z", layer=":") + cw.sites("mlp_out", layer=":"), 3),
    ("relp", HEADS, None),
    ("relp", "edges", None),
    ("eap", "edges", None),
    ("eap-ig", "edges", 3),
    ("eap-ig-source", "edges", 3),
    ("eap-ig-activations", "edges", 3),
    ("gim", HEADS, None),
    ("gim", "edges", None),
]


def sites_of(model: cw.Model, sites: Any) -> Any:
    return model.edges() if sites == "edges" else sites


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(("method", "sites", "steps"), METHODS)
def test_a_plan_says_what_a_run_counts(name: str, method: str, sites: Any, steps: int | None) -> None:
    model = model_of(name, torch.float32)
    asked: dict[str, Any] = {
        "base": run_of(name, 1),
        "source": run_of(name, 2),
        "metric": [squares, cw.logit(3)],
        "method": method,
        "steps": steps,
    }
    plan = model.attribute(sites_of(model, sites), **asked).plan()
    found = model.attribute(sites_of(model, sites), **asked).run()
    assert plan.node_evaluations == found.ledger.node_evaluations > 0
    assert plan.flops == found.plan.flops > 0
    assert f"{plan.forwards:,} forward pass" in found.plan.why
    assert f"{plan.backwards:,} backward pass" in found.plan.why
    assert plan.backwards >= 2 * plan.forwards
    assert plan.cells == len(found.cells)
    # The first run of a shape finds out how heads project, which takes memory of its own.
    again = model.attribute(sites_of(model, sites), **asked).plan()
    assert plan.peak_bytes >= again.peak_bytes == found.plan.peak_bytes
    assert method in str(plan)


def test_nothing_is_computed_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gpt2", torch.float32)
    inputs: dict[str, Any] = {"base": inputs_of("gpt2", 1), "source": inputs_of("gpt2", 2)}

    def rehearsed(compute: Callable[..., Any]) -> Callable[..., Any]:
        def only(*given: Any, **named: Any) -> Any:
            assert is_rehearsal()
            return compute(*given, **named)

        return only

    monkeypatch.setattr("conewise.runs.run.computed", rehearsed(run.computed))
    monkeypatch.setattr(Work, "record", rehearsed(Work.record))
    plan = model.attribute(model.edges(), **inputs, metric=cw.logit(3), method="eap-ig", steps=4).plan()
    assert (plan.forwards, plan.backwards, plan.batches, plan.pieces) == (4, 4, 1, 1)
    hybrid = model.attribute(HEADS, **inputs, metric=cw.logit(3), method="hybrid").plan()
    assert (hybrid.forwards, hybrid.backwards) == (1, 1)


def some_metrics(prompts: int) -> list[Any]:
    answers, wrong = list(range(prompts)), list(range(10, 10 + prompts))
    model = model_of("gpt2", torch.float32)
    several = [[one, one + 1] if one % 2 else [one] for one in answers]
    return [
        cw.logit_diff(answers, wrong),
        cw.logit(answers, name="each"),
        cw.logit(5, name="one"),
        cw.prob(answers),
        cw.kl_to(model.run(**inputs_of("gpt2", 3, prompts))),
        cw.cross_entropy(torch.arange(6 * prompts).view(prompts, 6) % 7),
        logit_diff(several, [[one] for one in wrong], name="answer_diff"),
        prob(several, name="answer_prob"),
    ]


@pytest.mark.parametrize(("method", "sites", "steps"), METHODS)
def test_prompts_in_pieces_are_as_if_computed_together(method: str, sites: Any, steps: int | None) -> None:
    model, prompts = model_of("gpt2", torch.float32), 5
    asked: dict[str, Any] = {
        "base": inputs_of("gpt2", 1, prompts),
        "source": inputs_of("gpt2", 2, prompts),
        "metric": some_metrics(prompts),
        "method": method,
        "steps": steps,
    }
    sites = sites_of(model, sites)
    # The first run of a shape finds out how heads project, which takes memory of its own: it goes before.
    together = model.attribute(sites, **asked).run()
    whole = model.attribute(sites, **asked).plan()
    budget = int(0.55 * whole.peak_bytes)
    model.attribute(sites, **asked).run(max_memory=int(1.2 * budget))
    plan = model.attribute(sites, **asked).plan(budget)
    assert plan.pieces == 3
    assert plan.prompts_at_once == 2
    assert plan.peak_bytes <= budget < whole.peak_bytes
    told: list[tuple[int, int]] = []
    apart = model.attribute(sites, **asked).run(max_memory=budget, progress=lambda *done: told.append(done))
    assert apart.plan.node_evaluations == plan.node_evaluations == 3 * whole.node_evaluations
    torch.testing.assert_close(apart.per_prompt, together.per_prompt, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(apart.base_per_prompt, together.base_per_prompt, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(apart.source_per_prompt, together.source_per_prompt, rtol=1e-5, atol=1e-6)
    assert told == [(done * len(apart.cells), 3 * len(apart.cells)) for done in (1, 2, 3)]


def test_what_cannot_be_cut_says_why() -> None:
    model, inputs = model_of("gpt2", torch.float32), inputs_of("gpt2", 1, 4)
    source = inputs_of("gpt2", 2, 4)
    least = model.attribute(HEADS, base=inputs_of("gpt2", 1, 1), source="zero", metric=cw.logit(3)).plan()
    budget = 2 * least.peak_bytes

    def plan(**asked: Any) -> Any:
        given: dict[str, Any] = {
            "base": inputs,
            "source": source,
            "metric": cw.logit(3),
        }
        budget_of = asked.pop("max_memory", budget)
        return model.attribute(HEADS, **given | asked).plan(budget_of)

    assert plan().pieces > 1
    assert plan(source="zero").pieces > 1
    with pytest.raises(SweepError, match="'squares' is a function of all prompts"):
        plan(metric=squares)
    with pytest.raises(SweepError, match="may depend on all prompts"):
        plan(source="mean")
    world = model.run(**inputs).fork()
    world.patch(("mlp_out", 0), "zero")
    with pytest.raises(SweepError, match="the base is a world with patches"):
        plan(base=world)
    with pytest.raises(SweepError, match=r"one prompt alone takes .* The least that would do is max_memory="):
        plan(max_memory=least.peak_bytes // 4)
    with pytest.raises(SweepError, match="it is one prompt"):
        plan(base=inputs_of("gpt2", 1, 1), source="zero", max_memory=least.peak_bytes // 4)


class StoppedError(Exception):
    """A run is cut off."""


def stopping(after: int) -> Callable[[int, int], None]:
    calls: list[int] = []

    def tell(_: int, __: int) -> None:
        calls.append(0)
        if len(calls) == after:
            raise StoppedError

    return tell


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gpt2", torch.float32)
    asked: dict[str, Any] = {
        "base": [inputs_of("gpt2", seed) for seed in (1, 3)],
        "source": [inputs_of("gpt2", seed) for seed in (2, 4)],
        "metric": cw.logit_diff([3, 4], [5, 6]),
        "method": "eap-ig",
        "steps": 2,
    }
    whole = model.attribute(model.edges(), **asked).run()
    with pytest.raises(StoppedError):
        model.attribute(model.edges(), **asked).run(out=tmp_path / "run", progress=stopping(1))
    with pytest.raises(SweepError, match="holds a run already, with 110 of 220 cells done"):
        model.attribute(model.edges(), **asked).run(out=tmp_path / "run")
    scored: list[int] = []
    scores = Method.scores

    def counting(*given: Any) -> Tensor:
        if not is_rehearsal():  # for what the pieces count that were computed before
            scored.append(1)
        return scores(*given)

    monkeypatch.setattr(Method, "scores", counting)
    on = model.attribute(model.edges(), **asked).run(out=tmp_path / "run", resume=True)
    assert len(scored) == 1
    assert torch.equal(on.per_prompt, whole.per_prompt)
    assert on.ledger.resumed == 110
    assert on.plan.node_evaluations == whole.plan.node_evaluations
    for other in ({"steps": 3}, {"method": "eap", "steps": None}, {"metric": cw.logit_diff([3, 4], [5, 7])}):
        with pytest.raises(SweepError, match="cannot go on as this attribution"):
            model.attribute(model.edges(), **asked | other).run(out=tmp_path / "run", resume=True)
    with pytest.raises(SweepError, match="'hybrid' is not stored"):
        model.attribute(HEADS, **asked | {"method": "hybrid", "steps": None}).run(out=tmp_path / "other")


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("method", ["atp", "atp*", "eap"])
def test_inputs_are_attributed_to_as_their_runs_are(name: str, method: str) -> None:
    """The base's own forward is recorded, of the output what the metrics read: the numbers are the same."""
    model = model_of(name, torch.float32)
    sites: Any = model.edges() if method == "eap" else HEADS + cw.sites("resid_pre", layer=":", pos=":")
    metrics: list[list[Any]] = [
        [squares],
        [cw.logit_diff([3, 4], [5, 6]), cw.logit(7)],
        [cw.prob(3), cw.logit(7)],
        [squares, cw.logit(7)],
    ]
    if name == "bert":
        metrics = metrics[:1]
    for metric in metrics:
        asked: dict[str, Any] = {"metric": metric, "method": method}
        runs = model.attribute(sites, base=run_of(name, 1), source=run_of(name, 2), **asked).run()
        given = model.attribute(sites, base=inputs_of(name, 1), source=inputs_of(name, 2), **asked).run()
        torch.testing.assert_close(given.per_prompt, runs.per_prompt, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(given.base_per_prompt, runs.base_per_prompt, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(given.source_per_prompt, runs.source_per_prompt, rtol=1e-5, atol=1e-5)
        exact = model.sweep(sites, base=run_of(name, 1), source=run_of(name, 2), metric=metric)
        torch.testing.assert_close(
            runs.base_per_prompt, exact.read_metrics(run_of(name, 1)), rtol=1e-5, atol=1e-5
        )


def test_the_base_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the source that is two forwards; nothing is read of another one."""
    model = model_of("gpt2", torch.float32)
    monkeypatch.setattr("conewise.runs.run.computed", None)
    for method, sites in (("atp", HEADS), ("eap", model.edges())):
        found = model.attribute(
            sites,
            base=inputs_of("gpt2", 1),
            source=inputs_of("gpt2", 2),
            metric=cw.logit_diff(3, 5),
            method=method,
        ).run()
        assert found.effect.abs().max() > 0


def test_sites_of_the_output_itself_see_all_of_it() -> None:
    model = model_of("gpt2", torch.float32)
    cells = [cw.site("lm_head"), cw.site("lm_head", pos=-1)]
    asked: dict[str, Any] = {
        "base": inputs_of("gpt2", 1),
        "source": inputs_of("gpt2", 2),
        "metric": cw.logit_diff(3, 5),
    }
    found = model.attribute(cells, **asked).run()
    exact = model.sweep(cells, **asked).run()
    torch.testing.assert_close(found.effect, exact.effect, rtol=1e-4, atol=1e-4)


def test_weights_that_were_changed_between_runs_are_seen() -> None:
    """What is kept of weights, the projections of heads, is found again."""
    module: Any = copy.deepcopy(module_of("llama"))
    model = cw.capture(module, **inputs_of("llama", 1))
    asked: dict[str, Any] = {
        "base": inputs_of("llama", 1),
        "source": inputs_of("llama", 2),
        "metric": cw.logit(3),
        "method": "eap",
    }
    weight = module.model.layers[1].self_attn.q_proj.weight
    first = model.attribute(model.edges(), **asked).run()
    with torch.no_grad():
        weight.mul_(2)
    second = model.attribute(model.edges(), **asked).run()
    fresh = cw.capture(module, **inputs_of("llama", 1)).attribute(model.edges(), **asked).run()
    torch.testing.assert_close(second.per_prompt, fresh.per_prompt)
    assert (second.effect - first.effect).abs().max() > 1e-3
