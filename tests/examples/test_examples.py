"""Every example runs, and the notebooks still give what is stored in them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.alike import is_alike
from tests.examples.execute import executed, read

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(ROOT.glob("examples/*.py"))
NOTEBOOKS = sorted(ROOT.glob("examples/notebooks/*.ipynb"))
LARGEST = 200_000  # bytes of a notebook: outputs are tables and small figures, not libraries


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """What became of each script, run by one process, as a user would run them: from outside of the tests."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.examples.every_script", *map(str, SCRIPTS)],
        capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    return {row["script"]: row for row in rows}


@pytest.mark.pages
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_runs_without_an_error(script: Path, outcomes: dict[str, Any]) -> None:
    outcome = outcomes[script.name]
    assert not outcome["failure"], outcome["failure"]
    assert outcome["printed"].strip()


def test_every_example_is_listed() -> None:
    listed = (ROOT / "examples/README.md").read_text("utf-8")
    for path in (*SCRIPTS, *NOTEBOOKS):
        assert f"]({path.relative_to(ROOT / 'examples')})" in listed
    assert len(SCRIPTS) >= 5
    assert len(NOTEBOOKS) >= 12


_MEASURED = re.compile(r",? (about )?[-0-9.e+]+ s\b|, peak memory [^,\n]*")
"""What the first line of an object says of the machine: its seconds, and its memory."""


def shown(cell: Any) -> str:
    """What a cell shows as text: printed, or the text form of its value."""
    texts = []
    for output in cell.get("outputs", ()):
        if output.output_type == "stream" and output.name == "stdout":
            texts.append(output.text)
        elif output.output_type == "execute_result":
            texts.append(_MEASURED.sub("", output.data.get("text/plain", "")))
    return "\n".join(texts).strip()


@pytest.fixture(scope="module")
def again_of(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Any]:
    """The notebooks, executed again: in one kernel, so that torch is loaded once."""
    again = executed(NOTEBOOKS, str(tmp_path_factory.mktemp("notebooks")))
    return dict(zip(NOTEBOOKS, again, strict=True))


@pytest.mark.pages
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_runs_and_shows_what_is_stored(notebook: Path, again_of: dict[Path, Any]) -> None:
    stored, again = read(notebook), again_of[notebook]
    compared = 0
    for before, after in zip(stored.cells, again.cells, strict=True):
        if before.cell_type == "code" and "varies" not in before.metadata.get("tags", ()):
            assert is_alike(shown(before), shown(after)), f"{shown(before)}\n\nis now\n\n{shown(after)}"
            compared += bool(shown(before))
    assert compared >= 3


@pytest.mark.pages
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_is_small_and_was_run_from_top_to_bottom(notebook: Path) -> None:
    assert notebook.stat().st_size < LARGEST
    code = [cell for cell in read(notebook).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert str(ROOT) not in notebook.read_text("utf-8")
