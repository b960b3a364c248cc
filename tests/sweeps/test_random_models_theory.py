"""Random models: theory, plan and ledger agree at zero tolerance on edges, stacks, searches and positions."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

import conewise as cw
from conewise.circuits.acdc import search_plan
from conewise.model import Model
from conewise.models.architectures import ARCHITECTURES
from conewise.paper import theory
from conewise.paper.experiments.positions import swept
from conewise.program.foreign import quiet
from conewise.sweeps.planning.planner import facts_of
from tests.circuits.edge_models import readers_of

METRIC = cw.logit_diff(1, 2)
HEADS = {"gpt2": "n_head", "llama": "num_attention_heads", "gpt_neox": "num_attention_heads"}


@dataclass(frozen=True)
class Drawn:
    """A random model of an architecture, captured."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    positions: int
    model: Model

    def run(self, seed: int) -> Any:
        return self.model.run(**ARCHITECTURES[self.name].example(self.positions, seed))


@cache
def drawn(seed: int) -> Drawn:
    chosen = random.Random(seed)
    name = list(HEADS)[seed % len(HEADS)]
    layers, heads, positions = chosen.randint(1, 3), chosen.choice([1, 2, 4]), chosen.randint(2, 5)
    kv_heads = chosen.choice([one for one in (1, 2, 4) if heads % one == 0]) if name == "llama" else heads
    settings = {**ARCHITECTURES[name].settings, HEADS[name]: heads}
    if name == "llama":
        settings["num_key_value_heads"] = kv_heads
    architecture = replace(ARCHITECTURES[name], settings=settings)
    with quiet():
        model = Model(architecture.make(layers, seed), (), architecture.example(positions, seed))
    return Drawn(name, layers, heads, kv_heads, positions, model)


SEEDS = pytest.mark.parametrize("seed", range(3))


@SEEDS
def test_every_edge_of_a_random_model_costs_what_the_theory_says(seed: int) -> None:
    one = drawn(seed)
    sweep = one.model.sweep(one.model.edges(), base=one.run(1), source=one.run(2), metric=METRIC)
    result = sweep.run(evaluator="wavefront", progress=False)
    cost = theory.edge_cost(one.model.graph, readers_of(one.model.components()), sweep.targets())
    assert cost.total == result.plan.node_evaluations == result.ledger.node_evaluations
    assert cost.one_by_one == sweep.plan(evaluator="serial").node_evaluations
    parallel = one.name == "gpt_neox"
    count = theory.edge_count(one.layers, one.heads, one.kv_heads, parallel=parallel)
    assert cost.edges == result.plan.worlds == count


@SEEDS
def test_stacks_of_a_random_model_launch_what_the_theory_says(seed: int) -> None:
    one = drawn(seed)
    heads = cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":")
    sweep = one.model.sweep(heads, base=one.run(1), source=one.run(2), metric=METRIC)
    graph, demand, plan = one.model.graph, sweep.targets(), sweep.plan(evaluator="wavefront")
    assert plan.compiled is not None
    nodes = [one.model.locate(place).node for cell in sweep.cells for place in cell.places]
    ordered = [nodes[cell] for cell in plan.compiled.order]
    result = plan.run(progress=False)
    assert plan.node_evaluations == result.ledger.node_evaluations == theory.sweep_cost(graph, nodes, demand)
    for width in range(1, len(nodes) + 1):
        chunks = [range(first, min(first + width, len(nodes))) for first in range(0, len(nodes), width)]
        launched = sum(
            any(begin < chunk.stop and chunk.start < end for begin, end in worlds)
            for chunk in chunks
            for _, worlds in plan.compiled.steps
        )
        assert theory.stack_launches(graph, ordered, width, demand) == launched


@SEEDS
def test_a_search_of_a_random_model_costs_at_most_what_the_theory_says(seed: int) -> None:
    one = drawn(seed)
    readers = one.model.components().readers
    every = [at for at in range(len(readers) - 1, -1, -1) for _ in range(readers[at].writers)]
    cost = theory.greedy_cost(
        one.model.graph,
        [reader.node for reader in readers],
        every,
        (),
        facts_of(one.model).targets((METRIC,)),
    )
    assert cost.total == search_plan(one.model, METRIC).node_evaluations


@pytest.mark.parametrize(("name", "layers", "positions"), [("gpt2", 2, 4), ("llama", 1, 3), ("bert", 2, 3)])
def test_plan_and_run_compute_the_rows_that_the_theory_says(name: str, layers: int, positions: int) -> None:
    for one in swept(name, layers, positions):
        assert one.predicted == one.planned == one.computed
        assert one.needed <= one.computed
