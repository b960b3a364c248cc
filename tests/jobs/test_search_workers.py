"""Searches for circuits by real workers: what a local search decides, whatever happens to them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import conewise as cw
from conewise.circuits.circuit import Circuit
from conewise.errors import FleetError
from conewise.model import Model
from tests.cli.commands import PAIR, Done
from tests.jobs.fleet_cases import METRIC, ids, killing
from tests.jobs.search_cases import Here, asked_of, changes, decided, stored_decisions

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def local(model: Model) -> Circuit:
    return model.find_circuit(**asked_of(model)).run()


def test_a_search_has_the_bits_of_the_same_parts(fleet: Any, model: Model, local: Circuit) -> None:
    """In whichever process a part is evaluated."""
    seen: list[tuple[int, int]] = []
    found = model.find_circuit(**asked_of(model)).run(workers=fleet, progress=lambda *both: seen.append(both))
    assert decided(found) == decided(local)
    assert found.edges == local.edges
    here = Here(2)
    assert torch.equal(changes(found), changes(model.find_circuit(**asked_of(model)).run(workers=here)))
    assert torch.allclose(changes(found), changes(local), rtol=0, atol=1e-6)
    assert seen[-1] == (len(local.log), len(local.log))
    worlds = [one.worlds for one in fleet.ledger.seats.values()]
    assert worlds == [one.worlds for one in here.ledger.seats.values()]
    assert fleet.ledger.died == fleet.ledger.halved == 0
    # Workers are asked for something else in between, and for the search again.
    sweep = model.sweep(cw.sites("z", layer=":", head=":"), base=ids_run(model), source="zero", metric=METRIC)
    assert torch.equal(sweep.run(workers=fleet).per_prompt, sweep.run().per_prompt)
    runs = {name: given for name, given in asked_of(model).items() if name != "threshold"}
    evaluated = found.evaluate(**runs, workers=fleet)
    assert evaluated == found.evaluate(**runs, workers=Here(2))
    assert evaluated.weakest == local.evaluate(**runs).weakest


def ids_run(model: Model) -> Any:
    return model.run(input_ids=ids(1))


def test_circuits_from_sweeps_of_edges(fleet: Any, model: Model) -> None:
    """What removed edges carry: another run, nothing, a mean; of one batch and of several."""
    base, several = ids_run(model), [{"input_ids": ids(seed)} for seed in (1, 2)]
    dataset = [{"input_ids": ids(seed)} for seed in (5, 6)]
    asked: list[dict[str, Any]] = [
        {"base": base, "source": "zero"},
        {"base": base, "source": cw.mean(model, dataset)},
        {"base": several, "source": several[::-1]},
    ]
    for given in asked:
        sweep = model.sweep(model.edges(), **given, metric=METRIC)
        found, expected = sweep.run(workers=fleet, max_memory="1MB"), sweep.run(max_memory="1MB")
        assert torch.equal(found.per_prompt, expected.per_prompt)
        assert found.circuit(top=20, model=model).edges == expected.circuit(top=20, model=model).edges


def test_a_killed_worker_costs_nothing_and_a_search_goes_on_anywhere(
    fleet: Any, model: Model, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    asked = asked_of(model, metric=killing(flag))
    expected = model.find_circuit(**asked).run()
    path = tmp_path / "search"
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        """A worker dies in the middle of the search, and the driver is interrupted behind that."""
        seen.append(done)
        if len(seen) == 2:
            flag.touch()
        elif len(seen) > 2 and not flag.exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.find_circuit(**asked).run(workers=fleet, out=path, progress=progress)
    assert fleet.ledger.died == 1
    assert any("died over batch" in line for line in fleet.ledger.log)
    assert 0 < stored_decisions(path) < len(expected.log)
    for number, executor in enumerate((None, fleet)):
        copy = shutil.copytree(path, tmp_path / f"copy {number}")
        found = model.find_circuit(**asked).run(workers=executor, out=copy, resume=True)
        assert decided(found) == decided(expected)
        assert torch.allclose(changes(found), changes(expected), rtol=0, atol=1e-6)


def test_workers_are_had_by_one_at_a_time(fleet: Any, model: Model) -> None:
    """A progress function that asks the same workers would mix up what comes back of both."""
    sweep = model.sweep(cw.sites("z", layer=":", head=":"), base=ids_run(model), source="zero", metric=METRIC)
    for ask in (
        lambda: sweep.run(workers=fleet),
        lambda: model.find_circuit(**asked_of(model)).run(workers=fleet),
    ):

        def progress(done: int, total: int, ask: Any = ask) -> None:
            ask()

        with pytest.raises(FleetError, match="in the middle of another sweep or search"):
            model.find_circuit(**asked_of(model)).run(workers=fleet, progress=progress)
        with pytest.raises(FleetError, match="in the middle of another sweep or search"):
            sweep.run(workers=fleet, progress=progress)


def test_a_part_that_does_not_fit_is_halved(model: Model, local: Circuit) -> None:
    with cw.Processes(1, max_memory="300KB") as small:
        found = model.find_circuit(**asked_of(model)).run(workers=small)
        assert small.ledger.halved > 0
        assert any("was cut in half" in line for line in small.ledger.log)
    assert decided(found) == decided(local)
    assert torch.allclose(changes(found), changes(local), rtol=0, atol=1e-6)


def test_an_operation_that_raises_ends_the_search(fleet: Any, model: Model, tmp_path: Path) -> None:
    driver = os.getpid()

    def third(outputs: Any) -> torch.Tensor:
        if os.getpid() != driver and (tmp_path / "flag").exists():
            raise RuntimeError("no such kernel")
        value: torch.Tensor = outputs.logits[:, -1, 3]
        return value

    asked = asked_of(model, metric=cw.metric(third, name="third", key="third"))
    path = tmp_path / "search"

    def progress(done: int, total: int) -> None:
        (tmp_path / "flag").touch()

    with pytest.raises(FleetError, match=r"could not be evaluated by a worker: .*no such kernel") as caught:
        model.find_circuit(**asked).run(workers=fleet, out=path, progress=progress)
    assert any("decisions are stored in" in note for note in caught.value.__notes__)
    expected = model.find_circuit(**asked).run()
    assert 0 < stored_decisions(path) < len(expected.log)
    workers = set(fleet.ledger.seats)
    (tmp_path / "flag").unlink()
    found = model.find_circuit(**asked).run(workers=fleet, out=path, resume=True)
    assert decided(found) == decided(expected)
    assert set(fleet.ledger.seats) == workers  # they were not started anew


def test_a_command_finds_the_same_circuit(tmp_path: Path) -> None:
    asked = ("circuit", "tiny", *PAIR, "--json")
    here = Done(*asked).json("circuit")
    there = Done(*asked, "--workers", "1", "--out", str(tmp_path / "run")).json("circuit")
    for name in ("edges", "evaluation", "curve"):
        assert there[name] == here[name]
    again = Done(*asked, "--out", str(tmp_path / "run"), "--resume").json("circuit")
    assert again["edges"] == here["edges"]
