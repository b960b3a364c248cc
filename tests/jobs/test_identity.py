"""What differs is told apart, what is the same has one text in every process, and the rest is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conewise.errors import IdentityError
from conewise.jobs import code_identity as code
from conewise.jobs.identity import Keyed, identified, identity
from tests.jobs.meanings import CHANGES, ORDINARY, REFUSED, made

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_a_function_means_changes_its_identity(name: str) -> None:
    text, change = CHANGES[name]
    module = made(text)
    before, parts = identity(module["p"]), identified(module["p"])
    try:
        exec(change, module)
        assert identity(module["p"]) != before
        assert identified(module["p"]) != parts
    finally:
        module.get("undo", int)()


@pytest.mark.parametrize("name", [*CHANGES, *ORDINARY])
def test_the_same_made_twice_has_one_identity(name: str) -> None:
    text = ORDINARY.get(name) or CHANGES[name][0]
    torch.manual_seed(0)
    one = made(text)
    torch.manual_seed(0)
    other = made(text)
    assert identity(one["p"]) == identity(other["p"])
    assert identified(one["p"]) == identified(other["p"])
    other.get("undo", int)()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_for_certain_is_refused_with_where_it_is(name: str) -> None:
    text, message = REFUSED[name]
    function = made(text)["p"]
    for ask in (identity, identified):
        with pytest.raises(IdentityError) as caught:
            ask(function)
        assert message in str(caught.value)
    assert identity(Keyed(function, "by name")) == "key 'by name'"


def test_the_identity_of_ordinary_functions_is_the_same_in_another_process() -> None:
    here = {name: identity(made(text)["p"]) for name, text in ORDINARY.items()}
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), *sys.path])
    there = subprocess.check_output(
        [sys.executable, "-m", "tests.jobs.meanings"],
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": paths},
    )
    assert json.loads(there) == here


def test_ordinary_functions_differ() -> None:
    texts = [identity(made(text)["p"]) for text in ORDINARY.values()]
    assert len(set(texts)) == len(texts)


def test_what_is_not_read_does_not_matter() -> None:
    module = made("import helpers_for_a_test as h\nG = [1]\ndef p(z): return h.twice(z)")
    before = identity(module["p"])
    module["G"][0] = 2
    module["h"].unused = 5
    module["h"].OFFSET[0] = 5.0
    assert identity(module["p"]) == before


def test_where_code_stands_does_not_matter() -> None:
    one = made("def p(z):\n    return z * 2")["p"]
    other = made("\n\n# a comment\nX = 1\n\n\ndef p(z):\n    # another\n    return z * 2")["p"]
    assert identity(one) == identity(other)


def test_a_function_is_told_by_all_that_it_reads() -> None:
    text = (
        "import helpers_for_a_test as h\nG = [.1]\ndef make(s):\n"
        "    def p(z, t=3): return h.twice(z) + G[0] + s + h.scale + t\n    return p\np = make(5)"
    )
    parts = identified(made(text)["p"])
    assert isinstance(parts, dict)
    assert parts.pop("def p").startswith("code ")
    assert parts.pop("h.twice").startswith("twice ")
    assert parts == {"t=": "3", "s": "5", "G": "[0.1]", "h.scale": "2.0"}


def test_plain_values_are_their_own_text() -> None:
    values: list[Any] = [3, 3.0, "3", None, True, (1, 2), [1, (2.0, None)], {"a": 1}, b"x"]
    assert [identity(value) for value in values] == [repr(value) for value in values]
    assert len({identity(value) for value in [[1, 2], (1, 2), {1, 2}, frozenset({1, 2, 3})]}) == 4


def test_things_that_hold_themselves_have_a_text() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    assert identity(endless) == "[1, the value]"


def test_a_library_is_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from numpy.linalg import norm\ndef p(z): return norm(z)"
    before = identity(made(text)["p"])
    code.library_of_file.cache_clear()
    code._package.cache_clear()
    monkeypatch.setattr(code, "_checksum", lambda _: " another build")
    assert identity(made(text)["p"]) != before
    code.library_of_file.cache_clear()
    code._package.cache_clear()
