"""A saved result loads as it was, and a folder that holds something else is refused."""

from __future__ import annotations

import hashlib
import json
import math
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import conewise as cw
from conewise.errors import FormatError, LoadError, SweepError
from conewise.model import Model
from conewise.sweeps.result import Result, load_result
from conewise.sweeps.storage.archive import FORMAT, MANIFEST, VALUES
from conewise.sweeps.storage.result_data import CellCheck
from tests.sweeps.small import model, prompts, sweep_over


@pytest.fixture(scope="module")
def captured() -> Model:
    return model()


@pytest.fixture(scope="module")
def result(captured: Model) -> Result:
    return sweep_over(captured, metric=[cw.logit_diff(7, 9), cw.prob(3)]).run()


def test_a_result_loads_as_it_was(result: Result, tmp_path: Path) -> None:
    assert result.save(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    loaded = cw.open(tmp_path / "a" / "b")
    assert isinstance(loaded, Result)
    assert loaded.equals(result)
    assert loaded.plan.costs() == result.plan.costs()
    assert loaded.ledger == result.ledger
    assert loaded.provenance == json.loads(json.dumps(result.provenance))
    assert loaded.to_dataframe().equals(result.to_dataframe())
    assert torch.equal(loaded["z"], result["z"])
    assert loaded.plot() == result.plot()
    assert str(loaded) == str(result)


def test_every_kind_of_site_and_number_loads_as_it_was(captured: Model, tmp_path: Path) -> None:
    sites = [
        (cw.site("z", layer=0, head=[0, 1]), cw.site("mlp_out", layer=1, pos=slice(2, None))),
        cw.site("z", layer=1, pos=-1),
    ]
    inputs = [{"input_ids": prompts(seed, 2)} for seed in (1, 2)]
    found = sweep_over(captured, sites, base=inputs, source="zero").run(evaluator="serial")
    table = found.table.clone()
    table[0, 0], table[0, 1] = math.inf, -0.0
    found = replace(
        found,
        table=table,
        base=torch.tensor([-math.inf], dtype=torch.float64),
        verification=CellCheck(2, 2, 0, 1e-9, 1e-9, 1e-4),
    )
    loaded = load_result(found.save(tmp_path))
    assert loaded.equals(found)
    assert loaded.source is None
    assert loaded.verification == found.verification
    assert loaded.cells == found.cells


def test_a_loaded_result_cannot_be_verified(result: Result, tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="a loaded result has no model at hand"):
        load_result(result.save(tmp_path)).verify()


def test_the_values_are_a_table_for_any_program(result: Result, tmp_path: Path) -> None:
    table = pd.read_parquet(result.save(tmp_path) / VALUES)
    assert list(table.columns) == [*result.to_dataframe().columns, "per_prompt"]
    assert table["value"].tolist() == result.table.flatten().tolist()
    assert list(table["per_prompt"][0]) == result.per_prompt[0, 0].tolist()


def test_the_manifest_says_what_was_run(result: Result, tmp_path: Path) -> None:
    manifest = json.loads((result.save(tmp_path) / MANIFEST).read_text())
    assert manifest["sweep"]["weights"] == result.provenance["weights"]
    assert manifest["sweep"]["batches"][0].keys() == {"base", "source", "patch"}
    assert manifest["plan"]["node_evaluations"] == manifest["measured"]["node_evaluations"] > 0
    assert manifest["measured"]["seconds"] > 0
    assert manifest["metrics"] == ["logit_diff", "prob"]
    assert {"conewise", "python", "command", "saved_at"} <= manifest.keys()


def test_nothing_is_overwritten(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path)
    with pytest.raises(SweepError, match=r"holds manifest\.json already; it was left as it is"):
        result.save(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / VALUES).write_text("mine")
    with pytest.raises(SweepError, match=r"holds values\.parquet already"):
        result.save(tmp_path / "other")
    assert (tmp_path / "other" / VALUES).read_text() == "mine"


def test_a_save_that_was_killed_can_be_made_again(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path)
    (tmp_path / MANIFEST).unlink()
    result.save(tmp_path)
    assert load_result(tmp_path).equals(result)


def test_a_result_may_be_saved_beside_its_store(captured: Model, tmp_path: Path) -> None:
    sweep = sweep_over(captured)
    with pytest.raises(SweepError, match="no saved result"):
        cw.open(tmp_path)
    found = sweep.run(out=tmp_path)
    with pytest.raises(SweepError, match=r"holds the store of a sweep, and no saved result.*resume=True"):
        load_result(tmp_path)
    found.save(tmp_path)
    assert load_result(tmp_path).equals(sweep.run(out=tmp_path, resume=True))


def test_a_folder_that_cannot_be_made_is_refused(result: Result, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SweepError, match=r"the result cannot be saved in .*: File exists"):
        result.save(tmp_path / "file")


def test_a_full_disk_leaves_no_result_that_looks_complete(result: Result, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(SweepError, match=r"the result cannot be saved in .*: File too large"):
            result.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / MANIFEST).exists()
    assert load_result(result.save(tmp_path)).equals(result)


# -- folders that are not sound ------------------------------------------------------------------


def test_a_folder_without_a_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"holds no saved result: there is no manifest\.json in it"):
        load_result(tmp_path)
    (tmp_path / MANIFEST).write_text('{"kind": "something else"}')
    with pytest.raises(SweepError, match="is not the manifest"):
        load_result(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(SweepError, match=r"is damaged: manifest\.json cannot be read"):
        load_result(tmp_path)


def test_other_folders_hold_no_result(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"kind": "something else"}')
    with pytest.raises(SweepError, match=r"no saved result|is not the manifest"):
        cw.open(tmp_path)
    with pytest.raises(SweepError, match=r"no saved result|is not the manifest"):
        cw.open(tmp_path / "nowhere")


def test_a_result_is_no_model(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path)
    with pytest.raises(LoadError, match=r"is not a model: it holds a saved result\. Open it with `cw\.open"):
        cw.load(tmp_path)


def test_a_result_of_a_newer_version_is_refused(result: Result, tmp_path: Path) -> None:
    path = result.save(tmp_path) / MANIFEST
    newer = {"format": FORMAT.version + 1, "conewise": "9.9"}
    path.write_text(json.dumps(json.loads(path.read_text()) | newer))
    with pytest.raises(FormatError, match=r"of format 2, and conewise .* reads format 1\. .* conewise 9\.9 "):
        load_result(tmp_path)


def test_damaged_values_are_found(result: Result, tmp_path: Path) -> None:
    path = result.save(tmp_path) / VALUES
    sound = path.read_bytes()
    for place in range(0, len(sound), 97):
        flipped = bytearray(sound)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(
            SweepError, match=r"values\.parquet does not have the checksum that manifest\.json"
        ):
            load_result(tmp_path)
    path.unlink()
    with pytest.raises(SweepError, match=r"values\.parquet cannot be read \(No such file or directory\)"):
        load_result(tmp_path)


@pytest.mark.parametrize("key", ["parts", "plan", "measured", "metrics", "base"])
def test_a_manifest_with_something_missing_is_damaged(result: Result, tmp_path: Path, key: str) -> None:
    path = result.save(tmp_path) / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest[key]
    path.write_text(json.dumps(manifest))
    with pytest.raises(
        SweepError, match=rf"manifest\.json cannot be understood: something in it has no '{key}'"
    ):
        load_result(tmp_path)


PART = {
    "name": "sites",
    "axes": ["site"],
    "coordinates": [[0]],
    "cells": [{"at": {}, "places": [{"name": "lm_head", "layer": None, "stack": "", "part": {}}]}],
}


def changed(folder: Path, *path: str | int, to: object) -> None:
    """Put something else into the manifest, at a path of keys."""
    manifest = json.loads((folder / MANIFEST).read_text())
    *above, last = path
    held = manifest
    for key in above:
        held = held[key]
    held[last] = to
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("path", "to", "said"),
    [
        (("parts",), [], "parts is not a list of at least one"),
        (("parts", 0), 3, r"parts\[0\] is not an object"),
        (("parts", 0, "cells"), [], r"parts\[0\] has 0 cells, and 4 in its 2 axes"),
        (("parts", 0, "cells", 1), [], r"parts\[0\].cells\[1\] is not an object"),
        (("parts", 0, "cells", 1, "places"), [], r"parts\[0\].cells\[1\] has no list of places"),
        (
            ("parts", 0, "cells", 1, "at"),
            {"layer": "0"},
            r"cells\[1\].at.layer is a text, where a whole number",
        ),
        (
            ("parts", 0, "cells", 1, "places", 0, "name"),
            3,
            r"places\[0\].name is a whole number, where a text is",
        ),
        (("parts", 0, "coordinates"), [[0], [0]], r"has 4 cells, and 1 in its 2 axes"),
        (("parts", 0, "axes"), ["layer"], r"has 4 cells, and 4 in its 1 axes"),
        (("metrics",), ["logit_diff"], "base_per_prompt is not a list of 1"),
        (("parts", 1), PART, "values.parquet cannot be understood: it has 12 rows, .* tells of 10 values"),
        (("metrics",), ["prob", "prob"], "metrics is not a list of at least one, each of its own name"),
        (("base",), ["0x1p+0"], "base is not a list of 2"),
        (("base",), ["x", "y"], "base holds 'x', where a number as text is expected"),
        (("base_per_prompt",), [["0x1p+0"], ["0x1p+0"]], "it has 12 values, and 24 of single prompts, in 12"),
        (
            ("source_per_prompt",),
            [["0x1p+0"]] * 2,
            "source_per_prompt is of 1 prompts, and the values are of 2",
        ),
        (("plan",), [], "plan is a list, where an object is expected"),
        (("plan", "worlds"), "6", "plan.worlds is a text, where a whole number is expected"),
        (("plan", "worlds"), True, "plan.worlds is true or false, where a whole number"),
        (("plan", "chunks"), 3, "plan.chunks is a whole number, where a list is expected"),
        (("measured", "seconds"), None, "measured.seconds is null, where a number is expected"),
        (("measured", "launches"), 10**30, "measured.launches is a number of 31 digits"),
        (("verification",), {"cells": 1}, "verification has no hooked"),
        (("sweep",), 3, "sweep is not an object"),
    ],
)
def test_wrong_counts_and_types_are_found(
    result: Result, tmp_path: Path, path: tuple[str | int, ...], to: object, said: str
) -> None:
    changed(result.save(tmp_path), *path, to=to)
    with pytest.raises(SweepError, match=rf"is damaged: .*{said}.*Put a sound copy in its place"):
        cw.open(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5_000 + "}", r'{"a": "\ud800"}', "[]", "3"])
def test_a_manifest_that_cannot_be_read_is_refused(result: Result, tmp_path: Path, text: str) -> None:
    (result.save(tmp_path) / MANIFEST).write_text(text)
    for load in (load_result, cw.open):
        with pytest.raises(
            SweepError, match=r"manifest.json (cannot be read|is not the manifest of a saved result)"
        ):
            load(tmp_path)


@pytest.mark.parametrize(("rows", "prompts"), [(3_000_000, 1), (12, 300_000)])
def test_values_that_are_far_more_than_was_told_are_not_read(
    result: Result, tmp_path: Path, rows: int, prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a few kilobytes holds any number of equal values."""
    values = pa.array(np.zeros(rows))
    single = pa.ListArray.from_arrays(np.arange(0, rows * prompts + 1, prompts), np.zeros(rows * prompts))
    path = result.save(tmp_path) / VALUES
    pq.write_table(pa.table({"value": values, "per_prompt": single}), path)
    assert path.stat().st_size < 200_000
    changed(tmp_path, "values_sha256", to=hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(pq.ParquetFile, "read", None)
    with pytest.raises(
        SweepError, match=rf"values.parquet cannot be understood: it has ({rows:,} rows|12 values)"
    ):
        load_result(tmp_path)
