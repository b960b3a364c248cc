"""Rows of any graph: what the ledger of a graph of rows shows, and what the closed form of a stack is of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conewise.paper import theory
from conewise.paper.theory import RowStack
from conewise.paper.theory.parts import Rows
from tests.laws.mutants import ROW_MUTANTS
from tests.laws.refuting import is_refuted
from tests.laws.row_graphs import RowGraph, row_graphs
from tests.laws.row_stacks import node_graph, row_stacks


def costs(given: RowGraph, **options: str) -> int:
    node, at = given.patch
    (found,) = theory.row_costs(
        given.graph(),
        [(str(node), at)],
        given.positions,
        given.named(),
        list(map(str, given.demand)),
        given.rows,
        causal=given.causal,
        **options,  # type: ignore[arg-type]
    )
    return found


@settings(max_examples=200)
@given(row_graphs())
def test_a_patch_at_a_row_costs_what_the_ledger_of_rows_shows(given: RowGraph) -> None:
    assert costs(given) == given.bill()
    assert costs(given, computed="from the first on") >= given.bill()


@given(row_stacks(), st.sampled_from(["all", "last"]))
def test_the_rows_of_a_stack_are_those_of_its_graph(stack: RowStack, demand: Rows) -> None:
    graph, mixes = node_graph(stack)
    places = [(str(layer), t) for layer in range(stack.layers) for t in range(stack.positions)]
    found = theory.row_costs(graph, places, stack.positions, mixes, "end", demand, causal=stack.causal)
    assert found == tuple(stack.cost(int(layer), t, demand) for layer, t in places)


@given(row_stacks())
def test_from_the_first_row_on_a_stack_costs_its_next_layer_more(stack: RowStack) -> None:
    """κ + q at R rows where one row of them changes; and q at the last row, which the theory leaves out."""
    graph, mixes = node_graph(stack)
    for layer in range(stack.layers):
        for t in range(stack.positions):
            (found,) = theory.row_costs(
                graph, [(str(layer), t)], stack.positions, mixes, "end", "last",
                causal=stack.causal, computed="from the first on",
            )  # fmt: skip
            assert found == stack.cost(layer, t, computed="from the first on")


@pytest.mark.parametrize("formula", ROW_MUTANTS)
def test_a_wrong_count_of_rows_is_refuted(formula: Callable[[RowGraph], int]) -> None:
    assert is_refuted(row_graphs(), lambda given: formula(given) != given.bill(), examples=100)


@given(row_stacks(), st.sampled_from(["all", "last"]), st.integers(0, 3))
def test_the_sweep_from_the_first_row_on_is_the_sum_of_its_patches(
    stack: RowStack, demand: Rows, first: int
) -> None:
    first = min(first, stack.positions - 1)
    found = [
        stack.cost(layer, t, demand, computed="from the first on")
        for layer in range(stack.layers)
        for t in range(first, stack.positions)
    ]
    assert stack.sweep(demand, first, computed="from the first on") == sum(found)
    assert stack.ratio(demand, first, computed="from the first on") <= stack.ratio(demand, first)
