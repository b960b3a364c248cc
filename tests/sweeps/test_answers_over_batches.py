"""Answers for the prompts of all batches together: each batch is read with its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import conewise as cw
from conewise.errors import MetricError
from conewise.runs.metric_words import logit_diff, prob
from conewise.runs.metrics import Metric
from tests.sweeps.tiny import LENGTH, logits, prompts, tiny, value

SIZES = (2, 3, 1)
BATCHES = [prompts(count, seed) for seed, count in enumerate(SIZES)]
ALL = torch.cat(BATCHES)
TARGETS = prompts(6, 9)


def metrics() -> list[Metric]:
    right, wrong = [5, 6, 7, 8, 9, 10], [16, 15, 14, 13, 12, 11]
    return [
        cw.logit_diff(right, wrong),
        cw.logit_diff(3, wrong, name="one for all"),
        cw.logit(right),
        cw.prob(right),
        cw.kl_to(tiny("llama").run(input_ids=prompts(6, 8))),
        cw.cross_entropy(TARGETS),
        logit_diff([[one, one + 20] for one in right], [[one] for one in wrong], name="several"),
        prob([[one, one + 20] for one in right], name="any of several"),
    ]


def swept(base: Any, metric: Any, **how: Any) -> cw.Result:
    sweep = tiny("llama").sweep(cw.sites("mlp_out", layer=":"), base=base, source="zero", metric=metric)
    return sweep.run(**how)


@pytest.mark.parametrize("evaluator", ["serial", "wavefront"])
def test_each_prompt_is_read_with_its_own_answers_whatever_the_batches(evaluator: str) -> None:
    whole = swept({"input_ids": ALL}, metrics(), evaluator=evaluator)
    apart = swept([{"input_ids": ids} for ids in BATCHES], metrics(), evaluator=evaluator)
    torch.testing.assert_close(apart.per_prompt, whole.per_prompt, rtol=1e-4, atol=1e-5)
    assert apart.base_per_prompt is not None
    for number in range(6):
        row = logits("llama", ALL[number : number + 1])[0, -1]
        right, wrong = 5 + number, 16 - number
        assert float(apart.base_per_prompt[0, number]) == pytest.approx(
            float(row[right] - row[wrong]), abs=1e-4
        )
    assert apart.verify(n=2).ok


def test_attribution_and_plans_of_batches_read_them_too() -> None:
    batches = [{"input_ids": ids} for ids in BATCHES]
    metric = metrics()[0]
    how: dict[str, Any] = {"source": "zero", "metric": metric, "method": "atp"}
    sites = cw.sites("mlp_out", layer=":")
    apart = tiny("llama").attribute(sites, base=batches, **how).run()
    whole = tiny("llama").attribute(sites, base={"input_ids": ALL}, **how).run()
    torch.testing.assert_close(apart.per_prompt, whole.per_prompt, rtol=1e-4, atol=1e-5)
    plan = tiny("llama").sweep(sites, base=batches, source="zero", metric=metric).plan()
    again = tiny("llama").planned(cw.SweepPlan.from_json(plan.to_json())).run()
    torch.testing.assert_close(again.per_prompt, swept(batches, metric).per_prompt)


@pytest.mark.parametrize("metric", metrics(), ids=lambda one: one.name)
def test_a_metric_of_some_prompts_reads_just_these(metric: Metric) -> None:
    assert metric.prompts == 6
    assert metric.of_prompts is not None
    picked = [4, 1, 3]
    some = swept({"input_ids": ALL[picked]}, metric.of_prompts(picked))
    torch.testing.assert_close(
        some.per_prompt, swept({"input_ids": ALL}, metric).per_prompt[..., picked], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("count", [2, 5, 7])
def test_a_list_that_does_not_fit_is_refused_when_the_sweep_is_made(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conewise.runs.run.computed", None)
    batches = [{"input_ids": ids} for ids in BATCHES]
    said = f"is made for {count} prompts, and batch . of base has .*one for each of the 6 in all batches"
    with pytest.raises(MetricError, match=said):
        swept(batches, cw.logit(list(range(count))))


def test_answers_that_fit_every_batch_are_those_of_each() -> None:
    batches = [{"input_ids": prompts(2, seed, LENGTH)} for seed in range(2)]
    found = swept(batches, cw.logit([5, 6]))
    assert found.base_per_prompt is not None
    rows = logits("llama", batches[1]["input_ids"])[:, -1]
    assert found.base_per_prompt[0, 2:].tolist() == pytest.approx(
        [float(rows[0, 5]), float(rows[1, 6])], abs=1e-4
    )


def test_a_metric_or_a_mean_has_the_tensors_that_it_was_made_of() -> None:
    targets, dataset = prompts(2, 3), prompts(2, 4)
    metric, mean = cw.cross_entropy(targets), cw.mean(tiny("llama"), [{"input_ids": dataset}])
    fresh = cw.cross_entropy(targets.clone()), cw.mean(tiny("llama"), [{"input_ids": dataset.clone()}])
    targets.zero_()
    dataset.zero_()

    def effects(metric: Metric, source: Any) -> torch.Tensor:
        sites, base = cw.sites("mlp_out", layer=":"), {"input_ids": prompts(2, 5)}
        return tiny("llama").sweep(sites, base=base, source=source, metric=metric).run().values

    assert torch.equal(effects(metric, mean), effects(*fresh))


def test_a_mean_by_word_is_of_each_batch_and_one_over_a_dataset_is_of_all() -> None:
    batches = [prompts(1, 1, 4), prompts(2, 2, 6)]
    values = [value("llama", "mlp_out", 1, ids).flatten(0, 1) for ids in batches]
    together = torch.cat(values).mean(0)
    inputs = [{"input_ids": ids} for ids in batches]
    for source, means in (
        ("mean", [own.mean(0) for own in values]),
        (cw.mean(tiny("llama"), inputs), [together] * 2),
    ):
        found = tiny("llama").sweep(
            [cw.site("mlp_out", layer=1)], base=inputs, source=source, metric=cw.logit(5)
        )
        wanted = [
            logits("llama", ids, {("mlp_out", 1): mean.expand_as})[:, -1, 5]
            for ids, mean in zip(batches, means, strict=True)
        ]
        torch.testing.assert_close(found.run().per_prompt[0, 0].float(), torch.cat(wanted), atol=1e-4, rtol=0)
