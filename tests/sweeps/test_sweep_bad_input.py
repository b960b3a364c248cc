"""Bad input to sweeps: each a clear message, before anything is lost; the module stays as it was."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import (
    BudgetError,
    ConewiseError,
    InputMismatchError,
    MetricError,
    MissingSiteError,
    OtherModelError,
    PatchError,
    SiteError,
    SweepError,
)
from conewise.model import Model
from conewise.program.tensors import multiplying
from conewise.runs.metric_words import logit_diff, prob
from conewise.runs.metrics import Metric
from conewise.sweeps.planning.planner import Planner
from tests.sweeps.small import model as small_model
from tests.sweeps.small import prompts, sweep_over


@pytest.fixture(scope="module")
def kept() -> Model:
    return small_model()


@pytest.fixture
def captured(kept: Model) -> Iterator[Model]:
    """The model; after the test, its module has the weights and no hooks that it had before."""
    before = {name: value.clone() for name, value in kept.module.state_dict().items()}
    yield kept
    after = kept.module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in kept.module.modules())
    assert sweep_over(kept).run().verify(n=2).ok


EVALUATORS = pytest.mark.parametrize("evaluator", ["serial", "wavefront"])


# -- metrics -----------------------------------------------------------------------------------


@EVALUATORS
@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (
            lambda out: out.logits[:, -1, :3],
            r"'metric' returned shape \(2, 3\); expected one number, or one for",
        ),
        (lambda out: out.logits[:1, -1, 0], r"'metric' returned shape \(1,\); .*the 2 prompts: shape \(2,\)"),
        (lambda out: None, "'metric' returned a NoneType; expected one number"),
        (lambda out: "high", "'metric' returned a str; expected one number"),
        (lambda out: [out.logits[0], out.logits[1]], "'metric' returned a list; expected one number"),
        (lambda out: out.logits[:, -1, 0] * torch.nan, "'metric' is NaN in 2 of 2 cases. Look for NaN"),
        (lambda out: out.logits[:, -1, 0] * 1j, r"'metric' returned complex numbers \(torch.complex64\)"),
        (Metric("mine", lambda x: x.sum(-1).sum(-1)), r"'mine' returned shape \(1,\); .*shape \(1, 2\)"),
        (Metric("mine", lambda x: None), "'mine' returned a NoneType; expected one number for each prompt"),
        (cw.logit_diff(answer=99, wrong=1), "answer token 99 is not in the vocabulary of 50"),
        (cw.logit_diff(answer=1, wrong=-2), "wrong token -2 is not in the vocabulary of 50"),
        (
            cw.cross_entropy(torch.zeros(2, 3, dtype=torch.long)),
            r"targets have shape \(2, 3\), the logits have",
        ),
    ],
)
def test_a_metric_that_gives_something_else(captured: Model, evaluator: str, metric: Any, said: str) -> None:
    with pytest.raises(MetricError, match=said):
        sweep_over(captured, metric=metric).run(evaluator=evaluator)


def test_a_metric_that_is_none(captured: Model) -> None:
    with pytest.raises(
        MetricError, match=r"a metric is `logit_diff\(...\)`.* and 'accuracy' is none of these"
    ):
        sweep_over(captured, metric="accuracy")
    with pytest.raises(SweepError, match="no metric: give one, or a list of several"):
        sweep_over(captured, metric=[])


def test_two_metrics_of_one_name(captured: Model) -> None:
    with pytest.raises(SweepError, match=r"two metrics are named \['prob', 'prob'\]; give each its own"):
        sweep_over(captured, metric=[cw.prob(1), cw.prob(2)])
    both = sweep_over(captured, metric=[cw.prob(1), cw.prob(2, name="other")]).run()
    assert not torch.equal(both.metric("prob"), both.metric("other"))
    with pytest.raises(SweepError, match="no metric 'third' in this result; there are prob, other"):
        both.metric("third")


def test_a_metric_of_an_output_that_is_not_there() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.layer(x)
            return {"left": y, "right": y.relu()}

    model = cw.capture(Two().eval(), torch.randn(2, 3))
    run = model.run(torch.randn(2, 3))
    with pytest.raises(
        MetricError, match="'logit_diff' reads 'logits', and the model's outputs are left, right"
    ):
        model.sweep(["layer"], base=run, source="zero", metric=cw.logit_diff(0, 1)).plan()


def test_answers_that_do_not_fit_are_found_out_when_the_sweep_is_made(
    captured: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = [
        cw.logit_diff([1, 2, 3], 9),
        cw.logit_diff(9, [1, 2, 3]),
        cw.logit([1, 2, 3]),
        cw.prob(torch.tensor([1, 2, 3])),
        cw.kl_to(captured.run(input_ids=prompts(3, 3))),
        cw.cross_entropy(torch.zeros(3, 6, dtype=torch.long)),
        logit_diff([[1, 2], [3], [4]], [[5], [6], [7]]),
        prob([[1, 2], [3], [4]]),
    ]
    base = captured.run(input_ids=prompts(1, 2))
    fitting, other = ({"input_ids": prompts(1, count)} for count in (3, 2))
    monkeypatch.setattr("conewise.runs.run.computed", None)  # nothing has to be run to know this
    for metric in three:
        said = rf"the metric '{metric.name}' is made for 3 prompts, and {{}} has 2\. Give one answer for all"
        for given in (base, other, [other]):
            with pytest.raises(MetricError, match=said.format("base")):
                sweep_over(captured, base=given, source="zero", metric=metric)
        with pytest.raises(MetricError, match=said.format("batch 1 of base")):
            sweep_over(
                captured, base=[fitting, other, fitting], source="zero", metric=[cw.prob(1, name="a"), metric]
            )


def test_answers_that_are_none_are_found_out_when_the_metric_is_made() -> None:
    with pytest.raises(MetricError, match="2 answer tokens and 3 wrong tokens; give one for all prompts"):
        cw.logit_diff([1, 2], [1, 2, 3])
    with pytest.raises(MetricError, match="2 answers and 3 wrong answers; give one for all prompts"):
        logit_diff([[1, 2], [5]], [[3], [4], [6]])
    with pytest.raises(MetricError, match="token: no tokens; give one"):
        cw.prob([])
    for wrong in (3.5, None, True, 10**30):
        with pytest.raises(
            MetricError, match=r"a token is its number in the vocabulary, and .* is none\. Look it"
        ):
            cw.logit_diff(1, wrong)  # type: ignore[arg-type]
    for answers in ([], [[1], []]):
        with pytest.raises(MetricError, match="token: no tokens; give one for all prompts, or one for each"):
            cw.prob(answers)
    with pytest.raises(MetricError, match=r"targets are tokens \[prompt, pos\], and this is shape \(3,\)"):
        cw.cross_entropy(torch.zeros(3))


def test_nothing_to_normalise_by(captured: Model) -> None:
    with pytest.raises(SweepError, match="the values did not come from a source run"):
        _ = sweep_over(captured, source="zero").run().normalised
    run = captured.run(input_ids=prompts(1, 2))
    with pytest.raises(SweepError, match="base and source have the same value of the metric"):
        _ = sweep_over(captured, base=run, source=run).run().normalised


# -- base and source ---------------------------------------------------------------------------


@EVALUATORS
def test_nan_in_a_source(captured: Model, evaluator: str) -> None:
    run = captured.run(input_ids=prompts(1, 2))
    with captured.run(input_ids=prompts(2, 2)).fork() as source:
        source.patch(cw.site("mlp_out", layer=1, pos=3), lambda present: present * torch.nan)
        with pytest.raises(PatchError, match=r"the source's value at mlp_out\[layer=1\] has NaN in it"):
            sweep_over(captured, base=run, source=source).run(evaluator=evaluator)
        source.patch(cw.site("mlp_out", layer=0, pos=5), lambda present: present * torch.nan)
        with pytest.raises(
            MetricError, match="in the source itself: the metric 'logit_diff' is NaN in 2 of 2"
        ):
            sweep_over(captured, base=run, source=source).run(evaluator=evaluator)


@EVALUATORS
def test_nan_made_by_a_function(captured: Model, evaluator: str) -> None:
    with pytest.raises(MetricError, match="is NaN in"):
        sweep_over(captured, source=lambda present: present / 0 - present / 0).run(evaluator=evaluator)


def test_lengths_that_differ(captured: Model) -> None:
    source = captured.run(input_ids=prompts(2, 2)[:, :4])
    with pytest.raises(
        SweepError, match=r"'input_ids' is \(2, 6\) in the base and \(2, 4\) in the source. Pad"
    ):
        sweep_over(captured, source=source)
    with pytest.raises(SweepError, match=r"\(2, 6\) in the base and \(3, 6\) in the source"):
        sweep_over(captured, source=captured.run(input_ids=prompts(2, 3)))


@pytest.mark.parametrize("where", ["base", "source"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"input_ids": prompts(1, 2).float()}, "'input_ids' is torch.float32 on cpu, but torch.int64"),
        (
            {"input_ids": prompts(1, 2).to("meta")},
            "'input_ids' is torch.int64 on meta, but torch.int64 on cpu",
        ),
        ({"input_ids": prompts(1, 2)[0]}, r"'input_ids' has shape \(6,\): it was captured with 2 dimensions"),
        ({"ids": prompts(1, 2)}, "'ids' was not part of the captured call"),
        ({"input_ids": prompts(1, 2)[:, :4]}, r"base and source differ in shape: 'input_ids' is \(2, [46]\)"),
    ],
)
def test_a_batch_that_does_not_fit_is_found_before_any_is_run(
    captured: Model, where: str, wrong: Any, said: str
) -> None:
    given: dict[str, Any] = {
        "base": [{"input_ids": prompts(seed, 2)} for seed in (1, 2, 3)],
        "source": [{"input_ids": prompts(seed, 2)} for seed in (4, 5, 6)],
    }
    given[where][2] = wrong
    with pytest.raises((InputMismatchError, SweepError), match=rf"^batch 2 of .*{said}"):
        sweep_over(captured, **given)


@EVALUATORS
@pytest.mark.parametrize("where", ["base", "source"])
def test_tokens_that_are_not_in_the_vocabulary(captured: Model, evaluator: str, where: str) -> None:
    """They are found out before anything is run, however base and source are computed."""
    given = {"base": {"input_ids": prompts(1, 2)}, "source": {"input_ids": prompts(2, 2)}}
    sweep_over(captured, **given).run(evaluator=evaluator)
    given[where]["input_ids"][1, 3] = 50
    said = "'input_ids' holds the id 50, and GPT2LMHeadModel knows 50, from 0 to 49. Tokenize with"
    with pytest.raises(InputMismatchError, match=said):
        sweep_over(captured, **given)


def test_runs_of_other_models(captured: Model) -> None:
    other = small_model(seed=1).run(input_ids=prompts(1, 2))
    with pytest.raises(SweepError, match="base is a run of another model"):
        sweep_over(captured, base=other)
    with pytest.raises(PatchError, match="the source is a run of another model"):
        sweep_over(captured, source=other)


@pytest.mark.parametrize("kind", ["other weights", "same weights", "other module"])
def test_whatever_reads_runs_of_another_model_is_refused_by_one_error(captured: Model, kind: str) -> None:
    """Runs, means and resamples, wherever they are given; a capture of the same module is another model."""
    if kind == "other module":
        other = cw.capture(nn.Sequential(nn.Linear(3, 4)), torch.ones(2, 3))
        run, inputs = other.run(torch.ones(2, 3)), {"input": torch.ones(2, 3)}
    else:
        other = small_model(seed=kind == "other weights")
        inputs = {"input_ids": prompts(1, 2)}
        run = other.run(**inputs)
    own = captured.run(input_ids=prompts(1, 2))
    asked: dict[str, Any] = {"base": own, "source": "zero", "metric": cw.logit_diff(1, 2)}
    heads = cw.sites("z", layer=":", head=":")
    sources: list[Any] = [run, cw.resample(run), cw.mean(other, [inputs])]
    calls: list[Callable[[], object]] = [
        partial(sweep_over, captured, base=run),
        partial(sweep_over, captured, base=[own, run]),
        partial(captured.paths, "a0.*", "logits", **{**asked, "base": run}),
        partial(captured.attribute, heads, **{**asked, "base": run}),
        partial(captured.find_circuit, **{**asked, "base": run, "source": own}, threshold=1.0),
        partial(captured.causal_trace, run, subject=[0], metric=cw.prob(1), n=1),
        partial(captured.generate, prompts(1, 1), 1, [(cw.site("z", layer=0, pos=0), run)]),
    ]
    for source in sources:
        calls += [
            partial(sweep_over, captured, source=source),
            partial(sweep_over, captured, base=[own, own], source=["zero", source]),
            partial(captured.sweep, [cw.cell(("z", 1), source=source)], base=own, metric=cw.logit_diff(1, 2)),
            partial(captured.paths, "a0.*", "logits", **{**asked, "source": source}),
            partial(captured.attribute, heads, **{**asked, "source": source}),
            partial(own.fork().patch, ("z", 1), source),
        ]
    for call in calls:
        with pytest.raises(OtherModelError, match=f"of another model .*{other.name}.*; both have to be of"):
            call()


@EVALUATORS
def test_a_plan_is_run_with_its_evaluator_and_within_the_budget_that_is_given(
    captured: Model, evaluator: str
) -> None:
    sweep = sweep_over(captured)
    plan, other = sweep.plan(evaluator=evaluator), {"serial": "wavefront"}.get(evaluator, "serial")
    with pytest.raises(SweepError, match=f"the plan is of evaluator='{evaluator}', and the run was asked"):
        sweep.run(plan=plan, evaluator=other)
    with pytest.raises(BudgetError, match=r"this plan .* takes .*, more than the budget") as found:
        plan.run(max_memory=plan.peak_bytes - 1)
    assert found.value.least == plan.peak_bytes
    same = sweep.run(plan=plan, evaluator=evaluator, max_memory=plan.peak_bytes)
    assert torch.equal(same.per_prompt, plan.run().per_prompt)


def test_all_batches_are_held_to_the_budget_of_a_plan_that_is_given(captured: Model) -> None:
    runs = [captured.run(input_ids=prompts(seed, 2)) for seed in range(2)]
    sweep = sweep_over(captured, base=runs, source="zero")
    budget = sweep.plan().peak_bytes // 2
    plan = sweep.plan(max_memory=budget)
    assert plan.run().plan.peak_bytes <= budget < sweep.plan().peak_bytes


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ([], "base is a run, or a list of runs or of inputs; it has at least one"),
        ("corrupted", "base is a run, or a list of runs or of inputs, and str 'corrupted' is neither"),
        (
            torch.zeros(2, 6),
            "base is a run, or a list of runs or of inputs, and Tensor of shape",
        ),
        ([3], "base is a run, or a list of runs or of inputs, and int 3 is neither. Inputs are written"),
    ],
)
def test_a_base_that_is_none(captured: Model, base: Any, said: str) -> None:
    with pytest.raises(SweepError, match=said):
        sweep_over(captured, base=base)


def test_batches_that_do_not_pair_up(captured: Model) -> None:
    one = {"input_ids": prompts(1, 2)}
    with pytest.raises(SweepError, match="base has 2 batches and source 1; they go in pairs"):
        sweep_over(captured, base=[one, one], source=[one])


@EVALUATORS
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("ones", "cannot patch with 'ones': source is a run, 'zero', 'mean'"),
        (3.0, "cannot patch with 3.0"),
        (lambda present: present[..., :2], "the value for .* has shape"),
        (lambda present: present.double(), "the value for .* has shape .*torch.float64"),
        (
            lambda present: None,
            "the function for .* returned NoneType None; it has to return a tensor of shape",
        ),
        (cw.add(torch.ones(5)), r"the vector to add at .* has shape \(5,\), and the place has"),
    ],
)
def test_a_source_that_does_not_fit(captured: Model, evaluator: str, source: Any, said: str) -> None:
    with pytest.raises(PatchError, match=said):
        sweep_over(captured, source=source).run(evaluator=evaluator)


# -- sites -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sites", "error", "said"),
    [
        ([], SiteError, "a sweep over no sites: give at least one place or selector"),
        ([()], SiteError, "a set of no places: a world of a sweep patches at least one"),
        (7, SiteError, "7 is no place, no selector, and no list of them"),
        ([7], SiteError, "7 is no place, and no set of places that are patched together"),
        (cw.sites("z", layer="5:"), SiteError, r"layer='5:' chooses nothing; there are 2, from 0"),
        (cw.sites("z", layer=":", head=[]), SiteError, r"head=\(\) chooses nothing; there are 2"),
        (cw.sites("z", layer=9), SiteError, "layer 9 is out of range; there are 2, from 0"),
        (cw.sites("z", layer=":", head=-3), SiteError, "head -3 is out of range; there are 2, from 0"),
        (cw.sites("z", layer=":", pos="6"), SiteError, "pos 6 is out of range; there are 6, from 0"),
        (
            cw.sites("z", layer="one"),
            SiteError,
            "layer='one' is no choice. Write a number, a list, or a slice",
        ),
        (cw.sites("z", layer=""), SiteError, "layer='' is no choice"),
        (cw.sites("z", layer="0:2:0"), SiteError, "layer='0:2:0' is no choice"),
        (cw.sites("z", layer=[0, -2]), SiteError, r"layer=\(0, -2\) names an entry twice"),
        (
            cw.sites("mlp_out", layer=":", head=":"),
            SiteError,
            "this site has no axis 'head'; its axes are batch,",
        ),
        (cw.sites("zz", layer=":"), MissingSiteError, "no site 'zz' in this model"),
        (cw.sites("z", head=":"), MissingSiteError, "'z' is a kind of site, one in each layer: say which"),
        (
            cw.sites("pattern", layer=":"),
            MissingSiteError,
            "layer 0 has no 'pattern': attention is computed by",
        ),
        ([cw.site("z", layer=0, head=7)], MissingSiteError, "no head 7: the axis 'head' has 2 entries"),
        ([cw.site("z", layer=0, d_model=7)], MissingSiteError, "no axis 'd_model' here"),
    ],
)
def test_sites_that_are_none(captured: Model, sites: Any, error: type[ConewiseError], said: str) -> None:
    with pytest.raises(error, match=said):
        sweep_over(captured, sites).run()


@pytest.mark.parametrize("choice", [True, 1.5, None, [0, 0.5], object()])
def test_choices_that_are_none(choice: Any) -> None:
    with pytest.raises(SiteError, match=re.escape("is no choice. Write a number, a list, or a slice like")):
        cw.sites("z", layer=choice)
    with pytest.raises(SiteError, match="no axis 'heads': a selector chooses along layer, head, kv_head"):
        cw.sites("z", heads=0)


@pytest.mark.parametrize(
    "choice", ["0:2", slice(0, 2), [0, 1], (0, 1), range(2), np.arange(2), torch.arange(2), [np.int64(0), 1]]
)
def test_choices_that_mean_the_same(captured: Model, choice: Any) -> None:
    values = sweep_over(captured, cw.sites("z", layer=1, head=choice)).run().values
    assert torch.equal(values, sweep_over(captured, cw.sites("z", layer=1, head=":")).run().values)


def test_lists_sums_and_sets_of_sites(captured: Model) -> None:
    z, mlp = cw.sites("z", layer=":", head=":"), cw.sites("mlp_out", layer=":")
    as_sum, as_list = sweep_over(captured, z + mlp).run(), sweep_over(captured, [z, mlp]).run()
    assert torch.equal(as_sum.values, as_list.values)
    assert as_list["z"].shape == (2, 2)
    mixed = sweep_over(captured, [("mlp_out", 0), *[z], "blocks.1.hook_mlp_out"]).run()
    assert torch.equal(mixed.table[0][[0, -1]], as_sum["mlp_out"])
    assert torch.equal(sweep_over(captured, ("mlp_out", 1)).run().table[0], as_sum["mlp_out"][1:])
    assert len(z.__radd__(["blocks.1.hook_mlp_out"]).parts) == 2
    places = [cw.site("z", layer=0, head=1), cw.site("mlp_out", layer=1), cw.site("resid_pre", layer=1)]
    (cell,) = sweep_over(captured, [set(places)]).cells
    assert cell.name == "mlp_out[layer=1] + resid_pre[layer=1] + z[layer=0, head=1]"


def test_a_site_that_the_metric_does_not_depend_on() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.body(x)
            return {"logits": self.left(y), "rest": self.right(y)}

    model = cw.capture(Two().eval(), torch.randn(2, 3))
    run = model.run(torch.randn(2, 3))
    sites = ["body", "right", "left"]
    with pytest.raises(
        SweepError, match=r"does not depend on 1 of 3 cells, right for one. Leave them out, or"
    ):
        model.sweep(sites, base=run, source="zero", metric=cw.logit_diff(0, 1)).plan()
    whole = model.sweep(sites, base=run, source="zero", metric=lambda out: out["rest"].sum(-1)).run()
    assert float(whole.values[2]) == float(whole.base[0])


def test_a_result_cannot_be_swept(captured: Model) -> None:
    with pytest.raises(
        SweepError, match=r"result\[layer=0, head=0\] is computed from z .* Sweep z: patching"
    ):
        sweep_over(captured, cw.sites("result", layer=":", head=":")).plan()


# -- plans -------------------------------------------------------------------------------------


def test_an_unknown_evaluator(captured: Model) -> None:
    said = "no evaluator 'parallel': there are 'serial', 'wavefront' and 'auto'"
    with pytest.raises(SweepError, match=said):
        sweep_over(captured).run(evaluator="parallel")
    with pytest.raises(SweepError, match=said):
        sweep_over(captured).plan(evaluator="parallel")


@pytest.mark.parametrize("budget", [1, "1KiB", "0.5 kb"])
def test_a_budget_too_small_for_one_world_says_the_least_that_would_do(captured: Model, budget: Any) -> None:
    sweep = sweep_over(captured)
    with pytest.raises(SweepError, match=r"more than the budget of .*The least that would do is") as refused:
        sweep.run(max_memory=budget)
    least = int(re.findall(r"max_memory=(\d+)", str(refused.value))[0])
    with pytest.raises(SweepError, match=f"max_memory={least}"):
        sweep.run(max_memory=least - 1)
    result = sweep.run(max_memory=least)
    assert result.plan.peak_bytes <= least
    assert result.plan.chunks == (1,) * 6
    torch.testing.assert_close(result.values, sweep.run().values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("budget", ["two", "2GiBs", "", 0, -5, 1.5, True])
def test_a_budget_that_is_none(captured: Model, budget: Any) -> None:
    with pytest.raises(
        SweepError, match="is no amount of memory; write a number of bytes, or '2GiB', '500MB'"
    ):
        sweep_over(captured).plan(max_memory=budget)


# -- precision ---------------------------------------------------------------------------------


def test_a_precision_that_is_not_there_is_refused(captured: Model) -> None:
    base = captured.run(input_ids=prompts(1, 2))
    given: dict[str, Any] = {"base": base, "source": "zero", "metric": cw.prob(1)}
    with pytest.raises(SweepError, match=r"no precision 'bf16'.*load the model with dtype='bfloat16'"):
        captured.sweep(cw.sites("z", layer=":"), **given, precision="bf16")
    with pytest.raises(
        SweepError, match=r"float32 on a CUDA device, and this model is in torch.float32 on cpu"
    ):
        captured.sweep(cw.sites("z", layer=":"), **given, precision="tf32")
    with pytest.raises(SweepError, match=r"Splitting into bfloat16 parts .* Leave precision='split' out"):
        captured.sweep(cw.sites("z", layer=":"), **given, precision="split")


def test_a_serial_run_rounds_no_more_than_a_full_re_run(captured: Model) -> None:
    sweep = sweep_over(captured)
    planner, batch = Planner(captured, replace(sweep.spec, precision="tf32")), sweep.batch(0)
    with pytest.raises(
        SweepError, match=r"bit for bit, and tf32 rounds otherwise. Leave precision='tf32' out, or run it"
    ):
        planner.plan(batch.base, batch.source, evaluator="serial")


def test_a_precision_lasts_as_long_as_it_is_asked_for() -> None:
    before = torch.get_float32_matmul_precision()
    with multiplying("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
    for other in (None, "split"):
        with multiplying(other):
            assert torch.get_float32_matmul_precision() == before
