"""Stacks of worlds in closed form: nested cones, chains, branches; depth by depth is not the best order."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conewise.errors import TheoryError
from conewise.paper import theory
from conewise.paper.experiments.sweeps import fan
from tests.laws.cost_scenes import line


@settings(max_examples=30)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.integers(1, 5))
def test_nested_cones_launch_least_from_the_largest_to_the_smallest(places: list[int], B: int) -> None:
    graph = line(nodes=9)
    sites = [f"n{place}" for place in sorted(places)]
    found = [Fraction(theory.stack_launches(graph, order, B)) for order in set(permutations(sites))]
    launches = theory.stack_launches(graph, sites, B)
    assert launches == min(found)
    cones = [9 - place for place in sorted(places)]
    assert launches == sum(cones[::B])
    assert Fraction(sum(cones), B) <= launches <= Fraction(sum(cones), B) + max(cones)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.fractions(0, 50, max_denominator=8),
    st.fractions(Fraction(1, 50), 1, max_denominator=50),
)
def test_enough_worlds_at_once_depend_on_the_launch_alone(
    places: list[int], launch: Fraction, share: Fraction
) -> None:
    B = theory.saturating_worlds(launch, 1, share)
    cones = sorted((10 - place for place in places), reverse=True)
    work, union = sum(cones), max(cones)
    assert launch * (sum(cones[::B]) - union) <= share * work
    assert theory.saturating_worlds(20, 2, Fraction(1, 10)) == 100


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), min_size=2, max_size=8))
def test_what_a_chain_holds_in_closed_form(nodes: list[tuple[int, int]]) -> None:
    """At node j, all worlds that began above it, twice: what it reads and what it makes."""
    graph = line(nodes=len(nodes))
    sizes = {f"n{at}": size for at, (size, _) in enumerate(nodes, 1)}
    sites = [f"n{at}" for at, (_, worlds) in enumerate(nodes[:-1], 1) for _ in range(worlds)]
    began = [sum(worlds for _, worlds in nodes[:at]) for at in range(len(nodes))]
    last = f"n{len(nodes)}"
    found = theory.stack_peak(graph, sites, None, last, sizes)
    assert found.peak == found.bound
    # A site inside of the chain is given in its own worlds, beside those that compute it.
    held = [
        (began[at] + (nodes[at][1] if at < len(nodes) - 1 else 0)) * nodes[at][0]
        + began[at] * nodes[at - 1][0]
        for at in range(1, len(nodes))
        if began[at]
    ]
    assert found.peak == max(held, default=0)


@given(st.integers(2, 6), st.integers(2, 50), st.integers(1, 4))
def test_depth_by_depth_holds_many_times_what_branch_by_branch_does(n: int, wide: int, worlds: int) -> None:
    """The counter-example: the order of depth holds all wide nodes at once."""
    graph, sizes = fan(n, wide)
    by_depth = [*(f"wide{at}" for at in range(n)), *(f"narrow{at}" for at in range(n)), "sum"]
    by_branch = [name for at in range(n) for name in (f"wide{at}", f"narrow{at}")] + ["sum"]
    sites = ["site"] * worlds
    depth = theory.stack_peak(graph, sites, by_depth, "sum", sizes)
    branch = theory.stack_peak(graph, sites, by_branch, "sum", sizes)
    assert depth.peak == worlds * max(n * wide + 1, n + 1)
    assert branch.peak == worlds * (wide + n)
    assert depth.bound == branch.bound <= branch.peak < depth.peak


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda two: (max(two), min(two))), max_size=5
    )
)
def test_branches_are_best_from_the_greatest_difference_on(branches: list[tuple[int, int]]) -> None:
    def peak(order: tuple[int, ...]) -> int:
        return max(
            (
                branches[at][0] + sum(branches[one][1] for one in order[:place])
                for place, at in enumerate(order)
            ),
            default=0,
        )

    order, most = theory.branch_order(branches)
    assert most == peak(order) == min(map(peak, permutations(range(len(branches)))))


def test_what_no_stack_is_refused() -> None:
    with pytest.raises(TheoryError, match="names each of them once"):
        theory.stack_peak(line(nodes=3), ["n1"], ["n2"])
    with pytest.raises(TheoryError, match="'n3' before 'n2', which it reads"):
        theory.stack_peak(line(nodes=3), ["n1"], ["n3", "n2"])
    with pytest.raises(TheoryError, match="always save something"):
        theory.saturating_worlds(1, 0, 0.1)
    with pytest.raises(TheoryError, match="which is less"):
        theory.branch_order([(1, 2)])
    with pytest.raises(TheoryError, match="`at_once` is 0"):
        theory.stack_launches(line(nodes=3), ["n1"], 0)
