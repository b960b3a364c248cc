"""`conewise steer`: what it prints, its page, its plan, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import CLEAN, Done

WORDS = (
    "steer",
    "tiny",
    "--toward",
    "John",
    "--away",
    "Mary",
    "--count",
    "John",
    "--prompt",
    CLEAN,
    "--n",
    "4",
)


def test_a_study_is_printed_as_json_and_as_a_page(tmp_path: Path) -> None:
    page, run = tmp_path / "page.html", tmp_path / "run"
    words = (*WORDS, "--scales", "-3,3", "--verify", "4", "--report", str(page), "--out", str(run))
    told: dict[str, Any] = Done(*words, "--json").json("steer")
    assert told["verification"] == {"texts": 4, "wrong": 0, "named": [], "ok": True}
    assert len(told["cells"]) == 8
    steered = {cell["name"]: cell["texts"][0].count("John") for cell in told["cells"]}
    own = told["unpatched"][0].count("John")
    assert {cell["name"]: cell["effect"] + own for cell in told["cells"]} == steered
    assert told["plan"]["passes"] == 4
    assert told["best"] is None or told["best"] in steered
    assert "Steering" in page.read_text()
    shown = Done(*words[:-6], "--out", str(run), "--resume", "--top", "3")
    assert shown.code == 0, shown.err
    assert told["finding"] in shown.out
    assert shown.out.count("\n") < 10


def test_a_plan_writes_nothing() -> None:
    told = Done(*WORDS, "--plan", "--json").json("steer")
    assert told["plan"]["cells"] == 16
    assert "cells" not in told
    assert "texts   16 patched" in Done(*WORDS, "--plan").out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--scales", "1,x"), "--scales 1,x: numbers separated by commas"),
        (("--scales", "2,2"), "each once"),
        (("--steered", "old"), "'old' is not one of 'all', 'new'"),
        (("--kind", "nothing"), "nothing"),
        (("--layer", "9"), "layer"),
        (("--fluent", "-1"), "most_perplexity"),
    ],
)
def test_what_cannot_be_meant_is_refused(more: tuple[str, ...], said: str) -> None:
    done = Done(*WORDS, *more)
    assert done.code == 2, done.err
    assert said in done.err
