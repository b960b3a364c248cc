"""Every door that files come in by: damaged at random, they end in errors of ours, and in time.

The damage is the same each time; see `tests/damage.py` for more of it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console

import conewise as cw
from conewise.circuits.circuit_data import Decision
from conewise.circuits.evaluation import Evaluation
from conewise.cli.folders import (
    FOLDED,
    INSIDE,
    QUESTION,
    FoundCircuit,
    read_circuit,
    read_inside,
    read_question,
    read_run,
    write_run,
)
from conewise.cli.output import Status, show_cost
from conewise.cli.questions import ModelName
from conewise.errors import LoadError
from conewise.jobs import store
from conewise.loading import load
from conewise.models import tiny
from conewise.models.gguf import read_header
from conewise.models.model_files import INDEX, WEIGHTS
from conewise.program.foreign import brief, quiet, translating
from conewise.report.circuit import Curve, CurvePoint
from conewise.report.page import sweep_page
from conewise.report.story import STORY, Story
from conewise.sweeps.storage.archive import MANIFEST, VALUES
from conewise.sweeps.sweep import Sweep
from conewise.text.prompts import Pair, read_pairs, tokenize
from conewise.text.questions import Question
from tests.circuits.graphs import graph, random_scores
from tests.cli.commands import CLEAN, CORRUPTED
from tests.damage import count, damaged_bytes, damaged_json
from tests.doors import all_ours
from tests.golden.formats import made as golden
from tests.program.small_llama import small_llama, small_tokenizer, write_gguf
from tests.sweeps.small import model as small_model
from tests.sweeps.small import sweep_over
from tests.sweeps.storage.resealed import body_of, reseal
from tests.text.written import write_pairs

PAIRS = [Pair(CLEAN, CORRUPTED, ("Mary",), ("John",))]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load("tiny").tokenizer


# -- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv"])
def test_prompts(suffix: str, tokenizer: Any, tmp_path: Path) -> None:
    sound = write_pairs(tmp_path / f"sound{suffix}", read_pairs(tiny.PROMPTS)[:3]).read_bytes()
    path = tmp_path / f"prompts{suffix}"

    def attempt(data: bytes) -> None:
        path.write_bytes(data)
        tokenize(read_pairs(path), tokenizer).tokenized_pairs()

    taken, refused = all_ours(damaged_bytes(sound, count(150)), attempt)
    assert taken > 0
    assert refused > 0
    if suffix == ".json":
        values = damaged_json(json.loads(sound), count(300))
        taken, refused = all_ours((text.encode() for text in values), attempt)
        assert taken > 0
        assert refused > 0


# -- models --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    small_llama(layers=1).save_pretrained(folder / "single")
    small_tokenizer().save_pretrained(folder / "single")
    small_llama(layers=1).save_pretrained(folder / "sharded", max_shard_size="20KB")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of the models, to be damaged."""
    shutil.copytree(made, tmp_path / "models")
    return tmp_path / "models"


@pytest.mark.parametrize(
    ("file", "cases"),
    [("single/config.json", 100), (f"sharded/{INDEX}", 100), ("single/generation_config.json", 20)],
)
def test_configurations(file: str, cases: int, folder: Path) -> None:
    path = folder / file

    def attempt(text: str) -> None:
        path.write_text(text, encoding="utf-8")
        load(path.parent)

    taken, refused = all_ours(damaged_json(json.loads(path.read_text()), count(cases)), attempt)
    assert taken > 0
    assert refused > 0


def test_weights(folder: Path) -> None:
    path = folder / "single" / WEIGHTS
    sound = path.read_bytes()
    start = 8 + int.from_bytes(sound[:8], "little")

    def attempt(header: bytes) -> None:
        path.write_bytes(header + sound[start:])
        load(path.parent)

    _, refused = all_ours(damaged_bytes(sound[:start], count(60)), attempt)
    assert refused > 0


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizers(file: str, tmp_path: Path) -> None:
    """Made and used: some fail only then."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.FOLDER / name, tmp_path)
    path = tmp_path / file

    def attempt(text: str) -> None:
        path.write_text(text, encoding="utf-8")
        with (
            translating(lambda error: LoadError(f"the tokenizer cannot be made: {brief(error)}")),
            quiet(),
        ):
            found = transformers.AutoTokenizer.from_pretrained(tmp_path)
        tokenize(PAIRS, found).tokenized_pairs()

    taken, refused = all_ours(damaged_json(json.loads(path.read_text()), count(200)), attempt)
    assert taken > 0
    assert refused > 0


def test_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header alone for most: a file that can be read is converted, which takes a while."""
    monkeypatch.setenv("CONEWISE_CACHE", str(tmp_path / "cache"))
    path = write_gguf(small_llama(layers=1), tmp_path / "small.gguf")
    sound, length = path.read_bytes(), 4_096

    def attempt(head: bytes) -> None:
        path.write_bytes(head + sound[length:])
        read_header(path)

    _, refused = all_ours(damaged_bytes(sound[:length], count(150)), attempt)
    assert refused > 0

    def convert(head: bytes) -> None:
        path.write_bytes(head + sound[length:])
        load(path)

    _, refused = all_ours(damaged_bytes(sound[:length], count(12), seed=1), convert)
    assert refused > 0


# -- runs that were kept -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def captured(tokenizer: Any) -> Any:
    module: Any = load("tiny").module
    return cw.capture(module, input_ids=tokenizer(CLEAN, return_tensors="pt").input_ids)


@pytest.fixture(scope="module")
def kept(captured: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run."""
    folder = tmp_path_factory.mktemp("run")
    sites = cw.sites("z", layer=":", head=[0, 1]) + cw.sites("mlp_out", layer=":")
    question = Question(captured, tokenize(PAIRS, tokenizer), sites)
    result = question.run(verify=2)
    story = question.story("tiny", "conewise sweep", 1)
    return write_run(folder / "run", result, story, question.folded(), question.inside(result, story))


def look_at(folder: Path) -> None:
    """Read a run, and whatever is made of it."""
    result, story, folded = read_run(folder)
    for _ in (str(result), result._repr_html_(), result.to_dataframe(), result.effect, result.strongest()):
        pass
    show_cost(Console(file=io.StringIO()), result, story)
    sweep_page(result, story, folded, read_inside(folder))


@pytest.mark.parametrize(("file", "cases"), [(MANIFEST, 100), (STORY, 60), (FOLDED, 60), (INSIDE, 60)])
def test_results_and_stories(file: str, cases: int, kept: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(kept, tmp_path / "run")
    path = folder / file

    def attempt(text: str) -> None:
        path.write_text(text, encoding="utf-8")
        look_at(folder)

    taken, refused = all_ours(damaged_json(json.loads(path.read_text()), count(cases)), attempt)
    assert taken > 0
    assert refused > 0


def test_values(kept: Path, tmp_path: Path) -> None:
    """With a checksum that fits: a hand that is able to change one file can change the other."""
    folder = shutil.copytree(kept, tmp_path / "run")
    manifest = json.loads((folder / MANIFEST).read_text())

    def attempt(data: bytes) -> None:
        (folder / VALUES).write_bytes(data)
        checksum = hashlib.sha256(data).hexdigest()
        (folder / MANIFEST).write_text(json.dumps({**manifest, "values_sha256": checksum}))
        look_at(folder)

    _, refused = all_ours(damaged_bytes((folder / VALUES).read_bytes(), count(100)), attempt)
    assert refused > 0


def test_questions(tmp_path: Path) -> None:
    sound = {"kind": "conewise question", "format": 1, "command": ["a", "b"], "question": {"sites": ["z"]}}

    def attempt(text: str) -> None:
        (tmp_path / QUESTION).write_text(text, encoding="utf-8")
        read_question(tmp_path)

    taken, refused = all_ours(damaged_json(sound, count(200)), attempt)
    assert taken > 0
    assert refused > 0


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    return sweep_over(small_model(), [cw.site("mlp_out", layer=0), cw.site("z", layer=1)])


def test_plans() -> None:
    """A plan that is taken gives the numbers of its sweep: it is of the same steps."""
    captured, sound = golden.model(), json.loads((golden.FOLDER / "0.1.0" / golden.PLAN).read_text("utf-8"))
    values = golden.sweep(captured).run().table

    def attempt(text: str) -> None:
        assert torch.equal(cw.SweepPlan.from_json(text).run(captured).table, values)

    taken, refused = all_ours(damaged_json(sound, count(200)), attempt)
    assert taken > 0
    assert refused > 0


def test_searches(tmp_path: Path) -> None:
    """A search that is taken was not damaged: it has its checksum."""
    captured, path = golden.model(), tmp_path / "search.json"
    sound = json.loads((golden.FOLDER / "0.1.0" / golden.FOUND / path.name).read_text("utf-8"))
    found = golden.search(captured)

    def attempt(text: str) -> None:
        path.write_text(text, "utf-8", "surrogatepass")
        shutil.rmtree(path.with_suffix(""), ignore_errors=True)
        assert golden.search(captured, out=path.with_suffix(""), resume=True).log == found.log

    _, refused = all_ours(damaged_json(sound, count(100)), attempt)
    assert refused > 50


@pytest.mark.parametrize("table", ["manifest", "plans", "chunks"])
def test_stores(table: str, sweep: Sweep, tmp_path: Path) -> None:
    """What a store holds, changed with a checksum that fits."""
    sweep.run(out=tmp_path / "sound", evaluator="serial")
    sound = (tmp_path / "sound" / store.FILE).read_bytes()
    column = "shape" if table == "chunks" else "body"
    body = body_of(tmp_path / "sound" / store.FILE, table, column)
    folder = tmp_path / "run"
    folder.mkdir()

    def attempt(text: str) -> None:
        (folder / store.FILE).write_bytes(sound)
        reseal(folder / store.FILE, table, column, text)
        sweep.run(out=folder, resume=True)

    _, refused = all_ours(damaged_json(json.loads(body), count(30)), attempt)
    assert refused > 0


# -- libraries -----------------------------------------------------------------------------------


# -- circuits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["conewise", "eap"])
@pytest.mark.parametrize("kv_heads", [None, 1])
def test_circuits(kind: str, kv_heads: int | None, tmp_path: Path) -> None:
    """Read, drawn, pruned and written again."""
    whole = graph(2, 2, kv_heads=kv_heads)
    scores = random_scores(whole, 1, missing=0.5)
    log = [Decision(edge, score > 0, score) for edge, score in scores.items()]
    circuit = cw.Circuit.from_scores(whole, scores, threshold=0.0, connected=False, of="small")
    path = replace(circuit, log=tuple(log)).save(tmp_path / "sound.json", format=kind)
    sound = json.loads(path.read_text())

    def attempt(text: str) -> None:
        path.write_text(text, encoding="utf-8")
        found = cw.Circuit.load(path)
        assert found.prune().nodes is not None
        found.to_dot()
        found.report(tmp_path / "page.html")
        assert cw.Circuit.load(found.save(tmp_path / "again.json")) == found

    taken, refused = all_ours(damaged_json(sound, count(80)), attempt)
    assert taken > 0
    assert refused > 0


@pytest.mark.parametrize("file", ["evaluation.json", "story.json"])
def test_folders_of_circuits(file: str, tmp_path: Path) -> None:
    circuit = cw.Circuit.from_nodes(graph(1, 2), ["m0"], of="small")
    evaluation = Evaluation("logit_diff", "zero", 3, 9, 1.0, 0.0, 0.9, 0.1, 0.9, 0.1, 0.01, "input->m0")
    curve = Curve((CurvePoint(0.5, 3, 0.9),), "logit_diff", 0.9)
    FoundCircuit(circuit, evaluation, curve, Story("tiny", metric="a logit")).write(tmp_path)
    path = tmp_path / file
    sound = json.loads(path.read_text())

    def attempt(text: str) -> None:
        path.write_text(text, encoding="utf-8")
        read_circuit(tmp_path).report(tmp_path / "page.html")

    taken, refused = all_ours(damaged_json(sound, count(40)), attempt)
    assert taken > 0
    assert refused > 0


def test_what_libraries_print_while_they_read_a_model_is_no_output(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader of tokenizers says on stdout, past Python, what it does not know in a file."""
    monkeypatch.setattr("conewise.loading.load", lambda *_, **__: os.write(1, b"Ignored\n"))
    ModelName("tiny").load(Status(quiet=True))
    assert capfd.readouterr() == ("", "Ignored\n")
    os.write(1, b"told\n")
    assert capfd.readouterr() == ("told\n", "")
