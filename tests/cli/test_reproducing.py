import json
from fractions import Fraction
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conewise.cli.app import app
from conewise.paper import experiments
from conewise.paper.experiments.result import Progress, Result, Row
from tests.paper.experiments.quick import quick


@pytest.fixture
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, progress: Progress) -> Result:
        progress(1, 1)
        return quick(name)

    monkeypatch.setattr(experiments, "run", run)


def test_json_is_all_that_stands_on_the_standard_output() -> None:
    done = CliRunner().invoke(app, ["reproduce", "e7", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["e7"]["all_match"] is True


@pytest.mark.usefixtures("_quickly")
def test_all_has_exactly_these_experiments() -> None:
    done = CliRunner().invoke(app, ["reproduce", "all", "--json"])
    assert done.exit_code == 0
    printed = json.loads(done.stdout)
    assert list(printed) == [
        "locality",
        "e4",
        "e5",
        "e7",
        "drift",
        "compiled",
        "e9",
        "skips",
        "growth",
        "index",
        "edges",
        "greedy",
        "positions",
        "wavefront",
        "backward",
    ]
    for result in printed.values():
        assert all({"paper", "predicted", "measured"} <= row.keys() for row in result["rows"])


def test_without_json_a_table_sets_the_three_beside_each_other() -> None:
    done = CliRunner().invoke(app, ["reproduce", "e7"])
    assert done.exit_code == 0
    for word in ("paper", "predicted", "measured", "match", "463"):
        assert word in done.stdout


def test_an_unknown_experiment_is_a_usage_error_that_lists_the_names() -> None:
    done = CliRunner().invoke(app, ["reproduce", "e6"])
    assert done.exit_code == 2
    assert "no experiment 'e6'" in done.stderr
    for name in experiments.NAMES:
        assert name in done.stderr
    assert done.stdout == ""


def test_a_folder_that_cannot_be_written_is_found_out_before_the_run(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    done = CliRunner().invoke(app, ["reproduce", "e7", "--out", str(file / "inside")])
    assert done.exit_code == 2
    assert "cannot write into --out" in done.stderr
    assert done.stdout == ""


def test_what_does_not_match_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Result([Row("ρ", Fraction(2), Fraction(3), "2.0")], name="e4", compared="compared")
    monkeypatch.setattr(experiments, "run", lambda name, progress: wrong)
    done = CliRunner().invoke(app, ["reproduce", "e4"])
    assert done.exit_code == 1
    assert "differs" in done.stdout
    assert "does not match: e4" in done.stderr


@pytest.mark.usefixtures("_quickly")
def test_out_writes_a_page_figures_and_tables(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["reproduce", "all", "--json", "--out", str(tmp_path / "new" / "report")])
    assert done.exit_code == 0
    folder = tmp_path / "new" / "report"
    assert json.loads((folder / "results.json").read_text()) == json.loads(done.stdout)
    for name in experiments.NAMES:
        assert (folder / "figures" / f"{name}.html").stat().st_size > 1000
        table = (folder / "tables" / f"{name}.csv").read_text()
        assert table.count("\n") == len(quick(name).rows) + 1


@pytest.mark.usefixtures("_quickly")
def test_a_folder_of_somebody_elses_page_is_left_alone(tmp_path: Path) -> None:
    words = ["reproduce", "e7", "--json", "--out", str(tmp_path)]
    for name in ("index.html", "results.json"):
        (tmp_path / name).write_text("mine")
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2
        assert f"holds {name}, which `conewise reproduce` did not write" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()
    for _ in range(2):
        assert CliRunner().invoke(app, words).exit_code == 0


def test_the_version_is_shown() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("conewise ")
