"""The tasks: pairs of prompts of one length that differ in one token, and what is read off the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import conewise as cw

Tensor = torch.Tensor

NAMES = (
    ("Mary", "John"), ("Anna", "Tom"), ("Kate", "Paul"), ("Emma", "Mark"), ("Jane", "Dan"),
    ("Sarah", "James"), ("Laura", "Peter"), ("Alice", "David"), ("Lisa", "Robert"), ("Susan", "Michael"),
    ("Rachel", "Daniel"), ("Helen", "George"),
)  # fmt: skip
PLACES = ("store", "park", "school", "office", "garden", "station")
THINGS = ("drink", "book", "ball", "ring", "letter", "key")

EVENTS = ("war", "trip", "project", "fight", "study", "strike", "journey", "siege")
TENS = (3, 4, 6)


@dataclass(frozen=True)
class Task:
    """Pairs of prompts as tokens [pair, position], and a metric for some of the pairs.

    The clean prompt is the base, whose behaviour is explained; the corrupted one is the source. `is_done`
    says for each row of logits [pair, vocabulary] whether the model did the task.
    """

    name: str
    texts: tuple[tuple[str, str], ...]
    clean: Tensor
    corrupted: Tensor
    metric: Callable[[slice], Any]
    is_done: Callable[[Tensor], Tensor]

    def __len__(self) -> int:
        return len(self.texts)


def ioi(tokenizer: Any, count: int) -> Task:
    """Indirect object identification: who is given the thing? The corrupted prompt has the other one give it.

    Each two names come in both orders.
    """
    pairs = []
    for number in range(count):
        names = NAMES[number // 2 % len(NAMES)]
        who, other = names if number % 2 == 0 else names[::-1]  # who is given it, and who gives
        first, second = (who, other) if number % 4 in (0, 3) else (other, who)
        place, thing = PLACES[number % len(PLACES)], THINGS[number // 4 % len(THINGS)]
        text = f"When {first} and {second} went to the {place}, {{}} gave a {thing} to"
        pairs.append((text.format(other), text.format(who)))
    clean, corrupted = _tokens(tokenizer, pairs)
    giver = clean != corrupted
    answers, wrong = corrupted[giver].tolist(), clean[giver].tolist()
    return Task(
        "ioi",
        tuple(pairs),
        clean,
        corrupted,
        lambda some: cw.logit_diff(answers[some], wrong[some]),
        lambda logits: logits.argmax(-1) == torch.tensor(answers),
    )


def greater_than(tokenizer: Any, count: int) -> Task:
    """The digit that follows "from the year 1745 to the year 17": no smaller one than the decade's.

    The metric is the probability of larger digits less that of smaller ones. The corrupted prompt has the
    decade 0, of which no digit is smaller.
    """
    digits = torch.tensor([tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(10)])
    pairs, tens = [], []
    for number in range(count):
        event, decade = EVENTS[number % len(EVENTS)], TENS[number % len(TENS)]
        text = f"The {event} lasted from the year 17{{}}{2 + number % 7} to the year 17"
        pairs.append((text.format(decade), text.format(0)))
        tens.append(decade)
    clean, corrupted = _tokens(tokenizer, pairs)
    # 1 for a larger digit, −1 for a smaller one.
    signs = torch.stack([torch.sign(torch.arange(10) - decade).float() for decade in tens])

    def metric(some: slice) -> Any:
        own = signs[some]

        def greater(outputs: Any) -> Tensor:
            shares: Tensor = outputs.logits[:, -1].float().softmax(-1)
            return (shares[:, digits] * own).sum(-1)

        return cw.metric(greater, key=f"digits greater than {tens[some]}", name="greater")

    return Task(
        "greater-than",
        tuple(pairs),
        clean,
        corrupted,
        metric,
        lambda logits: torch.stack(
            [
                (row[digits].argmax() >= decade) & (row.argmax() == digits[row[digits].argmax()])
                for row, decade in zip(logits, tens, strict=True)
            ]
        ),
    )


def _tokens(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Both sides as tokens. Raises ValueError where lengths differ, or more than one token of a pair does."""
    sides = [[tokenizer(pair[side]).input_ids for pair in pairs] for side in (0, 1)]
    lengths = sorted({len(row) for side in sides for row in side})
    if len(lengths) != 1:
        raise ValueError(f"prompts of one length are one batch, and these have lengths {lengths}.")
    clean, corrupted = (torch.tensor(side) for side in sides)
    if not bool(((clean != corrupted).sum(-1) == 1).all()):
        raise ValueError("a pair differs in one token, and these do not.")
    return clean, corrupted


TASKS = {"ioi": ioi, "greater-than": greater_than}
"""The tasks, by name."""
