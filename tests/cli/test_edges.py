"""`conewise edges`: every edge of the tiny model, planned, swept, kept, resumed, drawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import conewise as cw
from conewise.cli.folders import read_run
from tests.cli.captured_once import captured_once
from tests.cli.commands import PAIR, Done, refused


@pytest.fixture(autouse=True, scope="module")
def _captured_once() -> Iterator[None]:
    with captured_once():
        yield


def test_every_edge_is_swept_and_the_strongest_come_first(tmp_path: Path) -> None:
    folder, page = tmp_path / "run", tmp_path / "page.html"
    words = ("edges", "tiny", *PAIR, "--out", str(folder), "--report", str(page), "--json", "--verify", "2")
    told = Done(*words).json("edges")
    loaded: Any = cw.load("tiny")
    ids = {
        name: loaded.tokenizer(text, return_tensors="pt").input_ids
        for name, text in (("clean", PAIR[1]), ("corrupted", PAIR[3]))
    }
    model = cw.capture(loaded.module, input_ids=ids["clean"])
    answer, wrong = loaded.tokenizer.convert_tokens_to_ids(["Mary", "John"])
    result = model.sweep(
        model.edges(),
        base=model.run(input_ids=ids["corrupted"]),
        source=model.run(input_ids=ids["clean"]),
        metric=cw.logit_diff(answer=answer, wrong=wrong),
    ).run()
    by_name = {cell["site"]: cell["effect"] for cell in told["cells"]}
    assert list(by_name) == sorted(by_name, key=lambda name: -abs(by_name[name]))
    assert by_name == pytest.approx(
        {cell.name: effect for cell, effect, _ in result.strongest(top=len(result.cells))},
        rel=1e-3,
        abs=1e-4,
    )
    assert told["verification"]["ok"] is True
    assert "a1.h2-&gt;logits" in page.read_text("utf-8") or "a1.h2-\\u003elogits" in page.read_text("utf-8")
    kept, story, _ = read_run(folder)
    assert kept.circuit(top=20, model=model).edges
    assert story is not None
    again = Done(*words, "--resume").json("edges")
    assert again["measured"]["resumed"] == len(told["cells"])
    assert again["cells"] == told["cells"]


def test_a_plan_says_what_is_then_counted_and_runs_nothing(tmp_path: Path) -> None:
    chosen = ("edges", "tiny", *PAIR, "--edges", "*->*<k>", "--json")
    told = Done(*chosen, "--plan").json("edges")
    assert "cells" not in told
    done = Done(*chosen).json("edges")
    assert done["measured"]["node_evaluations"] == told["plan"]["node_evaluations"]
    assert {cell["site"].rpartition("<")[2] for cell in done["cells"]} == {"k>"}
    assert "--plan runs nothing" in refused(*chosen, "--plan", "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_people_see_edges() -> None:
    done = Done("edges", "tiny", *PAIR, "--edges", "m?->logits", "--pos", "-1", "--top", "2")
    assert done.code == 0, done.err
    assert "one edge at a time" in done.out
    assert "The strongest 2 of 4 edges" in done.out
    assert "->logits@14" in done.out


def test_edges_that_are_none_are_refused() -> None:
    assert "has no arrow; write WRITER->READER" in refused("edges", "tiny", *PAIR, "--edges", "m0")
    assert "no edge from 'm9' to 'logits'" in refused("edges", "tiny", *PAIR, "--edges", "m9->logits")
