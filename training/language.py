"""The language of the tiny model: names, places, things, and the sentences made of them.

A story mentions two people, and then one of them gives something to the other: to whom is the model's task
(indirect object identification, after Wang et al., 2022). Which pairs of names, which pairs of a place and
a thing, and which templates are held out of training is decided here, once, for every seed.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

PAD, UNK, BOS, EOS = "<pad>", "<unk>", "<bos>", "<eos>"
SPECIAL = (PAD, UNK, BOS, EOS)

NAMES = tuple(
    "Mary John Alice Bob Anna Tom Kate James Sarah Paul Emma Mark Laura Peter Jane Dan Lucy Martin Amy Sam "
    "Rose Max Clara Simon Helen Jack Ruth Frank Nina David Julia Adam Grace Victor Sophie Henry Ella Oscar "
    "Lily George".split()
)
PLACES = tuple(
    "store park school garden house office station beach market restaurant hospital library museum lake "
    "church theatre".split()
)
THINGS = tuple(
    "drink book ball ring letter key cake hat gift flower computer snack necklace ticket picture lamp".split()
)
VERBS = ("gave", "handed", "passed", "brought", "sent", "sold", "lent", "showed")

# {A} and {B} are two people, {S} is one of them, and the sentence ends before the other's name.
TEMPLATES = (
    "When {A} and {B} went to the {P}, {S} {V} a {T} to",
    "When {A} and {B} were at the {P}, {S} {V} a {T} to",
    "After {A} and {B} went to the {P}, {S} {V} a {T} to",
    "While {A} and {B} sat in the {P}, {S} {V} a {T} to",
    "Then {A} and {B} went to the {P}. {S} {V} a {T} to",
    "Then, {A} and {B} had a long argument, and afterwards {S} said to",
    "Yesterday {A} and {B} were working at the {P}. {S} decided to give a {T} to",
    "The {P} that {A} and {B} visited had a {T}. {S} {V} it to",
    "Friends {A} and {B} found a {T} at the {P}. {S} {V} it to",
    "{A} and {B} walked to the {P}. Later {S} {V} the {T} to",
    "When {A} met {B} near the {P}, {S} {V} a {T} to",
    "{A} saw {B} at the {P}. Then {S} {V} a {T} to",
    "At the {P}, {A} sat next to {B}. {S} {V} a {T} to",
    "One day {A} had lunch with {B} at the {P}, where {S} {V} a {T} to",
    "It was late when {A} and {B} came to the {P}, so {S} {V} a {T} to",
    "In the {P} were {A} and {B}. After lunch {S} decided to give the {T} to",
)
# Never trained on, though each of their words is.
HELD_OUT_TEMPLATES = (
    "After {A} and {B} met in the {P}, {S} {V} the {T} to",
    "One day {A} and {B} walked to the {P}, and {S} {V} a {T} to",
    "Yesterday {A} sat with {B} near the {P}. Later {S} decided to give it to",
    "When {A} and {B} had lunch at the {P}, {S} {V} a {T} to",
)
# Three people, two of whom act: the third is the answer.
TRIOS = (
    "When {A}, {B} and {C} went to the {P}, {S} and {R} {V} a {T} to",
    "{A}, {B} and {C} were at the {P}. Then {S} and {R} {V} the {T} to",
)
# Sentences about somebody else, or about one of the two, before the story and in the middle of it.
ASIDES = (
    "{C} was tired.",
    "{C} sat in the {P}.",
    "{C} had a {T}.",
    "It was late.",
    "{C} walked to the {P}.",
    "{C} found a {T} near the {P}.",
)
# What somebody has is said, and asked for again: this cannot be done without looking it up.
FACT = "{S} has the {T}."
QUESTION = "{S} has the"

_WORD = re.compile(r"\w+|[^\w\s]")


def words(text: str) -> list[str]:
    """The words and punctuation marks of a text, as the tokenizer splits it."""
    return _WORD.findall(text)


@cache
def vocabulary() -> tuple[str, ...]:
    """Every token, special ones first; its place is its number."""
    slots = {"A", "B", "C", "P", "R", "S", "T", "V"}
    texts = (*TEMPLATES, *TRIOS, *ASIDES, FACT, QUESTION)
    plain = sorted({word for text in texts for word in words(text)} - slots - {"{", "}"})
    return (*SPECIAL, *plain, *VERBS, *PLACES, *THINGS, *NAMES)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text that ends before the name (or thing) `answer`; `wrong` is the other one that it might have been.

    `flipped` is the same story with the two people in each other's roles at their last mention, so that
    the right answer is `wrong`. It is empty where there is none.
    """

    text: str
    answer: str
    wrong: str
    flipped: str = ""


@dataclass(frozen=True)
class Split:
    """What a prompt may be made of: templates, unordered pairs of names, pairs of a place and a thing.

    With `is_training`, no two names of a story are a held-out pair, in whatever roles; otherwise the two
    people of the story are one.
    """

    templates: tuple[str, ...]
    pairs: frozenset[frozenset[str]]
    fillings: frozenset[tuple[str, str]]
    is_training: bool


@cache
def held_out_pairs() -> frozenset[frozenset[str]]:
    """A tenth of all pairs of names, among them Mary and John."""
    pairs = [frozenset(pair) for pair in itertools.combinations(NAMES, 2)]
    return frozenset(random.Random("pairs").sample(pairs, len(pairs) // 10)) | {frozenset({"Mary", "John"})}


@cache
def held_out_fillings() -> frozenset[tuple[str, str]]:
    """A tenth of all pairs of a place and a thing, among them the store and the drink."""
    fillings = list(itertools.product(PLACES, THINGS))
    return frozenset(random.Random("fillings").sample(fillings, len(fillings) // 10)) | {("store", "drink")}


@cache
def training_split() -> Split:
    """What the model is trained on."""
    pairs = frozenset(frozenset(pair) for pair in itertools.combinations(NAMES, 2))
    fillings = frozenset(itertools.product(PLACES, THINGS))
    return Split(TEMPLATES, pairs - held_out_pairs(), fillings - held_out_fillings(), is_training=True)


@cache
def held_out_split(*, templates: bool) -> Split:
    """Held-out names and fillings, in templates of training or (`templates`) in held-out ones too."""
    used = HELD_OUT_TEMPLATES if templates else TEMPLATES
    return Split(used, held_out_pairs(), held_out_fillings(), is_training=False)


class Teller:
    """Draws stories of a split from a seeded generator of its own."""

    def __init__(self, split: Split, seed: int | str) -> None:
        self.split = split
        self.rng = random.Random(seed)
        # Sorted: a set of strings has another order in each process.
        self._pairs = sorted(sorted(pair) for pair in split.pairs)
        self._fillings = sorted(split.fillings)

    def people(self, count: int) -> list[str]:
        """Names in random order, the first two of them a pair of the split."""
        while True:
            found = list(self.rng.choice(self._pairs))
            found += self.rng.sample([name for name in NAMES if name not in found], count - 2)
            if not self.split.is_training or not _has_pair(found, held_out_pairs()):
                break
        first = found[:2]
        self.rng.shuffle(first)
        return [*first, *found[2:]]

    def plain(self, template: str | None = None) -> Prompt:
        """Two people, one of whom acts, and nobody else."""
        return self._pair_story(
            template or self.rng.choice(self.split.templates), before=False, between=False
        )

    def with_asides(self) -> Prompt:
        """The same, where a sentence before it or in the middle of it may mention somebody."""
        template = self.rng.choice(self.split.templates)
        return self._pair_story(template, before=self.rng.random() < 0.5, between=self.rng.random() < 0.4)

    def _pair_story(self, template: str, *, before: bool, between: bool) -> Prompt:
        one, two, other = self.people(3)
        slots = self._slots()
        subject, answer = (one, two) if self.rng.random() < 0.5 else (two, one)
        head, dot, tail = template.partition(". ")
        if before:
            head = f"{self._aside([one, two, other])} {head}"
        if between and dot:
            tail = f"{self._aside([other])} {tail}"
        text = head + dot + tail
        told = text.format(A=one, B=two, S=subject, **slots)
        return Prompt(told, answer, subject, text.format(A=one, B=two, S=answer, **slots))

    def by_a_stranger(self) -> Prompt:
        """A third person acts: either of the two may be the answer."""
        one, two, other = self.people(3)
        template = self.rng.choice(self.split.templates)
        answer, wrong = (one, two) if self.rng.random() < 0.5 else (two, one)
        return Prompt(template.format(A=one, B=two, S=other, **self._slots()), answer, wrong)

    def trio(self) -> Prompt:
        """Three people, two of whom act."""
        three = self.people(3)
        self.rng.shuffle(three)
        subject, second, answer = self.rng.sample(three, 3)
        one, two, third = three
        template = self.rng.choice(TRIOS)
        text = template.format(A=one, B=two, C=third, S=subject, R=second, **self._slots())
        return Prompt(text, answer, subject)

    def recall(self) -> Prompt:
        """Who has what, and then what one of them has."""
        count = self.rng.randint(2, 4)
        people, things = self.people(count), self.rng.sample(THINGS, count)
        facts = [FACT.format(S=who, T=what) for who, what in zip(people, things, strict=True)]
        asked = self.rng.randrange(count)
        other = (asked + 1) % count
        question, flipped = (" ".join([*facts, QUESTION.format(S=people[at])]) for at in (asked, other))
        return Prompt(question, things[asked], things[other], flipped)

    def any(self) -> Prompt:
        """A story as training has them: every kind in its share."""
        kinds = (self.plain, self.with_asides, self.by_a_stranger, self.trio, self.recall)
        return self.rng.choices(kinds, weights=(30, 30, 8, 12, 20))[0]()

    def _aside(self, people: Collection[str]) -> str:
        return self.rng.choice(ASIDES).format(C=self.rng.choice(list(people)), **self._slots())

    def _slots(self) -> dict[str, str]:
        place, thing = self.rng.choice(self._fillings)
        return {"P": place, "T": thing, "V": self.rng.choice(VERBS)}


def _has_pair(names: Collection[str], pairs: frozenset[frozenset[str]]) -> bool:
    return any(frozenset(pair) in pairs for pair in itertools.combinations(names, 2))
