"""Patches that stay, and patches that are taken away in place, on small graphs."""

from itertools import permutations
from typing import Any

import pytest

import conewise as cw
from conewise.errors import TheoryError, UnknownSiteError
from conewise.paper import theory
from tests.laws.cost_scenes import line
from tests.laws.scenes import Mix


def test_downstream_first_is_best_on_a_chain() -> None:
    graph, patches = line(nodes=10), ["n2", "n5", "n8"]
    upstream_first = theory.patched_cost(graph, patches, "n10")
    assert upstream_first.costs == (8, 5, 2)
    assert upstream_first.total == upstream_first.isolated == 15
    assert upstream_first.batched == 2
    downstream_first = theory.patched_cost(graph, patches, "n10", order=(2, 1, 0))
    assert downstream_first.costs == (2, 0, 0)
    assert downstream_first.shielded == 13
    extremes = theory.patch_extremes(graph, patches, "n10")
    assert (extremes.least, extremes.most) == (2, 15)
    assert extremes.best == theory.best_patch_order(graph, patches) == (2, 1, 0)


def test_when_all_is_demanded_what_lies_between_patches_counts() -> None:
    graph, patches = line(nodes=10), ["n2", "n5", "n8"]
    assert theory.patched_cost(graph, patches, order=(2, 1, 0)).costs == (2, 2, 2)
    assert theory.patched_cost(graph, patches, order=(2, 1, 0)).batched == 6


@pytest.mark.parametrize("order", list(permutations(["n2", "n7", "n4"])))
def test_a_chain_is_restored_for_nothing(order: tuple[str, ...]) -> None:
    """Of ten nodes whose last is demanded; where all are, everything above the next site is computed too."""
    graph = line(nodes=10)
    restored = theory.restored_cost(graph, order, "n10")
    assert restored.costs == tuple(10 - int(site[1:]) for site in order)
    assert restored.surplus == 0
    assert theory.restored_cost(graph, ["n2", "n7"], "n10").costs == (8, 3)
    assert theory.restored_cost(graph, ["n2", "n7"]).costs == (8, 8)
    assert theory.restored_cost(graph, ["n7", "n2"]).costs == (3, 8)


def test_a_restore_that_the_next_patch_does_not_hide_is_paid_for() -> None:
    """Two branches: the restored one is computed again, site and all, and so is the node that joins them."""
    graph = cw.Graph()
    graph.source("x", 1)
    for branch in "ab":
        graph.node(f"{branch}1", Mix(), ["x"])
        graph.node(f"{branch}2", Mix(), [f"{branch}1"])
    graph.node("y", Mix(), ["a2", "b2"])
    restored = theory.restored_cost(graph, ["a1", "b1", "a1"], "y")
    assert restored.costs == (2, 2 + 2, 2 + 2)
    assert (restored.total, restored.forked, restored.surplus, restored.left) == (10, 6, 4, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: theory.patched_cost(g, ["n1", "n1"]), TheoryError, "'n1' is patched twice"),
        (lambda g: theory.patched_cost(g, ["n1"], order=[1]), TheoryError, "is not a permutation"),
        (lambda g: theory.patched_cost(g, ["m"]), UnknownSiteError, "no site 'm'"),
        (lambda g: theory.patch_extremes(g, ["n1"], "m"), UnknownSiteError, "no site 'm'"),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(line(nodes=3))
