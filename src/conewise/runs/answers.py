"""Metrics over prompts that have answers of their own, one or several; and tokens as the model's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from conewise.errors import MetricError
from conewise.runs.metrics import Metric, expect_apart, logit_diff, one_number, prob

Tensor = torch.Tensor
Tokens = Sequence[Sequence[int]]


def token_rows(rows: Tokens, device: object = None) -> Tensor:
    """Tokens [prompt, position] as a model takes them. All rows have one length."""
    return torch.tensor([list(row) for row in rows], dtype=torch.long, device=device)  # type: ignore[arg-type]


def answer_diff(answers: Tokens, wrong: Tokens, *, name: str = "logit_diff") -> Metric:
    """The mean logit of each prompt's answers less that of its wrong answers, at the last position.

    With one answer and one wrong answer for each prompt this is `logit_diff`. A token that is given twice is
    one answer; one that is on both sides raises MetricError.
    """
    answers, wrong = _sets(answers), _sets(wrong)
    given = {"answers": _rows(answers, "answers"), "wrong answers": _rows(wrong, "wrong answers")}
    prompts = one_number(given)
    expect_apart(answers, wrong)
    if all(len(tokens) == 1 for tokens in (*answers, *wrong)):
        return logit_diff([one for (one,) in answers], [one for (one,) in wrong], name=name)

    def compute(logits: Tensor) -> Tensor:
        return _mean(logits, answers) - _mean(logits, wrong)

    def among(columns: Mapping[int, int]) -> Metric:
        return answer_diff(_mapped(answers, columns), _mapped(wrong, columns), name=name)

    def of_prompts(numbers: Sequence[int]) -> Metric:
        own, others = ([rows[number] for number in numbers] for rows in (answers, wrong))
        return answer_diff(own, others, name=name)

    linear = tuple(
        tuple((token, sign / len(row)) for row, sign in ((right, 1.0), (other, -1.0)) for token in row)
        for right, other in zip(answers, wrong, strict=True)
    )
    return Metric(
        name,
        compute,
        described=("logit_diff", [list(row) for row in answers], [list(row) for row in wrong]),
        tokens=tuple(token for row in (*answers, *wrong) for token in row),
        among=among,
        prompts=prompts,
        of_prompts=of_prompts,
        linear=linear,
    )


def answer_prob(answers: Tokens, *, name: str = "prob") -> Metric:
    """The probability that one of each prompt's answers comes next.

    With one answer for each prompt this is `prob`. A token that is given twice is one answer.
    """
    answers = _sets(answers)
    prompts = _rows(answers, "answers")
    if all(len(tokens) == 1 for tokens in answers):
        return prob([one for (one,) in answers], name=name)

    def compute(logits: Tensor) -> Tensor:
        index, counts = _index(answers, logits)
        picked = logits.float().log_softmax(-1).gather(-1, index).exp()
        return torch.where(counts, picked, 0.0).sum(-1)

    return Metric(
        name,
        compute,
        described=("prob", [list(row) for row in answers]),
        copies=1,
        prompts=prompts,
        of_prompts=lambda numbers: answer_prob([answers[number] for number in numbers], name=name),
    )


def _sets(tokens: Tokens) -> list[list[int]]:
    """Each prompt's tokens, each once."""
    return [list(dict.fromkeys(row)) for row in tokens]


def _rows(tokens: Tokens, what: str) -> int:
    """For how many prompts there are tokens, each at least one. Raises MetricError."""
    if not len(tokens) or not all(len(row) for row in tokens):
        raise MetricError(
            f"{what} are a list of tokens for each prompt, each of at least one, and these are {tokens!r}."
        )
    return len(tokens)


def _mean(logits: Tensor, tokens: Tokens) -> Tensor:
    """The mean logit of each prompt's tokens: [world, prompt]."""
    index, counts = _index(tokens, logits)
    picked = logits.gather(-1, index).float()
    return torch.where(counts, picked, 0.0).sum(-1) / counts.sum(-1)


def _index(tokens: Tokens, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens as an index [world, prompt, answer] into logits, and which of them count [prompt, answer]."""
    if len(tokens) != logits.shape[1]:
        raise MetricError(f"answers for {len(tokens)} prompts, and this run has {logits.shape[1]}.")
    most = max(map(len, tokens))
    rows = torch.tensor([[*row, *[row[0]] * (most - len(row))] for row in tokens], device=logits.device)
    counts = torch.tensor(
        [[place < len(row) for place in range(most)] for row in tokens], device=logits.device
    )
    return rows.expand(logits.shape[0], -1, -1), counts


def _mapped(tokens: Tokens, columns: Mapping[int, int]) -> list[list[int]]:
    return [[columns[token] for token in row] for row in tokens]
