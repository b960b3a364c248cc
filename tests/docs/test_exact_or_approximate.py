"""The page "Exact or approximate?" says what its script found: tables, prose and picture."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchmarks.exact_or_approximate.__main__ import NUMBERS, PICTURE
from benchmarks.exact_or_approximate.picture import short
from benchmarks.exact_or_approximate.tables import said, signed, tables, titled
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/exact-or-approximate.md").read_text("utf-8")
FOUND: dict[str, Any] = json.loads(NUMBERS.read_text("utf-8"))
TABLES = tables(FOUND)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_the_page_is_that_of_the_numbers(name: str) -> None:
    assert TABLES[name] in PAGE


def _leaves(found: Any) -> Iterator[Any]:
    for one in found.values() if isinstance(found, dict) else found:
        if isinstance(one, dict | list):
            yield from _leaves(one)
        else:
            yield one


def _shown(value: float) -> set[str]:
    """The ways in which the prose gives a number."""
    texts = (f"{value:.2f}", signed(value), f"{value:.0%}", f"{value:.1%}", f"{round(value):,}")
    return {_plain(text) for text in texts}


def _plain(text: str) -> str:
    return text.replace("−", "-").removeprefix("+")


def test_a_number_of_the_prose_is_one_of_the_script() -> None:
    """Those with a point, a comma, a sign or a percent sign: others are counts that the prose explains."""
    prose = re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", "", PAGE, flags=re.DOTALL)
    prose = re.sub(r"^\|.*$", "", prose, flags=re.MULTILINE).replace(" %", "%")
    numbers = re.findall(r"(?<![\w.,])[−+]?\d[\d,]*(?:\.\d+)?%?", prose)
    checked = [_plain(one.rstrip(",")) for one in numbers if re.search(r"[.%−+]|,\d", one)]
    known = {text for value in _leaves(FOUND) if isinstance(value, int | float) for text in _shown(value)}
    assert len(checked) >= 10
    assert [one for one in checked if one not in known and one != "95%"] == []


def test_a_component_that_the_page_names_is_named_by_the_script() -> None:
    named = set(re.findall(r"`([am]\d+[^`\n]*)`", PAGE))
    text = json.dumps(FOUND).replace("\\u003e", ">")
    known = {short(name) for name in re.findall(r'"((?:z|mlp_out)\[[^"]*\]|[^"\s]*->[^"\s]*)"', text)}
    parts = {part for name in known for part in (name, *name.split("->"))}
    assert len(named) >= 3
    assert sorted(named - parts) == []


def test_the_picture_is_of_these_numbers() -> None:
    drawn = ET.fromstring(PICTURE.read_text("utf-8"))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    for numbers in FOUND.values():
        for kind in ("nodes", "edges"):
            for method, row in numbers[kind].items():
                at = texts.index(titled(method))
                assert said(row) == texts[at + 1]
                del texts[at : at + 2]
    assert f"]({PICTURE.relative_to(ROOT / 'docs').as_posix()})" in PAGE


def test_at_least_twenty_pairs_of_names_and_another_task() -> None:
    assert FOUND["ioi"]["behaviour"]["pairs"] >= 20
    assert len(FOUND) >= 2
    for numbers in FOUND.values():
        assert set(numbers["nodes"]) == {"atp", "atp*", "ig"}
        assert set(numbers["edges"]) == {"eap", "eap-ig"}
        assert numbers["behaviour"]["clean_least"] > 0 > numbers["behaviour"]["corrupted"]
