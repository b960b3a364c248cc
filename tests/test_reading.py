"""Text and JSON from elsewhere: one kind of error for all that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conewise.files import DEEPEST, as_path, is_there, lone_surrogate, parse_json, read_bounded, read_json
from tests.damage import DEEP, LONG


def test_json_is_read_as_it_is() -> None:
    for value in (None, [], {"a": [1, 2.5, "\U0001f600", {"b": "]["}]}, "[" * 300, ["{"] * 300):
        assert parse_json(json.dumps(value)) == value
    assert parse_json(r'"\ud83d\ude00"') == "\U0001f600"
    assert parse_json(r'"\\ud800"') == r"\ud800"


@pytest.mark.parametrize("text", ["", "{", "[1,", "{'a': 1}", "[1] 2", '"\x00"'])
def test_what_is_not_json_is_said_to_be_where(text: str) -> None:
    with pytest.raises(json.JSONDecodeError):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DEEP, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "nested too deeply"),
        (LONG, "a whole number of more than 4,300 digits"),
        (f'{{"a": -{LONG}}}', "a whole number of more than 4,300 digits"),
        (r'"a\ud800"', r"half of a surrogate pair, \\ud800"),
        (r'{"a": [{"\udc00": 1}]}', r"half of a surrogate pair, \\udc00"),
    ],
)
def test_json_that_cannot_be_used_is_a_value_error(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        parse_json(text)
    assert not isinstance(error.value, json.JSONDecodeError)


def test_json_that_is_just_as_deep_as_it_may_be_is_read() -> None:
    deep = parse_json("[" * DEEPEST + "]" * DEEPEST)
    for _ in range(DEEPEST - 1):
        (deep,) = deep
    assert deep == []


def test_a_file_that_is_not_utf8_is_a_value_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'"caf\xe9"')
    with pytest.raises(UnicodeDecodeError):
        read_json(tmp_path / "a.json")


def test_what_never_ends_is_read_to_a_bound(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert read_bounded(tmp_path / "a", 3) == b"abc"
    assert read_bounded(tmp_path / "a", 2) is None
    assert read_bounded(Path("/dev/zero"), 10) is None
    with pytest.raises(OSError, match="null byte"):
        read_bounded(Path("a\0b"), 10)


def test_paths_that_cannot_be_are_not_there() -> None:
    for path in (Path("a" * 5_000), Path("a\0b"), Path("/nowhere")):
        assert not is_there(path, Path.is_dir)
        assert not is_there(path, Path.exists)
    assert is_there(Path("/"), Path.is_dir)


def test_the_home_of_nobody_stays_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert as_path("~/a") == Path("/home/someone/a")
    assert as_path("~nobody-of-that-name/a") == Path("~nobody-of-that-name/a")


def test_a_text_of_characters_has_no_lone_surrogate() -> None:
    assert lone_surrogate("café \U0001f600") is None
    assert lone_surrogate("caf\udce9") == "\udce9"
