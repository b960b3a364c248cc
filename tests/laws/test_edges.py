"""Sweeps over edges: what the closed forms say is what the engine's ledger shows, edge by edge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conewise.paper import theory
from tests.laws.edge_stacks import EdgeStack, bills, edge_stacks
from tests.laws.mutants import EDGE_COST_MUTANTS, EDGE_COUNT_MUTANTS
from tests.laws.refuting import is_refuted


@settings(max_examples=25)
@given(edge_stacks())
def test_a_sweep_over_edges_costs_its_readers_once_for_each_writer_and_a_cone_for_each_edge(
    stack: EdgeStack,
) -> None:
    graph, readers, output = stack.graph()
    found = list(bills(stack))
    cost = theory.edge_cost(graph, readers, output)
    assert cost.edges == sum(len(behind) for _, behind in found)
    assert cost.shared == sum(own for own, _ in found)
    assert cost.apart == sum(own * len(behind) for own, behind in found)
    assert cost.cones == sum(sum(behind) for _, behind in found)
    assert cost.total == cost.shared + cost.cones
    assert cost.one_by_one == cost.apart + cost.cones
    assert cost.full == cost.edges * theory.full_cost(graph, output)


@given(edge_stacks(), st.integers(1, 6))
def test_the_closed_form_of_a_stack_is_that_of_its_graph(stack: EdgeStack, layers: int) -> None:
    deeper = replace(stack, layers=layers)
    graph, readers, output = deeper.graph()
    cost = deeper.closed_form()
    assert cost == theory.edge_cost(graph, readers, output)
    assert cost.edges == theory.edge_count(**deeper.shape)


@given(edge_stacks())
def test_only_readers_of_the_last_layer_compute_more_themselves_than_lies_behind_them(
    stack: EdgeStack,
) -> None:
    graph, readers, output = replace(stack, layers=stack.layers + 1).graph()
    for reader in readers:
        cost = theory.edge_cost(graph, [reader], output)
        if not reader.site.startswith((f"{stack.layers}.", "final")):
            assert cost.shared <= cost.cones


@given(edge_stacks())
def test_the_ratio_over_all_edges_tends_to_three_times_the_share_that_changes(stack: EdgeStack) -> None:
    for layers in (100, 1_000, 10_000):
        ratio = replace(stack, layers=layers).closed_form().ratio
        assert abs(ratio - stack.limit) <= 20 / layers


@given(edge_stacks())
def test_what_readers_share_vanishes_against_their_cones(stack: EdgeStack) -> None:
    """As 3·Σ|B| over P·M·L."""
    deep = replace(stack, layers=10_000)
    cost, (*attention, mlp, _) = deep.closed_form(), stack.chains
    between = 3 * stack.norm + sum(attention) + (mlp if stack.mlp else 0)
    readers = stack.heads + 2 * stack.kv_heads + stack.mlp
    expected = 3 * between / (readers * stack.layer * deep.layers)
    assert float(cost.shared / cost.cones) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("formula", EDGE_COST_MUTANTS)
def test_a_wrong_cost_of_edges_is_refuted(formula: Callable[..., int]) -> None:
    def refutes(stack: EdgeStack) -> bool:
        found = list(bills(stack))
        return formula(*stack.graph()) != sum(own + sum(behind) for own, behind in found)

    assert is_refuted(edge_stacks(), refutes, examples=20)


@pytest.mark.parametrize("formula", EDGE_COUNT_MUTANTS)
def test_a_wrong_number_of_edges_is_refuted(formula: Callable[..., int]) -> None:
    def refutes(stack: EdgeStack) -> bool:
        _, readers, _ = stack.graph()
        return formula(**stack.shape) != sum(reader.writers * reader.parts for reader in readers)

    assert is_refuted(edge_stacks(), refutes, examples=20)
