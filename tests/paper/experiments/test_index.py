from functools import cache

import pytest
import torch

import conewise as cw
from conewise.model import Model
from conewise.models.architectures import ARCHITECTURES
from conewise.paper.experiments import index
from tests.paper.experiments.quick import quick
from tests.program.zoo import ZOO


@cache
def captured(name: str) -> Model:
    architecture = ARCHITECTURES[name]
    return cw.capture(architecture.make(1), **architecture.example(8))


def test_every_architecture_of_the_coverage_table_is_there() -> None:
    ours = {"skips", "two_and_two"}
    assert set(ZOO) - ours == set(ARCHITECTURES) - {"mobilenet_v2"}
    for name in set(ZOO) - ours:
        assert (ZOO[name].config, ZOO[name].model) == (ARCHITECTURES[name].config, ARCHITECTURES[name].model)


@pytest.mark.parametrize(("name", "depth"), [("vit", 1), ("t5", 2), ("mobilenet_v2", 16)])
def test_each_operation_is_in_one_layer_or_before_or_after_them(name: str, depth: int) -> None:
    model = captured(name)
    layers = index.layers_of(model.program)
    inside = [node for layer in layers.inside for node in layer]
    assert sorted([*layers.before, *inside, *layers.after]) == sorted(model.graph.computed)
    assert len(layers.inside) == depth
    assert all(layers.inside)


def test_layers_that_are_alike_have_index_zero_and_the_ratio_that_follows() -> None:
    rows = [
        row for row in quick("index").rows if row.facts.get("weight") in ("nodes", "FLOPs") and not row.detail
    ]
    assert [row.facts["index"] for row in rows] == [0, 0]
    for row in rows:
        assert row.predicted == pytest.approx(float(row.measured), rel=1e-12)
        assert row.facts["limit"] == 2


def test_making_a_model_leaves_the_random_numbers_of_others_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    ARCHITECTURES["vit"].make(1, seed=5)
    assert torch.equal(torch.rand(3), expected)
