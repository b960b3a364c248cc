import random

import pytest
import torch

from conewise.errors import MetricError
from conewise.runs.inputs import token_rows
from conewise.runs.metric_words import logit_diff, prob

ANSWERS = [[3], [1, 4], [0, 2, 5]]
WRONG = [[6, 2], [5], [7]]


def logits() -> torch.Tensor:
    """[world, prompt, vocabulary]."""
    return torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))


def test_several_answers_count_by_their_mean_logit() -> None:
    given = logits()
    found = logit_diff(ANSWERS, WRONG).compute(given)
    for world in range(4):
        for prompt in range(3):
            row = given[world, prompt]
            expected = row[ANSWERS[prompt]].mean() - row[WRONG[prompt]].mean()
            assert torch.isclose(found[world, prompt], expected)


def test_several_answers_count_by_the_sum_of_their_probabilities() -> None:
    given = logits()
    found = prob(ANSWERS).compute(given)
    for prompt in range(3):
        expected = given[:, prompt].softmax(-1)[:, ANSWERS[prompt]].sum(-1)
        assert torch.allclose(found[:, prompt], expected)


def test_one_answer_for_each_prompt_is_the_plain_metric() -> None:
    given, answers, wrong = logits(), [[3], [1], [0]], [[6], [5], [7]]
    plain = logit_diff([3, 1, 0], [6, 5, 7])
    found = logit_diff(answers, wrong)
    assert found.described == plain.described
    assert torch.equal(found.compute(given), plain.compute(given))
    assert prob(answers).described == prob([3, 1, 0]).described


def test_only_the_columns_that_are_read_are_needed() -> None:
    given, metric = logits(), logit_diff(ANSWERS, WRONG)
    columns = sorted(set(metric.tokens))
    assert columns == [0, 1, 2, 3, 4, 5, 6, 7]
    metric = logit_diff([[3], [1, 4], [4]], [[6], [3], [1]])
    columns = sorted(set(metric.tokens))
    assert columns == [1, 3, 4, 6]
    assert metric.among is not None
    few = metric.among({token: at for at, token in enumerate(columns)})
    assert torch.equal(few.compute(given[..., columns]), metric.compute(given))


def test_answers_for_other_prompts_than_there_are_are_refused() -> None:
    with pytest.raises(MetricError, match="answers for 3 prompts, and this run has 2"):
        logit_diff(ANSWERS, WRONG).compute(logits()[:, :2])


def test_a_token_that_is_given_twice_is_one_answer() -> None:
    given, draw = logits(), random.Random(0)
    for _ in range(20):
        tokens = draw.sample(range(8), 8)
        right = [draw.choices(tokens[:4], k=draw.randint(1, 5)) for _ in range(3)]
        wrong = [draw.choices(tokens[4:], k=draw.randint(1, 5)) for _ in range(3)]
        found, difference = prob(right), logit_diff(right, wrong)
        for prompt in range(3):
            own, others = list(set(right[prompt])), list(set(wrong[prompt]))
            rows = given[:, prompt]
            expected = rows.softmax(-1)[:, own].sum(-1)
            assert torch.allclose(found.compute(given)[:, prompt], expected)
            expected = rows[:, own].mean(-1) - rows[:, others].mean(-1)
            assert torch.allclose(difference.compute(given)[:, prompt], expected, atol=1e-6)


def test_a_token_that_is_right_and_wrong_is_refused() -> None:
    with pytest.raises(MetricError, match="prompt 2 has the token 4 as answer and as wrong answer"):
        logit_diff([[3], [1, 4]], [[4], [4, 5]])
    with pytest.raises(MetricError, match=r"^the token 7 as answer and as wrong answer"):
        logit_diff(7, 7)
    with pytest.raises(MetricError, match="prompt 3 has the token 2"):
        logit_diff([0, 1, 2], 2)


def test_tokens_are_whole_numbers_in_rows() -> None:
    rows = token_rows([(1, 2), (3, 4)])
    assert rows.dtype == torch.int64
    assert rows.tolist() == [[1, 2], [3, 4]]
