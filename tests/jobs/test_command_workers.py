"""`--workers` on the command line: numbers of the same command without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import PAIR, Done

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("words", [("--method", "atp"), ()])
def test_a_command_by_workers_prints_what_it_prints_alone(words: tuple[str, ...], tmp_path: Path) -> None:
    asked = ("sweep", "tiny", *PAIR, "--sites", "z", *words, "--json")
    here = Done(*asked).json("sweep")
    there = Done(*asked, "--workers", "1", "--out", str(tmp_path / "run")).json("sweep")
    assert there["cells"] == here["cells"]
    again = Done(*asked, "--out", str(tmp_path / "run"), "--resume").json("sweep")
    assert again["cells"] == here["cells"]
