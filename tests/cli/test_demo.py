"""The demo on the tiny model: what it says is what it wrote, and it writes over nothing but its own."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from conewise.cli import demo
from conewise.cli.app import app
from conewise.cli.folders import read_run
from conewise.cli.output import show_cost
from conewise.cli.questions import ModelName
from conewise.errors import ConewiseError, LoadError
from conewise.report.folded import Folded
from conewise.report.story import Story
from conewise.status import shown_phases
from conewise.sweeps.result import Result
from conewise.text.answer import Answer
from conewise.text.questions import Question


@dataclass(frozen=True)
class Shown:
    """A demo that was run: what it printed, and what stood in its folder then."""

    out: Path
    text: str
    errors: str
    result: Result
    story: Story
    folded: Folded
    page: str


def shown(out: Path, *, as_json: bool) -> Shown:
    text, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(text), redirect_stderr(errors):
        demo.demo(tiny=True, out=out, json=as_json)
    result, story, folded = read_run(out / "run")
    assert story is not None
    assert folded is not None
    page = (out / "index.html").read_text(encoding="utf-8")
    return Shown(out, text.getvalue(), errors.getvalue(), result, story, folded, page)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    return shown(tmp_path_factory.mktemp("demo") / "report", as_json=False)


@pytest.fixture(scope="module")
def second(first: Shown) -> Shown:
    """Another one, into the same folder."""
    return shown(first.out, as_json=True)


# -- what is said and what is written ------------------------------------------------------------


def test_every_head_and_mlp_is_asked_about(first: Shown) -> None:
    assert [part.name for part in first.result.spreads] == ["z", "mlp_out"]
    heads, mlps = first.result.spreads
    assert len(heads.shape) == 2
    assert mlps.shape == heads.shape[:1]
    assert f"In each of {len(first.result.cells)} worlds" in first.text


def test_the_summary_has_the_numbers_of_the_run(first: Shown) -> None:
    result, plan = first.result, first.result.plan
    words = " ".join(first.text.split())
    for cell, effect, value in result.strongest(top=10):
        (line,) = (line for line in first.text.splitlines() if line.split("  ")[1:2] == [cell.name])
        assert f"{value:.4f}" in line
        assert f"{effect:+.4f}" in line
    assert result.ledger.node_evaluations == plan.node_evaluations
    assert f"{plan.node_evaluations:,} node evaluations instead of {plan.full_evaluations:,}" in words
    assert f"{float(result.base[0]):+.2f} in the corrupted runs" in words
    assert result.verification is not None
    assert f"verification {result.verification}" in words


def test_the_speed_is_that_of_forwards_that_were_timed(first: Shown) -> None:
    story, ledger = first.story, first.result.ledger
    assert story.forwards_timed == demo.FORWARDS
    assert story.forward_seconds is not None
    full = story.forward_seconds * first.result.plan.worlds
    (line,) = (line for line in first.text.splitlines() if line.strip("| ").startswith("seconds"))
    assert f"{ledger.seconds:.3g}" in line
    assert f"{full:.3g}" in line
    assert f"{full / ledger.seconds:.2f}×" in line
    assert f"Of the measured seconds: {shown_phases(ledger.phases)}." in first.text


@pytest.mark.parametrize(("slowest", "is_busy"), [(1.9, False), (2.1, True)])
def test_a_busy_machine_is_told_of(first: Shown, slowest: float, is_busy: bool) -> None:
    console = Console(file=io.StringIO(), width=400)
    story = replace(first.story, forward_range=(1.0, slowest))
    assert story.forward_range is not None
    assert story.was_busy == is_busy
    show_cost(console, first.result, story)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"(1 to {slowest} s)" in text
    assert ("do not trust the speed" in text) == is_busy


def test_the_sizes_of_cones_are_those_of_the_model(first: Shown) -> None:
    cells = first.result.cells
    words = " ".join(first.text.split())
    early, late = (first.folded.cone(cell.name).node_evaluations for cell in (cells[0], cells[-1]))
    assert early > late
    assert f"{early:,} at {cells[0].name}, {late:,} at {cells[-1].name}" in words


def test_the_numbers_were_checked_by_the_module_itself(first: Shown) -> None:
    check = first.result.verification
    assert check is not None
    assert check.ok
    assert (check.cells, check.hooked) == (demo.CHECKED, demo.CHECKED)


def test_the_page_tells_the_question(first: Shown) -> None:
    assert first.page.startswith("<!doctype html>")
    assert demo.TITLE in first.page
    assert first.story.command == f"conewise demo --tiny --out {first.out}"
    assert first.story.command in first.page
    assert len(first.story.prompts) == first.result.per_prompt.shape[-1]


def test_without_a_terminal_the_text_is_plain_and_the_bar_goes_elsewhere(first: Shown) -> None:
    assert "\x1b" not in first.text
    assert "sweeping" not in first.text
    assert f"{len(first.result.cells)}/{len(first.result.cells)} cells" in first.errors


def test_a_second_demo_takes_the_place_of_the_first(first: Shown, second: Shown) -> None:
    told = json.loads(second.text)
    assert told["command"] == "demo"
    assert second.result.equals(first.result)
    cell, effect, value = second.result.strongest()[0]
    assert told["cells"][0]["site"] == cell.name
    assert told["cells"][0]["effect"] == pytest.approx(effect)
    assert told["cells"][0]["value"] == pytest.approx(value)
    assert told["measured"]["seconds"] == second.result.ledger.seconds != first.result.ledger.seconds
    assert told["files"] == {"out": str(second.out / "run"), "report": str(second.out / "index.html")}


# -- the prompts of SmolLM2 ----------------------------------------------------------------------


def test_each_scene_is_asked_both_ways() -> None:
    pairs = demo.pairs(demo.MODEL)
    assert pairs[0].clean == "When Mary and John went to the store, John gave a drink to"
    assert pairs[0].answers == (" Mary",)
    assert len(pairs) == 2 * len(demo.SCENES)
    for one, other in zip(pairs[::2], pairs[1::2], strict=True):
        assert (one.clean, one.corrupted) == (other.corrupted, other.clean)
        assert (one.answers, one.wrong_answers) == (other.wrong_answers, other.answers)


# -- what goes wrong -----------------------------------------------------------------------------


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is loaded: what is wrong with a folder is found before."""

    def asked(*_: object) -> Any:
        raise AssertionError("a model was asked")

    monkeypatch.setattr(demo, "ask", asked)


@pytest.mark.usefixtures("unasked")
def test_a_page_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>My site</h1>", encoding="utf-8")
    with pytest.raises(
        ConewiseError, match=r"holds index.html, which no demo wrote.*another folder with --out"
    ):
        demo.demo(tiny=True, out=tmp_path)
    assert (tmp_path / "index.html").read_text(encoding="utf-8") == "<h1>My site</h1>"


@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize(
    "story", [None, "{", Story("tiny").to_json(), replace(Story("x"), command="ls").to_json()]
)
def test_a_run_that_is_not_ours_is_left_alone(tmp_path: Path, story: str | None) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    if story is not None:
        (tmp_path / "run" / "story.json").write_text(story, encoding="utf-8")
    with pytest.raises(ConewiseError, match="holds run, which no demo wrote"):
        demo.demo(tiny=True, out=tmp_path)


@pytest.mark.usefixtures("unasked")
def test_a_folder_that_cannot_be_made_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = CliRunner().invoke(app, ["demo", "--tiny", "--out", str(tmp_path / "file")])
    assert found.exit_code == 2
    assert "cannot write into --out" in found.output
    assert "Traceback" not in found.output


def test_who_lacks_the_weights_is_told_of_the_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> Any:
        raise LoadError("there are no weights.")

    monkeypatch.setattr(ModelName, "load", missing)
    found = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "report")])
    assert found.exit_code == 2
    assert "there are no weights." in found.output
    assert "conewise demo --tiny" in found.output


def test_ctrl_c_ends_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Question, "run", interrupted)
    found = CliRunner().invoke(app, ["demo", "--tiny", "--out", str(tmp_path / "report")])
    assert found.exit_code == 130
    assert "interrupted" in found.output
    assert "Traceback" not in found.output
    assert not (tmp_path / "report" / "index.html").exists()


def test_numbers_that_do_not_stand_up_end_in_1(
    first: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = first.result.verification
    assert check is not None
    monkeypatch.setattr(Answer, "verify", lambda *_, **__: replace(check, relative=1.0))
    with pytest.raises(typer.Exit) as ended:
        demo.demo(tiny=True, out=tmp_path / "report", json=True)
    assert ended.value.exit_code == 1
