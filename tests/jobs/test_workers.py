"""Real workers, processes and actors of Ray: the numbers of a local run, whatever happens to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import conewise as cw
from conewise.errors import ArgumentError, FleetError, SweepError, WeightsChangedError
from conewise.model import Model
from tests.jobs.fleet_cases import BUDGET, METRIC, heads, ids, killing, quick, raising, small_model

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("evaluator", ["wavefront", "serial"])
def test_a_sweep_has_the_bits_of_a_local_one(fleet: Any, model: Model, evaluator: str) -> None:
    sweep = heads(model)
    local = sweep.run(evaluator=evaluator, max_memory=BUDGET)
    assert evaluator == "serial" or len(local.plan.chunks) > 2
    seen: list[tuple[int, int]] = []
    found = sweep.run(
        evaluator=evaluator, max_memory=BUDGET, workers=fleet, progress=lambda *both: seen.append(both)
    )
    assert torch.equal(found.per_prompt, local.per_prompt)
    assert found.equals(local)
    assert found.ledger.node_evaluations == local.ledger.node_evaluations == found.plan.node_evaluations
    assert seen[-1] == (len(sweep.cells), len(sweep.cells))
    assert sum(one.worlds for one in fleet.ledger.seats.values()) == len(sweep.cells)
    assert found.verify(n=3).ok


def test_edges_too(fleet: Any, model: Model) -> None:
    sweep = model.sweep(
        model.edges(), base={"input_ids": ids(1)}, source={"input_ids": ids(2)}, metric=METRIC
    )
    assert torch.equal(sweep.run(workers=fleet).per_prompt, sweep.run().per_prompt)


def test_what_a_sweep_is_given_travels(fleet: Any, model: Model) -> None:
    """Functions, means over datasets, patched bases, several batches, KL to a run, cells of their own."""
    base = model.run(input_ids=ids(1))
    with base.fork() as world:
        world.patch(cw.site("mlp_out", layer=0), torch.zeros(2, 7, 32))
        dataset = [{"input_ids": ids(seed)} for seed in (5, 6)]
        several = [{"input_ids": ids(seed)} for seed in (1, 2, 3)]
        asked: list[dict[str, Any]] = [
            {"source": lambda present: present * 0.5, "metric": lambda outputs: outputs.logits[:, -1, 3]},
            {"source": cw.mean(model, dataset)},
            {"base": world},
            {"base": several, "source": several[::-1]},
            {"metric": [METRIC, cw.kl_to(base)]},
            {"source": cw.noise(0.1, seed=3)},
            # One answer for each prompt of all batches: each batch reads its own.
            {"base": several, "source": several[::-1], "metric": cw.logit_diff([1, 2, 3, 4, 5, 6], [7] * 6)},
        ]
        for given in asked:
            sweep = heads(model, **given)
            assert torch.equal(sweep.run(workers=fleet).per_prompt, sweep.run().per_prompt), given


def test_a_killed_worker_costs_nothing(fleet: Any, model: Model, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    sweep = heads(model, metric=killing(flag))
    local = sweep.run(max_memory=BUDGET)
    flag.touch()
    found = sweep.run(max_memory=BUDGET, workers=fleet, out=tmp_path / "run")
    assert not flag.exists()
    assert torch.equal(found.per_prompt, local.per_prompt)
    assert fleet.ledger.died == 1
    assert "died over batch 0" in fleet.ledger.log[0]
    # What is stored is whole: nothing is computed again, here or there.
    for executor in (None, fleet):
        again = sweep.run(max_memory=BUDGET, workers=executor, out=tmp_path / "run", resume=True)
        assert again.ledger.resumed == len(sweep.cells)
        assert torch.equal(again.per_prompt, local.per_prompt)


def test_a_share_that_does_not_fit_is_cut(fleet: Any, model: Model) -> None:
    sweep = heads(model)
    local = sweep.run(max_memory=BUDGET)
    tight = local.plan.peak_bytes // 3
    shared: dict[str, Any] = {} if isinstance(fleet, cw.Processes) else {"cpus_per_worker": 0}
    with type(fleet)(workers=2, max_memory=tight, **shared) as small:
        found = sweep.run(max_memory=BUDGET, workers=small)
        assert small.ledger.halved > 0
        assert any("was cut in half" in line for line in small.ledger.log)
    assert torch.allclose(found.per_prompt, local.per_prompt, rtol=0, atol=1e-5)
    assert not found.missing


def test_an_operation_that_raises_ends_its_share_alone(fleet: Any, model: Model) -> None:
    base = model.run(input_ids=ids(1))
    place = cw.site("z", layer=1, head=2, pos=3)
    sweep = heads(model, source=raising(base.read(place)))
    with pytest.raises(Exception, match="no such kernel"):
        sweep.run()
    found = sweep.run(workers=fleet, evaluator="serial")
    gone = {name for one in found.missing for name in one.names}
    assert str(place) in gone
    assert len(gone) < len(sweep.cells)
    assert all("no such kernel" in one.why for one in found.missing)
    names = [cell.name for cell in sweep.cells]
    for number, name in enumerate(names):
        assert bool(torch.isnan(found.per_prompt[0, number]).any()) == (name in gone)
    assert "could not be computed" in str(found)


def test_what_cannot_travel_is_said(fleet: Any, model: Model) -> None:
    other = small_model()
    sweep = heads(model, metric=lambda outputs: outputs.logits[:, -1, len(other.name)])
    with pytest.raises(FleetError, match="another captured model"):
        sweep.run(workers=fleet)
    numbers = (number for number in range(3))
    with pytest.raises(FleetError, match="cannot be sent"):
        heads(model, metric=lambda outputs: outputs.logits[:, -1, next(numbers)]).run(workers=fleet)
    with pytest.raises(ArgumentError, match=r"`run` has no option 'device' here; it has out, resume"):
        heads(model).run(workers=fleet, device="cpu")


DRIVER = """
    import sys
    import conewise as cw
    from tests.jobs.fleet_cases import BUDGET, heads, slow, small_model

    model = small_model()
    sweep = heads(model, metric=cw.metric(slow, name="slow", key="slow"))
    fleet = cw.Processes(2) if sys.argv[1] == "processes" else cw.Ray(workers=2)
    print("begun", flush=True)
    shown = lambda *done: print(*done, flush=True)
    sweep.run(max_memory=BUDGET, workers=fleet, out=sys.argv[2], progress=shown)
"""


def test_a_killed_driver_goes_on_where_it_was(fleet: Any, model: Model, tmp_path: Path) -> None:
    kind = "processes" if isinstance(fleet, cw.Processes) else "ray"
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    paths = {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    with subprocess.Popen(
        [sys.executable, str(script), kind, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **paths},
        start_new_session=True,
    ) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            if line.split() and line.split()[0].isdigit():
                break
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    sweep = heads(model, metric=cw.metric(quick, name="slow", key="slow"))
    found = sweep.run(max_memory=BUDGET, workers=fleet, out=tmp_path / "run", resume=True)
    assert 0 < found.ledger.resumed < len(sweep.cells)
    assert torch.equal(found.per_prompt, sweep.run(max_memory=BUDGET).per_prompt)


def test_devices_of_one_machine_by_name(model: Model) -> None:
    sweep = heads(model)
    assert torch.equal(sweep.run(workers=cw.Processes(devices="cpu,cpu")).per_prompt, sweep.run().per_prompt)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"workers": 0}, "1 or more"),
        ({"load": {"dtype": "float16"}}, "was not given"),
        ({"max_memory": "much"}, "no amount of memory"),
    ],
)
def test_what_is_no_fleet(given: dict[str, Any], said: str) -> None:
    for kind in (cw.Ray, cw.Processes):
        with pytest.raises(SweepError, match=said):
            kind(**given)
        with pytest.raises(ArgumentError, match="`workers` is bool True; expected a whole number"):
            kind(workers=True)
    with pytest.raises(FleetError, match="one worker for each device"):
        cw.Processes(3, devices="cuda:0,cuda:1")
    with pytest.raises(FleetError, match="0 or more"):
        cw.Ray(gpus_per_worker=-1)


def test_weights_that_were_written_to_are_sent_again(fleet: Any) -> None:
    own = small_model()
    first = heads(own).run(workers=fleet)
    with torch.no_grad():
        own.module.transformer.h[1].mlp.c_fc.weight.mul_(1.5)
    sweep = heads(own)
    found = sweep.run(workers=fleet)
    assert torch.equal(found.per_prompt, sweep.run().per_prompt)
    assert not torch.equal(found.per_prompt, first.per_prompt)


def test_runs_of_other_weights_are_refused(fleet: Any) -> None:
    own = small_model()
    sweep = heads(own)
    with torch.no_grad():
        own.module.transformer.h[1].mlp.c_fc.weight.mul_(1.5)
    with pytest.raises(WeightsChangedError):
        sweep.run(workers=fleet)


def test_after_an_error_of_the_driver_workers_are_as_good_as_new(fleet: Any, model: Model) -> None:
    """What was still computed when it ended is not taken for what comes next."""
    sweep = heads(model)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep.run(workers=fleet, max_memory=BUDGET, progress=stop)
    given: dict[str, Any] = {"base": {"input_ids": ids(1)}, "source": "zero", "metric": METRIC}
    other = model.sweep(cw.sites("mlp_out", layer=":"), **given)
    found = other.run(workers=fleet, max_memory=BUDGET)
    assert torch.equal(found.per_prompt, other.run(max_memory=BUDGET).per_prompt)


def test_progress_tells_of_all_workers(fleet: Any, model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = heads(model)
    sweep.run(max_memory=BUDGET)  # so that something was timed
    sweep.run(max_memory=BUDGET, workers=fleet, progress=True)
    said = capsys.readouterr().err
    shares = sum(one.shares for one in fleet.ledger.seats.values())
    assert f"{shares}/{shares} shares by 2 workers" in said
    assert fleet.ledger.predicted is not None
    assert fleet.ledger.left == 0


def test_a_plan_that_is_given_is_followed(fleet: Any, model: Model) -> None:
    sweep = heads(model)
    plan = sweep.plan(BUDGET)
    found = sweep.run(plan=plan, workers=fleet)
    assert found.plan.chunks == plan.chunks
    assert torch.equal(found.per_prompt, sweep.run(plan=plan).per_prompt)
    given: dict[str, Any] = {"base": {"input_ids": ids(1)}, "source": "zero", "metric": METRIC}
    other = model.sweep(cw.sites("mlp_out", layer=":"), **given)
    with pytest.raises(SweepError, match="Plan it again"):
        other.run(plan=plan, workers=fleet)
