"""Positions: the closed forms in node-rows are what the ledger of a graph of rows shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conewise.paper.experiments.positions import counts
from conewise.paper.theory import RowStack
from conewise.paper.theory.parts import Rows
from tests.laws.mutants import POSITION_MUTANTS
from tests.laws.refuting import is_refuted
from tests.laws.row_stacks import row_stacks

demands: st.SearchStrategy[Rows] = st.sampled_from(["all", "last"])


@given(row_stacks(), demands)
def test_a_patch_at_a_position_costs_the_rows_that_the_closed_form_says(
    stack: RowStack, demand: Rows
) -> None:
    full, found = counts(stack, demand)
    assert full == stack.full(demand)
    assert found == {at: stack.cost(*at, demand) for at in found}


@given(row_stacks(), demands, st.integers(0, 3))
def test_a_sweep_over_layers_and_positions_costs_what_the_closed_form_says(
    stack: RowStack, demand: Rows, first: int
) -> None:
    first = min(first, stack.positions - 1)
    _, found = counts(stack, demand)
    assert stack.sweep(demand, first) == sum(cost for (_, t), cost in found.items() if t >= first)


@pytest.mark.parametrize("formula", POSITION_MUTANTS)
def test_a_wrong_cost_of_positions_is_refuted(formula: Callable[[RowStack], int]) -> None:
    def refutes(stack: RowStack) -> bool:
        return formula(stack) != sum(counts(stack, "last")[1].values())

    assert is_refuted(row_stacks(), refutes, examples=30)
