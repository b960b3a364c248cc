"""`conewise circuit`: the circuit of the tiny model's task, planned, found, kept, resumed, drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import conewise as cw
from conewise.cli import circuit_finding
from conewise.loading import load
from conewise.text.prompts import Pair, tokenize
from tests.cli.captured_once import captured_once
from tests.cli.commands import CLEAN, CORRUPTED, PAIR, Done, refused
from tests.text.written import write_pairs


@pytest.fixture(autouse=True, scope="module")
def _captured_once() -> Iterator[None]:
    with captured_once():
        yield


def library() -> tuple[Any, dict[str, Any]]:
    """The tiny model, and what the library is asked for PAIR."""
    loaded = load("tiny")
    prompts = tokenize([Pair(CLEAN, CORRUPTED, ("Mary",), ("John",), "the test")], loaded.tokenizer)
    model = cw.capture(loaded.module, **prompts.inputs_of(0, "clean"))
    runs = {name: model.run(**prompts.inputs_of(0, name)) for name in ("clean", "corrupted")}
    return model, {"base": runs["clean"], "source": runs["corrupted"], "metric": prompts.metric(0)}


def test_acdc_finds_what_the_library_finds_and_keeps_it(tmp_path: Path) -> None:
    folder, page = tmp_path / "run", tmp_path / "page.html"
    words = ("circuit", "tiny", *PAIR, "--out", str(folder), "--json")
    told = Done(*words, "--threshold", "0.5", "--report", str(page)).json("circuit")
    model, asked = library()
    circuit = model.find_circuit(**asked, threshold=0.5).run()
    assert [edge["edge"] for edge in told["edges"]] == list(circuit.edges)
    assert told["nodes"] == list(circuit.nodes)
    found = circuit.evaluate(**asked)
    assert told["evaluation"]["faithfulness"] == pytest.approx(found.faithfulness, abs=1e-4)
    assert told["evaluation"]["weakest"] == found.weakest
    assert told["graph"]["edges"] == 479
    assert "The edge that is needed least is" in page.read_text("utf-8")
    assert "the logit of the answer less that of the wrong answer" in page.read_text("utf-8")
    assert {path.name for path in folder.iterdir()} == {
        *("circuit.json", "evaluation.json", "question.json", "search", "story.json")
    }
    kept = cw.Circuit.load(folder / "circuit.json", model)
    assert kept.edges == circuit.edges
    assert kept.log == circuit.log
    # The same again, from the decisions that were kept; and nothing else.
    assert "holds a run already" in refused(*words, "--threshold", "0.5")
    again = Done(*words, "--threshold", "0.5", "--resume").json("circuit")
    assert again["edges"] == told["edges"]
    assert "asks something else" in refused(*words, "--threshold", "0.6", "--resume")
    report = Done("report", str(folder), "-o", str(tmp_path / "again.html"), "--json").json("report")
    assert report["edges"] == len(circuit)
    first, second = (path.read_text("utf-8") for path in (page, tmp_path / "again.html"))
    data = [text.partition('id="conewise-circuit">')[2].partition("</script>")[0] for text in (first, second)]
    assert json.loads(data[0]) == json.loads(data[1])
    (folder / "evaluation.json").write_text("{}")
    assert "is damaged: evaluation.json or story.json cannot be read" in refused("report", str(folder))


def test_a_search_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("circuit", "tiny", *PAIR, "--threshold", "0.5", "--out", str(tmp_path / "run"))

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(circuit_finding.Search, "run", interrupted)
        done = Done(*words)
    assert done.code == 130
    assert "what was done is kept" in done.err
    assert "--resume" in done.err
    assert Done(*words, "--resume", "--json").json("circuit")["edges"]


@pytest.mark.parametrize("ablation", ["run", "zero", "mean"])
def test_the_exact_method_keeps_the_edges_with_the_largest_effects(tmp_path: Path, ablation: str) -> None:
    folder = tmp_path / "run"
    words = ("circuit", "tiny", *PAIR, "--method", "exact", "--source", ablation, "--out", str(folder))
    told = Done(*words, "--top", "12", "--json", "--no-minimality").json("circuit")
    model, asked = library()
    source: Any = asked["source"] if ablation == "run" else ablation
    if ablation == "mean":
        source = cw.mean(model, [asked["base"].inputs])
    result = model.sweep(model.edges(), **(asked | {"source": source})).run()
    assert [edge["edge"] for edge in told["edges"]] == list(result.circuit(top=12).edges)
    assert told["evaluation"]["minimality"] is None
    assert told["threshold"] is None
    assert told["curve"][0]["edges"] <= told["curve"][-1]["edges"]


def test_a_circuit_without_edges_is_told_why() -> None:
    words = ("circuit", "tiny", *PAIR, "--method", "exact", "--json")
    for threshold, said in (
        ("1000", "no edge changes the metric by as much"),
        ("20", "Some do from --threshold"),
    ):
        done = Done(*words, "--threshold", threshold)
        assert done.json("circuit")["edges"] == []
        assert said in done.err
    lower = done.err.partition("Some do from --threshold ")[2].split()[0]
    found = Done(*words, "--threshold", str(0.999 * float(lower)), "--no-minimality").json("circuit")
    assert found["edges"]


def test_people_see_what_was_found() -> None:
    done = Done("circuit", "tiny", *PAIR)
    assert done.code == 0, done.err
    assert "removed edges carry what they do on the corrupted prompt" in done.out
    assert "found by acdc, threshold" in done.out
    assert "faithfulness" in done.out
    assert "input->a0.h2<v>" in done.out


@pytest.mark.parametrize("method", ["acdc", "exact"])
def test_a_plan_runs_nothing(method: str, tmp_path: Path) -> None:
    words = ("circuit", "tiny", *PAIR, "--method", method, "--plan")
    told = Done(*words, "--json").json("circuit")
    assert told["plan"]["worlds"] == 479
    assert "edges" not in told
    assert "479" in Done(*words).out
    assert "--plan runs nothing" in refused(*words, "--out", str(tmp_path / "run"))


def test_workers_of_a_search_on_paper() -> None:
    words = ("circuit", "tiny", *PAIR, "--plan")
    told = Done(*words, "--simulate", "--workers", "4", "--json").json("circuit")["simulation"]
    assert told["workers"] == 4
    assert 1 <= told["worth_having"] <= 4
    assert told["gain"] == pytest.approx(told["one_worker_batch_seconds"] / told["batch_seconds"])
    shown = Done(*words, "--simulate", "--workers", "4").out
    assert f"a narrow batch, of {told['batch_worlds']} worlds" in shown
    swept = Done(*words, "--method", "exact", "--simulate", "--workers", "2", "--json").json("circuit")
    assert swept["simulation"]["workers"] == 2
    assert "a plan runs nothing" in refused(*words, "--workers", "4")
    assert "a plan runs nothing" in refused("edges", "tiny", *PAIR, "--plan", "--ray")
    assert "--simulate of how many workers" in refused(*words, "--simulate")
    assert "--simulate runs nothing" in refused(*words[:-1], "--simulate", "--workers", "4")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--threshold", "-1"), "--threshold -1.0 is no threshold: it is a change of the metric, above 0"),
        (("--method", "exact", "--threshold", "nan"), "--threshold nan is no threshold"),
        (("--method", "exact", "--top", "480"), "--top 480 is more than the 479 edges that there are"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_begun(
    words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert said in refused("circuit", "tiny", *PAIR, *words, "--out", str(folder))
    assert not (folder / "question.json").exists()


def test_single_edges_that_were_swept_are_chosen_from_again(tmp_path: Path) -> None:
    base = ("circuit", "tiny", *PAIR, "--method", "exact", "--no-minimality", "--out", str(tmp_path / "run"))
    assert "more than --top 1" in refused(*base, "--top", "1")
    told = Done(*base, "--resume", "--top", "12", "--json").json("circuit")
    assert len(told["edges"]) <= 12


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    base = ("circuit", "tiny", *PAIR)
    assert "--top is for --method exact" in refused(*base, "--top", "5")
    assert "--top and --threshold both say" in refused(
        *base, "--method", "exact", "--top", "5", "--threshold", "1"
    )
    assert "--resume without --out" in refused(*base, "--resume")
    assert "--no-connected is for --method exact" in refused(*base, "--no-connected")
    assert "--threshold 0.0 is no threshold" in refused(*base, "--threshold", "0")
    few = refused(*base, "--method", "exact", "--top", "1")
    assert "more than --top 1" in few
    assert "--no-connected" in few
    one = Pair(CLEAN, CORRUPTED, ("Mary",), ("John",), "")
    shorter = replace(one, clean=CLEAN.removeprefix("When "), corrupted=CORRUPTED.removeprefix("When "))
    path = write_pairs(tmp_path / "pairs.json", [one, shorter])
    assert "a circuit is found over one batch. Give prompts of one length" in refused(
        "circuit", "tiny", "--prompts", str(path)
    )
