"""The laws of cost: what the theory predicts from the graph alone is what the engine's ledger shows.

Each law at zero tolerance, over random graphs, sites, orders and weights. `cost_mutants.py` holds
wrong formulas that these laws refute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import conewise as cw
from conewise.errors import TheoryError
from conewise.paper import theory
from tests.laws import cost_mutants as mutants
from tests.laws import oracle
from tests.laws.cost_scenes import (
    BLOCKS,
    GraftScene,
    Weight,
    apply,
    bill,
    graft_scenes,
    part_prices,
    patched_bills,
    restored_bills,
    stacks,
    weights,
)
from tests.laws.refuting import is_refuted
from tests.laws.scenes import Mix, Scene, fresh_value, scenes


def exact(weight: Weight) -> Fraction:
    return Fraction(weight)


# -- sweeps -------------------------------------------------------------------------------------


@given(st.data(), scenes(), st.booleans())
def test_a_sweep_costs_the_sum_of_what_is_stale(data: st.DataObject, scene: Scene, is_full: bool) -> None:
    graph, prices = scene.graph(), data.draw(weights(scene))
    demand = None if is_full else scene.demand
    groups = data.draw(st.lists(st.lists(st.sampled_from(scene.sites), min_size=1, unique=True), min_size=1))
    patches = [*scene.patch, *groups]
    base = cw.World(graph)
    full = bill(base, demand, prices)

    bills = []
    for patch in patches:
        with base.fork() as fork:
            for site in [patch] if isinstance(patch, str) else patch:
                fork.patch(site, fresh_value())
            bills.append(bill(fork, demand, prices))

    assert theory.full_cost(graph, demand, prices) == full
    assert list(theory.sweep_costs(graph, patches, demand, prices)) == bills
    assert theory.sweep_cost(graph, patches, demand, prices) == sum(bills)
    if sum(bills):
        assert theory.sweep_ratio(graph, patches, demand=demand, weights=prices) == len(bills) * exact(
            full
        ) / exact(sum(bills))


@given(scenes())
def test_stale_is_the_formula(scene: Scene) -> None:
    graph = scene.graph()
    assert theory.stale(graph, scene.patch, scene.demand) == oracle.stale(
        oracle.wiring(graph), scene.patch, scene.demand
    )


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(1, 3))
def test_the_ratio_of_a_profile_is_that_of_its_graph(profile: list[int], terminal: int) -> None:
    graph, sites = layered(profile, terminal)
    assert theory.sweep_ratio(profile, terminal=terminal) == theory.sweep_ratio(graph, sites)
    assert theory.training_ratio(profile, terminal=terminal) == theory.training_ratio(graph, sites) == 1
    assert theory.downstream_fractions(profile, terminal=terminal) == theory.downstream_fractions(
        graph, sites
    )


def layered(profile: list[int], terminal: int) -> tuple[cw.Graph, list[str]]:
    """A chain of layers; the site of a layer is its last node."""
    graph = cw.Graph()
    before = graph.source("x", 1)
    sites = []
    for layer, width in enumerate([*profile, terminal]):
        for place in range(width):
            before = graph.node(f"{layer}.{place}", Mix(), [before])
        sites.append(before)
    return graph, sites[:-1]


# -- grafts -------------------------------------------------------------------------------------


@given(st.data(), graft_scenes(), st.booleans())
def test_interleaved_grafts_cost_what_the_closed_form_says(
    data: st.DataObject, made: GraftScene, is_full: bool
) -> None:
    """Theorem 3, for grafts on edges, after sites, and both at one site; an impossible order is refused."""
    graph, prices = made.scene.graph(), data.draw(weights(made.scene))
    demand = None if is_full else made.scene.demand
    if made.order not in made.possible_orders():
        with pytest.raises(TheoryError, match="Apply the edge grafts of a site before"):
            theory.interleaved_cost(graph, made.grafts(), made.order)
        return
    grafts = made.grafts(priced=True)
    predicted = theory.interleaved_cost(graph, grafts, made.order, demand=demand, weights=prices)
    isolated = [interleaved_bills(made, (k,), demand, prices)[0] for k in range(len(made.places))]

    bills = interleaved_bills(made, made.order, demand, prices)

    assert list(predicted.costs) == bills
    assert predicted.total == sum(bills)
    assert predicted.isolated == sum(isolated)
    assert predicted.isolated == theory.isolated_cost(graph, grafts, demand=demand, weights=prices)
    assert predicted.overcount == sum(bills) - sum(isolated) >= 0
    assert predicted.overcount == theory.overcount(graph, grafts, made.order, demand=demand, weights=prices)


@given(st.data(), graft_scenes(), st.booleans())
def test_steps_of_a_training_leave_the_cost_of_grafts_as_it_is(
    data: st.DataObject, made: GraftScene, is_full: bool
) -> None:
    """Growth: between grafts sources are set, those of the blocks too, and the demand is answered."""
    graph, order = made.scene.graph(), data.draw(st.sampled_from(made.possible_orders()))
    demand = None if is_full else made.scene.demand
    predicted = theory.interleaved_cost(graph, made.grafts(), order, demand=demand).costs
    world = cw.World(graph)
    bill(world, demand)
    for k, cost in zip(order, predicted, strict=True):
        trained = data.draw(st.lists(st.sampled_from(graph.sources), min_size=1, unique=True))
        for source in trained:
            world.set(source, fresh_value())
        reads = oracle.wiring(graph)
        step = oracle.cone(reads, trained) & oracle.support(reads, demand or graph.sites)
        assert bill(world, demand) == len(step) == theory.sweep_cost(graph, [trained], demand)
        apply(graph, made.places[k])
        assert bill(world, demand) == cost


def interleaved_bills(
    made: GraftScene,
    order: tuple[int, ...],
    demand: tuple[str, ...] | None,
    prices: dict[str, Weight] | None = None,
) -> list[Weight]:
    """The engine's bill for each graft; where there are prices, a block's nodes have `part_prices`."""
    graph = made.scene.graph()
    world = cw.World(graph)
    bill(world, demand)
    known: dict[str, Weight] = dict.fromkeys(graph.computed, 1) if prices is None else dict(prices)
    bills = []
    for k in order:
        at, number = made.places[k]
        fresh = apply(graph, (at, number)).sites
        paid: Iterable[Weight] = (
            [1] * len(fresh) if prices is None else part_prices(BLOCKS[number]()).values()
        )
        known |= dict(zip(fresh, paid, strict=True))
        bills.append(bill(world, demand, known))
    return bills


@given(graft_scenes(), st.booleans())
def test_batched_grafts_cost_the_union_in_any_order(made: GraftScene, is_full: bool) -> None:
    demand = None if is_full else made.scene.demand
    predicted = theory.batched_cost(made.scene.graph(), made.grafts(), demand=demand)
    assert {batched_bill(made, order, demand) for order in made.possible_orders()} == {predicted}
    assert predicted <= theory.isolated_cost(made.scene.graph(), made.grafts(), demand=demand)


@given(graft_scenes(), st.data(), st.booleans())
def test_a_batch_costs_less_iff_a_weighed_and_wanted_node_is_disturbed_twice(
    made: GraftScene, data: st.DataObject, is_full: bool
) -> None:
    graph, prices = made.scene.graph(), data.draw(weights(made.scene))
    demand = None if is_full else made.scene.demand
    reads, grafts = oracle.wiring(graph), made.grafts(priced=True)
    wanted = oracle.support(reads, demand or graph.sites)
    disturbed = Counter(
        node
        for at, _ in made.places
        for node in (
            oracle.cone(reads, [at]) if isinstance(at, str) else {at[1], *oracle.cone(reads, [at[1]])}
        )
    )
    twice = any(times > 1 and prices[node] > 0 and node in wanted for node, times in disturbed.items())
    batched = theory.batched_cost(graph, grafts, demand=demand, weights=prices)
    assert (batched < theory.isolated_cost(graph, grafts, demand=demand, weights=prices)) == twice


def batched_bill(made: GraftScene, order: tuple[int, ...], demand: tuple[str, ...] | None) -> Weight:
    graph = made.scene.graph()
    world = cw.World(graph)
    bill(world, demand)
    for k in order:
        apply(graph, made.places[k])
    return bill(world, demand)


@given(graft_scenes(), st.booleans())
def test_the_extremes_over_orders_are_those_of_all_orders(made: GraftScene, is_full: bool) -> None:
    graph, grafts = made.scene.graph(), made.grafts()
    demand = None if is_full else made.scene.demand
    orders = made.possible_orders()
    counts = [theory.overcount(graph, grafts, order, demand=demand) for order in orders]

    extremes = theory.order_extremes(graph, grafts, demand=demand)

    assert (extremes.least, extremes.most) == (min(counts), max(counts))
    assert extremes.expected == sum(map(exact, counts)) / len(counts)
    assert extremes.best == theory.best_order(graph, grafts, demand=demand)
    assert theory.overcount(graph, grafts, extremes.best, demand=demand) == min(counts)
    assert theory.overcount(graph, grafts, extremes.worst, demand=demand) == max(counts)
    assert {extremes.best, extremes.worst} <= set(orders)


@given(graft_scenes())
def test_upstream_first_is_free_when_all_sites_differ(made: GraftScene) -> None:
    anchors = [at if isinstance(at, str) else at[0] for at, _ in made.places]
    if len(set(anchors)) == len(anchors):
        assert theory.order_extremes(made.scene.graph(), made.grafts()).least == 0


# -- patches ------------------------------------------------------------------------------------


@given(st.data(), scenes(), st.booleans())
def test_patches_that_stay_cost_what_the_closed_form_says(
    data: st.DataObject, scene: Scene, is_full: bool
) -> None:
    graph, prices = scene.graph(), data.draw(weights(scene))
    demand = None if is_full else scene.demand
    order = data.draw(st.permutations(range(len(scene.patch))))
    predicted = theory.patched_cost(graph, scene.patch, demand, order=order, weights=prices)

    assert list(predicted.costs) == patched_bills(graph, [scene.patch[k] for k in order], demand, prices)
    assert predicted.isolated == theory.sweep_cost(graph, scene.patch, demand, prices)
    assert predicted.batched == theory.sweep_cost(graph, [scene.patch], demand, prices)
    assert predicted.batched <= predicted.total <= predicted.isolated
    assert predicted.shielded == predicted.isolated - predicted.total


@given(st.data(), scenes(), st.booleans())
def test_patches_are_cheapest_downstream_first(data: st.DataObject, scene: Scene, is_full: bool) -> None:
    graph = scene.graph()
    demand = None if is_full else scene.demand
    orders = st.permutations(range(len(scene.patch)))
    extremes = theory.patch_extremes(graph, scene.patch, demand)

    def spent(order: tuple[int, ...]) -> Weight:
        return theory.patched_cost(graph, scene.patch, demand, order=order).total

    assert extremes.least <= spent(tuple(data.draw(orders))) <= extremes.most
    assert spent(extremes.best) == extremes.least
    assert spent(extremes.worst) == extremes.most == theory.sweep_cost(graph, scene.patch, demand)
    assert theory.best_patch_order(graph, scene.patch) == extremes.best


# -- restoring in place -------------------------------------------------------------------------


@given(st.data(), scenes(), st.booleans(), st.booleans())
def test_restoring_in_place_costs_what_the_closed_form_says(
    data: st.DataObject, scene: Scene, is_full: bool, is_late: bool
) -> None:
    """The engine's bills; whether a patch goes before the next is made, or right after."""
    graph, prices = scene.graph(), data.draw(weights(scene))
    demand = None if is_full else scene.demand
    groups = st.lists(st.sampled_from(scene.sites), min_size=1, max_size=2, unique=True)
    patches = data.draw(st.lists(groups, min_size=1, max_size=4))
    if is_late:
        patches = [[site] for site in dict.fromkeys(site for patch in patches for site in patch)]

    predicted = theory.restored_cost(graph, patches, demand, weights=prices)

    bills, left = restored_bills(graph, patches, demand, prices, is_late=is_late)
    assert list(predicted.costs) == bills
    assert predicted.left == left
    assert predicted.total == sum(bills)
    assert predicted.forked == theory.sweep_cost(graph, patches, demand, prices)
    assert predicted.surplus == predicted.total - predicted.forked >= 0


@given(scenes(), st.data())
def test_the_naive_engine_restores_at_the_same_cost(scene: Scene, data: st.DataObject) -> None:
    graph = scene.graph()
    patches = data.draw(st.lists(st.sampled_from(scene.sites), min_size=1, max_size=4))
    world = oracle.NaiveWorld(oracle.naive(graph))
    world.computed(world.needed(scene.demand))
    bills = []
    for site in patches:
        world.patch(site, "value", 1)
        needed = world.needed(scene.demand)
        world.computed(needed)
        bills.append(len(needed))
        world.frames.clear()
        world.restore(site)
    predicted = theory.restored_cost(graph, patches, scene.demand)
    assert list(predicted.costs) == bills
    assert predicted.left == len(world.needed(scene.demand))


@given(scenes(), st.data(), st.booleans())
def test_a_restore_costs_more_unless_the_site_is_below_the_next_or_only_seen_through_it(
    scene: Scene, data: st.DataObject, is_full: bool
) -> None:
    graph, demand = scene.graph(), None if is_full else scene.demand
    reads = oracle.wiring(graph)
    site, following = (data.draw(st.sampled_from(choice)) for choice in (scene.computed, scene.sites))
    surplus = theory.restored_cost(graph, [site, following], demand).surplus

    is_below = site == following or site in oracle.cone(reads, [following])
    is_hidden = site not in oracle.support(reads, demand or scene.sites, cut=[following])
    assert (surplus == 0) == (is_below or is_hidden)


def test_what_an_earlier_site_left_stale_is_computed_when_it_is_seen_again() -> None:
    """Though z lies below y, y pays for x: the demand under the patch of z did not look at it."""
    graph = cw.Graph()
    graph.source("in", 1)
    for site, inputs in (("x", ["in"]), ("y", ["in"]), ("z", ["x", "y"])):
        graph.node(site, Mix(), inputs)
    sweep = ["x", "z", "y"]
    assert theory.restored_cost(graph, ["z", "y"], "z").surplus == 0
    predicted = theory.restored_cost(graph, sweep, "z")
    assert predicted.costs == (1, 0, 2)
    assert predicted.surplus == 1
    bills, _ = restored_bills(graph, [[site] for site in sweep], ["z"], None, is_late=False)
    assert bills == [1, 0, 2]


@given(scenes(), st.data(), st.booleans())
def test_restoring_in_place_costs_at_most_the_restored_cones_more(
    scene: Scene, data: st.DataObject, is_full: bool
) -> None:
    graph, demand = scene.graph(), None if is_full else scene.demand
    patches = data.draw(st.lists(st.sampled_from(scene.sites), min_size=1, max_size=4))
    every = [theory.restored_cost(graph, [site], demand).left for site in patches]
    assert theory.restored_cost(graph, patches, demand).surplus <= sum(every[:-1])


# -- the backward pass --------------------------------------------------------------------------


@given(scenes())
def test_a_training_cone_is_all_that_is_comparable(scene: Scene) -> None:
    graph = scene.graph()
    reads = oracle.wiring(graph)
    for site in scene.patch:
        cone, above = oracle.cone(reads, {site}), oracle.support(reads, {site})
        assert theory.training_cone(graph, site) == (cone | above) - set(scene.sources)


@given(scenes())
def test_a_sweep_of_all_sites_ties_the_two_ratios_together(scene: Scene) -> None:
    """1/ρ_train = 2/ρ + 1/N on any DAG; and 1 ≤ ρ_train ≤ ρ for any sites."""
    graph, N = scene.graph(), len(scene.computed)
    pairs = theory.comparable_pairs(graph)
    assert pairs == theory.sweep_cost(graph, scene.computed)
    training = theory.training_ratio(graph, scene.computed)
    assert training == Fraction(N * N, 2 * pairs + N)
    if pairs:
        forward = theory.sweep_ratio(graph, scene.computed)
        assert training == theory.training_from_forward(forward, N)
        assert 1 <= training <= forward


@given(scenes(), st.data())
def test_under_weights_the_two_ratios_of_all_sites_need_the_mirror_image(
    scene: Scene, data: st.DataObject
) -> None:
    """1/ρ_train = 1/ρ + 1/ρ⁻ + 1/N, where ρ⁻ is ρ with upstream(s) for cone(s); N counts nodes."""
    graph, prices = scene.graph(), data.draw(weights(scene))
    reads, N = oracle.wiring(graph), len(scene.computed)
    full = sum(map(exact, prices.values()), Fraction(0))
    if not full:
        return
    above = [(oracle.support(reads, [site]) - {site}) & set(prices) for site in scene.computed]
    up = sum((exact(prices[node]) for nodes in above for node in nodes), Fraction(0))
    down = exact(theory.sweep_cost(graph, scene.computed, weights=prices))
    training = theory.training_ratio(graph, scene.computed, weights=prices)
    assert 1 / exact(training) == (down + up) / (N * full) + Fraction(1, N)
    assert down == sum(
        exact(prices[site]) * len(nodes) for site, nodes in zip(scene.computed, above, strict=True)
    )


@given(stacks())
def test_sites_that_all_other_layers_are_comparable_with_have_the_closed_form(
    made: tuple[cw.Graph, list[str]],
) -> None:
    """And only these: the closed form is the most that is touched, so it is a bound for the others."""
    graph, sites = made
    L = len(sites)
    own = [{f"a{layer}", f"b{layer}"} for layer in range(L)]
    are_all = all(
        set(graph.computed) - layer <= theory.training_cone(graph, site)
        for site, layer in zip(sites, own, strict=True)
    )
    closed, counted = theory.training_ratio([2] * L, local=1, terminal=1), theory.training_ratio(graph, sites)
    assert (counted == closed) == are_all
    assert counted >= closed


# -- that a law can fail ------------------------------------------------------------------------


def _grafts_differ(mutant: Callable[[cw.Graph, list[Any]], Weight], made: GraftScene) -> bool:
    return mutant(made.scene.graph(), made.grafts()) != batched_bill(made, made.possible_orders()[0], None)


def _sequence_differs(mutant: Callable[..., Weight], made: GraftScene) -> bool:
    order = made.possible_orders()[0]
    return mutant(made.scene.graph(), made.grafts(), order) != sum(interleaved_bills(made, order, None))


def _single_differs(made: GraftScene) -> bool:
    predicted = mutants.graft_cost_by_the_cone_of_u(made.scene.graph(), made.grafts()[0])
    return predicted != interleaved_bills(made, (0,), None)[0]


def _meeting_differs(made: tuple[GraftScene, list[int]]) -> bool:
    grafting, drawn = made
    graph, grafts, demand = grafting.scene.graph(), grafting.grafts(priced=True), grafting.scene.demand
    prices: dict[str, Weight] = dict(zip(graph.computed, drawn, strict=False))
    isolated = theory.isolated_cost(graph, grafts, demand=demand, weights=prices)
    is_less = theory.batched_cost(graph, grafts, demand=demand, weights=prices) < isolated
    return is_less != mutants.batched_is_less_where_disturbed_sets_meet(graph, grafts)


def _mean_differs(made: GraftScene) -> bool:
    graph, grafts = made.scene.graph(), made.grafts()
    bills = [exact(sum(interleaved_bills(made, order, None))) for order in made.possible_orders()]
    mean = sum(bills, Fraction(0)) / len(bills) - exact(theory.isolated_cost(graph, grafts))
    return mutants.mean_over_comparable_sites(graph, grafts) != mean


def _patches_differ(mutant: Callable[..., int], scene: Scene, is_batch: bool) -> bool:
    bills = patched_bills(scene.graph(), scene.patch, None, None)
    exact = theory.sweep_cost(scene.graph(), [scene.patch]) if is_batch else bills[-1]
    return mutant(scene.graph(), scene.patch) != exact


def _restores_differ(mutant: Callable[..., int], scene: Scene) -> bool:
    first, second = scene.patch[0], scene.patch[-1]
    bills, _ = restored_bills(scene.graph(), [[first], [second]], scene.demand, None, is_late=False)
    return mutant(scene.graph(), first, second, scene.demand) != bills[1]


def _surplus_differs(scene: Scene) -> bool:
    first, second = scene.patch[0], scene.patch[-1]
    graph = scene.graph()
    costs_more = theory.restored_cost(graph, [first, second], scene.demand).surplus > 0
    return costs_more != mutants.restoring_costs_more_unless_nested(graph, first, second)


def _ratio_differs(mutant: Callable[[list[int], int], Fraction], profile: list[int]) -> bool:
    return mutant(profile, 1) != theory.sweep_ratio(*layered(profile, 1))


def _weighted_identity_differs(made: tuple[Scene, list[int]]) -> bool:
    scene, drawn = made
    graph, N = scene.graph(), len(scene.computed)
    prices: dict[str, Weight] = dict(zip(graph.computed, drawn, strict=False))
    if not theory.sweep_cost(graph, graph.computed, weights=prices):
        return False
    forward = theory.sweep_ratio(graph, graph.computed, weights=prices)
    training = theory.training_ratio(graph, graph.computed, weights=prices)
    return mutants.training_from_forward_with_weights(exact(forward), N) != training


def _side_differs(made: tuple[int, int, int]) -> bool:
    M, t, fixed = made
    ratio = theory.wallclock_ratio([3 * M + t, 2 * M + t, M + t, t], 4 * M + t, 1, 1, fixed)
    return not mutants.wallclock_from_above(exact(ratio), Fraction(4, 3))


PROFILES = st.lists(st.integers(1, 6), min_size=2, max_size=8)

REFUTED: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], bool]]] = {
    "terminal missing from the cones": (
        PROFILES,
        lambda p: _ratio_differs(mutants.ratio_without_the_terminal_in_cones, p),
    ),
    "terminal missing from N": (
        PROFILES,
        lambda p: _ratio_differs(mutants.ratio_without_the_terminal_in_n, p),
    ),
    "V⁺ᵤ for an edge graft": (graft_scenes(), _single_differs),
    "sites taken off the union": (
        graft_scenes(),
        lambda made: _grafts_differ(mutants.batched_without_the_sites, made),
    ),
    "less iff disturbed sets meet": (
        st.tuples(graft_scenes(), st.lists(st.integers(0, 1), min_size=9, max_size=9)),
        _meeting_differs,
    ),
    "the mean over comparable sites": (graft_scenes(), _mean_differs),
    "one less per site": (
        graft_scenes(),
        lambda made: _grafts_differ(mutants.batched_less_one_per_site, made),
    ),
    "pairs by the cone of u": (
        graft_scenes(),
        lambda made: _sequence_differs(mutants.interleaved_by_strict_cones, made),
    ),
    "pairs strictly below the reader of an edge": (
        graft_scenes(),
        lambda made: _sequence_differs(mutants.interleaved_below_the_reader, made),
    ),
    "whole blocks again": (
        graft_scenes(),
        lambda made: _sequence_differs(mutants.interleaved_with_whole_blocks, made),
    ),
    "plain union of patched cones": (
        scenes(),
        lambda scene: _patches_differ(mutants.patched_by_union, scene, is_batch=True),
    ),
    "layers that no edge passes by": (
        stacks(),
        lambda made: mutants.training_of_consecutive_layers(len(made[1])) != theory.training_ratio(*made),
    ),
    "one identity for all weights": (
        st.tuples(scenes(), st.lists(st.integers(1, 9), min_size=12, max_size=12)),
        _weighted_identity_differs,
    ),
    "always from above": (st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)), _side_differs),
    "a restore brings the restored cone along": (
        scenes(),
        lambda scene: _restores_differ(mutants.restored_by_both_cones, scene),
    ),
    "a restore brings the site and its cone along": (
        scenes(),
        lambda scene: _restores_differ(mutants.restored_by_site_and_both_cones, scene),
    ),
    "a restore costs more unless the cones are nested": (scenes(), _surplus_differs),
    "patches that a path meets": (
        scenes(),
        lambda scene: _patches_differ(mutants.patched_step_with_the_patches, scene, is_batch=False),
    ),
    "a patch seen through patches": (
        scenes(),
        lambda scene: _patches_differ(mutants.patched_step_uncut, scene, is_batch=False),
    ),
}


@pytest.mark.parametrize("mutant", REFUTED)
def test_a_wrong_formula_is_refuted(mutant: str) -> None:
    strategy, is_refuted_by = REFUTED[mutant]
    assert is_refuted(strategy, is_refuted_by, examples=200), mutant
