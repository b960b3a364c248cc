"""Texts wherever a model takes inputs, and traces from text, against tokens and plain hooks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import conewise as cw
from conewise.circuits.tracing import noisy
from conewise.errors import PromptError, SweepError
from conewise.model import Model
from tests.text.plain import logits, tiny, token, tokens

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
SHORT = "John gave a drink to"


@cache
def model() -> Model:
    return cw.capture(tiny(), CLEAN)


@cache
def metric() -> Any:
    return cw.logit_diff(token(" Mary"), token(" John"))


def test_a_text_is_run_as_its_tokens_are() -> None:
    by_tokens = model().run(input_ids=tokens(CLEAN))
    for run in (model().run(CLEAN), model().run([CLEAN]), model().run(input_ids=CLEAN)):
        assert torch.equal(run.logits, by_tokens.logits)
    both = model().run([CLEAN, CORRUPTED])
    assert both.inputs["input_ids"].tolist() == torch.cat([tokens(CLEAN), tokens(CORRUPTED)]).tolist()
    assert torch.equal(model().run(CLEAN, keep="all").logits, by_tokens.logits)


def test_a_loaded_model_needs_no_example_and_a_module_takes_a_tokenizer() -> None:
    loaded = tiny()
    assert torch.equal(cw.capture(loaded).run(CLEAN).logits, model().run(CLEAN).logits)
    by_module = cw.capture(loaded.module, tokenizer=loaded.tokenizer)
    assert torch.equal(by_module.run(CLEAN).logits, model().run(CLEAN).logits)
    last = cw.capture(loaded, CLEAN, logits_to_keep=1)
    assert last.run(SHORT).logits.shape[1] == 1


def test_a_model_with_a_mask_sees_all_of_a_text() -> None:
    mask = torch.ones(1, 15, dtype=torch.long)
    masked = cw.capture(tiny(), input_ids=tokens(CLEAN), attention_mask=mask)
    torch.testing.assert_close(masked.run(SHORT).logits, model().run(SHORT).logits)


def test_sweeps_means_and_searches_take_texts() -> None:
    heads = cw.sites("z", layer=":", head=":")
    by_text = model().sweep(heads, base=CORRUPTED, source=CLEAN, metric=metric()).run()
    ids: dict[str, Any] = {"base": {"input_ids": tokens(CORRUPTED)}, "source": {"input_ids": tokens(CLEAN)}}
    assert by_text.equals(model().sweep(heads, **ids, metric=metric()).run())
    pair = model().sweep(heads, base=[CORRUPTED, CLEAN], source=[CLEAN, CORRUPTED], metric=metric()).run()
    assert pair.per_prompt.shape[-1] == 2
    batches = model().sweep(
        heads, base=[[CORRUPTED], {"input_ids": tokens(SHORT)}], source=[CLEAN, SHORT], metric=metric()
    )
    assert batches.batches == 2
    put = cw.mean(model(), [CLEAN, SHORT])
    means = model().sweep(heads, base=CLEAN, source=put, metric=metric()).run()
    ids_put = cw.mean(model(), [{"input_ids": tokens(CLEAN)}, {"input_ids": tokens(SHORT)}])
    assert torch.equal(
        means.values, model().sweep(heads, base=CLEAN, source=ids_put, metric=metric()).run().values
    )
    found = model().find_circuit(base=CLEAN, source=CORRUPTED, metric=metric(), threshold=5.0).run()
    assert (
        found
        == model().find_circuit(base=ids["source"], source=ids["base"], metric=metric(), threshold=5.0).run()
    )


def test_words_for_a_source_are_no_texts() -> None:
    heads = cw.sites("z", layer=":", head=":")
    zero = model().sweep(heads, base=CLEAN, source="zero", metric=metric())
    assert zero.batch(0).source is None
    with pytest.raises(cw.ConewiseError, match="cannot patch with 'maen'"):
        model().sweep(heads, base=CLEAN, source="maen", metric=metric())
    with pytest.raises(SweepError, match="differ in shape"):
        model().sweep(heads, base=CLEAN, source=SHORT, metric=metric())


def test_texts_that_cannot_be_read_are_refused() -> None:
    bare = cw.capture(tiny().module, input_ids=tokens(CLEAN))
    for given in (CLEAN, [CLEAN]):
        with pytest.raises(PromptError, match="captured without its tokenizer"):
            bare.run(given)
    with pytest.raises(SweepError, match="A text is one where the model was captured with its tokenizer"):
        bare.sweep("resid_post.0", base=CLEAN, source="zero", metric=metric())
    with pytest.raises(PromptError, match=r"have 6 to 15 tokens.*`model.ask"):
        model().run([CLEAN, SHORT])
    with pytest.raises(PromptError, match="no tokenizer to read it with"):
        cw.capture(tiny().module, CLEAN)

    class Floats(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    floats = cw.capture(Floats(), torch.ones(2, 3), tokenizer=tiny().tokenizer)
    with pytest.raises(PromptError, match="no one input that texts could be given as"):
        floats.run(CLEAN)


def plain_trace(text: str, subject: list[int], answer: int, scale: float, samples: int) -> torch.Tensor:
    """[sample, layer, pos]: a hooked forward for each."""
    module: Any = tiny().module
    layers = list(module.model.layers)
    states: dict[Any, torch.Tensor] = {}

    def keep(layer: Any) -> Any:
        def edit(out: torch.Tensor) -> torch.Tensor:
            states[layer] = out.clone()
            return out

        return edit

    logits(text, {layer: keep(layer) for layer in layers}, of_inputs=False)
    length = tokens(text).shape[1]
    found = torch.zeros(samples, len(layers), length, dtype=torch.float64)
    for sample in range(samples):

        def corrupt(out: torch.Tensor, sample: int = sample) -> torch.Tensor:
            out = out.clone()
            out[:, subject] = noisy(out[:, subject], scale, 0, [sample])
            return out

        for number, layer in enumerate(layers):
            for pos in range(length):

                def restore(out: torch.Tensor, layer: Any = layer, pos: int = pos) -> torch.Tensor:
                    out = out.clone()
                    out[:, pos] = states[layer][:, pos]
                    return out

                edits: dict[Any, Any] = {module.model.embed_tokens: corrupt, layer: restore}
                found[sample, number, pos] = logits(text, edits, of_inputs=False).softmax(-1)[answer]
    return found


def test_a_trace_from_text_is_what_hooks_find() -> None:
    trace = model().causal_trace(CLEAN, subject="John", answer=" Mary", noise=1.0, n=2).run()
    assert trace.subject == (4, 10)  # both of them
    plain = plain_trace(CLEAN, [4, 10], token(" Mary"), 1.0, 2)
    torch.testing.assert_close(trace.per_sample, plain, rtol=1e-4, atol=1e-5)
    by_tokens = (
        model()
        .causal_trace(tokens(CLEAN), subject=[4, 10], metric=cw.prob(token(" Mary")), noise=1.0, n=2)
        .run()
    )
    assert torch.equal(trace.values, by_tokens.values)


def test_without_an_answer_a_trace_reads_what_the_model_goes_on_with() -> None:
    likeliest = int(logits(CLEAN).argmax())
    asked: dict[str, Any] = {"subject": "Mary and John", "n": 2, "layer": 0}
    trace = model().causal_trace(CLEAN, **asked).run()
    assert trace.subject == (2, 3, 4)
    known = model().causal_trace(CLEAN, metric=cw.prob(likeliest), **asked).run()
    assert torch.equal(trace.values, known.values)
    assert trace.result.story is not None
    assert trace.result.story.metric == "the probability of what the model itself goes on with"


def test_a_trace_is_drawn_with_its_tokens() -> None:
    trace = model().causal_trace(CLEAN, subject="John", answer=" Mary", n=2, layer="1:3").run()
    labels = trace.plot().data[0].x
    assert list(labels[:4]) == ["&lt;bos&gt; 0", "When 1", "Mary 2", "and 3"]
    swept = model().sweep(
        cw.sites("resid_pre", layer=":", pos=":"), base=CLEAN, source="zero", metric=metric()
    )
    assert list(swept.run().plot().data[0].x[1:3]) == ["When 1", "Mary 2"]
    asked = [{"clean": CLEAN, "corrupted": CORRUPTED, "answer": " Mary", "wrong": " John"}]
    again = {"clean": CLEAN.replace("drink", "book"), "corrupted": CORRUPTED.replace("drink", "book")}
    two = model().ask([*asked, {**asked[0], **again}], sites="resid_pre[layer=0, pos=:]").run()
    assert list(two.plot().data[0].x[-2:]) == ["drink/book 13", "to 14"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"subject": "Paul"}, "does not stand in the prompt"),
        ({"subject": "John", "answer": " Mary", "metric": cw.prob(3)}, "both say what is read"),
        ({"subject": "John", "answer": "wombat"}, "not in the vocabulary"),
        ({"subject": "John", "answer": [" Mary", " John"]}, "2 answers for 1 prompts"),
        ({"subject": "John", "answer": 5}, "`answer` is int 5; expected a text"),
        ({"subject": " "}, "the subject is empty"),
        ({"inputs": [CLEAN, CLEAN.replace("When", "So when")], "subject": [4]}, "have 15 to 16 tokens"),
        ({"inputs": [CLEAN, CORRUPTED], "subject": "John"}, "stands at other positions"),
        ({"inputs": torch.zeros(1, 5, dtype=torch.long), "subject": 1, "answer": " Mary"}, "given as tokens"),
    ],
)
def test_a_trace_that_cannot_be_asked_is_refused_before_it_is_run(asked: dict[str, Any], said: str) -> None:
    given = {"inputs": CLEAN, **asked}
    with pytest.raises(cw.ConewiseError, match=said):
        model().causal_trace(given.pop("inputs"), **given).run()
