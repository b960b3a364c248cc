"""Weights: sums are exact, and what is handed out as a float is the float nearest to the true value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conewise as cw
from conewise.errors import TheoryError
from conewise.paper import theory
from tests.laws import oracle
from tests.laws.cost_scenes import line, lopsided
from tests.laws.scenes import Scene, scenes

Weight = int | float | Fraction
ANY: st.SearchStrategy[Weight] = st.one_of(
    st.floats(0, 10, allow_subnormal=False),
    st.sampled_from([0, 0.1, 0.3, 1e16, 1e-16, Fraction(1, 3)]),
    st.integers(0, 9),
    st.fractions(0, 9, max_denominator=7),
)


def weighed(scene: Scene, data: st.DataObject) -> tuple[cw.Graph, dict[str, Weight], dict[str, Fraction]]:
    prices = data.draw(st.fixed_dictionaries(dict.fromkeys(scene.computed, ANY)))
    return scene.graph(), prices, {site: Fraction(weight) for site, weight in prices.items()}


def handed_out(value: Fraction, prices: dict[str, Weight]) -> Weight:
    """What stands for a true value: itself, or the nearest float where a weight is a float."""
    return float(value) if any(isinstance(weight, float) for weight in prices.values()) else value


@given(scenes(), st.data())
def test_each_sum_and_ratio_is_the_float_nearest_to_the_true_one(scene: Scene, data: st.DataObject) -> None:
    graph, prices, true = weighed(scene, data)
    reads = oracle.wiring(graph)
    cones = [sum((true[node] for node in oracle.cone(reads, [site])), Fraction(0)) for site in scene.patch]
    full = sum(true.values(), Fraction(0))

    assert theory.sweep_costs(graph, scene.patch, weights=prices) == tuple(
        handed_out(cone, prices) for cone in cones
    )
    assert theory.sweep_cost(graph, scene.patch, weights=prices) == handed_out(
        sum(cones, Fraction(0)), prices
    )
    assert theory.full_cost(graph, weights=prices) == handed_out(full, prices)
    if sum(cones):
        rho = len(cones) * full / sum(cones, Fraction(0))
        assert theory.sweep_ratio(graph, scene.patch, weights=prices) == handed_out(rho, prices)


@given(scenes(), st.data())
def test_what_holds_of_true_values_holds_of_what_is_handed_out(scene: Scene, data: st.DataObject) -> None:
    """Rounding keeps order: 1 ≤ ρ_train ≤ ρ, and batched ≤ total ≤ isolated."""
    graph, prices, _ = weighed(scene, data)
    patched = theory.patched_cost(graph, scene.patch, scene.demand, weights=prices)
    assert patched.batched <= patched.total <= patched.isolated
    restored = theory.restored_cost(graph, scene.patch, scene.demand, weights=prices)
    assert restored.forked <= restored.total
    if sum(prices[site] for site in scene.patch if site in prices):
        training = theory.training_ratio(graph, scene.patch, weights=prices)
        assert training >= 1
        if theory.sweep_cost(graph, scene.patch, weights=prices):
            assert training <= theory.sweep_ratio(graph, scene.patch, weights=prices)


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=8), st.floats(0, 1e9))
def test_the_training_ratio_of_a_profile_of_floats_is_never_below_1(
    profile: list[float], terminal: float
) -> None:
    assert theory.training_ratio(profile, terminal=terminal) == 1
    assert theory.training_ratio(profile, local=[weight / 3 for weight in profile], terminal=terminal) >= 1


def test_a_sum_of_rounded_sums_is_not_what_is_handed_out() -> None:
    graph = line(nodes=3)
    prices: dict[str, Weight] = {"n1": 0, "n2": 2.0**53, "n3": 1}
    assert theory.sweep_costs(graph, ["n1", "n2"], weights=prices) == (2.0**53, 1.0)
    assert 2.0**53 + 1.0 == 2.0**53
    assert theory.sweep_cost(graph, ["n1", "n2"], weights=prices) == 2.0**53 + 2


@pytest.mark.parametrize("unit", [2.0**1000, 1.0, 2.0**-1060])
@pytest.mark.parametrize("profile", [[1, 2, 3], [7, 1, 1, 5]])
def test_ratios_do_not_depend_on_the_unit(profile: Sequence[int], unit: float) -> None:
    scaled = [weight * unit for weight in profile]
    assert theory.sweep_ratio(scaled, terminal=unit) == float(theory.sweep_ratio(profile, terminal=1))
    assert theory.training_ratio(scaled, local=unit) == float(theory.training_ratio(profile, local=1))
    assert theory.skip_ratio(scaled, 2, 3, terminal=unit) == float(
        theory.skip_ratio(profile, 2, 3, terminal=1)
    )
    assert theory.karamata_index(scaled).q.value == pytest.approx(theory.karamata_index(profile).q.value)
    graph = line(nodes=len(profile))
    sites = graph.computed[:-1]
    weights = dict(zip(graph.computed, scaled, strict=True))
    whole = dict(zip(graph.computed, profile, strict=True))
    assert theory.sweep_ratio(graph, sites, weights=weights) == float(
        theory.sweep_ratio(graph, sites, weights=whole)
    )


POSITIVE = st.floats(0, exclude_min=True, allow_infinity=False)
SHARE, RATIO = st.floats(0, 1), st.floats(1, exclude_min=True, allow_infinity=False)
FORMS: dict[str, tuple[Callable[..., Any], tuple[st.SearchStrategy[float], ...]]] = {
    "sweep_ratio": (lambda a, b, c: theory.sweep_ratio([a, b, c], terminal=a), (POSITIVE,) * 3),
    "mean_fraction": (lambda a, b: theory.mean_fraction([a, b]), (POSITIVE,) * 2),
    "downstream_fractions": (lambda a, b: theory.downstream_fractions([a, b])[0], (POSITIVE,) * 2),
    "training_ratio": (lambda a, b: theory.training_ratio([a, b], local=min(a, b)), (POSITIVE,) * 2),
    "skip_ratio": (lambda a, b, c: theory.skip_ratio([a, b, c], 2, 3), (POSITIVE,) * 3),
    "skip_training_ratio": (lambda a, b, c: theory.skip_training_ratio([a, b, c], 2, 3), (POSITIVE,) * 3),
    "skip_limits": (lambda a: theory.skip_limits(a, 3)[1], (SHARE,)),
    "limit_ratio": (theory.limit_ratio, (POSITIVE,)),
    "limit_ratio, input-heavy": (lambda q: theory.limit_ratio(q, "input-heavy"), (POSITIVE,)),
    "effective_index": (lambda rho: theory.effective_index(rho)[0], (RATIO,)),
    "dense_joint_ratio": (theory.dense_joint_ratio, (RATIO, POSITIVE)),
    "wallclock_ratio": (
        lambda a, b, c: theory.wallclock_ratio([min(a, b), max(a, b)], max(a, b), c, a, b),
        (POSITIVE,) * 3,
    ),
    "wallclock_ceiling": (theory.wallclock_ceiling, (POSITIVE, POSITIVE, SHARE)),
    "batched_cost": (
        lambda a, b: theory.batched_cost(line(nodes=2), [("n1", a), ("n2", b)]),
        (POSITIVE,) * 2,
    ),
}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40)
@given(data=st.data())
def test_floats_give_the_float_nearest_to_the_exact_answer(form: str, data: st.DataObject) -> None:
    """Of any size, from 5e-324 to 1e308; what no float can hold is refused."""
    function, strategies = FORMS[form]
    floats = [data.draw(strategy) for strategy in strategies]
    exact = function(*map(Fraction, floats))
    assert isinstance(exact, int | Fraction)
    try:
        nearest = float(exact)
    except OverflowError:
        with pytest.raises(TheoryError, match=r"floats end at 10\^308"):
            function(*floats)
    else:
        assert function(*floats) == nearest


def test_a_sum_that_no_float_can_hold_is_refused_and_its_ratio_is_not() -> None:
    graph = line(nodes=3)
    huge = dict.fromkeys(graph.computed, 1e308)
    with pytest.raises(TheoryError, match=r"the full cost is about 10\^308, and floats end at 10\^308"):
        theory.full_cost(graph, weights=huge)
    assert theory.full_cost(graph, weights=dict.fromkeys(graph.computed, 10**400)) == 3 * 10**400
    assert theory.sweep_ratio(graph, ["n1", "n2"], weights=huge) == 2.0
    with pytest.raises(TheoryError, match=r"the ratio is about 10\^629, and floats end at 10\^308"):
        theory.sweep_ratio(graph, ["n2"], weights=huge | {"n3": 1e-320})


def test_the_numbers_of_numpy_are_numbers() -> None:
    graph = line(nodes=3)
    nine, large, half, order = map(
        _untyped, (np.int64(9), np.int64(2**40), np.float32(0.5), np.array([1, 0]))
    )
    assert theory.skip_ratio(nine, 2, 4) == theory.skip_ratio(9, 2, 4)
    assert theory.training_ratio(np.array([2, 2]), local=np.array([1, 2])) == Fraction(8, 7)
    assert theory.transformer_cone(large, large, 1) == 10 + (2**40 - 1) * (7 * 2**40 + 15)
    assert theory.full_cost(graph, weights=dict.fromkeys(graph.computed, half)) == 1.5
    assert theory.overcount(graph, [("n1", nine), ("n2", 3)], order) == 3


def _untyped(value: Any) -> Any:
    """Where the signatures say int or float, the numbers of numpy will do."""
    return value


def test_a_float_among_the_weights_makes_floats_wherever_it_stands() -> None:
    """Be it at a source, or at a node of a block that is computed once; and each weight is looked at."""
    graph = line(nodes=2)
    weights: dict[str, Any] = {"n1": 1, "n2": 2}
    for cost in (theory.full_cost(graph, weights=weights | {"x": 0.5}), theory.GraftAt("n1", *LATE).reach):
        assert type(cost) is float
    for wrong in (-1, "two"):
        with pytest.raises(TheoryError, match="the weight of 'x' is"):
            theory.full_cost(graph, weights=weights | {"x": wrong})
        with pytest.raises(TheoryError, match="the weight of 'p' is"):
            assert theory.GraftAt("n1", lopsided(), LATE[1] | {"p": wrong}).reach


LATE: tuple[cw.Block, dict[str, Any]] = lopsided(), {"prepared": 0.5, "first": 1, "last": 1}


def test_the_nodes_of_a_block_are_weighed_too() -> None:
    prices: dict[str, Weight] = {"prepared": 10, "first": 0.5, "last": Fraction(1, 4)}
    graft = theory.GraftAt("n1", lopsided(), prices)
    assert (graft.fresh, graft.reach) == (10.75, 0.75)
    graph, weights = line(nodes=3), {"n1": 1, "n2": 2, "n3": 4}
    assert theory.isolated_cost(graph, [graft], weights=weights) == 6 + 10.75
    with pytest.raises(TheoryError, match="those of the block at 'n1' have none"):
        theory.isolated_cost(graph, [("n1", lopsided())], weights=weights)
    for wrong in ({"first": 1, "last": 1}, prices | {"third": 1}):
        with pytest.raises(TheoryError, match=r"do not agree about '(prepared|third)'"):
            assert theory.GraftAt("n1", lopsided(), wrong).fresh
    with pytest.raises(TheoryError, match="is a number, and `weights` are for the nodes of a block"):
        assert theory.GraftAt("n1", 3, prices).fresh
