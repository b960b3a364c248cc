"""Tokenized prompts: pairs in the tokens of one model, checked, in groups of one length, with answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conewise.errors import PromptError
from conewise.program.tensors import Tensor
from conewise.report.story import TokenizedPair
from conewise.runs.inputs import answer_diff, answer_prob, token_rows
from conewise.runs.metrics import Metric, kl_to
from conewise.text.pairs import Pair
from conewise.text.tokens import AnswerReader, token_ids, token_texts

Tokens = tuple[int, ...]

METRICS: Mapping[str, str] = {
    "logit_diff": "the logit of the answer less that of the wrong answer",
    "prob": "the probability of the answer",
    "kl": "how far the prediction lies from that of the clean prompt (KL divergence)",
}
"""The metrics of prompts and answers, in words; all at the last position."""

BATCH = 256
"""The most prompts that are run as one batch, by default."""

Progress = Callable[[int, int], None]
"""Called with how many are done, and of how many."""

_READS = {"logit_diff": ("answers", "wrong_answers"), "prob": ("answers",), "kl": ()}


@dataclass(frozen=True)
class TokenizedPrompts:
    """Pairs of prompts in the tokens of one model.

    `clean`, `corrupted`, `answers` and `wrong_answers` are the tokens of each pair, in the order of `pairs`.
    `groups` are the numbers of the pairs that are run as one batch: all of a group have one length. `notes`
    say in words what a careful person would want to know of how the texts were read.
    """

    pairs: tuple[Pair, ...]
    clean: tuple[Tokens, ...]
    corrupted: tuple[Tokens, ...]
    answers: tuple[Tokens, ...]
    wrong_answers: tuple[Tokens, ...]
    groups: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...] = ()
    tokenizer: Any = field(default=None, repr=False, compare=False)

    def inputs(self, run: str, device: Any = None) -> list[dict[str, Tensor]]:
        """The inputs of each group's "clean" or "corrupted" run."""
        return [self.inputs_of(group, run, device) for group in range(len(self.groups))]

    def inputs_of(self, group: int, run: str, device: Any = None) -> dict[str, Tensor]:
        """The inputs of one group's "clean" or "corrupted" run."""
        rows: Sequence[Tokens] = getattr(self, run)
        return {"input_ids": token_rows([rows[number] for number in self.groups[group]], device)}

    def metric(self, group: int = 0, kind: str = "logit_diff", clean: Any = None) -> Metric:
        """One of `METRICS` for one group, reading each prompt's own answers. `kl` needs the clean run."""
        self.expect_answers(kind, self.groups[group])
        answers = [self.answers[number] for number in self.groups[group]]
        if kind == "logit_diff":
            return answer_diff(answers, [self.wrong_answers[number] for number in self.groups[group]])
        if kind == "prob":
            return answer_prob(answers)
        return kl_to(clean)

    def expect_answers(self, kind: str, numbers: Sequence[int] | None = None) -> None:
        """Raise PromptError when a pair lacks what a metric reads: any pair, or one of `numbers`."""
        if kind not in METRICS:
            raise PromptError(f"no metric {kind!r} for prompts; there are {', '.join(METRICS)}.")
        for number in range(len(self.pairs)) if numbers is None else numbers:
            pair = self.pairs[number]
            for name in _READS[kind]:
                if not getattr(pair, name):
                    raise PromptError(
                        f"{_where(pair, number)} has no {name}, and the metric {kind} reads them. Give them, "
                        "or choose another metric."
                    )
            both = set(self.answers[number]) & set(self.wrong_answers[number])
            if both and kind == "logit_diff":
                text = token_texts(self.tokenizer, sorted(both))[0]
                raise PromptError(
                    f"{_where(pair, number)} has {text!r} among its answers and among its wrong answers: "
                    "their difference says nothing."
                )

    def of(self, numbers: Sequence[int]) -> TokenizedPrompts:
        """Some of the prompts, by number, in that order; their groups are no larger than these."""
        pairs = tuple(self.pairs[number] for number in numbers)
        clean, corrupted, answers, wrong = (
            tuple(rows[number] for number in numbers)
            for rows in (self.clean, self.corrupted, self.answers, self.wrong_answers)
        )
        groups = _groups([len(tokens) for tokens in clean], max(map(len, self.groups)))
        return TokenizedPrompts(pairs, clean, corrupted, answers, wrong, groups, self.notes, self.tokenizer)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The tokens of each group's prompts, in the order of the groups."""
        return tuple(len(self.clean[group[0]]) for group in self.groups)

    def tokenized_pairs(self) -> tuple[TokenizedPair, ...]:
        """The pairs with their tokens as text, in their own order."""
        return tuple(
            TokenizedPair(
                pair.clean,
                pair.corrupted,
                token_texts(self.tokenizer, self.clean[number]),
                token_texts(self.tokenizer, self.corrupted[number]),
                token_texts(self.tokenizer, self.answers[number]),
                token_texts(self.tokenizer, self.wrong_answers[number]),
            )
            for number, pair in enumerate(self.pairs)
        )


def tokenize(
    pairs: Iterable[Pair],
    tokenizer: Any,
    *,
    batch_size: int | None = None,
    as_written: bool = False,
    progress: Progress | None = None,
) -> TokenizedPrompts:
    """Tokenise pairs, check them, and group them by length, at most `batch_size` (else `BATCH`) in a group.

    A prompt is tokenised as the tokenizer does by default, with the special tokens that it adds. Clean and
    corrupted must have equally many tokens, for a position to mean the same in both.

    An answer is one token. It is taken as written where that is one token, else with a leading space added or
    removed where that is; `notes` say so. A word without a leading space after a prompt that ends in a letter
    ("... gave a drink to" and "Mary") is refused where it is a token with the space as well: a model that has
    both would be measured on the wrong one. With `as_written` it is taken. Raises PromptError, which names
    the file, the row and the field, and shows the tokens.
    """
    listed = tuple(pairs)
    if not listed:
        raise PromptError("no prompts: give at least one pair of a clean and a corrupted prompt.")
    if tokenizer is None:
        raise PromptError(
            "this model has no tokenizer, so texts cannot be asked of it. Add its tokenizer files to its "
            "folder, or run the sweep from Python with tokens of your own (`model.sweep`)."
        )
    size: Any = batch_size
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise PromptError(f"a batch size of {size!r}; it is a whole number, 1 or more.")
    reader = _Reader(tokenizer, as_written)
    clean, corrupted, answers, wrong = [], [], [], []
    for number, pair in enumerate(listed):
        where = _where(pair, number)
        clean.append(reader.prompt(pair.clean, f"{where}, field 'clean'"))
        corrupted.append(reader.prompt(pair.corrupted, f"{where}, field 'corrupted'"))
        reader.expect_aligned(clean[-1], corrupted[-1], where)
        answers.append(reader.answers(pair.answers, pair, f"{where}, field 'answers'"))
        wrong.append(reader.answers(pair.wrong_answers, pair, f"{where}, field 'wrong_answers'"))
        if progress is not None:
            progress(number + 1, len(listed))
    groups = _groups([len(tokens) for tokens in clean], batch_size or BATCH)
    notes = tuple(dict.fromkeys(reader.notes))
    return TokenizedPrompts(
        listed, tuple(clean), tuple(corrupted), tuple(answers), tuple(wrong), groups, notes, tokenizer
    )


def _where(pair: Pair, number: int) -> str:
    return pair.where or f"prompt {number + 1}"


def _groups(lengths: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of equal length together, shorter ones first, at most `size` in a group."""
    by_length: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        by_length.setdefault(length, []).append(number)
    return tuple(
        tuple(numbers[start : start + size])
        for _, numbers in sorted(by_length.items())
        for start in range(0, len(numbers), size)
    )


class _Reader:
    """Reads prompts as tokens, and their answers; notes what is worth a word."""

    def __init__(self, tokenizer: Any, as_written: bool) -> None:
        self._tokenizer = tokenizer
        self._answers = AnswerReader(tokenizer, as_written=as_written)
        self.notes = self._answers.notes

    def prompt(self, text: str, where: str) -> Tokens:
        tokens = token_ids(self._tokenizer, text)
        if not tokens:
            raise PromptError(f"{where}: {text!r} has no tokens.")
        if self._answers.is_unknown(tokens):
            self.notes.append(
                f"{where}: part of {text!r} is not in the vocabulary ({self._shown(tokens)}); the model sees "
                "an unknown token there"
            )
        return tokens

    def expect_aligned(self, clean: Tokens, corrupted: Tokens, where: str) -> None:
        if len(clean) != len(corrupted):
            raise PromptError(
                f"{where}: clean has {len(clean)} tokens and corrupted {len(corrupted)}, so positions do "
                "not mean the same in both. Reword one until they are equally long.\n"
                f"  clean:     {self._shown(clean)}\n  corrupted: {self._shown(corrupted)}"
            )

    def answers(self, texts: Sequence[str], pair: Pair, where: str) -> Tokens:
        """The tokens of these texts, each once: an answer that is given twice is one answer."""
        found: dict[int, str] = {}
        for text in texts:
            token = self._answers.token(text, pair.clean, where)
            if token in found:
                self.notes.append(f"{where}: {text!r} is the same token as {found[token]!r}, and counts once")
            found.setdefault(token, text)
        return tuple(found)

    def _shown(self, tokens: Tokens) -> str:
        return self._answers.shown(tokens)
