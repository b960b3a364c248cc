"""Patches that stay: on a chain, the best order for patches is the worst for grafts."""

from typing import Any

import pytest

from conewise import theory
from conewise.errors import TheoryError, UnknownSiteError
from tests.laws.cost_scenes import line


def test_downstream_first_is_best_on_a_chain() -> None:
    graph, patches = line(nodes=10), ["n2", "n5", "n8"]
    upstream_first = theory.patched_cost(graph, patches, "n10")
    assert upstream_first.costs == (8, 5, 2)
    assert upstream_first.total == upstream_first.isolated == 15
    assert upstream_first.batched == 2
    downstream_first = theory.patched_cost(graph, patches, "n10", order=(2, 1, 0))
    assert downstream_first.costs == (2, 0, 0)
    assert downstream_first.shielded == 13
    extremes = theory.patch_extremes(graph, patches, "n10")
    assert (extremes.least, extremes.most) == (2, 15)
    assert extremes.best == theory.best_patch_order(graph, patches) == (2, 1, 0)


def test_when_all_is_demanded_what_lies_between_patches_counts() -> None:
    graph, patches = line(nodes=10), ["n2", "n5", "n8"]
    assert theory.patched_cost(graph, patches, order=(2, 1, 0)).costs == (2, 2, 2)
    assert theory.patched_cost(graph, patches, order=(2, 1, 0)).batched == 6


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: theory.patched_cost(g, ["n1", "n1"]), TheoryError, "'n1' is patched twice"),
        (lambda g: theory.patched_cost(g, ["n1"], order=[1]), TheoryError, "is not a permutation"),
        (lambda g: theory.patched_cost(g, ["m"]), UnknownSiteError, "no site 'm'"),
        (lambda g: theory.patch_extremes(g, ["n1"], "m"), UnknownSiteError, "no site 'm'"),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(line(nodes=3))
