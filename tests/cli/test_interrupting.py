"""Ctrl-C in the middle of a run, and going on with it."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conewise.cli import folders as run_folder
from conewise.cli.folders import FILES
from conewise.files import write_whole
from conewise.sweeps.storage import archive
from conewise.text.questions import Question
from tests.cli.commands import COMMAND, Done, environment, forked, refused, valid

WORDS = ("sweep", "tiny", "--sites", "z,resid_pre", "--pos", ":", "--evaluator", "serial", "--json")


def interrupted(*words: str, cwd: Path) -> tuple[int, str, str]:
    """Run a command, and press Ctrl-C once some of its cells are done: exit code, stdout, stderr."""
    process = subprocess.Popen(
        [*COMMAND, *words, "--progress"],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if "cells done" in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=120)
    return process.returncode, out, "".join(said) + err


def test_a_run_that_is_interrupted_says_how_to_go_on_and_does_so_with_the_same_numbers(
    tmp_path: Path,
) -> None:
    code, out, err = interrupted(*WORDS, "--out", "run", cwd=tmp_path)
    assert code == 130
    assert out == ""
    assert "Traceback" not in err
    found = re.search(r"interrupted: (\d+) of (\d+) cells are kept in run. Go on with:\n  (.*)\n", err)
    assert found is not None, err
    done, cells, command = int(found[1]), int(found[2]), shlex.split(found[3])
    assert 0 < done < cells
    assert command == ["conewise", *WORDS, "--out", "run", "--progress", "--resume"]

    unfinished = Done("report", str(tmp_path / "run"))
    assert unfinished.code == 2
    assert "is not finished. Go on with it:\n  conewise sweep tiny" in unfinished.err
    another = Done(*WORDS, "--out", str(tmp_path / "run"))
    assert another.code == 2
    assert "holds a run already" in another.err

    resumed = valid("sweep", forked(*command[1:], cwd=tmp_path).stdout)
    assert resumed["measured"]["resumed"] == done
    at_once = valid("sweep", forked(*WORDS, cwd=tmp_path).stdout)
    assert resumed["cells"] == at_once["cells"]
    assert resumed["measured"]["node_evaluations"] == at_once["measured"]["node_evaluations"]
    assert (resumed["base"], resumed["source"]) == (at_once["base"], at_once["source"])
    assert (tmp_path / "run" / "manifest.json").exists()

    other = Done(*WORDS[:2], "--sites", "z", "--out", str(tmp_path / "run"), "--resume")
    assert other.code == 2
    assert "asks something else" in other.err
    assert "sites: " in other.err
    assert "conewise sweep tiny --sites z,resid_pre" in other.err


@pytest.mark.parametrize("dies_at", [0, 3, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 2))])
def test_a_command_that_dies_while_it_writes_its_result_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    """At any of its files: the story, the folded graph, the values, the manifest."""
    folder = tmp_path / "run"
    written: list[str] = []

    def dying(path: Path, data: bytes) -> None:
        if path.parent == folder and path.name in FILES:
            if path.name == FILES[dies_at]:
                raise SystemExit(9)
            written.append(path.name)
        write_whole(path, data)

    for module in (archive, run_folder):
        monkeypatch.setattr(module, "write_whole", dying)
    assert Done("sweep", "tiny", "--out", str(folder)).code == 9
    assert written == FILES[:dies_at]
    monkeypatch.undo()
    resumed = Done("sweep", "tiny", "--out", str(folder), "--resume")
    assert resumed.code == 0, resumed.err
    result, story, folded = run_folder.read_run(folder)
    assert len(result.cells) > 0
    assert story is not None
    assert folded is not None


@pytest.mark.parametrize("name", FILES)
def test_a_folder_that_holds_such_a_file_of_somebody_else_is_refused_before_the_run(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("mine")
    for more in ((), ("--resume",)):
        assert f"holds {name} already" in refused("sweep", "tiny", "--out", str(tmp_path), *more)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert (tmp_path / name).read_text() == "mine"


def test_without_a_folder_nothing_is_kept_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(_: Question, progress: Any, **__: Any) -> None:
        progress(5, 20)
        raise KeyboardInterrupt

    monkeypatch.setattr(Question, "run", cut)
    done = Done("sweep", "tiny")
    assert (done.code, done.out) == (130, "")
    assert "interrupted after 5 of 20 cells; nothing was kept. With --out DIR" in done.err


def test_a_finished_run_is_shown_again_and_another_model_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    first = Done("sweep", "tiny", "--json", "--out", folder).json("sweep")
    again = Done("sweep", "tiny", "--json", "--out", folder, "--resume").json("sweep")
    assert again["cells"] == first["cells"]
    assert again["measured"]["resumed"] == len(first["cells"])
    other = Done("sweep", "tiny", "--dtype", "float64", "--out", folder, "--resume")
    assert other.code == 2
    assert "float32" in other.err
    assert "--out" in other.err
    assert "out=" not in other.err
    question = tmp_path / "run" / "question.json"
    question.write_text(json.dumps({"kind": "something else"}))
    damaged = Done("sweep", "tiny", "--out", folder, "--resume")
    assert damaged.code == 2
    assert "question.json cannot be understood" in damaged.err
