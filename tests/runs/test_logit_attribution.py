"""Direct logit attribution is what plain hooks compute, and adds up to the metric."""

from __future__ import annotations

import functools

import pytest
import torch

import conewise as cw
from conewise.errors import DecompositionError, MetricError
from conewise.runs.metric_words import logit_diff
from tests.anatomy.made import stacked
from tests.anatomy.test_names import FORMS
from tests.circuits.edge_models import inputs_of, module_of, run_of, stirred
from tests.runs.plain_hooks import PlainHooks

NAMES = ["gpt2", "llama", "gpt_neox", "gemma2"]


@functools.cache
def hooked(name: str) -> PlainHooks:
    with torch.no_grad():
        return PlainHooks(module_of(name), **inputs_of(name, 0))


@pytest.mark.parametrize("name", NAMES)
def test_every_head_adds_what_plain_hooks_compute(name: str) -> None:
    run, plain = run_of(name, 0), hooked(name)
    found = run.logit_attribution(cw.logit_diff(7, 3))
    everywhere = run.logit_attribution(cw.logit_diff(7, 3), pos="all")
    for writer, part in plain.parts.items():
        with torch.no_grad():
            expected = plain.logit_diff_of(part, 7, 3).double()
        torch.testing.assert_close(found[writer], expected[:, -1], atol=2e-5, rtol=2e-4)
        torch.testing.assert_close(everywhere[writer], expected, atol=2e-5, rtol=2e-4)
    logits = plain.seen.logits.double()
    whole = logits[..., 7] - logits[..., 3]
    torch.testing.assert_close(found.tensor.sum(0), whole[:, -1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(everywhere.tensor.sum(0), whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(everywhere.numbers, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("by", ["head", "component", "layer"])
def test_all_ways_add_up_to_the_same_metric(by: str) -> None:
    run, plain = run_of("gpt2", 0), hooked("gpt2")
    found = run.logit_attribution(cw.logit([5, 9]), by=by)
    logits = plain.seen.logits.double()[:, -1]
    expected = torch.stack([logits[0, 5], logits[1, 9]])
    torch.testing.assert_close(found.numbers, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.tensor.sum(0), expected, atol=1e-4, rtol=1e-4)
    assert found.names[0] == "input"
    assert found.names[-1] == "bias"  # of the final norm


def test_several_answers_of_a_prompt_are_a_mean_of_logits() -> None:
    run, plain = run_of("gpt_neox", 0), hooked("gpt_neox")
    found = run.logit_attribution(logit_diff([[1, 2], [3]], [[4], [5, 6]]), by="layer")
    logits = plain.seen.logits.double()[:, -1]
    first = logits[0, [1, 2]].mean() - logits[0, 4]
    second = logits[1, 3] - logits[1, [5, 6]].mean()
    torch.testing.assert_close(found.tensor.sum(0), torch.stack([first, second]), atol=1e-4, rtol=1e-4)


def test_logits_of_the_last_position_alone_are_attributed_too() -> None:
    model = cw.capture(module_of("llama"), **inputs_of("llama", 0), logits_to_keep=1)
    found = model.run(**inputs_of("llama", 0)).logit_attribution(cw.logit_diff(7, 3))
    expected = run_of("llama", 0).logit_attribution(cw.logit_diff(7, 3))
    torch.testing.assert_close(found.tensor, expected.tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_half_precision_says_how_far_it_is_off(name: str) -> None:
    found = run_of(name, 0, torch.bfloat16).logit_attribution(cw.logit_diff(7, 3))
    exact = run_of(name, 0).logit_attribution(cw.logit_diff(7, 3))
    assert 0 < found.deviation <= found.allowed == 3e-2
    scale = float(exact.tensor.abs().max())
    torch.testing.assert_close(found.tensor, exact.tensor, atol=0.1 * scale, rtol=0.1)


def test_a_norm_in_single_precision_within_a_double_model_is_allowed_for() -> None:
    """Llama norms in float32, whatever the stream is."""
    found = run_of("llama", 0, torch.float64).logit_attribution(cw.logit(1), by="layer")
    assert found.deviation <= found.allowed == 1e-4


def test_a_module_that_returns_one_tensor_is_attributed_and_read_by_the_lens() -> None:
    flow, parts, _, _ = FORMS["pre_norm"]
    ids = torch.arange(14).reshape(2, 7)
    run = cw.capture(stirred(stacked(flow, **parts)), ids=ids).run(ids=ids)
    found = run.logit_attribution(cw.logit(3))
    torch.testing.assert_close(found.tensor.sum(0), run.outputs[:, -1, 3].double(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(run.lens(tokens=[3]).logits[-1, ..., 0], run.outputs[..., 3])


def test_metrics_that_are_no_sum_of_logits_are_refused() -> None:
    run = run_of("gpt2", 0)
    for metric in (cw.prob(3), cw.kl_to(run), lambda outputs: outputs.logits[:, -1, 3]):
        with pytest.raises(MetricError, match=r"is no sum of logits.*cw\.logit"):
            run.logit_attribution(metric)
    with pytest.raises(MetricError, match="made for 3 prompts"):
        run.logit_attribution(cw.logit([1, 2, 3]))
    with pytest.raises(MetricError, match="not in the vocabulary"):
        run.logit_attribution(cw.logit(10**6))
    with pytest.raises(DecompositionError, match="pos='each'"):
        run.logit_attribution(cw.logit(3), pos="each")


def test_what_lies_before_the_unembedding_of_bert_is_named() -> None:
    with pytest.raises(DecompositionError, match=r"gelu.*neither a norm nor a projection.*run\.lens"):
        run_of("bert", 0).logit_attribution(cw.logit(3, pos=-1))


def test_a_world_is_attributed_as_it_is() -> None:
    base, source = run_of("llama", 0), run_of("llama", 1)
    with base.fork() as world:
        world.patch(cw.site("z", layer=1, head=2), source)
        found = world.logit_attribution(cw.logit(3))
        torch.testing.assert_close(found.numbers, world.logits[:, -1, 3].double(), atol=1e-6, rtol=1e-5)
        assert float((found["a1.h2"] - base.logit_attribution(cw.logit(3))["a1.h2"]).abs().max()) > 1e-3


def test_the_table_and_the_pictures() -> None:
    run = run_of("gpt2", 0)
    found = run.logit_attribution(cw.logit_diff(7, 3))
    frame = found.to_dataframe()
    assert frame.groupby("prompt").value.sum().tolist() == pytest.approx(found.numbers.tolist(), abs=1e-4)
    figure = found.plot()
    assert list(figure.layout.xaxis.ticktext) == ["0", "1", "2", "3", "MLP"]
    assert list(figure.layout.yaxis.ticktext) == ["0", "1", "input", "bias"]
    assert figure.data[0].z[1][2] == pytest.approx(float(found["a1.h2"].mean()))
    assert found.strongest(1)[0][0] in found.names
    everywhere = run.logit_attribution(cw.logit_diff(7, 3), by="layer", pos="all")
    assert len(everywhere.to_dataframe()) == 4 * 2 * 6
    assert len(everywhere.plot(prompt=1).layout.xaxis.ticktext) == 6
    assert list(run.logit_attribution(cw.logit(3), by="layer").plot().layout.xaxis.ticktext)[1] == "layer 0"
