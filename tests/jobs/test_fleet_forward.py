"""A search by workers decides what it decides without, whatever happens to them. Workers are here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import conewise as cw
from conewise.circuits.acdc import Search
from conewise.circuits.circuit import Circuit
from conewise.errors import ArgumentError, CircuitError, FleetError
from conewise.jobs.scheduling import DIED, OWN, Failed, Share
from conewise.jobs.search_job import Bits, cuts
from conewise.model import Model
from tests.circuits.small_models import small
from tests.jobs.fleet_cases import METRIC
from tests.jobs.search_cases import Here, asked_of, changes, decided, dying, stored_decisions, too_large


@pytest.fixture(scope="module")
def local(model: Model) -> Circuit:
    found = model.find_circuit(**asked_of(model)).run()
    assert 20 < len(found.edges) < 100
    return found


def expect_equal(found: Circuit, local: Circuit) -> None:
    assert decided(found) == decided(local)
    assert found.edges == local.edges
    assert torch.allclose(changes(found), changes(local), rtol=0, atol=1e-6)


@given(st.integers(1, 600), st.integers(1, 40), st.none() | st.integers(1, 50))
def test_parts_are_all_worlds_in_order_and_even(worlds: int, workers: int, most: int | None) -> None:
    found = cuts(worlds, workers, most)
    assert [world for first, count in found for world in range(first, first + count)] == list(range(worlds))
    sizes = [count for _, count in found]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert most is None or max(sizes) <= most
    assert len(found) == min(worlds, workers) or (most is not None and max(sizes) + 1 > most * 0.5)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_masks_travel(shape: list[int], seed: int) -> None:
    mask = np.random.default_rng(seed).random(shape) < 0.5
    assert np.array_equal(Bits.of(mask).mask(), mask)
    assert Bits.of(mask).mask().dtype == bool


def test_one_worker_has_the_bits_of_a_local_search(model: Model, local: Circuit) -> None:
    asked = asked_of(model)
    one, here = Search(model, **asked), Search(model, **asked)
    fleet = Here(1)
    by_worker, without = one.run(workers=fleet), here.run()
    assert torch.equal(changes(by_worker), changes(without))
    assert decided(by_worker) == decided(without)
    assert one.spent == here.spent
    # The worlds that layers begin with are computed here, and by the worker that goes on from them.
    assert one.node_evaluations - fleet.begun == here.node_evaluations


@pytest.mark.parametrize("workers", [2, 3, 16])
def test_several_workers_decide_the_same(model: Model, local: Circuit, workers: int) -> None:
    fleet = Here(workers)
    expect_equal(model.find_circuit(**asked_of(model)).run(workers=fleet), local)
    ledger = fleet.ledger.seats
    assert len(ledger) == workers
    assert all(one.worlds for one in ledger.values())


@pytest.mark.parametrize(
    ("name", "threshold", "ablation"),
    [("gpt2", 0.003, "zero"), ("gpt2", 0.1, "mean"), ("gemma2", 0.3, "resample")],
)
def test_models_thresholds_and_ablations(name: str, threshold: float, ablation: str) -> None:
    """gemma2 norms its sums: it has the other forward."""
    given = small(name)
    asked: dict[str, Any] = {"base": given.base, "metric": METRIC, "threshold": threshold}
    sources = {"zero": "zero", "mean": cw.mean(given.model, [given.source.inputs]), "resample": given.source}
    asked["source"] = sources[ablation]
    expected = given.model.find_circuit(**asked).run()
    found = given.model.find_circuit(**asked).run(workers=Here(2))
    assert decided(found) == decided(expected)
    assert torch.allclose(changes(found), changes(expected), rtol=1e-4, atol=1e-7)


def test_little_memory_cuts_batches_and_decides_the_same(model: Model, local: Circuit) -> None:
    fleet = Here(2)
    expect_equal(model.find_circuit(**asked_of(model)).run(max_memory="300KB", workers=fleet), local)
    assert max(count for _, count in fleet.given) < 12
    asked, budget = asked_of(model), "600KB"
    one, here = Search(model, **asked), Search(model, **asked)
    found = one.run(workers=Here(1), max_memory=budget)
    assert torch.equal(changes(found), changes(here.run(max_memory=budget)))
    assert one.spent == here.spent


@pytest.mark.parametrize("every", [2, 3, 5])
def test_workers_that_die_cost_nothing(model: Model, local: Circuit, every: int) -> None:
    fleet = Here(2, dying(every))
    expect_equal(model.find_circuit(**asked_of(model)).run(workers=fleet), local)
    assert fleet.ledger.died > 2
    assert any("died over batch" in line for line in fleet.ledger.log)


def test_parts_that_do_not_fit_are_halved_and_those_behind_are_smaller(model: Model, local: Circuit) -> None:
    fleet = Here(2, too_large(3))
    expect_equal(model.find_circuit(**asked_of(model)).run(workers=fleet), local)
    failed = [count for _, count in fleet.given if count > 3]
    assert fleet.ledger.halved == len(failed)
    assert len(failed) < len(fleet.given) / 4  # it is not found out anew with each batch
    assert any("was cut in half" in line for line in fleet.ledger.log)


def test_a_worker_with_less_memory_than_the_search_may_take(model: Model, local: Circuit) -> None:
    fleet = Here(2, memory=300_000)
    expect_equal(model.find_circuit(**asked_of(model)).run(workers=fleet), local)
    assert fleet.ledger.halved > 0


def test_one_world_that_does_not_fit_ends_the_search(model: Model) -> None:
    with pytest.raises(FleetError, match="one world alone does not fit"):
        model.find_circuit(**asked_of(model)).run(workers=Here(2, too_large(0)))
    with pytest.raises(FleetError, match="could not be evaluated by a worker"):
        model.find_circuit(**asked_of(model)).run(workers=Here(2, memory=1000))


def test_a_part_that_raises_ends_the_search_and_its_folder_keeps_what_was_decided(
    model: Model, local: Circuit, tmp_path: Path
) -> None:
    def fault(name: str, share: Share) -> Failed | None:
        return Failed(OWN, "RuntimeError: no such kernel") if share.batch == 6 and share.first else None

    path = tmp_path / "search"
    with pytest.raises(FleetError, match=r"batch 6, worlds \d+ to \d+ .*no such kernel") as caught:
        model.find_circuit(**asked_of(model)).run(workers=Here(2, fault), out=path)
    assert any("decisions are stored in" in note for note in caught.value.__notes__)
    kept = stored_decisions(path)
    assert 0 < kept < len(local.log)
    expect_equal(model.find_circuit(**asked_of(model)).run(workers=Here(3), out=path, resume=True), local)


def test_a_search_goes_on_with_workers_and_without(model: Model, local: Circuit, tmp_path: Path) -> None:
    class EnoughError(Exception):
        pass

    def stop(after: int) -> Any:
        def progress(done: int, total: int) -> None:
            if done > after:
                raise EnoughError

        return progress

    path = tmp_path / "search"
    executors = [Here(2), None, Here(1), None]
    for at, executor in enumerate(executors):
        with pytest.raises(EnoughError):
            model.find_circuit(**asked_of(model)).run(
                workers=executor, out=path, resume=at > 0, progress=stop(60 * at + 30)
            )
    expect_equal(model.find_circuit(**asked_of(model)).run(workers=Here(2), out=path, resume=True), local)


def test_workers_that_always_die_end_the_search(model: Model) -> None:
    with pytest.raises(FleetError, match="workers died over it"):
        model.find_circuit(**asked_of(model)).run(
            workers=Here(2, lambda name, share: Failed(DIED, "no memory"))
        )


def test_workers_that_are_closed_meanwhile_end_the_search(model: Model) -> None:
    fleet = Here(2)
    with pytest.raises(FleetError, match="were closed in the middle of a search"):
        model.find_circuit(**asked_of(model)).run(workers=fleet, progress=lambda *done: fleet.seats.clear())


def test_circuits_are_evaluated_by_workers(model: Model, local: Circuit) -> None:
    runs = {name: given for name, given in asked_of(model).items() if name != "threshold"}
    bits = local.evaluate(**runs)
    assert local.evaluate(**runs, workers=Here(1)) == bits
    found = local.evaluate(**runs, workers=Here(3))
    assert found.weakest == bits.weakest
    for name in ("full", "ablated", "circuit", "complement", "faithfulness", "completeness", "minimality"):
        assert getattr(found, name) == pytest.approx(getattr(bits, name), rel=1e-4, abs=1e-6)
    curve, expected = local.curve(**runs, workers=Here(2)), local.curve(**runs)
    assert [one.threshold for one in curve.points] == [one.threshold for one in expected.points]
    assert [one.faithfulness for one in curve.points] == pytest.approx(
        [one.faithfulness for one in expected.points], rel=1e-4, abs=1e-5
    )


def test_what_is_no_executor(model: Model) -> None:
    with pytest.raises(ArgumentError, match="expected a whole number or a text or workers"):
        model.find_circuit(**asked_of(model)).run(workers=[2])  # type: ignore[arg-type]
    with pytest.raises(CircuitError, match="one at a time"):
        model.find_circuit(**asked_of(model), speculative=False).run(workers=cw.Processes(2))
