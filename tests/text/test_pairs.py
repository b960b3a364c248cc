import json
from pathlib import Path
from typing import Any

import pytest

from conewise.errors import PromptError
from conewise.text import prompts as pairs
from conewise.text.prompts import Pair, read_pairs
from tests.text.written import write_pairs

PAIRS = [
    Pair("John gave it to", "Mary gave it to", (" Mary", " Marie"), (" John",)),
    Pair('He said, "go | stop" to', "She said,\n go to", (" her",), (" him", " them")),
]
ROWS = [
    {
        "clean": pair.clean,
        "corrupted": pair.corrupted,
        "answers": list(pair.answers),
        "wrong_answers": list(pair.wrong_answers),
    }
    for pair in PAIRS
]


def written(tmp_path: Path, text: str, name: str = "pairs.json") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["pairs.json", "pairs.jsonl", "pairs.ndjson", "pairs.csv", "PAIRS.CSV"])
def test_pairs_are_read_as_they_were_written(tmp_path: Path, name: str) -> None:
    assert read_pairs(write_pairs(tmp_path / name, PAIRS)) == PAIRS


def test_rows_under_prompts_with_corrupt_are_read_as_the_field_writes_them(tmp_path: Path) -> None:
    rows = [{("corrupt" if key == "corrupted" else key): value for key, value in row.items()} for row in ROWS]
    held = {"word_idxs": {"subject": 3}, "prompts": rows}
    assert read_pairs(written(tmp_path, json.dumps(held))) == PAIRS


def test_json_lines_are_read_whatever_the_file_is_named(tmp_path: Path) -> None:
    lines = "\n\n".join(map(json.dumps, ROWS))
    assert read_pairs(written(tmp_path, lines, "pairs.json")) == PAIRS


def test_one_answer_may_be_a_text_and_answers_may_be_missing(tmp_path: Path) -> None:
    rows = [{"clean": "a", "corrupted": "b", "answers": " c"}]
    assert read_pairs(written(tmp_path, json.dumps(rows))) == [Pair("a", "b", (" c",), ())]


def test_a_byte_order_mark_is_not_part_of_the_first_column(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeffclean,corrupted,answers\na,b, c| d\n", "pairs.csv")
    assert read_pairs(path) == [Pair("a", "b", (" c", " d"), ())]


def test_a_pair_remembers_where_it_was_read_and_does_not_compare_it(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "pairs.json", PAIRS)
    assert [pair.where for pair in read_pairs(path)] == [f"{path}, row 1", f"{path}, row 2"]


GOOD = json.dumps(ROWS[0])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.json", "", ["p.json is not JSON", "line 1"]),
        ("p.json", "[]", ["p.json holds no prompts"]),
        ("p.json", '{"a": 1}', ["p.json holds an object where a list of rows is expected"]),
        ("p.json", '"text"', ["holds a text where a list"]),
        ("p.json", f"[{GOOD}, 3]", ["p.json, row 2 is a number, and a row is expected"]),
        ("p.json", '[{"clean": "a"}]', ["p.json, row 1 has no field 'corrupted'", "it has clean"]),
        ("p.json", f'[{GOOD}, {{"clan": "a"}}]', ["row 2 has no field 'clean'", "where it says 'clan'"]),
        ("p.json", '[{"clean": 3, "corrupted": "b"}]', ["row 1, field 'clean' is a number; a text"]),
        ("p.json", '[{"clean": "a", "corrupted": " "}]', ["row 1, field 'corrupted' is empty"]),
        ("p.json", '[{"clean": "a", "corrupted": "b", "answers": 3}]', ["field 'answers' is a number"]),
        ("p.json", '[{"clean": "a", "corrupted": "b", "answers": [3]}]', ["'answers' holds a number"]),
        ("p.json", '[{"clean": "a", "corrupted": "b", "wrong_answers": [""]}]', ["holds an empty text"]),
        ("p.jsonl", f"{GOOD}\n{{", ["p.jsonl is not JSON", "line 2"]),
        ("p.csv", "clean,corrupted\n", ["p.csv holds no prompts"]),
        ("p.csv", "clean,answers\na,b\n", ["p.csv, line 2 has no field 'corrupted'"]),
        ("p.csv", "clean,corrupted\na,b,c\n", ["p.csv, line 2 has 3 values for 2 columns", "double quotes"]),
        ("p.csv", "clean,corrupted\na\n", ["p.csv, line 2 has 1 values for 2 columns"]),
        ("p.csv", 'clean,corrupted\na,"b\n', ["p.csv, line", "is not CSV"]),
    ],
)
def test_an_error_names_the_file_the_row_and_the_field(
    tmp_path: Path, name: str, text: str, words: list[str]
) -> None:
    with pytest.raises(PromptError) as raised:
        read_pairs(written(tmp_path, text, name))
    for word in words:
        assert word in str(raised.value)


def test_a_file_that_is_not_there_or_not_text_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"nowhere\.json cannot be read: No such file"):
        read_pairs(tmp_path / "nowhere.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(PromptError, match=r"bytes\.json are not UTF-8"):
        read_pairs(tmp_path / "bytes.json")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5_000, "a whole number of more than 4,300 digits"),
        (r'"\ud800"', "half of a surrogate pair"),
    ],
)
@pytest.mark.parametrize("name", ["pairs.json", "pairs.jsonl"])
def test_json_that_python_cannot_read_is_refused(tmp_path: Path, name: str, value: str, said: str) -> None:
    row = f'{{"clean": "a", "corrupted": "b", "more": {value}}}'
    text = f"[{row}]" if name.endswith(".json") else f"\n{row}\n"
    with pytest.raises(PromptError, match=rf"{name}(, line 2)? cannot be used: .*{said}.*Expected, for one"):
        read_pairs(written(tmp_path, text, name))


def test_prompts_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conewise.text.prompts.MOST", 1_000)
    with pytest.raises(PromptError, match=r"the prompts /dev/zero are more than 1,000 bytes.*Split them"):
        read_pairs("/dev/zero")


def test_paths_that_cannot_be_are_refused() -> None:
    for path in ("a\0b.json", f"{'a' * 5_000}.json", "~nobody-of-that-name/pairs.json"):
        with pytest.raises(PromptError, match="cannot be read: "):
            read_pairs(path)


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv"])
def test_the_first_row_that_is_none_ends_the_reading(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many follow: a million rows of nothing are refused as one is."""
    looked: list[object] = []
    pair = pairs._pair

    def watched(where: str, *row: Any) -> Pair:
        looked.append(where)
        return pair(where, *row)

    monkeypatch.setattr(pairs, "_pair", watched)
    count = 1_000
    texts = {
        ".json": f"[{','.join(['{}'] * count)}]",
        ".jsonl": "{}\n" * count,
        ".csv": "clean,corrupted\n" + ",\n" * (count - 1) + "not,CSV,at,all",
    }
    path = tmp_path / f"prompts{suffix}"
    path.write_text(texts[suffix], encoding="utf-8")
    with pytest.raises(PromptError, match=r"(row 1|line [12])\b.* (has no field 'clean'|'clean' is empty)"):
        read_pairs(path)
    assert len(looked) == 1
