"""Sweeps over positions in closed form: limits, boundary cases, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conewise.errors import TheoryError
from conewise.paper import theory
from conewise.paper.theory import RowStack
from conewise.paper.theory.parts import Rows
from tests.laws.row_stacks import row_stacks

DEEP = 4_000
demands: st.SearchStrategy[Rows] = st.sampled_from(["all", "last"])


@given(row_stacks(), demands)
def test_the_ratio_over_layers_and_positions_tends_to_four(stack: RowStack, demand: Rows) -> None:
    deep = replace(stack, layers=DEEP, positions=DEEP)
    limit = theory.position_limit(causal=stack.causal)
    assert limit == (4 if stack.causal else 2)
    assert float(deep.ratio(demand)) == pytest.approx(float(limit), rel=0.01)


@given(row_stacks(), demands)
def test_a_shared_prefix_divides_by_what_is_left(stack: RowStack, demand: Rows) -> None:
    deep = replace(stack, layers=DEEP, positions=DEEP, causal=True)
    limit = theory.position_limit(shared=Fraction(3, 4))
    assert limit == 16
    assert float(deep.ratio(demand, 3 * DEEP // 4)) == pytest.approx(16, rel=0.02)
    whole = replace(deep, causal=False)
    assert float(whole.ratio(demand, 3 * DEEP // 4)) == pytest.approx(2, rel=0.02)


@given(row_stacks(), st.integers(3, 8))
def test_at_a_fixed_depth_many_positions_have_a_limit_of_their_own(stack: RowStack, L: int) -> None:
    long = replace(stack, layers=L, positions=10**6, causal=True)
    k, b, e, M = stack.keys, stack.mixed, stack.terminal, stack.layer
    last = Fraction(2 * L * ((L - 1) * M + k), (L - 2) * (b + k) + M * ((L - 2) * (L - 3) // 2))
    whole = Fraction(2 * L * (L * M + e), (L - 1) * (b + e) + M * ((L - 1) * (L - 2) // 2))
    assert float(long.ratio("last")) == pytest.approx(float(last), rel=1e-3)
    assert float(long.ratio("all")) == pytest.approx(float(whole), rel=1e-3)


@given(row_stacks())
def test_one_position_is_a_profile_of_whole_nodes(stack: RowStack) -> None:
    single = replace(stack, positions=1)
    expected = theory.sweep_ratio([single.layer] * single.layers, terminal=single.terminal)
    assert single.ratio("all") == single.ratio("last") == expected


@given(row_stacks(), demands)
def test_where_attention_looks_both_ways_a_patch_costs_the_same_at_every_position(
    stack: RowStack, demand: Rows
) -> None:
    """Two layers or more behind it; a causal stack never costs more."""
    both = replace(stack, layers=stack.layers + 2, causal=False)
    causal = replace(both, causal=True)
    for layer in range(stack.layers):
        costs = {both.cost(layer, t, demand) for t in range(both.positions)}
        assert len(costs) == 1
        found = [causal.cost(layer, t, demand) for t in range(both.positions)]
        assert found == sorted(found, reverse=True)
        assert found[0] == max(costs)


def test_profiles_in_depth_have_twice_the_limit_of_whole_nodes() -> None:
    assert theory.position_limit(1, "input-heavy") == 6
    assert theory.position_limit(1, "output-heavy") == 3
    assert theory.position_limit(1, "input-heavy", causal=False) == 3


def test_stacks_of_rows_that_cannot_be_are_refused() -> None:
    stack = RowStack(3, 4, 2, 1, 3)
    with pytest.raises(TheoryError, match="layer 3 at position 0"):
        stack.cost(3, 0)
    with pytest.raises(TheoryError, match="differ somewhere"):
        stack.sweep("all", first=4)
    with pytest.raises(TheoryError, match="one of all, last"):
        stack.full("first")  # type: ignore[arg-type]
    with pytest.raises(TheoryError, match="`mixed` is 0"):
        RowStack(3, 4, 2, 1, 0)
    with pytest.raises(TheoryError, match="from 0 to below 1"):
        theory.position_limit(shared=1)
