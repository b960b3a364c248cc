"""Tasks of the field as prompts: pairs of a clean and a corrupted prompt, well-formed for a tokenizer.

A row has `clean`, `corrupted`, `answers`, `wrong_answers` and the number of its `template`. A row is
well-formed where both prompts have equally many tokens, all of them known, and every answer is one token that
follows the prompt as it is. Templates are held out as a whole, so that nothing is learned by heart.
"""

from __future__ import annotations

import csv
import io
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conewise.arguments import checked
from conewise.errors import Argument, PromptError, describe
from conewise.files import as_path, write_whole
from conewise.runs.captured import Captured
from conewise.runs.run import baseline
from conewise.sweeps.execution.reading import MetricReader
from conewise.sweeps.planning.planner import facts_of
from conewise.text.ask import capture_with
from conewise.text.prompts import FIELDS, Pair, as_pairs, tokenize
from conewise.text.tokens import expect_decodes, token_ids, unknown_token

Row = dict[str, Any]
"""A pair of prompts with its answers: what `model.ask`, circuits and their curves take."""

SPLITS = ("all", "train", "test")
HELD_OUT = 1 / 3
"""The share of the templates that are held out for the split "test", at least one."""
TRIES = 400
"""How many drafts are drawn for each row that is wanted, at most."""
REPEATS = 20
"""After so many drafts for each row found, with no new one among them, there are no more."""


Draw = Callable[[str, random.Random, "Words"], Pair | None]
"""Fills a template at random; None where the draw says nothing."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task in a few words, its templates, and how one of them is filled."""

    what: str
    templates: tuple[str, ...]
    draw: Draw


TASKS: dict[str, Task] = {}
"""The tasks, by name."""


def _task(what: str, *templates: str) -> Callable[[Draw], Callable[..., list[Row]]]:
    """Add a task that fills templates so, under the function's name, which then draws rows as `make` does."""

    def added(draw: Draw) -> Callable[..., list[Row]]:
        name = draw.__name__

        def rows(model: Any, n: int = 100, *, seed: int = 0, split: str = "all") -> list[Row]:
            return make(name, model, n, seed=seed, split=split)

        TASKS[name] = Task(what, templates, draw)
        rows.__name__, rows.__doc__ = name, draw.__doc__
        return rows

    return added


class Words:
    """The tokens of texts; a tokenizer is asked for each text once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, tuple[int, ...]] = {}
        self._unknown = unknown_token(tokenizer)
        self._usable: dict[tuple[str, ...], list[str]] = {}

    def tokens(self, text: str) -> tuple[int, ...]:
        """The tokens of a prompt."""
        if text not in self._known:
            self._known[text] = token_ids(self._tokenizer, text)
        return self._known[text]

    def is_known(self, text: str) -> bool:
        """True if no part of a text is the unknown token."""
        return self._unknown is None or self._unknown not in self.tokens(text)

    def follows(self, prompt: str, answer: str) -> bool:
        """True if an answer is one token more behind a prompt, whose own tokens stay as they are."""
        before, after = self.tokens(prompt), self.tokens(prompt + answer)
        ends = token_ids(self._tokenizer, answer, add_special_tokens=False)
        if before and before[-1] == getattr(self._tokenizer, "eos_token_id", None):
            before, after = before[:-1], after[:-1]
        return after[:-1] == before and len(ends) == 1 and ends[0] == after[-1] != self._unknown

    def usable(self, words: Sequence[str]) -> list[str]:
        """The words that are one known token behind another word."""
        key = tuple(words)
        if key not in self._usable:
            self._usable[key] = [
                word for word in words if len(self._bare(f" {word}")) == 1 and self.is_known(f" {word}")
            ]
        return self._usable[key]

    def keeps_numbers(self, text: str) -> bool:
        """True if a number of two digits behind a text is one token."""
        return self.follows(text, "42")

    def _bare(self, text: str) -> tuple[int, ...]:
        return token_ids(self._tokenizer, text, add_special_tokens=False)


# -- what the tasks are made of ------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return text.split()


HE = _words(
    "John James Bob Tom Paul Mark Peter Dan Martin Sam Max Simon Jack Frank David Adam Victor Henry "
    "Oscar George William Robert Richard Charles Joseph Daniel Steven Edward Brian Kevin Jason Eric "
    "Andrew Michael"
)
SHE = _words(
    "Mary Alice Anna Kate Sarah Emma Laura Jane Lucy Amy Rose Clara Helen Ruth Nina Julia Grace "
    "Sophie Ella Lily Jennifer Linda Elizabeth Susan Jessica Karen Lisa Nancy Margaret Michelle "
    "Rachel Maria Diana Lauren"
)
PLACES = _words(
    "store park school garden house office station beach market restaurant hospital library museum "
    "lake church theatre"
)
THINGS = _words(
    "drink book ball ring letter key cake hat gift flower computer snack necklace ticket picture lamp"
)
NOUNS = _words(
    "war project journey contract study trial program reign siege campaign conflict expedition strike "
    "voyage marriage treaty dispute construction investigation tournament"
)
PRAISE = _words("friend person leader student teacher cook driver neighbor guest worker")
CAPITALS = dict(
    pair.split(":")
    for pair in _words(
        "France:Paris Germany:Berlin Italy:Rome Spain:Madrid Russia:Moscow Japan:Tokyo China:Beijing "
        "Egypt:Cairo Greece:Athens Austria:Vienna Ireland:Dublin Poland:Warsaw Portugal:Lisbon "
        "Cuba:Havana Peru:Lima Norway:Oslo Sweden:Stockholm Hungary:Budapest Turkey:Ankara Iran:Tehran "
        "Iraq:Baghdad Syria:Damascus Canada:Ottawa England:London Kenya:Nairobi Belgium:Brussels "
        "Thailand:Bangkok Lebanon:Beirut Libya:Tripoli"
    )
)
COLOURS = _words("red blue green yellow black white brown gray pink purple orange")
OBJECTS = _words("box ball car cup hat chair door shirt bag pen table lamp coat bottle book")
SUBJECTS = _words(  # which take an s when there are several
    "key boy girl dog car book teacher doctor student author farmer picture letter friend worker "
    "horse house ship tree"
)
VERBS = (("is", "are"), ("was", "were"), ("has", "have"))
LETTERS = "ABCD"


@_task(
    "indirect object identification: who of two people something is given to (Wang et al. 2022)",
    "When {one} and {other} went to the {place}, {subject} gave a {thing} to",
    "Then, {one} and {other} went to the {place}. {subject} gave a {thing} to",
    "After {one} and {other} went to the {place}, {subject} gave a {thing} to",
    "While {one} and {other} were working at the {place}, {subject} gave a {thing} to",
    "Then, {one} and {other} had a long argument, and afterwards {subject} said to",
    "One day {one} and {other} walked to the {place}, where {subject} handed a {thing} to",
)
def ioi(template: str, drawn: random.Random, words: Words) -> Pair | None:
    """Rows of indirect object identification; in the corrupted prompt the other one acts. See `make`."""
    names = words.usable([*HE, *SHE])
    if len(names) < 2:
        return None
    one, other = drawn.sample(names, 2)
    subject, recipient = drawn.sample([one, other], 2)
    places, things = words.usable(PLACES), words.usable(THINGS)
    filled = {"one": one, "other": other, "place": _any(drawn, places), "thing": _any(drawn, things)}
    clean, corrupted = (template.format(**filled, subject=name) for name in (subject, recipient))
    return Pair(clean, corrupted, (f" {recipient}",), (f" {subject}",))


@_task(
    "a year that is greater than another one of its century (Hanna et al. 2023)",
    "The {noun} lasted from the year {year} to the year {century}",
    "The {noun} started in the year {year} and ended in the year {century}",
    "The {noun} went on from {year} to {century}",
)
def greater_than(template: str, drawn: random.Random, words: Words) -> Pair | None:
    """Rows of greater-than: years of two digits, or the digit of the tens where numbers are split."""
    noun, century = drawn.choice(NOUNS), drawn.randint(11, 19)
    year = drawn.randint(2, 97)
    texts = (template.format(noun=noun, year=f"{century}{at:02d}", century=century) for at in (year, 1))
    clean, corrupted = texts
    if words.keeps_numbers(clean):
        known = [at for at in range(2, 100) if words.follows(clean, f"{at:02d}")]
        above = tuple(f"{at:02d}" for at in known if at > year)
        below = tuple(f"{at:02d}" for at in known if at <= year)
    else:  # a tokenizer that splits numbers: the answer is the digit of the tens
        tens = year // 10
        above = tuple(str(digit) for digit in range(tens + 1, 10))
        below = tuple(str(digit) for digit in range(tens))
    return Pair(clean, corrupted, above, below)


@_task(
    "he or she, by a name (Mathwin et al. 2023)",
    "So {name} is a really great {praise}, isn't",
    "{name} is such a good {praise}, isn't",
    "{name} went to the {place} because",
    "{name} was late for the {place}, so",
)
def gendered_pronoun(template: str, drawn: random.Random, words: Words) -> Pair | None:
    """Rows of gendered pronouns: he or she, by a name. See `make`."""
    men, women = words.usable(HE), words.usable(SHE)
    if not men or not women:
        return None
    filled = {"praise": drawn.choice(PRAISE), "place": drawn.choice(PLACES)}
    pairs = [(drawn.choice(men), " he"), (drawn.choice(women), " she")]
    (name, answer), (other, wrong) = drawn.sample(pairs, 2)
    return Pair(
        template.format(name=name, **filled), template.format(name=other, **filled), (answer,), (wrong,)
    )


@_task(
    "the capital of a country",
    "The capital of {country} is the city of",
    "The capital city of {country} is called",
    "Q: What is the capital of {country}?\nA: The capital is",
    "People in {country} are governed from the capital,",
)
def country_capital(template: str, drawn: random.Random, _: Words) -> Pair | None:
    """Rows of countries and their capitals. See `make`."""
    one, other = drawn.sample(sorted(CAPITALS), 2)
    clean, corrupted = (template.format(country=country) for country in (one, other))
    return Pair(clean, corrupted, (f" {CAPITALS[one]}",), (f" {CAPITALS[other]}",))


@_task(
    "sums and differences whose result is one token",
    "1+2=3\n7-2=5\n{a}{sign}{b}=",
    "4-3=1\n2+2=4\n5+3=8\n{a}{sign}{b}=",
    "3 + 1 = 4\n9 - 2 = 7\n{a} {sign} {b} = ",
    "The {word} of {a} and {b} is ",
    "What is the {word} of {a} and {b}? The answer is ",
)
def arithmetic(template: str, drawn: random.Random, words: Words) -> Pair | None:
    """Rows of sums and differences; the corrupted prompt has other numbers. See `make`."""
    most = 99 if words.keeps_numbers(template.format(a=1, sign="+", b=2, word="sum")) else 9
    plus = drawn.random() < 0.5

    def numbers() -> tuple[int, int, int]:
        total, part = sorted((drawn.randint(1, most), drawn.randint(1, most)), reverse=True)
        return (part, total - part, total) if plus else (total, part, total - part)

    (a, b, right), (c, d, wrong) = numbers(), numbers()
    filled = {"sign": "+", "word": "sum"} if plus else {"sign": "-", "word": "difference"}
    if right == wrong or 0 in (b, d):
        return None
    clean, corrupted = (template.format(a=x, b=y, **filled) for x, y in ((a, b), (c, d)))
    return Pair(clean, corrupted, (str(right),), (str(wrong),))


@_task(
    "the letter of the choice that a sentence names (Wiegreffe et al. 2024)",
    "The {thing} is {colour}. What color is the {thing}?\n{choices}\nAnswer:",
    "Question: A {thing} is {colour}. What color is it?\n{choices}\nAnswer:",
    "{colour} is the color of the {thing}. Which color is that?\n{choices}\nThe answer is",
)
def mcqa(template: str, drawn: random.Random, _: Words) -> Pair | None:
    """Rows of questions with four choices; the corrupted prompt has them in another order. See `make`."""
    choices, thing = drawn.sample(COLOURS, len(LETTERS)), drawn.choice(OBJECTS)
    right = drawn.choice(choices)
    moved = drawn.sample(choices, len(choices))
    if moved.index(right) == choices.index(right):
        return None

    def shown(order: Sequence[str]) -> str:
        lines = "\n".join(f"{letter}. {colour}" for letter, colour in zip(LETTERS, order, strict=True))
        return template.format(thing=thing, colour=right, choices=lines)

    answer = LETTERS[choices.index(right)]
    wrong = tuple(f" {letter}" for letter in LETTERS if letter != answer)
    return Pair(shown(choices), shown(moved), (f" {answer}",), wrong)


@_task(
    "the number of a verb, by its subject and not by the noun beside it (Linzen et al. 2016)",
    "The {subject} near the {near}",
    "The {subject} behind the {near}",
    "Everybody knows that the {subject} next to the {near}",
)
def subject_verb(template: str, drawn: random.Random, _: Words) -> Pair | None:
    """Rows of subject–verb agreement, with a noun of the other number between. See `make`."""
    subject, attractor = drawn.sample(sorted(SUBJECTS), 2)
    verbs = drawn.choice(VERBS)
    number = drawn.randrange(2)
    forms = (subject, f"{subject}s")
    near = (attractor, f"{attractor}s")[1 - number]
    clean, corrupted = (template.format(subject=forms[at], near=near) for at in (number, 1 - number))
    return Pair(clean, corrupted, (f" {verbs[number]}",), (f" {verbs[1 - number]}",))


def _any(drawn: random.Random, words: Sequence[str]) -> str:
    """A word, or one that is none where there is no usable one: its draft is not well-formed."""
    return drawn.choice(words) if words else "\N{REPLACEMENT CHARACTER}"


# -- rows ----------------------------------------------------------------------------------------------


@checked
def make(name: str, model: Any, n: int = 100, *, seed: int = 0, split: str = "all") -> list[Row]:
    """Draw `n` rows of a task for a model's tokenizer, or for a tokenizer; the same seed gives the same rows.

    `split` is "all", or "train" or "test", which share no template. Raises PromptError if the task has no
    well-formed prompts for this tokenizer, or fewer than `n`.
    """
    if name not in TASKS:
        raise PromptError(f"no task {name!r}; there are {', '.join(TASKS)}.")
    task, tokenizer = TASKS[name], getattr(model, "tokenizer", model)
    if tokenizer is None:
        raise PromptError(f"{describe(model)} has no tokenizer, and prompts are made for one.")
    expect_decodes(tokenizer)
    if isinstance(n, bool) or n < 1:
        raise PromptError(Argument("n", n), ": it is how many rows to draw, 1 or more.")
    words, drawn = Words(tokenizer), random.Random(f"{name} {seed}")
    templates = templates_of(task, split)
    usable = {at: text for at, text in templates.items() if _is_usable(task, text, drawn, words)}
    found: dict[tuple[str, str], Row] = {}
    if usable:
        repeated = 0
        for at in itertools.islice(_in_turn(usable, drawn), TRIES * n):
            draft = task.draw(usable[at], drawn, words)
            if draft is None:
                continue
            if (draft.clean, draft.corrupted) in found:
                repeated += 1
                if repeated > TRIES + REPEATS * len(found):
                    break
            elif is_well_formed(draft, words):
                row = {name: getattr(draft, name) for name in FIELDS[:2]}
                row |= {name: list(getattr(draft, name)) for name in FIELDS[2:]}
                found[draft.clean, draft.corrupted] = {**row, "template": str(at)}
                repeated = 0
                if len(found) == n:
                    return list(found.values())
    raise PromptError(
        f"{len(found)} well-formed prompts of the task {name!r} were found for this tokenizer, and ",
        Argument("n", n),
        f" were asked for: {len(usable)} of its {len(templates)} templates can be written so that both "
        "prompts have equally many tokens and every answer is one token. Ask for fewer, or for another task.",
    )


def templates_of(task: Task, split: str) -> dict[int, str]:
    """The templates of a split, by number: those that are held out stand at the end."""
    if split not in SPLITS:
        raise PromptError(f"no split {split!r}; there are {', '.join(SPLITS)}.")
    cut = len(task.templates) - max(1, round(HELD_OUT * len(task.templates)))
    chosen = {"all": range(len(task.templates)), "train": range(cut)}
    numbers = chosen.get(split, range(cut, len(task.templates)))
    return {number: task.templates[number] for number in numbers}


def is_well_formed(draft: Pair, words: Words) -> bool:
    """True if both prompts have equally many known tokens, and every answer is a token behind the prompt."""
    both = (draft.clean, draft.corrupted)
    answers = (*draft.answers, *draft.wrong_answers)
    return (
        bool(draft.answers and draft.wrong_answers)
        and words.tokens(draft.clean) != words.tokens(draft.corrupted)
        and len(words.tokens(draft.clean)) == len(words.tokens(draft.corrupted))
        and all(map(words.is_known, both))
        and all(words.follows(draft.clean, answer) for answer in answers)
    )


def _is_usable(task: Task, template: str, drawn: random.Random, words: Words) -> bool:
    """True if one draft of some is well-formed."""
    drafts = (task.draw(template, drawn, words) for _ in range(TRIES))
    return any(draft is not None and is_well_formed(draft, words) for draft in drafts)


def _in_turn(templates: Mapping[int, str], drawn: random.Random) -> Iterator[int]:
    """The templates, each as often as the others, in a random order."""
    while True:
        yield from drawn.sample(list(templates), len(templates))


@checked
def write_csv(prompts: Any, model: Any, path: str | Path) -> Path:
    """Write rows as EAP-IG's CSV, with answers as the tokens of a model; returns the path.

    Its columns are clean, corrupted, correct_idx and incorrect_idx. `model.ask(path)` reads it.
    """
    read = tokenize(as_pairs(prompts), getattr(model, "tokenizer", model), as_written=True)
    text = io.StringIO(newline="")
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["clean", "corrupted", "correct_idx", "incorrect_idx"])
    for pair, right, wrong in zip(read.pairs, read.answers, read.wrong_answers, strict=True):
        tokens = (one[0] if len(one) == 1 else list(one) for one in (right, wrong))
        lines.writerow([pair.clean, pair.corrupted, *tokens])
    found = as_path(path)
    try:
        found.parent.mkdir(parents=True, exist_ok=True)
        write_whole(found, text.getvalue().encode())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise PromptError(f"the prompts cannot be written to {found}: {why}. Name another file.") from None
    return found


# -- how well a model does a task ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskScore:
    """The accuracy of a model on a task, and its margin.

    `accuracy` is the share of prompts in which the mean logit of the answers exceeds that of the wrong
    answers. `corrupted` is the same for the corrupted prompts, and should be small. `logit_diff` is the mean
    difference, and `prob` the mean probability of all answers together.
    """

    prompts: int
    accuracy: float
    corrupted: float
    logit_diff: float
    prob: float

    def __str__(self) -> str:
        return (
            f"{self.accuracy:.0%} of {self.prompts} prompts right ({self.corrupted:.0%} when corrupted), "
            f"logit difference {self.logit_diff:.2f}, probability of the answers {self.prob:.2f}"
        )


@checked
def measure(model: Captured, prompts: Any) -> TaskScore:
    """Measure the accuracy of a model on the rows of a task."""
    read = tokenize(as_pairs(prompts), model.tokenizer, as_written=True)
    capture_with(model, read)
    differences: dict[str, list[float]] = {"clean": [], "corrupted": []}
    probabilities: list[float] = []
    for group in range(len(read.groups)):
        metrics = [read.metric(group, kind) for kind in ("logit_diff", "prob")]
        for name in differences:
            inputs = read.inputs_of(group, name, facts_of(model).input_device)
            found = MetricReader(facts_of(model), metrics).of_run(baseline(model, (), inputs, keep=()))
            differences[name] += found[0].tolist()
            probabilities += found[1].tolist() if name == "clean" else []
    clean, corrupted = differences["clean"], differences["corrupted"]
    count = len(clean)
    return TaskScore(
        count,
        sum(one > 0 for one in clean) / count,
        sum(one > 0 for one in corrupted) / count,
        sum(clean) / count,
        sum(probabilities) / count,
    )
