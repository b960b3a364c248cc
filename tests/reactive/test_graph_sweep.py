"""Sweeps of hand-built graphs: the plan of the theory, the ledger of the engine, and values by full runs."""

from __future__ import annotations

import random

import pytest

import conewise as cw
from conewise.errors import GraphError, WorldError


def graph_of(seed: int, size: int = 40) -> cw.Graph:
    draw, graph = random.Random(seed), cw.Graph()
    names = [graph.source("x", 2.0), graph.source("y", 3.0)]
    for number in range(size):
        reads = draw.sample(names[-8:], min(len(names), draw.randint(1, 3)))
        factor = draw.random()
        names.append(graph.node(f"n{number}", lambda *v, f=factor: f * sum(v) + 1.0, reads))
    return graph


@pytest.mark.parametrize("seed", range(5))
def test_a_sweep_of_a_graph_costs_what_its_plan_says_and_changes_what_full_runs_change(seed: int) -> None:
    graph = graph_of(seed)
    sites: list[str | tuple[str, ...]] = [*graph.computed[::3], ("n1", "n5")]
    job = cw.sweep(graph, sites, "n39", value=lambda there: there + 1)
    result = job.run()
    assert result.ledger["recomputed"] == job.plan().node_evaluations
    assert result.plan.full == len(graph.upstream("n39")) + 1 - len(
        [s for s in graph.sources if s in graph.upstream("n39")]
    )
    for patch in sites:
        fresh, before = cw.World(graph), cw.World(graph)
        for site in patch if isinstance(patch, tuple) else (patch,):
            fresh.patch(site, before.demand(site) + 1)
        assert result[patch] == fresh.demand("n39")
    assert result.base == cw.World(graph).demand("n39")


def test_values_come_from_a_mapping_a_world_or_one_for_all() -> None:
    graph = graph_of(1)
    other = cw.World(graph)
    other.set("x", 5.0)
    by_world = cw.sweep(graph, ["n3"], "n39", value=other).run()
    by_mapping = cw.sweep(graph, ["n3"], "n39", value={"n3": other.demand("n3")}).run()
    assert by_world["n3"] == by_mapping["n3"]
    assert cw.sweep(graph, "n3", "n39", value=other.demand("n3")).run()["n3"] == by_world["n3"]
    assert str(by_world.plan).startswith("1 worlds: ")
    with pytest.raises(WorldError, match="no value for 'n3'"):
        cw.sweep(graph, ["n3"], "n39", value={}).run()
    with pytest.raises(GraphError):
        cw.sweep(graph, ["nothing"], "n39", value=0)
    with pytest.raises(WorldError, match="another graph"):
        cw.sweep(graph, ["n3"], "n39", value=0, base=cw.World(graph_of(2)))
