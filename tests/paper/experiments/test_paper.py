"""The paper's printed figures, reproduced; each experiment in a size that keeps what is printed."""

from fractions import Fraction
from functools import cache
from itertools import permutations

import pytest

from conewise.paper import experiments
from conewise.paper.experiments import drift, e9, grafts, layered
from conewise.paper.experiments.layered import branched, profile_weights, sequential
from conewise.paper.experiments.result import Result, patch_cost, patch_wave, prints_as, warm
from conewise.paper.theory import GraftAt, interleaved_cost, sweep_ratio, transformer_ratio
from tests.paper.experiments.quick import quick


@pytest.mark.parametrize("name", experiments.NAMES)
def test_everything_exact_matches(name: str) -> None:
    assert [row.name for row in quick(name).rows if row.match is False] == []
    assert quick(name).all_match


@cache
def deep_e4() -> Result:
    return layered.e4(depths=(20, 160, 320))


def test_e4_has_all_of_the_papers_table() -> None:
    result = deep_e4()
    assert result.all_match
    printed = [row for row in result.rows if row.paper is not None and row.exact]
    assert sum(not row.paper_predicts for row in printed) == len(layered.PAPER) == 9
    assert sum(row.paper_predicts for row in printed) == len(layered.PAPER_LIMITS) == 8


def test_e5_prints_the_same_for_every_profile() -> None:
    rows = [row for row in quick("e5").rows if row.facts["count"] == "paper" and row.facts["L"] == 20]
    assert len(rows) == 8
    assert {round(float(row.measured), 4) for row in rows} == {1.0256}


def test_e5_at_its_deepest() -> None:
    assert layered.e5(depths=(160,)).all_match


def test_e5_does_not_collapse_when_gradients_are_counted_exactly() -> None:
    exact = [row for row in quick("e5").rows if row.facts["count"] == "exact"]
    assert all(row.measured > Fraction(6, 5) for row in exact)


def test_what_a_patch_invalidates_is_what_its_demand_recomputes() -> None:
    wide = branched(profile_weights(10, 1.0, "input-heavy", 200))
    base = warm(wide.graph, wide.output)
    for site in wide.sites:
        cost = patch_cost(base, site, 2.0, wide.output)
        assert cost.invalidated == cost.recomputed == patch_wave(base, site, 2.0)


def test_e7_has_the_18_costs_the_three_overcounts_and_the_batched_totals() -> None:
    rows = quick("e7").rows
    assert sum("step" in row.facts for row in rows) == 18
    assert [row.measured for row in rows if row.name.endswith("Δ")] == [0, 300, 140]
    assert [row.measured for row in rows if row.name.endswith("batched")] == [463, 463, 463]


def test_one_order_only_has_the_costs_of_the_papers_random_one() -> None:
    graph, sites = grafts.build()
    planned = [GraftAt(site, grafts.FRESH) for site in sites]
    printed = tuple(map(int, grafts.PAPER["random"].costs))
    found = [p for p in permutations(range(6)) if interleaved_cost(graph, planned, p).costs == printed]
    assert found == [grafts.PAPER["random"].order]


def test_drift_reports_slopes_with_intervals_and_judges_only_counts() -> None:
    result = quick("drift")
    slopes = [row for row in result.rows if "drift per" in row.name]
    assert len(slopes) == 3
    for row in slopes:
        assert row.facts["low"] <= row.measured <= row.facts["high"]
        assert row.match is None
    assert {row.unit for row in result.rows if row.exact and "the paper's" not in row.name} == {"nodes"}


def test_drift_makes_as_many_mutations_as_it_says() -> None:
    arms = drift.mutate(50)
    assert [len(arm.milliseconds) for arm in arms.values()] == [50, 50]
    assert {kind: arm.lengths[-1] - 1 for kind, arm in arms.items()} == {
        "graft": drift.NODES + 50,
        "redefinition": drift.NODES,
    }


def test_the_papers_ceiling_follows_from_its_own_constants_and_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is fed with the paper's constants measures nothing, and so can neither match nor fail."""
    rows = drift.printed_rows()
    assert [row.match for row in rows] == [None, None]
    assert all(prints_as(row.measured, row.paper or "") for row in rows)
    monkeypatch.setattr(drift, "PAPER_BETA", Fraction("0.0054"))
    _, limit = drift.printed_rows()
    assert prints_as(limit.measured, "1.80")


def test_the_sizes_of_the_drift_are_those_that_the_paper_prints() -> None:
    printed = [row.paper for row in quick("drift").rows if row.unit == "nodes" and row.paper]
    assert sorted(printed) == ["401", "401", "451", "500", "501"]


def test_two_profiles_move_away_from_their_limit_again() -> None:
    """The paper says that every entry converges across its depths; those of q = 2 do not, at the last."""
    rows = deep_e4().rows
    nearer = {
        row.name.rpartition(" ")[2]: row.measured for row in rows if row.name.startswith("of 8 profiles")
    }
    assert nearer == {"20": 8, "160": 6}


def test_the_papers_clock_is_as_far_as_it_says_only_at_the_end_of_its_rounding() -> None:
    rows = e9._distances(e9.SIZES[0], transformer_ratio(12, 12), "")
    assert rows[0].paper == "1.14"
    assert prints_as(rows[0].measured, "1.11")
    assert rows[1].match is True
    assert prints_as(e9._distances(e9.SIZES[1], transformer_ratio(24, 16), "")[0].measured, "1.33")


def test_e9_counts_all_cones_of_the_papers_first_size() -> None:
    rows = e9.count(e9.LLAMA, 12, 12)
    cones = [row for row in rows if row.detail]
    assert len(cones) == 156
    assert all(row.match for row in rows if row.exact)
    assert {row.paper for row in rows} == {
        *(None, "156", "2.145", "1.14"),
        *("108", "9", "99", "144", "12", "122"),
    }


def test_skips_that_are_added_change_nothing_and_those_that_bypass_do() -> None:
    rows = quick("skips").rows
    plain = {row.measured for row in rows if row.facts["ratio"] == "ρ_train" and row.facts["y"] == 0.0}
    bent = {row.measured for row in rows if row.facts["ratio"] == "ρ_train" and row.facts["y"] > 0.0}
    assert plain == {1}
    assert min(bent) > 1


def test_a_prediction_that_forgets_the_terminal_node_is_refuted() -> None:
    weights = profile_weights(20, 1.0, "input-heavy")
    chain = sequential(weights)
    base = warm(chain.graph, chain.output)
    spent = sum(patch_cost(base, site, 2.0, chain.output).recomputed for site in chain.sites)
    measured = Fraction(len(weights) * chain.size, spent)
    assert measured == sweep_ratio(weights, terminal=1)
    assert measured != sweep_ratio(weights)
    assert not prints_as(sweep_ratio(weights), "3.1585")
