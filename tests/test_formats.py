"""Every file that conewise writes and reads says what it is: others are refused by name, and stay."""

from __future__ import annotations

import ast
import json
import math
import re
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import conewise
import conewise as cw
from conewise.cli.folders import read_circuit, read_inside, read_question, read_run
from conewise.errors import ConewiseError, FormatError
from conewise.files import Format
from conewise.jobs.store import FILE
from conewise.model import Model
from conewise.sweeps.planning.plan import SweepPlan
from tests.golden.formats import made

KEPT = made.FOLDER / "0.1.0"
PAGE = Path(__file__).parents[1] / "docs" / "formats.md"


@pytest.fixture(scope="module")
def model() -> Model:
    return made.model()


def _kept(name: str) -> Path:
    """A file of 0.1.0, or of a kind that came later."""
    return KEPT / name if (KEPT / name).exists() else made.FOLDER / name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the files of 0.1.0, and of kinds that came later."""
    shutil.copytree(made.FOLDER / "texts", tmp_path / "kept" / "texts")
    return Path(shutil.copytree(KEPT, tmp_path / "kept", dirs_exist_ok=True))


Read = Callable[[Path, Model], object]

READERS: dict[str, tuple[str, Read]] = {
    "conewise result": ("result/manifest.json", lambda kept, _: cw.open(kept / made.RESULT)),
    "conewise story": ("result/story.json", lambda kept, _: cw.open(kept / made.RESULT)),
    "conewise folded": ("result/folded.json", lambda kept, _: read_run(kept / made.RESULT)),
    "conewise inside": ("result/inside.json", lambda kept, _: read_inside(kept / made.RESULT)),
    "conewise plan": ("plan.json", lambda kept, _: SweepPlan.from_json((kept / made.PLAN).read_text())),
    "conewise circuit": ("found/circuit.json", lambda kept, _: cw.Circuit.load(kept / "found/circuit.json")),
    "conewise evaluation": ("found/evaluation.json", lambda kept, _: read_circuit(kept / made.FOUND)),
    "conewise search": (
        "found/search.json",
        lambda kept, model: made.search(model, out=kept / "found/search", resume=True),
    ),
    "conewise texts": ("texts/texts.json", lambda kept, _: cw.open(kept / "texts")),
    "conewise question": ("store/question.json", lambda kept, _: read_question(kept / made.STORE)),
    "conewise store": (
        "store/sweep.sqlite",
        lambda kept, model: made.long_sweep(model).run(out=kept / made.STORE, resume=True),
    ),
}
"""By kind: the file among those that are kept, and who reads it."""

JSON = [kind for kind, (path, _) in READERS.items() if path.endswith(".json")]


def test_every_format_is_among_these() -> None:
    assert sorted(one.kind for one in _formats()) == sorted(READERS)


def test_every_format_and_its_version_is_on_the_page() -> None:
    rows = re.findall(
        r"^\| `([\w.]+)`.* \| `(conewise \w+)` \| (\d+) \|", PAGE.read_text("utf-8"), re.MULTILINE
    )
    names = {one.kind: Path(READERS[one.kind][0]).name for one in _formats()} | {"conewise store": FILE}
    files = [(names[one.kind], one.kind, str(one.version)) for one in _formats()]
    assert sorted(files) == sorted(rows)


@cache
def _formats() -> tuple[Format, ...]:
    """All that the sources make, read with `ast`: `Format("kind", version, oldest=...)`."""
    found = []
    for path in Path(conewise.__file__).parent.rglob("*.py"):
        text = path.read_text("utf-8")
        for one in ast.walk(ast.parse(text)) if "= Format(" in text else ():
            if isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id == "Format":
                named = {str(given.arg): ast.literal_eval(given.value) for given in one.keywords}
                found.append(Format(*map(ast.literal_eval, one.args), **named))
    return tuple(found)


# -- another version ---------------------------------------------------------------------------------


def _stamp(path: Path, change: dict[str, Any]) -> None:
    if path.suffix == ".sqlite":
        with sqlite3.connect(path) as connection:
            connection.execute(f"PRAGMA user_version = {change['format']}")
        connection.close()
    else:
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | change), "utf-8")


@pytest.mark.parametrize("kind", READERS)
def test_a_file_of_a_newer_version_is_refused_and_stays(kind: str, folder: Path, model: Model) -> None:
    name, read = READERS[kind]
    _stamp(folder / name, {"format": 9, "conewise": "9.8.7"})
    before = _contents(folder)
    with pytest.raises(FormatError) as raised:
        read(folder, model)
    said = str(raised.value)
    assert f"is a {kind!r} of format 9, and conewise {cw.__version__} reads format" in said
    assert "It was left as it is. A newer conewise" in said
    assert "`pip install -U conewise`" in said
    assert ("this plan" if name == "plan.json" else str(folder / name)) in said
    assert "9.8.7" in said or name.endswith((".sqlite", "plan.json"))
    assert _contents(folder) == before


@pytest.mark.parametrize("kind", JSON)
@pytest.mark.parametrize("version", [None, 0, -1, True, 1.0, "1", 10**9])
def test_a_version_that_is_none_is_damage(kind: str, version: object, folder: Path, model: Model) -> None:
    name, read = READERS[kind]
    _stamp(folder / name, {"format": version})
    with pytest.raises(
        ConewiseError, match=r"its format is .*, where a whole number from 1 is expected"
    ) as raised:
        read(folder, model)
    assert not isinstance(raised.value, FormatError)


@pytest.mark.parametrize("kind", JSON)
def test_a_file_of_another_kind_is_refused(kind: str, folder: Path, model: Model) -> None:
    """Each in the place of each other."""
    name, read = READERS[kind]
    for other in JSON:
        if other == kind:
            continue
        shutil.copyfile(_kept(READERS[other][0]), folder / name)
        before = _contents(folder)
        with pytest.raises(ConewiseError, match=rf"{other}|is not the manifest of a saved result") as raised:
            read(folder, model)
        assert not isinstance(raised.value, FormatError)
        assert _contents(folder) == before


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_file_that_is_cut_short_is_refused_and_stays(
    kind: str, share: float, folder: Path, model: Model
) -> None:
    name, read = READERS[kind]
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: int(len(whole) * share)])
    before = _contents(folder)
    with pytest.raises(ConewiseError) as raised:
        read(folder, model)
    assert not isinstance(raised.value, FormatError)
    assert _contents(folder) == before


def test_what_is_not_known_is_ignored(folder: Path, model: Model) -> None:
    """A later version may add to a format without raising its number."""
    for kind in JSON:
        if kind != "conewise search":
            name, read = READERS[kind]
            _stamp(folder / name, {"weather": "fine"})
            read(folder, model)


def test_a_decision_that_was_changed_by_hand_is_found(folder: Path, model: Model) -> None:
    path = folder / "found/search.json"
    text = path.read_text("utf-8")
    path.write_text(text.replace('"m0->logits", true', '"m0->logits", false'), "utf-8")
    with pytest.raises(ConewiseError, match="does not have the checksum that it was written with"):
        made.search(model, out=path.with_suffix(""), resume=True)


def test_a_number_of_a_manifest_that_was_changed_by_hand_is_found(folder: Path) -> None:
    path = folder / "result/manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(manifest | {"base": [(2.0).hex(), (3.0).hex()]}), "utf-8")
    with pytest.raises(ConewiseError, match=r"manifest\.json does not have the checksum that it was written"):
        cw.open(folder / made.RESULT)


def test_an_evaluation_over_nothing_comes_back(folder: Path, tmp_path: Path) -> None:
    found = read_circuit(folder / made.FOUND)
    nothing = replace(
        found, evaluation=replace(found.evaluation, faithfulness=math.nan, completeness=math.nan)
    )
    (tmp_path / "again").mkdir()
    nothing.write(tmp_path / "again")
    again = read_circuit(tmp_path / "again").evaluation
    assert math.isnan(again.faithfulness)
    assert math.isnan(again.completeness)
    assert replace(again, faithfulness=1.0, completeness=0.0) == found.evaluation


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
