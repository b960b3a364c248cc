"""Sweeps: the finite ratios, their limits, the paper's E4, and what is refused."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conewise as cw
from conewise.errors import TheoryError, UnknownSiteError
from conewise.paper import theory
from tests.laws.cost_scenes import line


def paper_profile(L: int, q: float, *, input_heavy: bool = False) -> list[int]:
    powers = [j**q for j in range(1, L + 1)]
    if input_heavy:
        powers.reverse()
    return [max(1, round(4000 * power / sum(powers))) for power in powers]


@pytest.mark.parametrize(
    ("q", "L", "output_heavy", "input_heavy"),
    [
        (0.0, 320, "2.0057", "2.0057"),
        (0.5, 320, "1.6722", "2.5057"),
        (1.0, 320, "1.5064", "3.0004"),
        (2.0, 320, "1.3471", "3.9247"),
        (1.0, 20, None, "3.1585"),
    ],
)
def test_the_paper_s_table_e4(q: float, L: int, output_heavy: str | None, input_heavy: str) -> None:
    if output_heavy:
        assert f"{float(theory.sweep_ratio(paper_profile(L, q), terminal=1)):.4f}" == output_heavy
    reverse = paper_profile(L, q, input_heavy=True)
    assert f"{float(theory.sweep_ratio(reverse, terminal=1)):.4f}" == input_heavy


def test_a_uniform_profile_has_an_exact_ratio() -> None:
    assert theory.sweep_ratio([1] * 320) == Fraction(640, 319)
    assert theory.sweep_ratio([0.5] * 320) == pytest.approx(640 / 319, rel=1e-15)
    assert isinstance(theory.sweep_ratio([0.5, 1]), float)
    assert theory.sweep_ratio(np.ones(320, dtype=int)) == Fraction(640, 319)


@given(st.lists(st.fractions(min_value=Fraction(1, 9), max_value=9), min_size=2, max_size=9))
def test_the_ratio_is_one_over_the_mean_fraction(profile: list[Fraction]) -> None:
    fractions = theory.downstream_fractions(profile)
    mean = sum(fractions) / len(profile)
    assert theory.mean_fraction(profile) == mean
    assert theory.sweep_ratio(profile) == 1 / Fraction(mean)
    assert theory.sweep_ratio([float(w) for w in profile]) == pytest.approx(float(1 / mean))


def test_the_limits() -> None:
    assert theory.limit_ratio(q=1.0, profile="input-heavy") == 3.0
    assert theory.limit_ratio(0.5) == pytest.approx(5 / 3)
    assert theory.limit_ratio(1) == Fraction(3, 2)
    assert theory.limit_ratio(0) == theory.limit_ratio(0, "input-heavy") == 2


@pytest.mark.parametrize("q", [0, 1, 2, 3])
def test_the_ratio_of_a_power_profile_tends_to_its_limit(q: int) -> None:
    rising = [j**q for j in range(1, 4001)]
    assert theory.sweep_ratio(rising) == pytest.approx(theory.limit_ratio(q), rel=2e-3)
    assert theory.sweep_ratio(rising[::-1]) == pytest.approx(theory.limit_ratio(q, "input-heavy"), rel=2e-3)


@given(st.fractions(min_value=0, max_value=50), st.sampled_from(["output-heavy", "input-heavy"]))
def test_the_effective_index_undoes_the_limit(q: Fraction, profile: Any) -> None:
    index, orientation = theory.effective_index(theory.limit_ratio(q, profile))
    assert index == q
    assert orientation == profile or q == 0


def test_a_demand_and_weights_narrow_the_cost() -> None:
    graph = line(nodes=3)
    graph.node("aside", lambda v: v, ["n1"])
    assert theory.sweep_cost(graph, ["n1", "n2"]) == 3 + 1
    assert theory.sweep_cost(graph, ["n1", "n2"], demand="n3") == 2 + 1
    prices: dict[str, int | float | Fraction] = {"n1": 1, "n2": Fraction(1, 2), "n3": 0.25, "aside": 100}
    assert theory.sweep_cost(graph, ["n1"], "n3", prices) == 0.75
    assert theory.full_cost(graph, "n2", prices) == Fraction(3, 2)
    assert theory.full_cost(graph) == 4


def test_several_sites_in_one_world_are_cut() -> None:
    graph = line(nodes=4)
    assert theory.stale(graph, ["n1", "n3"], "n4") == {"n4"}
    assert theory.sweep_cost(graph, [["n1", "n3"]], "n4") == 1
    assert theory.sweep_cost(graph, ["n1"], "n4") == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: theory.sweep_ratio([]), "the profile is empty"),
        (lambda g: theory.sweep_ratio([1, 0, 2]), "layer 2 of the profile weighs 0"),
        (lambda g: theory.sweep_ratio([1, -1]), "layer 2 of the profile weighs -1"),
        (lambda g: theory.sweep_ratio([1, float("nan")]), "the weight of layer 2 is nan"),
        (lambda g: theory.sweep_ratio(["a"]), "a finite number was expected"),  # type: ignore[list-item]
        (lambda g: theory.sweep_ratio([1]), "recomputes nothing"),
        (lambda g: theory.sweep_ratio([1, 2], ["n1"]), "belong to a graph"),
        (lambda g: theory.sweep_ratio([1, 2], terminal=-1), "`terminal` is -1"),
        (theory.sweep_ratio, "which sites of the graph"),
        (lambda g: theory.sweep_ratio(g, []), "no sites are given"),
        (lambda g: theory.sweep_ratio(g, ["n1"], terminal=1), "belongs to a profile"),
        (lambda g: theory.sweep_ratio(g, ["n3"]), "recomputes nothing"),
        (lambda g: theory.sweep_cost(g, ["n1"], weights={"n1": 1}), "no entry for the computed node 'n2'"),
        (
            lambda g: theory.sweep_cost(g, ["n1"], weights={"n1": 1, "n2": -1, "n3": 1}),
            "the weight of 'n2' is -1; a weight is zero or more",
        ),
        (lambda g: theory.limit_ratio(-0.5), "the index q is -0.5; it is 0 or more"),
        (lambda g: theory.limit_ratio(float("inf")), "the index q is inf"),
        (lambda g: theory.limit_ratio(1, "middle-heavy"), "the profile is"),  # type: ignore[arg-type]
        (lambda g: theory.effective_index(1), "above 1"),
    ],
)
def test_what_is_refused(call: Any, message: str) -> None:
    with pytest.raises(TheoryError, match=message):
        call(line(nodes=3))


def test_a_site_that_is_not_there_is_named() -> None:
    graph = line(nodes=3)
    with pytest.raises(UnknownSiteError, match="no site 'n9'"):
        theory.sweep_ratio(graph, ["n1", "n9"])
    with pytest.raises(UnknownSiteError, match="no site 'm1'"):
        theory.full_cost(graph, weights={"n1": 1, "n2": 1, "n3": 1, "m1": 1})
    assert issubclass(TheoryError, ValueError)
    assert issubclass(TheoryError, cw.ConewiseError)
