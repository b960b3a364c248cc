"""The ledger has the seconds of each phase of a run; a clock that tests turn says which is which."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import conewise as cw
from conewise import status as phases
from conewise.program.weights import Weights
from conewise.sweeps.execution.executors import SerialExecutor, WavefrontExecution, WavefrontExecutor
from conewise.sweeps.execution.reading import PHASES
from conewise.sweeps.planning.planner import Planner
from conewise.sweeps.storage.archive import MANIFEST
from tests.sweeps.small import model, prompts, sweep_over
from tests.test_phases import Clock

NOTHING = dict.fromkeys([*PHASES, "other"], 0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that goes on by what planning, baselines, passes and reading weights are said to take."""
    made = Clock()
    monkeypatch.setattr(phases, "clock", made)

    def takes(owner: Any, name: str, seconds: float) -> None:
        usual: Callable[..., Any] = getattr(owner, name)

        def slow(*args: Any, **named: Any) -> Any:
            made.turn(seconds)
            return usual(*args, **named)

        monkeypatch.setattr(owner, name, slow)

    takes(Planner, "plan", 1)
    for executor in (SerialExecutor, WavefrontExecutor):
        takes(executor, "over", 10)
    takes(WavefrontExecution, "start", 100)
    takes(Weights, "whole_contents", 1000)
    return made


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": prompts(number, 2)} for number in range(count)]


def test_each_phase_has_its_seconds(clock: Clock) -> None:
    sweep = sweep_over(model())
    clock.turn(5)
    started = clock.now
    ledger = sweep.run(evaluator="wavefront").ledger
    reads = ledger.phases["weights"] / 1000
    assert reads >= 1  # at the end, at least
    assert ledger.phases == {
        **NOTHING,
        "weights": 1000 * reads,
        "planning": 1,
        "baselines": 10,
        "passes": 100,
    }
    assert ledger.seconds == sum(ledger.phases.values()) == clock.now - started


def test_phases_are_summed_over_batches(clock: Clock) -> None:
    sweep = sweep_over(model(), base=batches(3), source="zero")
    ledger = sweep.run(evaluator="wavefront").ledger
    assert (ledger.phases["planning"], ledger.phases["baselines"], ledger.phases["passes"]) == (3, 30, 300)
    assert ledger.seconds == sum(ledger.phases.values())


def test_weights_are_read_before_all_that_is_stored(clock: Clock, tmp_path: Path) -> None:
    ledger = sweep_over(model()).run(evaluator="wavefront", out=tmp_path / "run").ledger
    assert ledger.phases["weights"] >= 3000  # before the run, before a chunk is stored, at the end
    assert ledger.phases["passes"] == 100
    again = sweep_over(model()).run(evaluator="wavefront", out=tmp_path / "run", resume=True).ledger
    assert again.phases["passes"] == 0
    assert again.seconds == sum(again.phases.values())


@pytest.mark.usefixtures("clock")
def test_a_text_says_where_the_time_went() -> None:
    result = sweep_over(model()).run(evaluator="wavefront")
    shown = phases.shown_phases(result.ledger.phases)
    assert "passes 100 s" in shown
    assert str(result).endswith(f"  time: {shown}")
    assert shown in result._repr_html_()
    old = replace(result, ledger=replace(result.ledger, phases={}))
    assert "time:" not in str(old)


@pytest.mark.usefixtures("clock")
def test_a_page_says_where_the_time_went(tmp_path: Path) -> None:
    result = sweep_over(model()).run(evaluator="wavefront")
    page = result.report(tmp_path / "page.html").read_text()
    assert f"Of the measured seconds: {phases.shown_phases(result.ledger.phases)}." in page


def test_phases_are_saved_and_results_without_them_load(tmp_path: Path) -> None:
    result = sweep_over(model()).run()
    folder = result.save(tmp_path / "saved")
    loaded = cw.open(folder)
    assert loaded.ledger == result.ledger  # type: ignore[union-attr]
    manifest = json.loads((folder / MANIFEST).read_text())
    assert set(manifest["measured"].pop("phases")) == {*PHASES, "other"}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    old = cw.open(folder)
    assert old.ledger == replace(result.ledger, phases={})  # type: ignore[union-attr]
    assert "time:" not in str(old)
