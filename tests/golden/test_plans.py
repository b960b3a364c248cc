"""Plans are values: the same as they were kept, and the same after a journey as JSON to another process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import conewise as cw
from conewise.errors import SweepError
from conewise.sweeps.planning.plan import SweepPlan
from tests.golden.plans import SWEEPS, path_of, plan_of
from tests.sweeps.small import model, prompts, sweep_over


@pytest.mark.parametrize("name", SWEEPS)
def test_the_plan_is_the_one_that_was_kept(name: str) -> None:
    kept = path_of(name).read_text("utf-8")
    assert plan_of(name) == kept, "if the change is meant: python -m tests.golden.plans"


@pytest.mark.parametrize("name", SWEEPS)
def test_a_plan_is_equal_after_json_and_back(name: str) -> None:
    make, budget = SWEEPS[name]
    plan = make().plan(max_memory=budget)
    read = SweepPlan.from_json(plan.to_json())
    assert read == plan
    assert read.to_json() == plan.to_json()
    read.check()


@pytest.mark.parametrize("name", SWEEPS)
def test_running_a_plan_is_running_its_sweep(name: str) -> None:
    make, budget = SWEEPS[name]
    sweep = make()
    plan = sweep.plan(max_memory=budget)
    result = plan.run()
    assert torch.equal(result.table, sweep.run(max_memory=budget).table)
    assert result.ledger.node_evaluations == plan.node_evaluations
    assert result.ledger.launches == plan.launches
    assert result.plan == plan


def test_a_plan_of_a_machine_with_other_threads_runs() -> None:
    """Kernels take memory for each thread, so what its steps take is not what they take here."""
    plan = SweepPlan.from_json(plan_of("several_chunks"))
    threads, here = torch.get_num_threads(), sweep_over(model(), cw.sites("z", layer=":", head=":", pos=":"))
    try:
        torch.set_num_threads(4)
        result = here.run(plan=plan)
    finally:
        torch.set_num_threads(threads)
    assert torch.allclose(result.table, here.run().table)
    assert result.plan.chunks == plan.chunks


SCRIPT = """
import sys
from pathlib import Path
from conewise.sweeps.planning.plan import SweepPlan
from tests.sweeps.small import model
plan = SweepPlan.from_json(Path(sys.argv[1]).read_text())
print(plan.run(model()).table.tolist())
"""


def test_a_plan_runs_in_another_process_that_only_has_the_model(tmp_path: Path) -> None:
    captured = model()
    plan = sweep_over(captured).plan()
    (tmp_path / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    root = Path(__file__).parents[2]
    found = subprocess.check_output(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "plan.json")],
        text=True,
        cwd=root,
        stderr=subprocess.DEVNULL,
    )
    assert json.loads(found) == plan.run().table.tolist()


def test_what_a_plan_cannot_hold_has_to_be_given_again() -> None:
    captured = model()
    sweep = sweep_over(captured, source=lambda value: value / 2)
    plan = SweepPlan.from_json(sweep.plan().to_json())
    with pytest.raises(SweepError, match=r"does not hold its source: .* `sweep.run\(plan=plan\)`"):
        plan.run(captured)
    with pytest.raises(SweepError, match=r"has no model at hand: plan.run\(model\)"):
        plan.run()
    assert torch.equal(sweep.run(plan=plan).table, sweep.run().table)


def test_a_plan_of_other_inputs_is_refused() -> None:
    captured = model()
    plan = sweep_over(captured).plan()
    longer = torch.zeros(2, 9, dtype=torch.long)
    other = sweep_over(captured, base={"input_ids": longer}, source={"input_ids": longer})
    with pytest.raises(SweepError, match=r"the sweep has 6 worlds and sizes .* Plan it again"):
        other.run(plan=plan)


@pytest.mark.parametrize("evaluator", ["serial", "wavefront"])
@pytest.mark.parametrize("is_read", [True, False], ids=["from JSON", "as it was made"])
def test_a_plan_of_another_sweep_is_refused(evaluator: str, is_read: bool) -> None:
    """Of as many worlds, over inputs of the same sizes; its cells would be taken for the sweep's own."""
    captured = model()
    base, source = ({"input_ids": prompts(seed, 2)} for seed in (1, 2))
    heads, streams = cw.sites("z", layer=":", head=":"), cw.sites("resid_pre", layer=":", pos="2:4")
    sweep = sweep_over(captured, heads, base=base, source=source)
    plan = sweep.plan(evaluator=evaluator)
    if is_read:
        plan = SweepPlan.from_json(plan.to_json())
    others = [
        sweep_over(captured, streams, base=base, source=source),
        sweep_over(captured, heads, base=base, source=source, metric=lambda out: out.logits[:, 0, 3]),
        sweep_over(captured, heads, base=base, source=source, metric=cw.cross_entropy(prompts(3, 2))),
    ]
    for other in others if evaluator == "wavefront" else others[:1]:  # serial steps know no metric
        with pytest.raises(SweepError, match=r"this plan is of another sweep: other cells, .*Plan it again"):
            other.run(plan=plan)
    tokens = sweep_over(captured, heads, base=base, source=source, metric=cw.logit_diff(3, 4))
    for fitting in (sweep, tokens):
        expected = fitting.run(evaluator=evaluator).table
        torch.testing.assert_close(fitting.run(plan=plan).table, expected, rtol=0, atol=1e-6)


def test_a_plan_of_runs_that_differ_later_is_refused() -> None:
    captured = model()
    base, late = ({"input_ids": prompts(1, 2)} for _ in range(2))
    late["input_ids"][:, -1] = (late["input_ids"][:, -1] + 1) % 50
    streams = cw.sites("resid_pre", layer=":")
    plan = sweep_over(captured, streams, base=base, source=late).plan()
    assert plan.compiled is not None
    assert {one.start for one in plan.compiled.passes} == {5}
    other = sweep_over(captured, streams, base=base, source={"input_ids": prompts(2, 2)})
    for given in (plan, SweepPlan.from_json(plan.to_json())):
        with pytest.raises(SweepError, match="runs that differ from another position on"):
            other.run(plan=given)


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"worlds": 3}', "null"])
def test_what_is_no_plan_is_said_to_be_none(damage: str) -> None:
    with pytest.raises(SweepError, match="no plan of a sweep"):
        SweepPlan.from_json(damage)


def test_a_plan_whose_parts_do_not_agree_is_refused() -> None:
    plain = json.loads(path_of("heads_and_mlps").read_text("utf-8"))
    plain["compiled"]["order"] = plain["compiled"]["order"][1:]
    with pytest.raises(SweepError, match="the order has every cell once"):
        SweepPlan.from_json(json.dumps(plain))
    plain = json.loads(path_of("heads_and_mlps").read_text("utf-8"))
    del plain["compiled"]["programs"][0]["steps"][3]
    with pytest.raises(SweepError, match=r"memory of every step|the steps are what is counted"):
        SweepPlan.from_json(json.dumps(plain))


def test_seconds_are_there_once_something_was_timed() -> None:
    captured = model(seed=9)
    sweep = sweep_over(captured)
    assert sweep.plan().seconds is None
    sweep.run()
    assert sweep.plan().seconds is not None
