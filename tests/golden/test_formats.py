"""The files of each version that was released are read, with the values that were written beside them."""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import conewise as cw
from conewise.cli.folders import CIRCUIT, SEARCH, read_circuit, read_inside, read_question, read_run
from conewise.errors import SweepError
from conewise.jobs import store
from conewise.model import Model
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.result import load_result
from conewise.sweeps.storage import provenance
from conewise.sweeps.sweep import Sweep
from tests.golden.formats import made

VERSIONS = sorted(path for path in made.FOLDER.iterdir() if (path / made.EXPECTED).is_file())


@pytest.fixture(scope="module")
def model() -> Model:
    return made.model()


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the files of a version."""
    return Path(shutil.copytree(request.param, tmp_path / "kept"))


@pytest.fixture
def expected(kept: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((kept / made.EXPECTED).read_text("utf-8"))
    return found


def _there(folder: Path, *names: str) -> Path:
    """The file in a folder that has one of these names: they changed since 0.1.0."""
    return next(folder / name for name in names if (folder / name).is_file())


def _as_then(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let this machine be the one that the store was begun on: what else it compares is the run itself."""
    then = json.loads(_there(folder, store.OLD_MANIFEST, store.MANIFEST).read_text("utf-8"))
    monkeypatch.setattr("conewise.jobs.digests.__version__", f"{then['machine']['conewise']}.0")
    machine = {name: value for name, value in then["machine"].items() if name not in {"conewise", "python"}}
    monkeypatch.setattr("conewise.jobs.digests.numerics", lambda _: machine)
    monkeypatch.setattr(platform, "python_version_tuple", lambda: then["machine"]["python"].split("."))
    monkeypatch.setattr(provenance, "versions", lambda: then["sweep"]["versions"])


def test_there_are_files_of_a_version() -> None:
    assert "0.1.0" in [path.name for path in VERSIONS]


def test_they_are_small() -> None:
    for folder in VERSIONS:
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 300_000


def test_they_are_never_written_again(capsys: pytest.CaptureFixture[str]) -> None:
    folder = VERSIONS[0]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert made.main([str(folder)]) == 1
    assert "never written again" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_the_result_has_its_values(kept: Path, expected: dict[str, Any]) -> None:
    result, story, folded = read_run(kept / made.RESULT)
    values = expected["result"]
    assert list(result.metrics) == values["metrics"]
    assert [cell.name for cell in result.cells] == values["cells"]
    for name in ("table", "per_prompt", "base", "source"):
        assert getattr(result, name).tolist() == values[name]
    assert made.written(result.plan.costs()) == values["costs"]
    assert result.ledger.node_evaluations == values["node_evaluations"]
    assert story == made.STORY
    assert folded is not None
    assert made.folded_facts(folded) == expected["folded"]
    assert read_inside(kept / made.RESULT) == made.INSIDE


def test_the_result_is_that_of_the_sweep_today(kept: Path, model: Model) -> None:
    assert load_result(kept / made.RESULT).equals(made.sweep(model).run())


def test_the_plan_is_equal_and_runs(kept: Path, expected: dict[str, Any], model: Model) -> None:
    text = (kept / made.PLAN).read_text("utf-8")
    plan = SweepPlan.from_json(text)
    assert plan.to_json() == text
    assert made.written(plan.costs()) == expected["plan"]["costs"]
    assert plan.run(model).table.tolist() == expected["plan"]["table"]


def test_the_store_goes_on(
    kept: Path, expected: dict[str, Any], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_then(monkeypatch, kept / made.STORE)
    with store.recorder(
        made.long_sweep(model)._stored(model.weights.whole_contents().whole), kept / made.STORE, resume=True
    ) as record:
        assert isinstance(record, store.Store)
        assert (record.stored, record.cells) == (expected["store"]["stored"], expected["store"]["cells"])
    result = made.long_sweep(model).run(out=kept / made.STORE, resume=True)
    assert result.table.tolist() == expected["store"]["table"]
    assert result.ledger.resumed == expected["store"]["stored"]


def test_the_store_of_an_attribution_goes_on(
    kept: Path, expected: dict[str, Any], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_then(monkeypatch, kept / made.ATTRIBUTED)
    again = made.attribute(model, out=kept / made.ATTRIBUTED, resume=True)
    read = load_result(kept / made.ATTRIBUTED)
    for one in (again, read):
        assert [cell.name for cell in one.cells] == expected["attributed"]["cells"]
        assert one.table.tolist() == expected["attributed"]["table"]
        assert one.method == expected["attributed"]["method"]


def test_a_store_of_another_machine_says_what_differs(
    kept: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_then(monkeypatch, kept / made.STORE)
    monkeypatch.setattr(provenance, "versions", lambda: {"torch": "9.9"})
    monkeypatch.setattr("conewise.jobs.digests.numerics", lambda _: {"threads": 64})
    before = _there(kept / made.STORE, store.OLD_FILE, store.FILE).read_bytes()
    with pytest.raises(SweepError, match=r"(?s)versions\.torch: .* → 9\.9\n.*machine\.threads: 1 → 64\n"):
        made.long_sweep(model).run(out=kept / made.STORE, resume=True)
    assert _there(kept / made.STORE, store.OLD_FILE, store.FILE).read_bytes() == before


def test_the_circuit_evaluates(kept: Path, expected: dict[str, Any], model: Model) -> None:
    values = expected["circuit"]
    found = read_circuit(kept / made.FOUND)
    for circuit in (found.circuit, cw.Circuit.load(kept / made.FOUND / CIRCUIT, model)):
        assert list(circuit.edges) == values["edges"]
        assert circuit.scores == values["scores"]
        assert circuit.threshold == values["threshold"]
        assert made.decisions(circuit) == expected["search"]["decisions"]
    again = made.evaluate(cw.Circuit.load(kept / made.FOUND / CIRCUIT, model))
    assert (again.faithfulness, again.minimality) == (values["faithfulness"], values["minimality"])
    assert asdict(again) == asdict(found.evaluation)
    assert (found.curve, found.story) == (made.CURVE, made.STORY)
    assert list(cw.Circuit.load(kept / made.EAP, model).edges) == values["edges"]


def test_the_search_goes_on(
    kept: Path, expected: dict[str, Any], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told = kept / made.FOUND / SEARCH, []
    if path.is_dir():
        _as_then(monkeypatch, path)
    else:
        old = json.loads(path.with_suffix(".json").read_text("utf-8"))
        assert len(old["decisions"]) == expected["search"]["kept"]
    circuit = made.search(model, out=path, resume=True, progress=lambda done, _: told.append(done))
    assert made.decisions(circuit) == expected["search"]["decisions"]
    # A layer that was cut off is decided again: all are told, whatever was kept.
    assert told == sorted(told)
    assert told[-1] == len(expected["search"]["decisions"])


def test_the_question_is_read(kept: Path) -> None:
    found = read_question(kept / made.STORE)
    assert found is not None
    assert (list(found.command), found.question) == (made.COMMAND, made.QUESTION)


def test_what_identifies_the_model_is_what_it_was(kept: Path, model: Model) -> None:
    """The weights' digest, the program's, those of inputs: the same on every machine and every Python."""
    then = json.loads(_there(kept / made.STORE, store.OLD_MANIFEST, store.MANIFEST).read_text("utf-8"))[
        "sweep"
    ]
    now: dict[str, Any] = Sweep.provenance(made.long_sweep(model))
    assert {name: one for name, one in now.items() if name != "versions"} == {
        name: one for name, one in then.items() if name != "versions"
    }
