"""Prompts: pairs of a clean prompt and its corrupted twin, the files that hold them, and their tokens."""

from __future__ import annotations

import csv
import io
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conewise.arguments import has_items
from conewise.errors import PromptError, describe, nearest_names
from conewise.files import as_path, parse_json, read_bounded
from conewise.program.tensors import Tensor
from conewise.report.story import TokenizedPair
from conewise.runs.inputs import token_rows
from conewise.runs.metric_words import (
    kl_to,
    logit_diff,
    prob,
    prob_diff,
)
from conewise.runs.metrics import Metric
from conewise.text.tokens import AnswerReader, token_ids, token_texts

FIELDS = ("clean", "corrupted", "answers", "wrong_answers")
ALIASES = {
    "corrupt": "corrupted",
    "answer": "answers",
    "wrong": "wrong_answers",
    "wrong_answer": "wrong_answers",
}
"""Other names of fields that prompt files of the field have."""

MOST = 256 * 2**20
"""Bytes of the largest file of prompts that is read."""

BETWEEN = "|"
"""The separator of answers in a CSV file."""

_LINES = (".jsonl", ".ndjson")
_EXAMPLE = (
    '[{"clean": "... John gave a drink to", "corrupted": "... Mary gave a drink to", '
    '"answers": [" Mary"], "wrong_answers": [" John"]}]'
)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two prompts that differ in what is studied, and what should and should not come next in the clean one.

    `ids` are the answers and the wrong answers as tokens, where a file has them as such (EAP-IG's CSV does).
    `template` names the template that both were made from, where that is known: ablations by the mean of a
    template go by it. `where` says in words where it was read, for messages; it is not compared.
    """

    clean: str
    corrupted: str
    answers: tuple[str, ...] = ()
    wrong_answers: tuple[str, ...] = ()
    where: str = field(default="", compare=False)
    template: str = ""
    ids: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


def as_pairs(given: Any, *, needs_both: bool = True) -> list[Pair]:
    """Pairs as people have them: a file, a table, a row or a list of rows, pairs.

    A row is as in a file, see `read_pairs`. A table is a DataFrame or a Hugging Face dataset with such
    columns, in which several answers are a list or are separated by `|`. Where the corrupted prompts are not
    needed they may be missing, and a text is a row of its own. Raises PromptError, which names the row and
    the field.
    """
    if isinstance(given, Path) or (isinstance(given, str) and _is_file_name(given)):
        return read_pairs(given, needs_both=needs_both)
    if isinstance(given, Mapping) and "prompts" in given and "clean" not in given:
        given = given["prompts"]
    if isinstance(given, Mapping | Pair | str):
        given = [given]
    if hasattr(given, "to_dict") and hasattr(given, "columns"):  # a DataFrame
        given = (_cells(row) for row in given.to_dict("records"))
    elif hasattr(given, "column_names") and has_items(given):  # a dataset of Hugging Face
        given = (_cells(row) for row in given)
    if not has_items(given):
        raise PromptError(
            f"prompts are a file, a table or a list of rows, and this is {describe(given)}. For one: "
            f"{_EXAMPLE}"
        )
    pairs = [_any_pair(f"row {number}", row, needs_both) for number, row in enumerate(given, 1)]
    if not pairs:
        raise PromptError(f"no prompts: give at least one row, for one: {_EXAMPLE}")
    return pairs


def _is_file_name(text: str) -> bool:
    """True if a text names a file, and is no prompt: a prompt would be long, or have spaces and no suffix."""
    has_suffix = Path(text).suffix.lower() in {*_LINES, ".json", ".csv"} if len(text) < 4096 else False
    return has_suffix or " " not in text.strip()


def _cells(row: Mapping[Any, Any]) -> dict[Any, Any]:
    """A row of a table: what is missing is left out, and several answers are told apart."""
    found: dict[Any, Any] = {}
    for name, value in row.items():
        if value is None or (isinstance(value, float) and math.isnan(value)):
            continue
        found[name] = _several(value) if ALIASES.get(str(name), str(name)) in FIELDS[2:] else value
    return found


def _several(value: Any) -> Any:
    """Answers in a cell of a table: separated, or an array of them."""
    if isinstance(value, str):
        return [one for one in value.split(BETWEEN) if one]
    return value.tolist() if hasattr(value, "tolist") else value


def _any_pair(where: str, row: Any, needs_both: bool) -> Pair:
    if isinstance(row, Pair):
        return row if row.where else replace(row, where=where)
    if isinstance(row, str):
        if needs_both:
            raise PromptError(
                f"{where} is a text, and a clean and a corrupted prompt are expected, for one: "
                f"{_EXAMPLE[1:-1]}"
            )
        row = {"clean": row}
    return _pair(where, row, needs_both)


def read_pairs(path: str | Path, *, needs_both: bool = True) -> list[Pair]:
    """The pairs of a file: JSON, JSON lines or CSV, by its suffix.

    JSON: a list of rows `{clean, corrupted, answers, wrong_answers}`, or `{"prompts": [rows]}`; `corrupt` is
    read as `corrupted`, and the answers are a text or a list of texts. JSON lines: a row on each line. CSV:
    the same names as a header, and several answers separated by `|`; or as EAP-IG has it, with answers as
    numbers of tokens, `correct_idx` and `incorrect_idx`. Rows of the Mechanistic Interpretability Benchmark
    are read too: `prompt`, `choices` and `answerKey`, and the same in `..._counterfactual`. `answers` and
    `wrong_answers` may be missing, and `corrupted` too unless it `needs_both`; other fields are not read.
    Raises PromptError, which names the file, the row and the field.
    """
    path = as_path(path)
    try:
        data = read_bounded(path, MOST)
        text = None if data is None else data.decode("utf-8-sig")
    except OSError as error:
        raise PromptError(f"the prompts {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise PromptError(
            f"the prompts {path} are not UTF-8 text ({error.reason} at byte {error.start}). Save them so."
        ) from None
    if text is None:
        raise PromptError(
            f"the prompts {path} are more than {MOST:,} bytes, too many for one sweep. Split them into "
            "several files."
        )
    rows = _csv_rows(path, text) if path.suffix.lower() == ".csv" else _json_rows(path, text)
    pairs = [_pair(where, row, needs_both) for where, row in rows]  # the first that is none ends it
    if not pairs:
        raise PromptError(f"{path} holds no prompts. Expected, for one: {_EXAMPLE}")
    return pairs


# -- rows of a file, each with where it stands --------------------------------------------------


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    if path.suffix.lower() in _LINES:
        yield from _lines(path, text)
        return
    try:
        found = parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and error.lineno > 1:
            yield from _lines(path, text)
            return
        raise _not_json(path, error) from None
    except ValueError as error:
        raise _unusable(str(path), error) from None
    if isinstance(found, Mapping) and "prompts" in found:
        found = found["prompts"]
    if not isinstance(found, list):
        raise PromptError(
            f"{path} holds {_kind(found)} where a list of rows is expected, for one: {_EXAMPLE}, or the same "
            'list under "prompts".'
        )
    for number, row in enumerate(found, 1):
        yield f"{path}, row {number}", row


def _lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield f"{path}, line {number}", parse_json(line)
            except json.JSONDecodeError as error:
                raise _not_json(path, error, number) from None
            except ValueError as error:
                raise _unusable(f"{path}, line {number}", error) from None


def _not_json(path: Path, error: json.JSONDecodeError, line: int | None = None) -> PromptError:
    return PromptError(
        f"{path} is not JSON: {error.msg}, line {line or error.lineno}, column {error.colno}. Prompts are "
        "read from JSON, from JSON lines (.jsonl) and from CSV (.csv)."
    )


def _unusable(where: str, error: ValueError) -> PromptError:
    return PromptError(f"{where} cannot be used: {error}. Expected, for one: {_EXAMPLE}")


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                found = sum(value is not None for value in row.values())
                found += len(row.get(None) or ()) - (None in row)
                raise PromptError(
                    f"{where} has {found} values for {len(reader.fieldnames or ())} columns. Put a text that "
                    "holds a comma into double quotes."
                )
            yield where, _cells(row)
    except csv.Error as error:
        raise PromptError(f"{path}, line {reader.line_num} is not CSV: {error}.") from None


# -- one row ------------------------------------------------------------------------------------


def _pair(where: str, row: Any, needs_both: bool = True) -> Pair:
    if not isinstance(row, Mapping):
        raise PromptError(f"{where} is {_kind(row)}, and a row is expected, for one: {_EXAMPLE[1:-1]}")
    named: dict[str, Any] = {}
    for key, value in _of_benchmark(where, row).items():
        name = ALIASES.get(str(key), str(key))
        if name in named and name in FIELDS:
            raise PromptError(
                f"{where} has the field {name!r} twice, under two names: leave one of them out."
            )
        named[name] = value
    if not needs_both and named.get("corrupted") is None:
        named["corrupted"] = named.get("clean")
    texts = [_text(where, named, name) for name in FIELDS[:2]]
    answers, wrong = (_texts(where, named.get(name), name) for name in FIELDS[2:])
    ids = _ids(where, named, "correct_idx"), _ids(where, named, "incorrect_idx")
    return Pair(texts[0], texts[1], answers, wrong, where, str(named.get("template", "")), ids)


COUNTERFACTUAL = "_counterfactual"
USUAL = ("s2_io_flip_counterfactual", "random_counterfactual", "symbol_counterfactual")
"""The columns of corrupted prompts that the benchmark's circuits are of; else the first one is."""


def _of_benchmark(where: str, row: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """A row of the Mechanistic Interpretability Benchmark as one of ours; others as they are.

    Answers are those of its circuit track: the two names (IOI), labels of choices, or sums, in the prompt and
    in its counterfactual.
    """
    others = [str(key) for key, one in row.items() if str(key).endswith(COUNTERFACTUAL) and one]
    if "clean" in row or "prompt" not in row or not others:
        return row
    name = next((one for one in USUAL if one in others), others[0])
    other = row[name]
    if not isinstance(other, Mapping) or "prompt" not in other:
        raise PromptError(f"{where}, field {name!r} is {_kind(other)}; a row with a 'prompt' is expected.")
    names = row.get("metadata") or {}
    is_ioi = "indirect_object" in names and "subject" in names
    right, wrong = (
        (f" {names['indirect_object']}", f" {names['subject']}")
        if is_ioi
        else (_benchmark_answer(where, row), _benchmark_answer(where, other))
    )
    found = {"clean": row["prompt"], "corrupted": other["prompt"], "answers": right, "wrong_answers": wrong}
    return {**found, "template": row.get("template") or ""}


def _benchmark_answer(where: str, row: Mapping[Any, Any]) -> str | None:
    """The answer to a prompt of the benchmark: its label, or the label of one of its choices."""
    if row.get("label") is not None:
        return str(row["label"])
    choices, key = row.get("choices"), row.get("answerKey")
    listed = choices.get("label") if isinstance(choices, Mapping) else choices
    if listed is None or key is None:
        return None
    if not isinstance(key, int) or isinstance(key, bool) or not 0 <= key < len(listed):
        raise PromptError(f"{where}, field 'answerKey' is {key!r}; it is the number of one of {len(listed)}.")
    return str(listed[key])


def _ids(where: str, row: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Tokens by number, as EAP-IG's CSV has them: one, or several in brackets. None where there are none."""
    found = row.get(name)
    if found is None or found == "":
        return ()
    if isinstance(found, str):
        found = [one for one in re.split(r"[\s,|]+", found.strip("[]() ")) if one]
    listed = found if isinstance(found, list | tuple) else [found]
    try:
        numbers = [int(one) if isinstance(one, str) else operator.index(one) for one in listed]
    except (TypeError, ValueError):
        numbers = [-1]
    if any(one < 0 for one in numbers) or any(isinstance(one, bool) for one in listed):
        raise PromptError(f"{where}, field {name!r} is {row[name]!r}; it is the number of a token.") from None
    return tuple(dict.fromkeys(numbers))


def _text(where: str, row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        near = nearest_names(name, [str(key) for key in row])
        hint = f" Did you mean {name!r} where it says {near[0]!r}?" if near else ""
        raise PromptError(
            f"{where} has no field {name!r}; it has {', '.join(map(str, row)) or 'none'}. A row has "
            f"{', '.join(FIELDS)}.{hint}"
        )
    value = row[name]
    if not isinstance(value, str):
        raise PromptError(f"{where}, field {name!r} is {_kind(value)}; a text is expected.")
    if not value.strip():
        raise PromptError(f"{where}, field {name!r} is empty; a text is expected.")
    return value


def _texts(where: str, value: Any, name: str) -> tuple[str, ...]:
    if value is None:
        return ()
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, Sequence):
        raise PromptError(
            f"{where}, field {name!r} is {_kind(value)}; a text or a list of texts is expected."
        )
    for one in listed:
        if not isinstance(one, str) or not one:
            raise PromptError(
                f"{where}, field {name!r} holds {_kind(one) if one != '' else 'an empty text'}; each answer "
                'is the text of one token, for one " Mary".'
            )
    return tuple(listed)


def _kind(value: Any) -> str:
    """A JSON value in a few words."""
    if value is None:
        return "null"
    names = {bool: "a truth value", int: "a number", float: "a number", str: "a text", list: "a list"}
    return names.get(type(value), "an object")


# -- tokens ----------------------------------------------------------------------

Tokens = tuple[int, ...]

METRICS: Mapping[str, str] = {
    "logit_diff": "the logit of the answer less that of the wrong answer",
    "prob": "the probability of the answer",
    "prob_diff": "the probability of the answer less that of the wrong answer",
    "kl": "how far the prediction lies from that of the clean prompt (KL divergence)",
}
"""The metrics of prompts and answers, in words; all at the last position."""

BATCH = 256
"""The most prompts that are run as one batch, by default."""

Progress = Callable[[int, int], None]
"""Called with how many are done, and of how many."""

_READS = {
    "logit_diff": ("answers", "wrong_answers"),
    "prob": ("answers",),
    "prob_diff": ("answers", "wrong_answers"),
    "kl": (),
}


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
        if kind == "kl":
            return kl_to(clean)
        makers: Mapping[str, Callable[..., Metric]] = {
            "logit_diff": logit_diff,
            "prob_diff": prob_diff,
            "prob": prob,
        }
        return makers[kind](
            *([getattr(self, name)[at] for at in self.groups[group]] for name in _READS[kind])
        )

    def expect_answers(self, kind: str, numbers: Sequence[int] | None = None) -> None:
        """Raise PromptError when a pair lacks what a metric reads: any pair, or one of `numbers`."""
        if kind not in METRICS:
            raise PromptError(f"no metric {kind!r} for prompts; there are {', '.join(METRICS)}.")
        for number in range(len(self.pairs)) if numbers is None else numbers:
            pair = self.pairs[number]
            for name in _READS[kind]:
                if not getattr(self, name)[number]:
                    raise PromptError(
                        f"{_where(pair, number)} has no {name}, and the metric {kind} reads them. Give them, "
                        "or choose another metric."
                    )
            both = set(self.answers[number]) & set(self.wrong_answers[number])
            if both and kind in {"logit_diff", "prob_diff"}:
                text = token_texts(self.tokenizer, sorted(both))[0]
                raise PromptError(
                    f"{_where(pair, number)} has {text!r} among its answers and among its wrong answers: "
                    "their difference says nothing."
                )

    def of(self, numbers: Sequence[int]) -> TokenizedPrompts:
        """Some of the prompts, by number, in that order; their groups are no larger than these."""
        some = {name: tuple(getattr(self, name)[at] for at in numbers) for name in ("pairs", *FIELDS)}
        groups = _groups([len(tokens) for tokens in some["clean"]], max(map(len, self.groups)))
        return replace(self, groups=groups, **some)

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
    reader = _Reader(tokenizer, as_written=as_written)
    clean: list[Tokens] = []
    corrupted: list[Tokens] = []
    answers: list[Tokens] = []
    wrong: list[Tokens] = []
    for number, pair in enumerate(listed):
        where = _where(pair, number)
        clean.append(reader.prompt(pair.clean, f"{where}, field 'clean'"))
        corrupted.append(reader.prompt(pair.corrupted, f"{where}, field 'corrupted'"))
        own, other = clean[-1], corrupted[-1]
        if len(own) != len(other):
            raise PromptError(
                f"{where}: clean has {len(own)} tokens and corrupted {len(other)}, so positions do not mean "
                "the same in both. Reword one until they are equally long.\n"
                f"  clean:     {reader.shown(own)}\n  corrupted: {reader.shown(other)}"
            )
        for name, ids, found in zip(FIELDS[2:], pair.ids, (answers, wrong), strict=True):
            given = getattr(pair, name)
            found.append(
                reader.numbers(ids, where) or reader.answers(given, pair, f"{where}, field {name!r}")
            )
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


class _Reader(AnswerReader):
    """Reads prompts as tokens, and their answers; notes what is worth a word."""

    def prompt(self, text: str, where: str) -> Tokens:
        tokens = token_ids(self._tokenizer, text)
        if not tokens:
            raise PromptError(f"{where}: {text!r} has no tokens.")
        if self._unknown in tokens:
            self.notes.append(
                f"{where}: part of {text!r} is not in the vocabulary ({self.shown(tokens)}); the model sees "
                "an unknown token there"
            )
        return tokens

    def numbers(self, tokens: Tokens, where: str) -> Tokens:
        """Tokens that a file has by number. Raises PromptError for one that the vocabulary does not have."""
        known = len(self._tokenizer) if isinstance(self._tokenizer, Sized) else None
        for token in tokens:
            if known is not None and token >= known:
                raise PromptError(
                    f"{where} has the token {token:,} among its answers, and this model's tokenizer has "
                    f"{known:,}: the file was made for another tokenizer. Give answers as texts, or make it "
                    "anew with `cw.tasks.write_csv`."
                )
        return tokens

    def answers(self, texts: Sequence[str], pair: Pair, where: str) -> Tokens:
        """The tokens of these texts, each once: an answer that is given twice is one answer."""
        found: dict[int, str] = {}
        for text in texts:
            token = self.token(text, pair.clean, where)
            if token in found:
                self.notes.append(f"{where}: {text!r} is the same token as {found[token]!r}, and counts once")
            found.setdefault(token, text)
        return tuple(found)
