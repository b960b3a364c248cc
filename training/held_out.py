"""Prompts that the tiny model was not trained on, and how well a model does on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from training.language import Prompt, Teller, held_out_split
from training.words import NUMBERS, encode

# Templates of one length, names in the same places: their prompts make one batch, and positions mean the
# same in all of them. The last one is held out.
ALIGNED = (
    "When {A} and {B} went to the {P}, {S} {V} a {T} to",
    "When {A} and {B} were at the {P}, {S} {V} a {T} to",
    "After {A} and {B} went to the {P}, {S} {V} a {T} to",
    "While {A} and {B} sat in the {P}, {S} {V} a {T} to",
    "After {A} and {B} met in the {P}, {S} {V} the {T} to",
)
NEW_NAMES, NEW_TEMPLATES = "new names", "new names and new templates"
FIRST = Prompt(
    "When Mary and John went to the store, John gave a drink to",
    "Mary",
    "John",
    "When Mary and John went to the store, Mary gave a drink to",
)


@cache
def held_out_prompts() -> dict[str, tuple[Prompt, ...]]:
    """Fixed sets of held-out prompts, by what is new in them and what they ask."""
    known, new = held_out_split(templates=False), held_out_split(templates=True)
    plain, templates, asides = Teller(known, "plain"), Teller(new, "templates"), Teller(known, "asides")
    others, trios, pairs = (
        Teller(known, "others", of_somebody=1),
        Teller(known, "trios"),
        Teller(known, "pairs"),
    )
    return {
        NEW_NAMES: tuple(plain.plain() for _ in range(1000)),
        NEW_TEMPLATES: tuple(templates.plain() for _ in range(1000)),
        "somebody else is mentioned": tuple(asides.with_asides() for _ in range(1000)),
        "the thing is somebody else's": tuple(others.with_asides() for _ in range(1000)),
        "three people, two act": tuple(trios.trio() for _ in range(1000)),
        "two pairs": tuple(pairs.pairs(2, acts=1) for _ in range(1000)),
    }


@cache
def default_prompts(count: int = 16) -> tuple[Prompt, ...]:
    """The prompts that come with the model: held out, aligned, either order of the names equally often."""
    teller = Teller(held_out_split(templates=True), "prompts")
    chosen = [FIRST]
    while len(chosen) < count:
        prompt = teller.plain(ALIGNED[len(chosen) % len(ALIGNED)])
        answer_first = prompt.text.index(prompt.answer) < prompt.text.index(prompt.wrong)
        is_new = all({prompt.answer, prompt.wrong} != {other.answer, other.wrong} for other in chosen)
        if is_new and answer_first == (len(chosen) % 2 == 0):
            chosen.append(prompt)
    return tuple(chosen)


@dataclass(frozen=True)
class Score:
    """How well a model answers: the share of prompts whose likeliest next word, of all words, is the answer.

    `logit_diff` is the mean of logit(answer) − logit(wrong).
    """

    prompts: int
    right: int
    logit_diff: float

    @property
    def accuracy(self) -> float:
        """Right answers, as a share."""
        return self.right / self.prompts


def score(module: Any, prompts: Sequence[Prompt]) -> Score:
    """The score of a module, which reads prompts of one length together and so needs no padding."""
    by_length: dict[int, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_length[len(encode(prompt.text))].append(prompt)
    right, differences = 0, 0.0
    for group in by_length.values():
        with torch.no_grad():
            logits = module(input_ids=torch.tensor([encode(p.text) for p in group])).logits[:, -1]
        answers = torch.tensor([NUMBERS[p.answer] for p in group])
        wrong = torch.tensor([NUMBERS[p.wrong] for p in group])
        rows = torch.arange(len(group))
        right += int((logits.argmax(-1) == answers).sum())
        differences += float((logits[rows, answers] - logits[rows, wrong]).double().sum())
    return Score(len(prompts), right, differences / len(prompts))


def rows(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Prompts as rows of a prompts file. An answer begins with the space that stands before it in a text."""
    return [
        {
            "clean": prompt.text,
            "corrupted": prompt.flipped,
            "answers": [f" {prompt.answer}"],
            "wrong_answers": [f" {prompt.wrong}"],
        }
        for prompt in prompts
    ]
