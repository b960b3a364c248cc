"""Pairs: a clean prompt, its corrupted twin and their answers as texts, and the files that hold them."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conewise.arguments import has_items
from conewise.errors import PromptError, describe, nearest_names
from conewise.files import as_path, parse_json, read_bounded

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

    `where` says in words where it was read, for messages; it is not compared.
    """

    clean: str
    corrupted: str
    answers: tuple[str, ...] = ()
    wrong_answers: tuple[str, ...] = ()
    where: str = field(default="", compare=False)


def as_pairs(given: Any, *, needs_both: bool = True) -> list[Pair]:
    """Pairs as people have them: a file, a table, a row or a list of rows, pairs.

    A row is as in a file, see `read_pairs`, and a table is a DataFrame with such columns, in which several
    answers are a list or are separated by `|`. Where the corrupted prompts are not needed they may be
    missing, and a text is a row of its own. Raises PromptError, which names the row and the field.
    """
    if isinstance(given, Path) or (isinstance(given, str) and _is_file_name(given)):
        return read_pairs(given, needs_both=needs_both)
    if isinstance(given, Mapping) and "prompts" in given and "clean" not in given:
        given = given["prompts"]
    if isinstance(given, Mapping | Pair | str):
        given = [given]
    is_table = hasattr(given, "to_dict") and hasattr(given, "columns")
    if is_table:
        given = (_cells(row) for row in given.to_dict("records"))
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
    the same names as a header, and several answers separated by `|`. `answers` and `wrong_answers` may be
    missing, and `corrupted` too unless it `needs_both`; other fields are not read. Raises PromptError, which
    names the file, the row and the field.
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
                found = (
                    sum(value is not None for value in row.values())
                    + len(row.get(None) or ())
                    - (None in row)
                )
                raise PromptError(
                    f"{where} has {found} values for {len(reader.fieldnames or ())} columns. Put a text that "
                    "holds a comma into double quotes."
                )
            answers = {
                name: [one for one in value.split(BETWEEN) if one]
                for name, value in row.items()
                if ALIASES.get(name, name) in FIELDS[2:]
            }
            yield where, {**row, **answers}
    except csv.Error as error:
        raise PromptError(f"{path}, line {reader.line_num} is not CSV: {error}.") from None


# -- one row ------------------------------------------------------------------------------------


def _pair(where: str, row: Any, needs_both: bool = True) -> Pair:
    if not isinstance(row, Mapping):
        raise PromptError(f"{where} is {_kind(row)}, and a row is expected, for one: {_EXAMPLE[1:-1]}")
    named: dict[str, Any] = {}
    for key, value in row.items():
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
    return Pair(texts[0], texts[1], answers, wrong, where)


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
