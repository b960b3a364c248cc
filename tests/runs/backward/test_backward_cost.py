"""Which part of a reverse pass depends on a patch: on captured models, by the ledger and by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.errors import ArgumentError, GradientError, MetricError, MissingSiteError
from conewise.paper.experiments.backward import counted, networks
from conewise.paper.theory.backward import reverse_cost
from conewise.program.tensors import computing
from conewise.reactive.gradients import gradients
from conewise.runs.backward_cost import METRIC, reverse_graph
from conewise.runs.metric_words import as_metric
from tests.circuits.edge_models import inputs_of, module_of, run_of


def ranks(outputs: Any) -> Tensor:
    found: Tensor = outputs.logits.argmax(-1)[:, -1].float()
    return found


SITES = cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":")


def squares(outputs: Any) -> Tensor:
    found: Tensor = outputs.logits.square().mean()
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_gradients_as_nodes_are_those_of_the_module(name: str) -> None:
    """The graph whose reverse pass is counted computes what torch computes."""
    run, module = run_of(name, 1), module_of(name)
    both = reverse_graph(run._tape(), as_metric(squares), run.inputs)
    named = dict(module.named_parameters())
    wrt = [parameter for parameter in both.parameters if parameter in named]
    grads = gradients(both.graph, METRIC, wrt)
    with computing(), cw.World(both.graph) as world:
        found = world.demand([grads[parameter] for parameter in wrt])
    loss = squares(module(**inputs_of(name, 1)))
    expected = torch.autograd.grad(loss, [named[parameter] for parameter in wrt])
    assert len(wrt) > 15
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_whole_reverse_pass_but_its_linear_end_depends_on_a_patch(name: str) -> None:
    run = run_of(name, 1)
    cost = run.backward_cost(cw.logit_diff(1, 2), SITES)
    assert len(cost) == 10
    assert next(iter(cost)) == str(cw.site("z", layer=0, head=0))
    assert {one.backward for one in cost.values()} == {cost.backward - 1}, "all but the logits' own gradient"
    nonlinear = run.backward_cost(squares, SITES)
    assert nonlinear.share == 1
    assert 1 < nonlinear.ratio < cost.ratio < cost.forward_ratio


def test_costs_by_weights_are_those_of_training() -> None:
    run = run_of("gpt2", 1)
    by_sites, by_weights = (run.backward_cost(squares, SITES, weights=weights) for weights in (False, True))
    assert by_weights.backward > by_sites.backward
    assert "28 weights" in str(by_weights)
    assert "stale of the reverse pass   100.0%" in str(by_weights)
    assert "100.0% of a reverse pass" in repr(by_weights)
    assert "<table" in by_weights._repr_html_()


def test_places_of_one_cell_are_patched_together() -> None:
    run = run_of("gpt2", 1)
    heads = run.backward_cost(squares, cw.sites("z", layer=0, head=":"))
    assert len({(one.forward, one.backward) for one in heads.values()}) == 1, "heads of one node"
    early, late = cw.site("z", layer=0), cw.site("mlp_out", layer=0)
    both = run.backward_cost(squares, [[early, late]])
    (found,) = both.values()
    assert found.forward == run.backward_cost(squares, early)[str(early)].forward - 2, (
        "a product and its view"
    )


def test_what_is_counted_is_what_the_engine_computes_and_torch_changes() -> None:
    for network in networks("four towers"):
        cost = reverse_cost(network.graph, network.sites, METRIC, network.wrt)
        found = counted(network, network.sites)
        assert (cost.forward, cost.backward) == (found.forward, found.backward)
        assert sum(cost.stale_forward) == found.stale_forward
        assert sum(cost.stale_backward) == found.stale_backward == found.changed
        assert found.uncounted == 0
        assert (cost.share == 1) == (network.loss == "squared")


def test_what_cannot_be_counted_is_said() -> None:
    run = run_of("gpt2", 1)
    cost = run.backward_cost(squares, ("z", 0))
    with pytest.raises(MissingSiteError, match=r"no patch at resid_pre was counted: those at 1 cells were"):
        cost["resid_pre"]
    with run.fork() as world:
        world.patch(("z", 0), "zero")
        with pytest.raises(GradientError, match="1 patches stand in this world"):
            world.backward_cost(squares, ("z", 0))
    with pytest.raises(GradientError, match="the metric 'ranks' has no gradient"):
        run.backward_cost(ranks, ("z", 0))
    with pytest.raises(ArgumentError, match="`weights` is int 3; expected True or False"):
        run.backward_cost(squares, ("z", 0), weights=3)  # type: ignore[arg-type]
    with pytest.raises(MetricError, match="3"):
        run.backward_cost(cw.logit_diff([1, 2, 3], [4, 5, 6]), ("z", 0))
