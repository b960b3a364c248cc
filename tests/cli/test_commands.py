"""Every command once in a process of its own, on the tiny model, as people and machines run it."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import conewise as cw
from conewise.cli.folders import read_run
from conewise.loading import load
from conewise.models.tiny import PROMPTS
from conewise.text.prompts import read_pairs, tokenize
from conewise.text.questions import Question
from tests.cli.commands import CLEAN, PAIR, forked, run, valid


@dataclass(frozen=True)
class Swept:
    done: subprocess.CompletedProcess[str]
    told: dict[str, Any]
    folder: Path
    page: Path


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """A sweep that is kept, drawn and checked."""
    here = tmp_path_factory.mktemp("sweep")
    done = run("sweep", "tiny", "--json", "--out", "run", "--report", "page.html", "--verify", "4", cwd=here)
    assert done.returncode == 0, done.stderr
    return Swept(done, valid("sweep", done.stdout), here / "run", here / "page.html")


def test_a_sweep_prints_the_numbers_that_the_library_finds(swept: Swept) -> None:
    loaded = load("tiny")
    prompts = tokenize(read_pairs(PROMPTS), loaded.tokenizer)
    model = cw.capture(loaded.module, **prompts.inputs_of(0, "clean"))
    sites = cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":")
    result = Question(model, prompts, sites).run()
    by_name = {cell["site"]: cell for cell in swept.told["cells"]}
    assert len(by_name) == len(result.cells)
    for cell, effect, value in result.strongest(top=len(result.cells)):
        assert by_name[cell.name]["value"] == pytest.approx(value, rel=1e-4, abs=1e-4)
        assert by_name[cell.name]["effect"] == pytest.approx(effect, rel=1e-4, abs=1e-4)
    assert swept.told["measured"]["node_evaluations"] == result.plan.node_evaluations
    assert swept.told["question"]["prompts"] == len(prompts.pairs)


def test_a_sweep_shows_its_strongest_sites_first_and_was_checked(swept: Swept) -> None:
    effects = [abs(cell["effect"]) for cell in swept.told["cells"]]
    assert effects == sorted(effects, reverse=True)
    assert swept.told["verification"]["ok"] is True
    assert swept.told["verification"]["cells"] == 4
    assert swept.told["full_forwards"]["seconds"] > 0
    assert swept.told["provenance"]["command"].startswith("conewise sweep tiny --json")
    assert "torch" in swept.told["provenance"]["versions"]


def test_progress_and_files_are_told_on_stderr(swept: Swept) -> None:
    assert swept.done.stderr.splitlines() == [
        "loading tiny",
        "capturing tiny as a graph",
        "kept the run in run",
        "wrote page.html",
    ]


def test_a_sweep_keeps_a_run_that_can_be_read_again(swept: Swept) -> None:
    result, story, folded = read_run(swept.folder)
    assert [float(value) for value in result.base] == [swept.told["base"]]
    assert story is not None
    assert story.model == "tiny"
    assert story.command == "conewise sweep tiny --json --out run --report page.html --verify 4"
    assert story.prompts[0].clean == read_pairs(PROMPTS)[0].clean
    assert folded is not None
    assert folded.node_evaluations == result.plan.node_evaluations
    assert "<html" in swept.page.read_text(encoding="utf-8")[:200]


def test_report_makes_a_page_of_the_run(swept: Swept) -> None:
    done = forked("report", "run", "--json", cwd=swept.folder.parent)
    told = valid("report", done.stdout)
    page = swept.folder / "report.html"
    assert (told["report"], told["bytes"]) == ("run/report.html", page.stat().st_size)
    assert told["has_story"] is True
    assert told["has_cones"] is True
    assert told["plan"] == swept.told["plan"]
    question = page.read_text(encoding="utf-8").partition('<section id="question"')[2]
    tokens = re.sub(r"<[^>]*>|\s|·", "", question)  # one after the other, spaces apart
    assert "".join(read_pairs(PROMPTS)[0].clean.split()) in tokens


def test_plan_prints_what_the_sweep_then_cost_and_runs_nothing(swept: Swept, tmp_path: Path) -> None:
    done = forked("plan", "tiny", "--json", cwd=tmp_path)
    told = valid("plan", done.stdout)
    assert {**told["plan"], "seconds": None} == {**swept.told["plan"], "seconds": None}
    assert told["question"] == swept.told["question"]
    assert list(tmp_path.iterdir()) == []


def test_people_see_a_question_a_table_and_a_cost() -> None:
    done = forked("sweep", "tiny", *PAIR, "--sites", "z", "--pos", "-1", "--top", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "restores" in lines[0]  # what was found stands first, then how sure that is, then what it cost
    assert lines[1].startswith("One prompt, so nothing is known about others")
    assert "node evaluations" in lines[2]
    assert "tiny, 1 pair of prompts of 15 tokens:" in lines
    assert f"  clean (source)     {CLEAN}" in lines
    assert "  denoising: the clean run's values are put into the corrupted run, one site at a time" in lines
    ranked = [line.split()[0] for line in lines if "z[layer=" in line]
    assert ranked == ["1", "2", "3"]
    assert all("pos=14]" in line for line in lines if "z[layer=" in line)
    assert any(line.startswith("node evaluations") and "✓" in line for line in lines)
    assert not any(character in done.stdout for character in "\x1b╭│")


def test_sites_lists_every_place() -> None:
    done = forked("sites", "tiny", "--json", "--quiet")
    told = valid("sites", done.stdout)
    assert done.stderr == ""
    names = {site["name"]: site for site in told["sites"]}
    assert names["blocks.1.attn.hook_z"]["head"] == 4
    assert {"z", "mlp_out", "resid_pre"} <= set(told["kinds"])
    assert any(site["kind"] == "op" for site in told["sites"])


def test_verify_compares_with_the_model_itself() -> None:
    done = forked("verify", "tiny", "--json", "--n", "2", "--seed", "5")
    told = valid("verify", done.stdout)
    assert (told["ok"], told["bitwise"], told["seed"], told["worst"]) == (True, True, 5, 0)
    assert done.returncode == 0


def test_cone_draws_what_a_patch_recomputes(tmp_path: Path) -> None:
    done = forked("cone", "tiny", "z[layer=1, head=2]", "-o", "cone.svg", "--json", cwd=tmp_path)
    told = valid("cone", done.stdout)
    assert told["site"] == "z[layer=1, head=2]"
    assert sum(part["recomputed"] for part in told["parts"]) == told["node_evaluations"]
    assert {part["layer"] for part in told["parts"] if part["is_patched"]} == {1}
    assert all(part["recomputed"] == 0 for part in told["parts"] if part["layer"] == 0)
    assert (tmp_path / "cone.svg").read_text(encoding="utf-8").lstrip().startswith("<svg")


def test_trace_restores_one_state_at_a_time(tmp_path: Path) -> None:
    words = ("--prompt", CLEAN, "--subject", "Mary", "--answer", "Mary", "--n", "2")
    done = forked("trace", "tiny", *words, "--verify", "2", "--report", "trace.html", "--json", cwd=tmp_path)
    told = valid("trace", done.stdout)
    assert [told["tokens"][at].strip() for at in told["subject"]] == ["Mary"]
    assert (len(told["values"]), len(told["values"][0])) == (len(told["layers"]), len(told["positions"]))
    assert told["values"][-1][-1] == pytest.approx(told["clean"], rel=1e-4)
    assert told["corrupted"] < told["clean"]
    assert told["verification"]["ok"] is True
    assert (tmp_path / "trace.html").stat().st_size > 10_000


def test_demo_takes_the_tiny_model_apart(tmp_path: Path) -> None:
    done = forked("demo", "--tiny", "--json", "--out", "shown", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = valid("demo", done.stdout)
    assert told["model"]["name"] == "tiny"
    assert Path(tmp_path / told["files"]["report"]).stat().st_size > 10_000


def test_reproduce_prints_what_its_schema_says() -> None:
    done = forked("reproduce", "e7", "--json")
    assert valid("reproduce", done.stdout)["e7"]["all_match"] is True
