"""The language of the tiny model: names, places, things, and the sentences made of them.

Two people are mentioned, and then one of them gives something to the other: to whom is the model's task
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

_WORD = re.compile(r"\w+|[^\w\s]")


def words(text: str) -> list[str]:
    """The words and punctuation marks of a text, as the tokenizer splits it."""
    return _WORD.findall(text)


NAMES = tuple(
    words(
        "Mary John Alice Bob Anna Tom Kate James Sarah Paul Emma Mark Laura Peter Jane Dan Lucy Martin Amy "
        "Sam Rose Max Clara Simon Helen Jack Ruth Frank Nina David Julia Adam Grace Victor Sophie Henry Ella "
        "Oscar Lily George"
    )
)
PLACES = tuple(
    words(
        "store park school garden house office station beach market restaurant hospital library museum lake "
        "church theatre"
    )
)
THINGS = tuple(
    words("drink book ball ring letter key cake hat gift flower computer snack necklace ticket picture lamp")
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
    "At the {P}, {A} sat beside {B}. {S} {V} a {T} to",
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
# Two people who are somewhere else.
SCENES = (
    "{A} and {B} were at the {P}.",
    "{A} and {B} sat in the {P}.",
    "{A} met {B} near the {P}.",
    "{A} had lunch with {B}.",
    "Friends {A} and {B} found a {T}.",
)
# {S} is one of a pair that was mentioned before, and {X} the other one.
ACTS = (
    "{S} {V} a {T} to {X}.",
    "Then {S} {V} a {T} to {X}.",
    "Later {S} decided to give the {T} to {X}.",
    "At the {P}, {S} {V} it to {X}.",
    "{S} and {X} went to the {P}.",
    "{S} and {X} walked to the {P}.",
    "{S} saw {X}.",
    "{S} met {X} at the {P}.",
    "Then {S} and {X} had lunch.",
)

# What is given may be somebody else's: then the name nearest to the end is not of the one who acts.
OWN, OTHERS = re.compile(r"\b(a|the) \{T\} to\b"), "the {T} of {O} to"

# Sentences about somebody alone, or about one of the two.
ASIDES = (
    "{C} was tired.",
    "{C} sat in the {P}.",
    "{C} had a {T}.",
    "It was late.",
    "{C} walked to the {P}.",
    "{C} found a {T} near the {P}.",
)


@cache
def vocabulary() -> tuple[str, ...]:
    """Every token, special ones first; its place is its number."""
    slots = set("ABCOPRSTVX")
    texts = (*TEMPLATES, *TRIOS, *SCENES, *ACTS, *ASIDES, OTHERS)
    plain = sorted({word for text in texts for word in words(text)} - slots - {"{", "}"})
    return (*SPECIAL, *plain, *VERBS, *PLACES, *THINGS, *NAMES)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text that ends before the name `answer`; `wrong` is the person who acts.

    `flipped` is the same text with the other one of the two acting, so that the answer is `wrong`; it is
    empty where there is none. `earlier` are the places, among the text's words, of names that the words
    before them already tell.
    """

    text: str
    answer: str
    wrong: str
    flipped: str = ""
    earlier: tuple[int, ...] = ()


@dataclass(frozen=True)
class Split:
    """What a prompt may be made of: templates, unordered pairs of names, pairs of a place and a thing.

    With `is_training`, no two names of a text are a held-out pair, in whatever roles.
    """

    templates: tuple[str, ...]
    pairs: frozenset[frozenset[str]]
    fillings: frozenset[tuple[str, str]]
    is_training: bool


@cache
def all_pairs() -> tuple[frozenset[str], ...]:
    """Every two names."""
    return tuple(frozenset(pair) for pair in itertools.combinations(NAMES, 2))


@cache
def held_out_pairs() -> frozenset[frozenset[str]]:
    """A tenth of all pairs of names, among them Mary and John."""
    chosen = random.Random("pairs").sample(all_pairs(), len(all_pairs()) // 10)
    return frozenset(chosen) | {frozenset({"Mary", "John"})}


@cache
def held_out_fillings() -> frozenset[tuple[str, str]]:
    """A tenth of all pairs of a place and a thing, among them the store and the drink."""
    fillings = list(itertools.product(PLACES, THINGS))
    return frozenset(random.Random("fillings").sample(fillings, len(fillings) // 10)) | {("store", "drink")}


@cache
def training_split() -> Split:
    """What the model is trained on."""
    pairs = frozenset(all_pairs())
    fillings = frozenset(itertools.product(PLACES, THINGS))
    return Split(TEMPLATES, pairs - held_out_pairs(), fillings - held_out_fillings(), is_training=True)


@cache
def held_out_split(*, templates: bool) -> Split:
    """Held-out names and fillings, in templates of training or (`templates`) in held-out ones too."""
    used = HELD_OUT_TEMPLATES if templates else TEMPLATES
    return Split(used, held_out_pairs(), held_out_fillings(), is_training=False)


class Teller:
    """Draws prompts of a split from a seeded generator of its own.

    Where a sentence can be about somebody else's thing, it is with the chance `of_somebody`.
    """

    def __init__(self, split: Split, seed: int | str, *, of_somebody: float = 0.25) -> None:
        self.split = split
        self.rng = random.Random(seed)
        self._share_of_somebody = of_somebody
        # Sorted: a set of strings has another order in each process.
        self._pairs = sorted(sorted(pair) for pair in split.pairs)
        self._fillings = sorted(split.fillings)

    def couples(self, count: int) -> list[list[str]]:
        """Pairs of the split, no name twice, in random order."""
        found: list[list[str]] = []
        while len(found) < count:
            couple = self.rng.choice(self._pairs)
            if self._may_join(couple, [name for other in found for name in other]):
                found.append(self.rng.sample(couple, 2))
        return found

    def people(self, count: int) -> list[str]:
        """Names, the first two of them a pair of the split."""
        (found,) = self.couples(1)
        while len(found) < count:
            found.append(self._another(found))
        return found

    def _another(self, present: Collection[str]) -> str:
        while True:
            name = self.rng.choice(NAMES)
            if self._may_join([name], present):
                return name

    def _may_join(self, names: Collection[str], present: Collection[str]) -> bool:
        """Whether none of the names is there already, nor makes a held-out pair with one in training."""
        if set(names) & set(present):
            return False
        made = {frozenset(pair) for pair in itertools.product(names, present)}
        return not (self.split.is_training and made & held_out_pairs())

    def plain(self, template: str | None = None) -> Prompt:
        """Two people, one of whom acts, and nobody else."""
        return self._about_two(template or self.rng.choice(self.split.templates), before=False, between=False)

    def with_asides(self) -> Prompt:
        """The same, where a sentence before it or in the middle of it may mention somebody."""
        template = self.rng.choice(self.split.templates)
        template = self._of_somebody(template)
        return self._about_two(template, before=self.rng.random() < 0.5, between=self.rng.random() < 0.4)

    def _about_two(self, template: str, *, before: bool, between: bool) -> Prompt:
        one, two, other = self.people(3)
        slots = self._slots() | {"O": other}
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

    def pairs(self, count: int, acts: int) -> Prompt:
        """Several pairs of people, and then several acts: the answer is the partner of whoever acts last.

        Names that are only counted, or only subtracted, do not tell it: who belongs to whom does.
        """
        couples = self.couples(count)
        other = self._another([name for couple in couples for name in couple])
        told = [self.rng.choice(SCENES).format(A=a, B=b, **self._slots()) for a, b in couples[:-1]]
        one, two = couples[-1]
        templates = [f"{self.rng.choice(self.split.templates)} {{X}}.", *self.rng.choices(ACTS, k=acts - 1)]
        earlier = []
        for number, template in enumerate(templates, start=1):
            subject, answer = self.rng.sample(self.rng.choice(couples), 2)
            slots = self._slots() | {"O": other}
            act, rest = self._of_somebody(template).split(" {X}")
            if number < acts:
                told.append(act.format(A=one, B=two, S=subject, **slots))
                earlier.append(len(words(" ".join(told))))
                told[-1] += f" {answer}{rest.format(**slots)}"
        shown, flipped = (act.format(A=one, B=two, S=who, **slots) for who in (subject, answer))
        return Prompt(" ".join([*told, shown]), answer, subject, " ".join([*told, flipped]), tuple(earlier))

    def some_pairs(self) -> Prompt:
        """Two pairs, and up to three acts."""
        return self.pairs(2, self.rng.choice((1, 2, 3)))

    def any(self) -> Prompt:
        """A prompt as training has them: every kind in its share."""
        kinds = (self.plain, self.with_asides, self.by_a_stranger, self.trio, self.some_pairs)
        return self.rng.choices(kinds, weights=(20, 15, 5, 15, 45))[0]()

    def _of_somebody(self, template: str) -> str:
        return OWN.sub(OTHERS, template) if self.rng.random() < self._share_of_somebody else template

    def _aside(self, people: Collection[str]) -> str:
        return self.rng.choice(ASIDES).format(C=self.rng.choice(list(people)), **self._slots())

    def _slots(self) -> dict[str, str]:
        place, thing = self.rng.choice(self._fillings)
        return {"P": place, "T": thing, "V": self.rng.choice(VERBS)}
