import json
import subprocess
import sys

import pytest

from conewise.paper.experiments import e9
from conewise.paper.experiments.e9 import clock
from tests.paper.experiments.quick import SMALL


def test_patched_outputs_equal_full_runs_bit_for_bit_at_every_site() -> None:
    timed = clock(SMALL, "cpu", full=True, repetitions=1)
    assert timed.timed_sites == timed.compared == 6
    assert timed.different == 0
    assert timed.nodes == 2 * (7 * 2 + 15) + 1


def test_a_sample_weighs_one_head_for_all_heads_of_its_layer() -> None:
    timed = clock(SMALL, "cpu", full=False, repetitions=2)
    assert timed.timed_sites == 4
    assert len(timed.full) == len(timed.ratios) == 2
    assert timed.ratio > 0
    assert "4 of 6 sites" in timed.note


def test_the_script_prints_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(e9, "SIZES", (SMALL,))
    assert e9.main(["--device", "cpu", "--full", "--repetitions", "1"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (size,) = printed["sizes"]
    assert {"ratio", "prediction", "distance_percent", "outputs_different"} <= size.keys()
    assert {"date", "versions"} <= printed.keys()


def test_the_script_needs_torch_and_numpy_only() -> None:
    heavy = {"pandas", "rich", "typer", "plotly"}
    script = f"import sys, conewise.paper.experiments.e9; print(sorted({heavy!r} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"
