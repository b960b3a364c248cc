"""Gates set by hand: what one edge at a time can show of redundant inputs, and what pairs show.

The base has both bits set, the source none. AND needs both: each of the edges on the way of a bit matters. OR
needs either: no edge on these ways matters alone, greedy search drops the first that it tries and keeps the
other, and only pairs show that there are two.
"""

from __future__ import annotations

import itertools

import pytest
from torch import Tensor

import conewise as cw
from conewise.circuits.circuit import Circuit
from tests.ground_truth import by_conewise, by_hand
from tests.ground_truth.gates import answer, bits, gate
from tests.ground_truth.stack import Outputs

FIRST = ("input->a0.h0<v>", "a0.h0->m0")
SECOND = ("input->a0.h1<v>", "a0.h1->m0")
LAST = "m0->logits"
# What attention to the other positions may change: its weight is exp(-40).
SMALL = 1e-6
THRESHOLD = 0.1
# One edge on the way of each bit.
ONE_OF_EACH = {frozenset(pair) for pair in itertools.product(FIRST, SECOND)}

BASE, SOURCE = bits(1, 1), bits(0, 0)


def error(outputs: Outputs) -> Tensor:
    """How far the answer is from that of the base, 1."""
    return (answer(outputs) - 1.0).abs()


@pytest.mark.parametrize(("name", "table"), [("or", [0, 1, 1, 1]), ("and", [0, 0, 0, 1])])
def test_a_gate_has_its_truth_table(name: str, table: list[int]) -> None:
    answers = [float(answer(gate(name)(bits(a, b)))) for a, b in itertools.product((0, 1), repeat=2)]
    assert answers == pytest.approx(table)


class TestByHand:
    def test_of_and_every_edge_matters(self) -> None:
        effects = by_hand.effects(gate("and"), BASE, SOURCE, error)
        assert {edge for edge, effect in effects.items() if effect > SMALL} == {*FIRST, *SECOND, LAST}

    def test_of_or_none_of_the_redundant_edges_matters_alone(self) -> None:
        effects = by_hand.effects(gate("or"), BASE, SOURCE, error)
        assert {edge for edge, effect in effects.items() if effect > SMALL} == {LAST}

    def test_of_or_greedy_search_keeps_one_of_two(self) -> None:
        left = by_hand.left_by_acdc(gate("or"), BASE, SOURCE, error, THRESHOLD)
        assert set(left) in ({*FIRST, LAST}, {*SECOND, LAST})

    def test_of_and_greedy_search_keeps_both(self) -> None:
        left = by_hand.left_by_acdc(gate("and"), BASE, SOURCE, error, THRESHOLD)
        assert set(left) == {*FIRST, *SECOND, LAST}

    def test_pairs_show_that_or_has_two_inputs(self) -> None:
        stack = gate("or")
        pairs = itertools.combinations([edge for edge in by_hand.edges(stack) if edge != LAST], 2)
        matter = {pair for pair in pairs if error(by_hand.outputs(stack, BASE, SOURCE, pair)) > SMALL}
        assert {frozenset(pair) for pair in matter} == ONE_OF_EACH


@pytest.mark.parametrize(("name", "matter"), [("or", {LAST}), ("and", {*FIRST, *SECOND, LAST})])
def test_the_exact_sweep_shows_what_matters_alone(name: str, matter: set[str]) -> None:
    stack = gate(name)
    effects = by_conewise.effects(stack, BASE, SOURCE, error)
    assert {edge for edge, effect in effects.items() if abs(effect) > SMALL} == matter
    assert effects == pytest.approx(by_hand.effects(stack, BASE, SOURCE, error), abs=SMALL)


def test_of_or_acdc_keeps_one_of_two_and_of_and_both() -> None:
    of_or = by_conewise.circuit(gate("or"), BASE, SOURCE, error, THRESHOLD)
    assert set(of_or.edges) in ({*FIRST, LAST}, {*SECOND, LAST})
    of_and = by_conewise.circuit(gate("and"), BASE, SOURCE, error, THRESHOLD)
    assert set(of_and.edges) == {*FIRST, *SECOND, LAST}


@pytest.mark.parametrize("way", [0, 1])
def test_pairs_into_the_same_component_show_that_or_has_two_inputs(way: int) -> None:
    """Neither of them matters alone; the sweep over all pairs of these edges shows both."""
    several = [edge for edge in by_conewise.edges(gate("or")) if edge.endswith(("<v>", "->m0")[way])]
    pairs = list(itertools.combinations(several, 2))
    effects = by_conewise.effects_of_sets(gate("or"), BASE, SOURCE, error, pairs)
    matter = {pair for pair, effect in effects.items() if abs(effect) > SMALL}
    assert matter == {(FIRST[way], SECOND[way])}
    assert effects[FIRST[way], SECOND[way]] == pytest.approx(1.0)


def test_edges_into_logits_without_a_norm_are_patched_together() -> None:
    """The reader is patched where it reads."""
    found = by_conewise.effects_of_sets(gate("or"), BASE, SOURCE, error, [("input->logits", LAST)])
    assert found["input->logits", LAST] == pytest.approx(1.0)


def test_with_readers_live_every_pair_shows_that_or_has_two_inputs() -> None:
    stack = gate("or")
    edges = by_conewise.edges(stack)
    pairs = list(itertools.combinations([edge for edge in edges if edge != LAST], 2))
    model = by_conewise.captured(stack)
    found = cw.evaluate(
        [Circuit.made(model, [edge for edge in edges if edge not in pair]) for pair in pairs],
        base={"ids": BASE},
        source={"ids": SOURCE},
        metric=error,
    )
    matter = {
        frozenset(pair) for pair, share in zip(pairs, found, strict=True) if share.faithfulness < 1.0 - SMALL
    }
    assert matter == ONE_OF_EACH
