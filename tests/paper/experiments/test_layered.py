import pytest

from conewise.paper.experiments.layered import branched, profile_weights, sequential


def test_weights_grow_towards_the_side_that_is_heavy() -> None:
    towards_output = profile_weights(20, 1.0, "output-heavy")
    assert towards_output == sorted(towards_output)
    assert profile_weights(20, 1.0, "input-heavy") == towards_output[::-1]
    assert profile_weights(20, 0.0, "output-heavy") == [200] * 20


def test_no_layer_is_empty_and_halves_are_rounded_to_even() -> None:
    assert min(profile_weights(320, 2.0, "output-heavy")) == 1
    assert profile_weights(320, 0.0, "output-heavy") == [12] * 320


@pytest.mark.parametrize("weights", [[1], [2, 3], [1, 1, 4]])
def test_graphs_have_the_nodes_that_the_paper_counts(weights: list[int]) -> None:
    chain, wide = sequential(weights), branched(weights)
    assert chain.size == sum(weights) + 1
    assert wide.size == sum(2 * w - 1 for w in weights) + 1
    assert len(chain.sites) == len(wide.sites) == len(weights)


def test_the_siblings_of_a_branch_are_neither_above_nor_below_it() -> None:
    wide = branched([3, 3])
    site = wide.sites[1]
    related = {*wide.graph.upstream(site), *wide.graph.cone(site)}
    assert {"layer2.branch1", "layer2.branch2"}.isdisjoint(related)
    assert "layer1.branch2" in related
