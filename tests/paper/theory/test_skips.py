"""Long skips: the closed forms against the graph they describe, at zero tolerance, and the limits."""

from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import conewise as cw
from conewise.errors import TheoryError
from conewise.paper import theory
from tests.laws.scenes import Mix

SHAPES = {"span": st.integers(1, 7), "every": st.integers(1, 14)}
PROFILES = st.lists(st.integers(1, 4), min_size=1, max_size=12)


def built(
    profile: list[int], edges: tuple[tuple[int, int], ...], terminal: int
) -> tuple[cw.Graph, list[str]]:
    """A chain of nodes for each layer; the first reads the last of every layer that the layer reads."""
    graph = cw.Graph()
    ends = [graph.source("x", 1)]
    for layer, width in enumerate([*profile, terminal], 1):
        reads = [ends[i] for i, j in edges if j == layer]
        for place in range(width):
            reads = [graph.node(f"{layer}.{place}", Mix(), reads)]
        ends.append(reads[0])
    return graph, ends[1:-1]


@given(PROFILES, SHAPES["span"], SHAPES["every"], st.integers(1, 2))
def test_both_ratios_are_those_of_the_graph(profile: list[int], span: int, every: int, terminal: int) -> None:
    edges = theory.skip_layers(len(profile), span, every)
    graph, sites = built(profile, edges, terminal)
    assert theory.skip_ratio(profile, span, every, terminal=terminal) == theory.sweep_ratio(graph, sites)
    assert theory.skip_training_ratio(profile, span, every, terminal=terminal) == theory.training_ratio(
        graph, sites
    )


@given(st.integers(1, 14), SHAPES["span"], SHAPES["every"], st.integers(1, 3), st.integers(1, 2))
def test_equal_layers_have_the_closed_form(L: int, span: int, every: int, w: int, t: int) -> None:
    graph, sites = built([w] * L, theory.skip_layers(L, span, every), t)
    parallel = sum(b not in graph.cone(a) for a, b in combinations(sites, 2))
    assert theory.incomparable_pairs(L, span, every) == parallel
    C = L * (L - 1) // 2 - parallel
    assert theory.skip_ratio([w] * L, span, every, terminal=t) == Fraction(L * (w * L + t), w * C + L * t)
    assert theory.skip_training_ratio([w] * L, span, every, terminal=t) == Fraction(
        L * (w * L + t), w * (2 * C + L) + L * t
    )


@given(PROFILES, SHAPES["span"], SHAPES["every"])
def test_an_added_skip_changes_no_cone(profile: list[int], span: int, every: int) -> None:
    edges = theory.skip_layers(len(profile), span, every, kind="added")
    graph, sites = built(profile, edges, 1)
    assert theory.sweep_ratio(graph, sites) == theory.sweep_ratio(profile, terminal=1)
    assert theory.training_ratio(graph, sites) == 1


@given(PROFILES, SHAPES["every"])
def test_span_one_is_the_plain_stack(profile: list[int], every: int) -> None:
    L = len(profile)
    assert theory.skip_layers(L, 1, every) == tuple((j, j + 1) for j in range(L + 1))
    assert theory.skip_ratio(profile, 1, every, terminal=1) == theory.sweep_ratio(profile, terminal=1)
    assert theory.skip_training_ratio(profile, 1, every, terminal=1) == 1


def test_the_edges_of_a_small_stack() -> None:
    assert theory.skip_layers(5, 2, 4) == (
        (0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5), (5, 6),
    )  # fmt: skip
    assert theory.skip_layers(4, 3, 2, kind="added") == ((0, 1), (0, 3), (1, 2), (2, 3), (3, 4), (4, 5))


@pytest.mark.parametrize("span", [1, 2, 5])
@pytest.mark.parametrize("share", [Fraction(1), Fraction(1, 2), Fraction(1, 10), Fraction(2, 5), 0.3])
def test_deep_stacks_tend_to_the_limits(span: int, share: Fraction | float) -> None:
    L = 20_000
    forward, training = theory.skip_limits(share, span)
    assert theory.skip_ratio(L, span, round(L * share)) == pytest.approx(forward, rel=1e-3)
    assert theory.skip_training_ratio(L, span, round(L * share)) == pytest.approx(training, rel=1e-3)


def test_bounded_periods_still_collapse() -> None:
    assert theory.skip_training_ratio(20_000, 8, 16) == pytest.approx(1, abs=1e-3)
    assert theory.skip_limits(0) == (2, 1)


def test_the_training_ratio_can_pass_the_forward_limit_of_the_plain_stack() -> None:
    """The paper expects it "strictly between 1 and the forward-only limit"; that limit is the graph's own."""
    assert theory.skip_limits(Fraction(1, 2)) == (4, 2)
    assert theory.skip_limits(1, 4) == (8, 4)


def star(N: int) -> cw.Graph:
    """One node with N − 1 readers."""
    graph = cw.Graph()
    graph.source("x", 1)
    graph.node("root", Mix(), ["x"])
    for number in range(N - 1):
        graph.node(f"n{number}", Mix(), ["root"])
    return graph


@pytest.mark.parametrize("N", [2, 10, 300])
def test_the_training_ratio_of_all_sites_is_half_the_forward_one_only_where_cones_grow(N: int) -> None:
    """ρ_train/ρ = 1/(2 + ρ/N): a half in the limit iff ρ = o(N); a third for a star, whose ρ is about N."""
    graph = star(N)
    assert theory.sweep_ratio(graph, graph.computed) == Fraction(N * N, N - 1)
    assert theory.training_ratio(graph, graph.computed) == Fraction(N * N, 3 * N - 2)
    assert theory.training_from_forward(Fraction(2 * N, N - 1), N) == 1


@given(st.integers(2, 9), st.data())
def test_every_number_of_pairs_is_some_graphs_and_no_other_ratio_is(N: int, data: st.DataObject) -> None:
    """A chain of k, and one node more that reads j of them: C = k(k−1)/2 + j, of any size up to N(N−1)/2."""
    C = data.draw(st.integers(1, N * (N - 1) // 2))
    k = next(k for k in range(1, N + 1) if k * (k + 1) // 2 >= C)
    graph = cw.Graph()
    before = graph.source("x", 1)
    for number in range(N):
        if number < k:
            before = graph.node(f"n{number}", Mix(), [before])
        else:
            j = C - k * (k - 1) // 2 if number == k else 0
            graph.node(f"n{number}", Mix(), [f"n{j - 1}" if j else "x"])
    assert theory.comparable_pairs(graph) == C
    forward = theory.sweep_ratio(graph, graph.computed)
    training = theory.training_ratio(graph, graph.computed)
    assert theory.training_from_forward(forward, N) == training
    assert theory.training_from_forward(float(forward), N) == pytest.approx(float(training))
    assert theory.training_from_forward(float(forward), N) >= 1
    with pytest.raises(TheoryError, match="which no graph of"):
        theory.training_from_forward(Fraction(N * N) / (C + Fraction(1, 2)), N)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.training_from_forward(1, 3), "the forward ratio is 1, which no graph of 3 nodes has"),
        (
            lambda: theory.training_from_forward(2.99, 3),
            "the forward ratio is 2.99, which no graph of 3 nodes",
        ),
        (
            lambda: theory.training_from_forward(10, 3),
            "the forward ratio is 10, which no graph of 3 nodes has",
        ),
        (lambda: theory.training_from_forward(3, 1), "a sweep of one node recomputes nothing"),
        (lambda: theory.skip_layers(10**9, 1, 1), "at most 20,000,000 are listed one by one"),
        (lambda: theory.skip_layers(0, 1, 1), "the number of layers is 0"),
        (lambda: theory.skip_layers(3, 0, 1), "`span` is 0"),
        (lambda: theory.skip_layers(3, 1, 0), "`every` is 0"),
        (lambda: theory.skip_layers(3, 1, 1, "dense"), "the kind of skip is 'dense'"),  # type: ignore[arg-type]
        (lambda: theory.skip_ratio([1, 0], 1, 1), "layer 2 of the profile weighs 0"),
        (lambda: theory.skip_ratio(3, 3, 3), "no layer has anything below it"),
        (lambda: theory.skip_limits(2), "`share` is 2"),
        (lambda: theory.skip_limits(1), "no finite limit"),
        (lambda: theory.training_from_forward(0, 3), "the forward ratio is 0"),
    ],
)
def test_what_is_refused(call: Any, message: str) -> None:
    with pytest.raises(TheoryError, match=message):
        call()
