"""A compiled sweep walks its graph while it is planned, and not while it runs: β, counted."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

import conewise as cw
from conewise.model import Model
from conewise.paper import theory
from conewise.paper.experiments.result import Scan, scanning
from conewise.sweeps.sweep import Sweep
from tests.sweeps.small import HEADS, LAYERS, LENGTH, model, prompts, sweep_over

PACKAGE = str(Path(cw.__file__).parent)


@pytest.fixture(scope="module")
def captured() -> Model:
    return model()


def nodes_of(sweep: Sweep) -> list[str]:
    """The node that each world patches."""
    return [sweep.model.locate(place).node for cell in sweep.cells for place in cell.places]


def test_a_plan_evaluates_every_cone_and_launches_their_union(captured: Model) -> None:
    sweep = sweep_over(captured)
    graph, sites, demand = captured.graph, nodes_of(sweep), sweep.targets()
    plan = sweep.plan(evaluator="wavefront")
    assert plan.compiled is not None
    union = set().union(*(theory.stale(graph, site, demand) for site in sites))

    assert plan.node_evaluations == theory.sweep_cost(graph, sites, demand)
    assert {node for node, _ in plan.compiled.steps} == union
    assert theory.stack_launches(graph, sites, len(sites), demand) == len(plan.compiled.steps)
    assert len(union) >= plan.launches
    cones, nodes = theory.sweep_costs(graph, sites, demand), theory.full_cost(graph, demand)
    in_launches = theory.compiled_ratio(cones, nodes, 1, 0, launch=1, launches=plan.launches)
    assert in_launches == len(sites) * nodes / Fraction(plan.launches)


def test_a_compiled_sweep_that_runs_again_follows_no_edge_of_the_graph(captured: Model) -> None:
    sweep = sweep_over(captured)
    first = sweep.run(evaluator="wavefront")
    with scanning(captured.graph) as scan:
        again = sweep.run(evaluator="wavefront")
        assert scan == Scan()
        sweep.run(evaluator="serial")
    assert again.ledger.node_evaluations == first.ledger.node_evaluations
    # One world after another walks what is stale in each: the demands of the interpreter.
    assert scan.up.nodes.total() >= again.ledger.node_evaluations


def test_a_second_run_does_as_much_however_large_the_rest_of_the_network_is() -> None:
    """What β would be paid for, counted in calls: layers above the swept one add none."""
    entered = []
    for layers in (2, 4):
        sweep = sweep_over(model(layers=layers), cw.sites("mlp_out", layer=layers - 1))
        sweep.run(evaluator="wavefront")
        entered.append(calls(partial(sweep.run, evaluator="wavefront")))
    assert entered[0].total() > 100
    assert entered[0] == entered[1]


def calls(task: Callable[[], object]) -> Counter[str]:
    """How often each function of the package is entered, but for those that read the weights."""
    entered: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and PACKAGE in code.co_filename and not code.co_filename.endswith("weights.py"):
            entered[code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        task()
    finally:
        sys.setprofile(before)
    del entered["writes_to"]
    return entered


def test_a_second_baseline_of_the_shape_is_not_planned_again(captured: Model) -> None:
    bases = [captured.run(input_ids=prompts(seed, 2)) for seed in (3, 4, 5)]
    sources = [captured.run(input_ids=prompts(seed, 2)) for seed in (6, 7, 8)]
    fresh = model(seed=5)
    runs = [fresh.run(input_ids=prompts(seed, 2)) for seed in (3, 6)]
    with scanning(fresh.graph) as scan:
        sweep_over(fresh, base=runs[0], source=runs[1]).run(evaluator="wavefront")
    assert scan != Scan()
    sweep_over(captured, base=bases[:1], source=sources[:1]).run(evaluator="wavefront")
    with scanning(captured.graph) as scan:
        sweep_over(captured, base=bases, source=sources).run(evaluator="wavefront")
        sweep_over(captured, base=bases[2], source=sources[0]).run(evaluator="wavefront")
    assert scan == Scan()


def test_planning_walks_as_far_for_few_worlds_as_for_many(captured: Model) -> None:
    """Sets of worlds are bit masks, so one walk serves them all."""
    few = sweep_over(captured, cw.sites("z", layer=0, head=0, pos=":"))
    many = sweep_over(captured, cw.sites("z", layer=":", head=":", pos=":"))
    assert (len(few.cells), len(many.cells)) == (LENGTH, LAYERS * HEADS * LENGTH)
    walked = []
    for sweep in (few, many):
        with scanning(captured.graph) as scan:
            sweep.plan(evaluator="wavefront")
        walked.append(scan.up)
    assert walked[0].nodes == walked[1].nodes
    assert max(walked[0].nodes.values()) < LENGTH * LAYERS
