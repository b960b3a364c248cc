"""Metrics by name: sets of answers, differences of probabilities, whole answers, the loss with its shift."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.errors import MetricError
from tests.sweeps.tiny import logits, prompts, tiny


def of(metric: Any, ids: Tensor) -> Tensor:
    """A metric of the base of a sweep, [prompt]."""
    sweep = tiny("gpt2").sweep(
        cw.sites("mlp_out", layer=0), base={"input_ids": ids}, source="zero", metric=metric
    )
    found = sweep.run(verify=1)
    assert found.verification is not None
    assert found.verification.ok
    assert found.base_per_prompt is not None
    return found.base_per_prompt[0]


IDS = prompts(2, 5)
LAST = logits("gpt2", IDS)[:, -1].double()
PROBS = LAST.softmax(-1)


def picked(of_all: Tensor, sets: list[list[int]]) -> list[Tensor]:
    return [row[own] for row, own in zip(of_all, sets, strict=True)]


@pytest.mark.parametrize(
    ("answer", "wrong", "sets"),
    [
        ([[1, 2], [3]], [[4], [5, 6]], ([[1, 2], [3]], [[4], [5, 6]])),
        ({1, 2}, {4}, ([[1, 2]] * 2, [[4]] * 2)),
        ([[1, 2], [3]], 9, ([[1, 2], [3]], [[9]] * 2)),
        (1, 2, ([[1]] * 2, [[2]] * 2)),
    ],
)
def test_several_answers_are_averaged_or_any_of_them(answer: Any, wrong: Any, sets: Any) -> None:
    right, other = sets
    means = torch.stack([one.mean() for one in picked(LAST, right)]) - torch.stack(
        [one.mean() for one in picked(LAST, other)]
    )
    assert torch.allclose(of(cw.logit_diff(answer, wrong), IDS), means, atol=1e-5)
    either = torch.stack([one.logsumexp(0) for one in picked(LAST, right)]) - torch.stack(
        [one.logsumexp(0) for one in picked(LAST, other)]
    )
    assert torch.allclose(of(cw.logit_diff(answer, wrong, over="logsumexp"), IDS), either, atol=1e-5)
    sums = [torch.stack([one.sum() for one in picked(PROBS, own)]) for own in sets]
    assert torch.allclose(of(cw.prob_diff(answer, wrong), IDS), sums[0] - sums[1], atol=1e-6)
    assert torch.allclose(of(cw.prob(answer), IDS), sums[0], atol=1e-6)


def test_a_whole_answer_has_a_log_probability() -> None:
    ids = prompts(2, 6)
    known = logits("gpt2", ids).double().log_softmax(-1)
    rows = [ids[0, -3:].tolist(), ids[1, -2:].tolist()]
    expected = [
        sum(known[number, ids.shape[1] - len(row) - 1 + at, token] for at, token in enumerate(row))
        for number, row in enumerate(rows)
    ]
    assert torch.allclose(of(cw.log_prob(rows), ids), torch.stack(expected), atol=1e-5)  # type: ignore[arg-type]
    with pytest.raises(MetricError, match="Run each prompt with its answer behind it"):
        of(cw.log_prob([rows[1], rows[0]]), ids)
    with pytest.raises(MetricError, match="is made for 2 prompts, and base has 1"):
        of(cw.log_prob(rows), ids[:1])


def test_labels_are_shifted_as_hugging_face_does_it() -> None:
    ids, module = prompts(2, 7), tiny("gpt2").module
    with torch.no_grad():
        loss = module(input_ids=ids, labels=ids, use_cache=False).loss
    found = of(cw.cross_entropy(labels=ids), ids)
    assert float(found.mean()) == pytest.approx(float(loss), abs=1e-5)
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    assert of(cw.cross_entropy(shifted), ids).equal(found)
    masked = ids.clone()
    masked[:, :4] = -100
    with torch.no_grad():
        loss = module(input_ids=ids, labels=masked, use_cache=False).loss
    assert float(of(cw.cross_entropy(labels=masked), ids).mean()) == pytest.approx(float(loss), abs=1e-5)
    with pytest.raises(MetricError, match="shifted already"):
        cw.cross_entropy()


def test_words_in_text_and_rows_of_a_question() -> None:
    model = cw.load("tiny")
    pairs = cw.tasks.ioi(model, n=4)
    heads = cw.sites("z", layer=3, head=":")
    asked: Any = model.ask(pairs, sites=heads, metric="prob_diff").run()
    assert asked.base.shape == (1,)
    base = asked.base_per_prompt[0] if asked.base_per_prompt is not None else None
    seen: list[int] = []

    def by_row(outputs: Any, rows: Any) -> Tensor:
        tokenizer = model.tokenizer
        seen.append(len(rows))
        assert tokenizer is not None
        right, wrong = (
            torch.tensor([tokenizer.encode(getattr(one, name)[0])[-1] for one in rows])
            for name in ("answers", "wrong_answers")
        )
        known = outputs.logits[:, -1].softmax(-1)
        found: Tensor = (known.gather(1, right[:, None]) - known.gather(1, wrong[:, None]))[:, 0]
        return found

    mine: Any = model.ask(pairs, sites=heads, metric=by_row).run()
    assert seen
    assert base is not None
    assert torch.allclose(mine.base_per_prompt[0], base, atol=1e-6)
    text = cw.logit_diff({" Mary", " John"}, {" Tom"}, over="logsumexp")
    assert "Mary" in repr(text)


def test_a_list_of_answers_for_one_prompt_says_how_a_set_is_written() -> None:
    with pytest.raises(MetricError, match=r"made for 2 prompts, and base has 1.*\[\[5, 7\]\]"):
        of(cw.logit_diff([1, 2], [3, 4]), IDS[:1])
    with pytest.raises(MetricError, match="as answer and as wrong answer"):
        cw.prob_diff([[1, 2]], [[2, 3]])
    with pytest.raises(MetricError, match="not in the vocabulary"):
        of(cw.prob_diff([[1, 99]], [[2]]), IDS)


def test_a_question_reads_sites_over_prompts_of_several_lengths() -> None:
    model = cw.load("tiny")
    pairs = cw.tasks.ioi(model, n=4)
    place = cw.site("resid_post", layer=2, pos=-1)
    found: Any = model.ask(pairs, sites=cw.sites("z", layer=":", head=":"), metric=place).run()
    assert found.values.shape == (4, 4, 64)
    assert (found.effect[3] == 0).all()
    assert found.verify(2).ok
    length: Any = model.ask(
        pairs, sites=cw.sites("z", layer=":", head=":"), metric=cw.read(place, norm=True)
    ).run()
    assert torch.allclose(length.base_per_prompt[0], found.base_per_prompt.norm(dim=0), rtol=1e-5)
