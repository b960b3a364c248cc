"""Circuits from scores, against answers that look at every path."""

import itertools
from typing import Any

import numpy as np
import pytest

from conewise.anatomy.edge_graph import EdgeGraph
from conewise.circuits.circuit_data import chosen, growing, levels, pruned, score_array
from conewise.errors import CircuitError
from tests.circuits.graphs import graph, on_a_path, random_scores

GRAPHS = {
    "plain": graph(2, 2),
    "grouped": graph(2, 4, kv_heads=2),
    "parallel": graph(2, 2, parallel=True),
    "deep": graph(3, 1),
}
CASES = [
    pytest.param(found, seed, id=f"{name}-{seed}") for name, found in GRAPHS.items() for seed in range(3)
]


def names(found: EdgeGraph, numbers: np.ndarray) -> set[str]:
    return set(found.names(numbers))


@pytest.mark.parametrize(("found", "seed"), CASES)
def test_pruning_leaves_the_edges_on_a_path_and_no_other(found: EdgeGraph, seed: int) -> None:
    draw = np.random.default_rng(seed)
    for share in (0.15, 0.3, 0.6):
        edges = np.flatnonzero(draw.random(found.count) < share)
        assert names(found, pruned(found, edges)) == on_a_path(found, names(found, edges))


@pytest.mark.parametrize(("found", "seed"), CASES)
def test_a_threshold_keeps_what_is_on_a_path_over_scores_as_large(found: EdgeGraph, seed: int) -> None:
    scores = random_scores(found, seed, missing=0.2)
    array = score_array(found, scores)
    sizes = set()
    for threshold in (0.0, 0.5, 0.75, 1.0, 1.25):
        strong = {edge for edge, score in scores.items() if abs(score) >= threshold}
        kept = names(found, chosen(found, array, top=None, threshold=threshold, connected=True))
        assert kept == on_a_path(found, strong)
        assert names(found, chosen(found, array, top=None, threshold=threshold, connected=False)) == strong
        sizes.add(len(kept))
    assert len(sizes) > 1


@pytest.mark.parametrize(("found", "seed"), CASES)
def test_the_level_of_an_edge_is_the_last_threshold_that_keeps_it(found: EdgeGraph, seed: int) -> None:
    scores = random_scores(found, seed, missing=0.2)
    level = levels(found, score_array(found, scores))
    for threshold in sorted({abs(score) for score in scores.values()}):
        kept = on_a_path(found, [edge for edge, score in scores.items() if abs(score) >= threshold])
        assert {found.edges[at] for at in np.flatnonzero(level >= threshold)} == kept


@pytest.mark.parametrize(("found", "seed"), CASES)
def test_the_top_without_paths_are_the_largest(found: EdgeGraph, seed: int) -> None:
    scores = random_scores(found, seed, missing=0.1)
    top = chosen(found, score_array(found, scores), top=7, threshold=None, connected=False)
    ordered = sorted(scores, key=lambda edge: (-abs(scores[edge]), found.number(edge)))
    assert [found.edges[at] for at in top] == ordered[:7]


def grown_by_hand(found: EdgeGraph, scores: dict[str, float]) -> list[set[str]]:
    """The circuits that growing comes by: one edge after another is taken, and all of it pruned each time."""
    taken: list[str] = []
    circuits: list[set[str]] = [set()]
    while True:
        writers = {edge.partition("->")[0] for edge in taken}
        owners = {
            reader.name: {found.writers[one].name for one in fed}
            for reader, fed in zip(found.readers, found.fed, strict=True)
        }
        open_edges = [
            edge
            for edge in scores
            if edge not in taken and (edge.endswith("->logits") or owners[edge.partition("->")[2]] & writers)
        ]
        if not open_edges:
            return circuits
        taken.append(min(open_edges, key=lambda edge: (-abs(scores[edge]), found.number(edge))))
        kept = on_a_path(found, taken)
        if kept != circuits[-1]:
            circuits.append(kept)


@pytest.mark.parametrize(("found", "seed"), CASES[:4] + CASES[6:])
def test_the_top_are_grown_from_the_logits(found: EdgeGraph, seed: int) -> None:
    scores = random_scores(found, seed, missing=0.3)
    by_hand = grown_by_hand(found, scores)
    groups = list(growing(found, score_array(found, scores)))
    circuits = [set(found.names(part)) for part in itertools.accumulate(groups, initial=[])]
    assert circuits == by_hand
    array = score_array(found, scores)
    for top in range(len(by_hand[1]), len(scores) + 1):
        kept = names(found, chosen(found, array, top=top, threshold=None, connected=True))
        assert kept == max((one for one in by_hand if len(one) <= top), key=len)
        assert kept == on_a_path(found, kept)


def test_too_few_edges_to_reach_the_input_are_refused_with_how_many_would() -> None:
    found = graph(1, 1)
    strong = ["m0->logits", "a0.h0->m0", "input->a0.h0<v>"]
    scores = score_array(found, dict.fromkeys(found.edges, 0.0) | dict.fromkeys(strong, 1.0))
    assert names(found, chosen(found, scores, top=3, threshold=None, connected=True)) == set(strong)
    with pytest.raises(CircuitError, match=r"are 3, more than top=2. Take as many, or .*connected=False"):
        chosen(found, scores, top=2, threshold=None, connected=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"top": None, "threshold": None}, "give one of the two"),
        ({"top": 3, "threshold": 0.1}, "give one of the two"),
        ({"top": 0, "threshold": None}, r"there are 12 edges with scores; top=0 is none of 1 to that"),
        ({"top": 13, "threshold": None}, "top=13"),
        ({"top": True, "threshold": None}, "top=True"),
        ({"top": None, "threshold": -0.1}, r"threshold=-0\.1 is no size of a score"),
        ({"top": None, "threshold": float("nan")}, "threshold=nan"),
        ({"top": None, "threshold": "much"}, "threshold='much'"),
        ({"top": 1.5, "threshold": None}, "top=1.5"),
    ],
)
def test_what_cannot_be_chosen_by_is_refused(given: dict[str, Any], said: str) -> None:
    found = graph(1, 3, parallel=True)
    scores = np.ones(found.count)
    scores[12:] = np.nan
    with pytest.raises(CircuitError, match=said):
        chosen(found, scores, connected=True, **given)
