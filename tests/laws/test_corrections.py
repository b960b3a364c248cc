"""Statements that stood in the documentation and do not hold, each with what says so."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

import conewise as cw
from conewise.errors import TheoryError
from conewise.paper.theory import (
    batched_cost,
    best_width,
    isolated_cost,
    layered_ratio,
    reverse_cost,
    saturating_worlds,
    speculation,
    stack_launches,
    wallclock_ceiling,
    wallclock_ratio,
)
from conewise.paper.theory.grafts import GraftAt


def test_the_product_along_an_edge_decides_and_not_that_an_operation_is_not_linear() -> None:
    """S = 2a, t = tanh(b), loss = s·t: the product towards s reads t alone."""
    graph = cw.Graph()
    graph.source("a", 0.5)
    graph.source("b", 0.25)
    graph.node("s", cw.ops.scale(2.0), ["a"])
    graph.node("t", cw.ops.tanh, ["b"])
    graph.node("loss", cw.ops.mul, ["s", "t"])
    assert reverse_cost(graph, ["s"], "loss", "a").stale_backward == (0,)
    assert sum(reverse_cost(graph, ["s"], "loss", "b").stale_backward) > 0
    assert sum(reverse_cost(graph, ["t"], "loss", "a").stale_backward) > 0


def test_cones_that_are_not_nested_leave_more_to_be_saved() -> None:
    """On a grid of sites with a node for each row and each column, the order of worlds decides."""
    graph, side = cw.Graph(), 8
    graph.source("x")
    grid = [[graph.node(f"s{i}.{j}", lambda x: x, ["x"]) for j in range(side)] for i in range(side)]
    for i in range(side):
        graph.node(f"row{i}", lambda *_: 0, grid[i])
        graph.node(f"column{i}", lambda *_: 0, [row[i] for row in grid])
    sites = [site for row in grid for site in row]
    enough = saturating_worlds(1, 1, Fraction(1, 8))
    work, launches, single = (stack_launches(graph, sites, at_once) for at_once in (1, enough, len(sites)))
    assert (enough, work, launches, single) == (8, 128, 72, 16)
    assert launches - single == 56 > work / 8


def test_the_best_width_may_be_one_and_then_no_world_is_in_vain() -> None:
    right, wide = Fraction(2, 5), 2
    assert best_width(right, 1) == 1
    assert right**wide * (1 + (wide + 1)) * (1 - right) <= 1 - right**wide, "what the first W ≥ 2 satisfies"
    found = speculation(7, 1, right)
    assert found.in_vain == 0
    assert found.worlds - found.stacks - 7 == -7


def test_comparable_edges_may_cost_as_much_in_a_batch() -> None:
    """U → a and u → v → z: the edge (v, z) lies below u, and disturbs nothing that (u, a) does."""
    graph = cw.Graph()
    graph.source("x")
    for name, read in (("u", "x"), ("a", "u"), ("v", "u"), ("z", "v")):
        graph.node(name, lambda x: x, [read])
    grafts = [GraftAt(("u", "a"), 2), GraftAt(("v", "z"), 2)]
    assert "v" in graph.cone("u")
    assert batched_cost(graph, grafts) == isolated_cost(graph, grafts) == 6


@pytest.mark.parametrize("fixed", [0, 3, 1000])
def test_without_a_cost_per_node_the_ratio_is_its_limit_from_no_side(fixed: int) -> None:
    """With a = 0 full runs and patches cost alike, whatever c is; the functions want a > 0."""
    cones, nodes, beta = [8, 4, 0], 12, 1
    assert Fraction(len(cones) * (beta * nodes + fixed), sum(beta * nodes + fixed for _ in cones)) == 1
    with pytest.raises(TheoryError, match="a is 0"):
        wallclock_ratio(cones, nodes, 0, beta, fixed)
    with pytest.raises(TheoryError, match="a is 0"):
        wallclock_ceiling(0, beta)
    sides = [wallclock_ratio(cones, nodes, Fraction(1, 100), beta, cost) for cost in (0, 1000)]
    assert sides[0] > wallclock_ceiling(Fraction(1, 100), beta) > sides[1]


@pytest.mark.parametrize("q", [0, 1, 2])
def test_a_slowly_varying_factor_makes_the_limit_slow(q: int) -> None:
    """For w_j = j^q·log j the distance from the limit falls as 1/log L, and not as 1/L."""
    depth = 20_000
    found = layered_ratio([float(j**q) * math.log(j) + (j == 1) for j in range(1, depth + 1)])
    limit, log = (q + 2) / (q + 1), math.log(depth)
    expected = limit * (1 - 1 / ((q + 1) * (q + 2) * (log - 1 / (q + 2))))
    assert float(found) == pytest.approx(expected, rel=5 / depth)
    assert limit - float(found) > limit / (12 * log)
