"""The laws of changes that stay: rules, edges and definitions, singly and in sequences.

What the theory predicts from the graph alone is what the engine's ledger shows, and what the naive
engine finds; `change_mutants.py` holds wrong formulas that these laws refute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conewise as cw
from conewise.errors import TheoryError
from conewise.paper import theory
from conewise.paper.theory import ChangeAt
from tests.laws import change_mutants as mutants
from tests.laws.change_scenes import (
    ChangeScene,
    change_scenes,
    changed_batch,
    changed_bills,
    naive_bills,
)
from tests.laws.cost_scenes import Weight, line, patched_bills, weights
from tests.laws.refuting import is_refuted
from tests.laws.scenes import Scene, fresh_rule, scenes

CALLED = 3
"""What a source costs that a function patches, where there are prices."""


@settings(max_examples=40)
@given(scenes())
def test_a_redefinition_costs_one_more_than_its_cone(scene: Scene) -> None:
    for site in scene.computed:
        for kind in ("rule", "redefine", "function"):
            graph = scene.graph()
            made = ChangeScene(scene, (ChangeAt(site, kind),), (0,))
            predicted = theory.disturbed(graph, made.changes)
            assert predicted == {site, *graph.cone(site)}
            assert changed_bills(made, (0,), None) == [1 + len(graph.cone(site))]
            wanted = {site, *graph.cone(site)} & set(graph.support(scene.demand))
            assert theory.disturbed(graph, made.changes[0], scene.demand) == wanted
            assert changed_bills(made, (0,), scene.demand) == [len(wanted)]


@settings(max_examples=40)
@given(scenes().filter(lambda scene: bool(scene.edges)))
def test_a_patched_edge_costs_one_more_than_the_cone_of_its_reader(scene: Scene) -> None:
    for edge in scene.edges:
        for kind in ("value", "function"):
            graph, change = scene.graph(), ChangeAt(edge, kind)
            assert theory.disturbed(graph, change) == {edge[1], *graph.cone(edge[1])}
            bills = changed_bills(ChangeScene(scene, (change,), (0,)), (0,), None)
            assert bills == [1 + len(graph.cone(edge[1]))]


@given(st.data(), change_scenes(), st.booleans(), st.booleans())
def test_changes_that_stay_cost_what_the_closed_form_says(
    data: st.DataObject, made: ChangeScene, is_full: bool, in_fork: bool
) -> None:
    """All kinds, in any order, at one place or far apart, redefinitions that read elsewhere included."""
    graph = made.scene.graph()
    prices: dict[str, Weight] = data.draw(weights(made.scene)) | dict.fromkeys(made.scene.sources, CALLED)
    demand = None if is_full else made.scene.demand
    if not made.is_possible(made.order):
        with pytest.raises(TheoryError):
            theory.changed_cost(graph, made.changes, order=made.order)
        return
    predicted = theory.changed_cost(graph, made.changes, demand, order=made.order, weights=prices)
    counted = theory.changed_cost(graph, made.changes, demand, order=made.order)

    assert list(predicted.costs) == changed_bills(made, made.order, demand, prices, in_fork=in_fork)
    assert list(counted.costs) == naive_bills(made, made.order, demand)
    assert predicted.total == sum(predicted.costs)
    assert predicted.batched <= predicted.total
    if not made.is_rewiring:
        assert predicted.isolated is not None
        assert predicted.total <= predicted.isolated


@settings(max_examples=60)
@given(change_scenes(), st.booleans())
def test_changes_alone_and_together(made: ChangeScene, is_full: bool) -> None:
    """The isolated sum, and one demand after all changes: the same sites in every order that is possible."""
    demand = None if is_full else made.scene.demand
    orders = made.possible_orders()
    if made.order not in orders:
        return
    graph, alone = made.scene.graph(), [(k,) for k in range(len(made.changes))]
    predicted = theory.changed_cost(graph, made.changes, demand, order=made.order)

    if all(made.is_possible(one) for one in alone):
        assert predicted.isolated == sum(changed_bills(made, one, demand)[0] for one in alone)
    else:
        assert predicted.isolated is None
    sites = theory.disturbed(graph, [made.changes[k] for k in made.order], demand)
    assert predicted.batched == len(sites)
    for order in orders:
        assert Counter(changed_batch(made, order, demand)) == Counter(sites)


@settings(max_examples=60)
@given(change_scenes(rewiring=False), st.booleans())
def test_changes_are_cheapest_downstream_first(made: ChangeScene, is_full: bool) -> None:
    graph, demand = made.scene.graph(), None if is_full else made.scene.demand
    extremes = theory.change_extremes(graph, made.changes, demand)
    spent = {order: sum(changed_bills(made, order, demand)) for order in made.possible_orders()}

    assert (extremes.least, extremes.most) == (min(spent.values()), max(spent.values()))
    assert spent[extremes.best] == extremes.least
    assert spent[extremes.worst] == extremes.most
    assert extremes.most == theory.changed_cost(graph, made.changes, demand).isolated
    assert extremes.best == theory.best_change_order(graph, made.changes)
    if all(change.kind != "value" for change in made.changes) and len(made.changes) == len(
        {change.at for change in made.changes}
    ):
        assert extremes.least == extremes.most


@settings(max_examples=50)
@given(st.data(), scenes(), st.booleans())
def test_values_alone_cost_what_patches_cost(data: st.DataObject, scene: Scene, is_full: bool) -> None:
    graph, prices = scene.graph(), data.draw(weights(scene))
    demand = None if is_full else scene.demand
    order = data.draw(st.permutations(range(len(scene.patch))))
    patched = theory.patched_cost(graph, scene.patch, demand, order=order, weights=prices)
    changes = [ChangeAt(site, "value") for site in scene.patch]
    changed = theory.changed_cost(graph, changes, demand, order=order, weights=prices)

    assert changed.costs == patched.costs
    assert (changed.isolated, changed.batched) == (patched.isolated, patched.batched)
    assert list(changed.costs) == patched_bills(graph, [scene.patch[k] for k in order], demand, prices)
    assert theory.disturbed(graph, changes, demand) == theory.stale(graph, scene.patch, demand)


# -- that a law can fail ------------------------------------------------------------------------


def _differs(mutant: Callable[[cw.Graph, ChangeScene], float], made: ChangeScene) -> bool:
    if not made.is_possible(made.order):
        return False
    bills = changed_bills(made, made.order, made.scene.demand)
    return mutant(made.scene.graph(), made) != sum(bills)


@pytest.mark.parametrize("mutant", mutants.ALL)
def test_a_wrong_formula_for_changes_is_refuted(mutant: Callable[[cw.Graph, ChangeScene], float]) -> None:
    assert is_refuted(change_scenes(), lambda made: _differs(mutant, made), examples=200), mutant.__name__


# -- by example ---------------------------------------------------------------------------------


def test_rules_cost_the_same_in_every_order_and_values_do_not() -> None:
    graph, sites = line(nodes=10), ("n2", "n5", "n8")
    rules, values = ([ChangeAt(site, kind) for site in sites] for kind in ("rule", "value"))
    assert theory.changed_cost(graph, rules).costs == (9, 6, 3)
    assert theory.changed_cost(graph, rules, order=(2, 1, 0)).costs == (3, 6, 9)
    assert theory.changed_cost(graph, rules).batched == 9
    assert theory.changed_cost(graph, values, "n10", order=(2, 1, 0)).costs == (2, 0, 0)


def test_a_redefinition_that_reads_elsewhere_computes_what_was_out_of_sight() -> None:
    """Here y reads a; b was patched while nobody looked. Reading b instead computes b's cone, and y."""
    graph = cw.Graph()
    graph.source("x", 1)
    for site, reads in (("a", "x"), ("b1", "x"), ("b2", "b1"), ("y", "a")):
        graph.node(site, fresh_rule(), [reads])
    changes = [ChangeAt("b1", "rule"), ChangeAt("y", "redefine", inputs=("b2",))]
    assert theory.changed_cost(graph, changes, "y").costs == (0, 3)
    assert theory.changed_cost(graph, changes).costs == (2, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (ChangeAt("x", "rule"), "'x', a source, which has no rule"),
        (ChangeAt(("n1", "n2"), "rule"), "an edge has no rule"),
        (ChangeAt("n1", "value", inputs=("x",)), "only that changes what is read"),
        (ChangeAt("n1", "redefine", inputs=("n3",)), "cannot read 'n3', which depends on it"),
        (ChangeAt("n1", "other"), "the kind of change 0 is 'other'"),  # type: ignore[arg-type]  # what is tested
        (("n1", "value"), "write ChangeAt"),
    ],
)
def test_a_change_that_cannot_be_is_refused(change: ChangeAt, message: str) -> None:
    with pytest.raises(TheoryError, match=message):
        theory.changed_cost(line(nodes=4), [change])


def test_each_place_is_changed_once() -> None:
    graph = line(nodes=4)
    twice = [ChangeAt("n1", "value"), ChangeAt("n1", "rule")]
    with pytest.raises(TheoryError, match="change 1 is a second one at 'n1'"):
        theory.changed_cost(graph, twice)
    assert theory.changed_cost(graph, [ChangeAt("n1", "value"), ChangeAt("n1", "redefine")]).costs == (3, 0)
    with pytest.raises(TheoryError, match="no order is the best"):
        theory.best_change_order(graph, [ChangeAt("n3", "redefine", inputs=("x",))])


def test_a_source_that_a_function_patches_is_computed_and_needs_a_weight() -> None:
    graph = line(nodes=2)
    change = ChangeAt("x", "function")
    assert theory.disturbed(graph, change) == {"x", "n1", "n2"}
    with pytest.raises(TheoryError, match="no entry for the source 'x'"):
        theory.changed_cost(graph, [change], weights={"n1": 1, "n2": 1})
