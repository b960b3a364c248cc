"""The closed forms of edges: counts of known models, limits, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conewise.errors import TheoryError
from conewise.paper import theory
from tests.laws.cost_scenes import line


@pytest.mark.parametrize(
    ("shape", "edges"),
    [
        ({"layers": 12, "heads": 12}, 32_491),  # GPT-2 small
        ({"layers": 2, "heads": 4}, 110),
        ({"layers": 2, "heads": 4, "kv_heads": 2}, 82),
        ({"layers": 2, "heads": 4, "parallel": True}, 102),
        ({"layers": 2, "heads": 8, "mlp": False}, 24 + 24 * 9 + 17),
        ({"layers": 1, "heads": 1}, 3 + 2 + 3),
    ],
)
def test_the_edges_of_known_models(shape: dict[str, Any], edges: int) -> None:
    assert theory.edge_count(**shape) == edges


@given(st.integers(0, 5))
def test_edges_grow_with_depth_as_sites_of_index_one_do(q: int) -> None:
    assert theory.edge_limit() == theory.sites_limit(0, 1) == 3
    assert theory.sites_limit(q, 1) == Fraction(q + 3, q + 1)
    assert theory.sites_limit(q, 1, "input-heavy", "output-heavy") == Fraction((q + 2) * (q + 3), 2)


def test_weights_are_summed_as_they_are() -> None:
    readers = [theory.ReaderAt("n1", "n3", writers=2, parts=3)]
    cost = theory.edge_cost(line(nodes=4), readers, weights={"n1": 1, "n2": 2, "n3": Fraction(1, 3), "n4": 5})
    assert cost == theory.EdgeCost(6, 2 * Fraction(7, 3), 30, 14, 6 * Fraction(25, 3))
    assert cost.total == 30 + Fraction(14, 3)
    assert cost.one_by_one == 44
    assert cost.ratio == Fraction(50) / (30 + Fraction(14, 3))
    rounded = theory.edge_cost(line(nodes=4), readers, weights=dict.fromkeys(["n1", "n2", "n3", "n4"], 0.1))
    assert rounded.total == 2 * 2 * 0.1 + 6 * 0.1


def test_what_is_no_reader_is_refused() -> None:
    with pytest.raises(TheoryError, match="does not depend on 'n3'"):
        theory.edge_cost(line(nodes=3), [theory.ReaderAt("n3", "n1", 1)])
    with pytest.raises(TheoryError, match="no ReaderAt"):
        theory.edge_cost(line(nodes=3), ["n1"])  # type: ignore[list-item]
    with pytest.raises(TheoryError, match="number of writers that 'n2' reads"):
        theory.ReaderAt("n1", "n2", 0)
    with pytest.raises(TheoryError, match="computes nothing"):
        _ = theory.edge_cost(line(nodes=3), []).ratio


def test_stacks_that_cannot_be_are_refused() -> None:
    with pytest.raises(TheoryError, match="12 heads cannot share 5"):
        theory.edge_count(12, 12, 5)
    with pytest.raises(TheoryError, match="have an MLP beside"):
        theory.edge_count(12, 12, mlp=False, parallel=True)
    with pytest.raises(TheoryError, match="the slots q, k, v, logits"):
        theory.stack_edge_cost(2, 2, between={"q": 1}, below={"q": 1}, layer=1, full=1, mlp=False)
    with pytest.raises(TheoryError, match="no more than the second"):
        theory.edge_limit(4, 3)
