"""Transformers: every cone of three architectures, counted on the graph; the paper's figures of E9."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

import conewise as cw
from conewise.errors import TheoryError
from conewise.paper import theory
from conewise.paper.theory.transformers import Architecture
from conewise.reactive.graph import cone_sizes
from tests.laws.scenes import Mix

FORMS: dict[Architecture, tuple[Callable[..., int], Callable[..., int], Callable[..., Fraction]]] = {
    "llama": (theory.transformer_cone, theory.transformer_nodes, theory.transformer_ratio),
    "gpt2": (theory.gpt2_cone, theory.gpt2_nodes, theory.gpt2_ratio),
    "encoder": (theory.encoder_cone, theory.encoder_nodes, theory.encoder_ratio),
}


def built(plan: theory.Blueprint) -> cw.Graph:
    graph = cw.Graph()
    for site, inputs in plan.nodes:
        if inputs:
            graph.node(site, Mix(), inputs)
        else:
            graph.source(site, 1, param=site in plan.params)
    return graph


@pytest.mark.parametrize("architecture", FORMS)
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 2), (12, 12), (24, 16)])
def test_every_cone_and_the_ratio_are_those_of_the_graph(
    architecture: Architecture, layers: int, heads: int
) -> None:
    cone, nodes, ratio = FORMS[architecture]
    plan = theory.blueprint(architecture, layers, heads)
    graph = built(plan)
    sites = [site for site, _, _ in plan.sites]
    sizes = cone_sizes(graph, sites)
    assert len(sites) == layers * (heads + 1)
    assert {site: cone(layers, heads, layer, kind) for site, layer, kind in plan.sites} == sizes
    assert nodes(layers, heads) == len(graph.computed)
    assert ratio(layers, heads, readout=True) == theory.sweep_ratio(graph, sites)
    assert ratio(layers, heads) == Fraction(len(sites) * (nodes(layers, heads) - 1), sum(sizes.values()))


def test_the_paper_s_figures_of_e9() -> None:
    assert theory.transformer_cone(layers=12, heads=12, layer=3, site="head") == 10 + 9 * 99
    assert theory.transformer_cone(12, 12, 12, "mlp") == 2
    assert f"{float(theory.transformer_ratio(12, 12)):.3f}" == "2.145"
    assert f"{float(theory.transformer_ratio(24, 16)):.3f}" == "2.073"
    assert f"{float(theory.transformer_ratio(12, 12, readout=True)):.3f}" == "2.147"
    assert f"{float(theory.transformer_ratio(24, 16, readout=True)):.3f}" == "2.074"
    M = 99
    assert theory.transformer_ratio(12, 12) == Fraction(13 * M * 12) / (Fraction(13 * M * 11, 2) + 122)


@pytest.mark.parametrize("heads", [1, 2, 12, 100])
def test_the_paper_s_ratio_comes_down_to_2_from_above(heads: int) -> None:
    ratios = [theory.transformer_ratio(layers, heads) for layers in (1, 2, 12, 1000)]
    assert ratios == sorted(ratios, reverse=True)
    assert 2 < ratios[-1] < 2.01


def test_a_layer_holds_nine_parameters() -> None:
    plan = theory.blueprint("llama", 2, 3)
    assert len(plan.params) == 18
    assert len(plan.nodes) == 1 + 2 * (7 * 3 + 24) + 1
    assert plan.sites[0] == ("layers.1.heads.0.out", 1, "head")
    assert plan.sites[3] == ("layers.1.down", 1, "mlp")
    assert dict(plan.nodes)["readout"] == ("layers.2.add2",)
    assert dict(plan.nodes)["layers.2.concat"] == tuple(f"layers.2.heads.{head}.out" for head in range(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.transformer_cone(12, 12, 13), "layer 13 of 12"),
        (lambda: theory.transformer_cone(12, 12, 0), "the layer is 0"),
        (lambda: theory.transformer_cone(0, 12, 1), "the number of layers is 0"),
        (lambda: theory.gpt2_ratio(12, 0), "the number of heads is 0"),
        (lambda: theory.gpt2_ratio(12, 1.5), "the number of heads is 1.5"),  # type: ignore[arg-type]
        (lambda: theory.encoder_cone(2, 2, 1, "tail"), "the site is 'tail'"),  # type: ignore[arg-type]
        (lambda: theory.blueprint("rnn", 1, 1), "one of llama, gpt2, encoder"),  # type: ignore[arg-type]
    ],
)
def test_what_is_refused(call: Any, message: str) -> None:
    with pytest.raises(TheoryError, match=message):
        call()
