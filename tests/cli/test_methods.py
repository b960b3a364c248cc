"""`--method`: effects by gradients from the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conewise.cli.folders import read_run
from tests.cli.captured_once import captured_once
from tests.cli.commands import PAIR, Done, refused


@pytest.fixture(autouse=True, scope="module")
def _captured_once() -> Iterator[None]:
    with captured_once():
        yield


def test_effects_are_estimated_and_said_to_be(tmp_path: Path) -> None:
    folder, page = tmp_path / "run", tmp_path / "page.html"
    words = ("sweep", "tiny", *PAIR, "--sites", "z", "--method", "ig", "--steps", "3")
    told = Done(*words, "--out", str(folder), "--report", str(page), "--json").json("sweep")
    assert told["method"] == "ig, 3 steps"
    assert told["plan"]["evaluator"] == "gradients"
    kept, story, _ = read_run(folder)
    assert kept.method == "ig, 3 steps"
    assert story is not None
    assert "approximated by ig, 3 steps" in page.read_text("utf-8")
    assert "Approximate: ig, 3 steps." in Done(*words).out
    assert Done("sweep", "tiny", *PAIR, "--json").json("sweep")["method"] is None


def test_edges_are_estimated() -> None:
    told = Done("edges", "tiny", *PAIR, "--method", "eap", "--json").json("edges")
    assert told["method"] == "eap"
    assert len(told["cells"]) == 479


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--method", "atp", "--verify", "2"), "--verify is for worlds"),
        (("--method", "atp", "--evaluator", "serial"), "--evaluator is for worlds"),
        (("--method", "hybrid", "--out", "somewhere", "--resume"), "--resume is for worlds"),
        (("--method", "atp", "--max-memory", "1kB"), "one prompt"),
        (("--steps", "3"), "--steps is for --method ig"),
        (("--method", "apt"), "no method 'apt'"),
        (("--method", "eap"), "'eap' attributes to edges"),
    ],
)
def test_what_only_worlds_have_is_refused(words: tuple[str, ...], said: str) -> None:
    assert said in refused("sweep", "tiny", *PAIR, *words)
