"""Modules that are called several times: their paths, and the names of single calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import MissingSiteError, SweepError
from tests.program.zoo import ZOO


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.a(x).tanh() + 3 * self.a(-x).tanh()
        return made


def total(y: Tensor) -> Tensor:
    return y.sum(-1)


@pytest.fixture
def model() -> cw.Model:
    torch.manual_seed(0)
    return cw.capture(Twice().eval(), torch.randn(4, 3))


@pytest.mark.parametrize("evaluator", ["serial", "wavefront"])
def test_a_path_is_patched_at_every_call(model: cw.Model, evaluator: str) -> None:
    sweep = model.sweep(["a", "a#1"], base=model.run(torch.randn(4, 3)), source="zero", metric=total)
    result = sweep.run(evaluator=evaluator)
    assert result.values[0] == 0
    assert result.values[1] != 0
    assert [cell.name for cell in result.cells] == ["a", "a#1"]
    assert result.verify().hooked == 2


def test_a_path_with_several_calls_is_read_call_by_call(model: cw.Model) -> None:
    run = model.run(torch.randn(4, 3))
    for read in (lambda: run["a"], lambda: run.gradients(total, ["a"])):
        with pytest.raises(MissingSiteError, match=r"'a' means 2 calls .* Say which: a#0, a#1"):
            read()
    assert torch.equal(
        run.outputs, run["a#0"].tanh() + 3 * run["a@1"].tanh()
    )  # the second as it was written once


def test_patches_of_a_path_are_taken_back_together(model: cw.Model) -> None:
    run = model.run(torch.randn(4, 3))
    with run.fork() as world:
        world.patch("a", "zero")
        assert not world.outputs.any()
        world.restore("a")
        assert torch.equal(world.outputs, run.outputs)


def test_an_attribution_to_a_path_is_that_to_its_calls(model: cw.Model) -> None:
    base, source = model.run(torch.randn(4, 3)), model.run(torch.randn(4, 3))
    found = model.attribute(["a", "a#0", "a#1"], base=base, source=source, metric=total).run().effect
    torch.testing.assert_close(found[0], found[1] + found[2])


def test_a_part_is_chosen_in_every_call(model: cw.Model) -> None:
    base = model.run(torch.randn(4, 3))
    result = model.sweep(cw.sites("a", dim1=":"), base=base, source="zero", metric=total).run()
    assert result.values.shape == (3,)
    with base.fork() as world:
        world.patch(cw.site("a", dim1=1), "zero")
        torch.testing.assert_close(result.values[1].float(), total(world.outputs).mean())


def test_a_cell_of_a_path_may_have_a_source_of_its_own(model: cw.Model) -> None:
    base = model.run(torch.randn(4, 3))
    result = model.sweep([cw.cell("a", source=0.5)], base=base, source=None, metric=total).run()
    assert result.values[0] == pytest.approx(4 * 3 * torch.tensor(0.5).tanh().item())


def test_several_paths_of_one_module_mean_the_same() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ModuleList([nn.Linear(3, 3)] * 3)

        def forward(self, x: Tensor) -> Tensor:
            for row in self.rows[1:]:
                x = x + row(x).tanh()
            return x

    model = cw.capture(Tied().eval(), torch.randn(4, 3))
    base = model.run(torch.randn(4, 3))
    sites = ["rows.0", "rows.1", "rows.2", ["rows.0#0", "rows.0#1"], "rows.2#1"]
    result = model.sweep(sites, base=base, source="zero", metric=total).run()
    assert len(set(result.values[:4].tolist())) == 1
    assert result.verify().hooked == 5


def test_a_call_that_computes_nothing_is_told() -> None:
    class Project(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x if x.shape[-1] == 4 else self.linear(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.drop = Project(), nn.Dropout()

        def forward(self, x: Tensor) -> Tensor:
            y = self.project(x).tanh()
            made: Tensor = self.project(y) + self.drop(y)
            return made

    model = cw.capture(Model().eval(), torch.randn(4, 3))
    base = model.run(torch.randn(4, 3))
    with pytest.raises(MissingSiteError, match=r"'project#1' has no output .* computes nothing .* project#0"):
        model.sweep(["project"], base=base, source="zero", metric=total)
    with pytest.raises(MissingSiteError, match=r"'drop' .* hands a value through there that others read"):
        model.sweep(["drop"], base=base, source="zero", metric=total)
    assert model.sweep(["project#0"], base=base, source="zero", metric=total).run().verify()


def test_verify_tells_of_calls_that_the_graph_does_not_show(model: cw.Model) -> None:
    sweep = model.sweep(["a"], base=model.run(torch.randn(4, 3)), source="zero", metric=total)
    object.__setattr__(model.program, "ports", model.program.ports[:1])
    check = model.verify()
    assert not check
    assert "'a' is called 2 times, and 1 times in the captured graph" in str(check)
    with pytest.raises(SweepError, match="not all of its calls were patched"):
        sweep.run().verify()


def test_layers_that_share_a_module_are_each_its_own_call() -> None:
    module, inputs = ZOO["albert"].make("eager"), ZOO["albert"].example(2, 5)
    model = cw.capture(module.eval(), **inputs)
    path = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn_output"
    run = model.run(**inputs)
    assert torch.equal(run["mlp_out", 2], run[f"{path}#2"])
    seen: list[int] = []

    def to_zero(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return output * 0

    handle = module.get_submodule(path).register_forward_hook(to_zero)
    with torch.no_grad():
        expected = module(**inputs).logits
    handle.remove()
    with run.fork() as world:
        world.patch(path, "zero")
        torch.testing.assert_close(world.logits, expected)
    assert len(seen) == 3
