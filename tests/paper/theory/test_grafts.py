"""Sequences of grafts: the paper's E7, grafts that meet at one site, and what is refused."""

from fractions import Fraction
from typing import Any

import pytest

import conewise as cw
from conewise.errors import TheoryError, UnknownEdgeError, UnknownSiteError
from conewise.paper import theory
from conewise.paper.theory import GraftAt
from tests.laws.cost_scenes import line, lopsided, straight
from tests.laws.scenes import Mix

SITES = [round(400 * k / 7) for k in range(1, 7)]


@pytest.mark.parametrize("is_edge", [True, False])
@pytest.mark.parametrize(
    ("order", "costs", "overcount"),
    [
        ((0, 1, 2, 3, 4, 5), (363, 306, 249, 191, 134, 77), 0),
        ((5, 4, 3, 2, 1, 0), (77, 154, 231, 309, 386, 463), 300),
        ((2, 3, 0, 5, 4, 1), (249, 191, 403, 77, 154, 386), 140),
    ],
)
def test_the_paper_s_table_e7(
    is_edge: bool, order: tuple[int, ...], costs: tuple[int, ...], overcount: int
) -> None:
    graph = line(nodes=400)
    grafts = [GraftAt((f"n{s}", f"n{s + 1}") if is_edge else f"n{s}", 20) for s in SITES]
    predicted = theory.interleaved_cost(graph, grafts, order)
    assert predicted.costs == costs
    assert predicted.overcount == overcount
    assert predicted.isolated == 1320
    assert predicted.total == 1320 + overcount
    assert theory.batched_cost(graph, grafts) == 463


def test_the_extremes_on_a_chain_are_the_corollary_s() -> None:
    extremes = theory.order_extremes(line(nodes=400), [(f"n{s}", 20) for s in SITES])
    assert (extremes.least, extremes.most, extremes.expected) == (0, 20 * 15, 20 * 15 / 2)
    assert extremes.best == (0, 1, 2, 3, 4, 5)
    assert extremes.worst == (5, 4, 3, 2, 1, 0)


def fan() -> cw.Graph:
    """One site, u, is read by a, b and c, which all feed z."""
    graph = cw.Graph()
    graph.source("x", 1)
    graph.node("u", Mix(), ["x"])
    for reader in "abc":
        graph.node(reader, Mix(), ["u"])
    graph.node("z", Mix(), ["a", "b", "c"])
    return graph


def test_an_edge_graft_leaves_the_other_readers_alone() -> None:
    assert theory.isolated_cost(fan(), [(("u", "a"), 2)]) == 2 + 2
    assert theory.isolated_cost(fan(), [("u", 2)]) == 4 + 2


def test_edges_of_one_site_do_not_see_each_other() -> None:
    grafts = [(("u", "a"), 2), (("u", "b"), 3)]
    assert theory.interleaved_cost(fan(), grafts, (1, 0)).overcount == 0
    assert theory.batched_cost(fan(), grafts) == 3 + 5


def test_a_graft_after_a_site_computes_what_already_hangs_there_again() -> None:
    grafts = [GraftAt("u", 5), GraftAt(("u", "a"), 2), GraftAt("u", 3)]
    assert theory.best_order(fan(), grafts) == (1, 2, 0)
    predicted = theory.interleaved_cost(fan(), grafts, (1, 2, 0))
    assert predicted.costs == (2 + 2, 4 + 3 + 2, 4 + 5 + 2 + 3)
    extremes = theory.order_extremes(fan(), grafts)
    assert (extremes.least, extremes.most) == (2 + 2 + 3, 2 + 2 + 5)
    assert extremes.expected == 4 + Fraction(8, 2)


def test_what_a_block_makes_of_its_own_parameters_is_computed_once() -> None:
    graft = GraftAt("n1", lopsided())
    assert (graft.fresh, graft.reach) == (3, 2)
    predicted = theory.interleaved_cost(line(nodes=3), [graft, ("x", straight(4))], (0, 1))
    assert predicted.costs == (2 + 3, 3 + 4 + 2)


def test_weights_and_sizes_may_be_fractions_and_floats() -> None:
    graph = line(nodes=2)
    half: dict[str, int | Fraction] = {"n1": Fraction(1, 2), "n2": 1}
    assert theory.batched_cost(graph, [("x", Fraction(1, 3))], weights=half) == Fraction(11, 6)
    extremes = theory.order_extremes(graph, [("x", 0.5), ("n1", 0.25)], weights=half)
    assert (extremes.least, extremes.most, extremes.expected) == (0, 0.25, 0.125)


def test_a_block_that_no_demand_wants_costs_nothing() -> None:
    graph = fan()
    graph.node("aside", Mix(), ["u"])
    grafts = [(("u", "aside"), 7), (("u", "a"), 2)]
    assert theory.interleaved_cost(graph, grafts, (0, 1), demand="z").costs == (0, 4)
    assert theory.batched_cost(graph, grafts, demand="z") == 4


@pytest.mark.parametrize(
    ("grafts", "order", "message"),
    [
        ([("u", 1), ("a", 1)], (0, 0), r"the order \[0, 0\] is not a permutation of 0..1"),
        ([("u", 1), ("a", 1)], (0,), "is not a permutation"),
        ([("u", 1), ("a", 1)], (1, 2), "is not a permutation"),
        ([(("u", "a"), 1), (("u", "a"), 1)], (0, 1), "is given two grafts"),
        ([("u", 1), (("u", "a"), 1)], (0, 1), "the edge is no more"),
        ([("u", -1)], (0,), "the size of the graft at 'u' is -1"),
        ([("u", "a")], (0,), "graft 0 is"),
        (["u"], (0,), "graft 0 is 'u'"),
    ],
)
def test_what_is_refused(grafts: Any, order: tuple[int, ...], message: str) -> None:
    with pytest.raises(TheoryError, match=message):
        theory.interleaved_cost(fan(), grafts, order)


def test_places_that_are_not_there_are_named() -> None:
    with pytest.raises(UnknownSiteError):
        theory.best_order(fan(), [("nowhere", 1)])
    with pytest.raises(UnknownEdgeError):
        theory.best_order(fan(), [(("u", "z"), 1)])


def test_a_block_that_ignores_its_input_is_refused() -> None:
    part = cw.chain(Mix()).nodes[0]
    deaf = cw.Block((type(part)("p", None, (), 1), type(part)("q", Mix(), (0,))), output=1)
    with pytest.raises(TheoryError, match="does not depend on its input"):
        theory.batched_cost(fan(), [("u", deaf)])


def test_a_block_with_a_node_that_leads_nowhere_is_refused() -> None:
    """A demand does not come to it, so that h would count one node too many."""
    part = cw.chain(Mix()).nodes[0]
    idle = cw.Block((type(part)("p", Mix(), (-1,)), type(part)("q", Mix(), (-1,))), output=0)
    with pytest.raises(TheoryError, match="no node of the block reads 'q'"):
        theory.interleaved_cost(fan(), [("u", idle)], demand="z")
    graph = fan()
    world = cw.World(graph)
    world.demand("z")
    graft = graph.graft_after("u", idle)
    with world.ledger.interval() as spent:
        world.demand("z")
    assert set(spent.recomputed) == {*"abcz", graft.output}


def test_comparable_sites_may_still_cost_as_much_in_a_batch() -> None:
    """The paper says "strictly whenever some pair is comparable": not where the lower cone is empty."""
    graph = line(nodes=2)
    grafts = [("n1", 1), ("n2", 1)]
    assert "n2" in graph.cone("n1")
    assert theory.batched_cost(graph, grafts) == theory.isolated_cost(graph, grafts) == 3


def test_incomparable_sites_may_cost_less_in_a_batch() -> None:
    """The paper says "disjoint cones, i.e. no two sites comparable": siblings share what they feed."""
    grafts = [("a", 1), ("b", 1)]
    assert "b" not in fan().cone("a")
    assert theory.batched_cost(fan(), grafts) == 3 < theory.isolated_cost(fan(), grafts) == 4
