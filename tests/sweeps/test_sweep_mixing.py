"""Which models can be swept as a wavefront, and what the plan says of those that cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import SweepError
from conewise.model import Model
from conewise.runs.metrics import Metric
from conewise.sweeps.sweep import Sweep


class Layers(nn.Module):
    """Two layers with something in between."""

    def __init__(self, between: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.first, self.between, self.second = nn.Linear(5, width), between, nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.between(self.first(x)))
        return out


class Lambda(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def shape_only(x: Tensor) -> Tensor:
    return x / x.shape[0]


def flat_rows(x: Tensor) -> Tensor:
    """Rows picked from a flattened batch: the indices of a world are not those of a stack."""
    picked = x.argmax(-1) + torch.arange(x.shape[0]) * x.shape[1]
    return x + x.reshape(-1)[picked][:, None]


def normed() -> nn.Module:
    norm = nn.BatchNorm1d(6)
    norm.running_mean.copy_(torch.randn(6))  # type: ignore[union-attr]
    norm.running_var.copy_(torch.rand(6) + 0.5)  # type: ignore[union-attr]
    return norm


def total(outputs: Tensor) -> Tensor:
    return outputs.sum(-1)


def swept(between: nn.Module, batch: int = 3) -> tuple[Model, Sweep]:
    torch.manual_seed(0)
    model = cw.capture(Layers(between).eval(), torch.randn(3, 5))
    base, source = model.run(torch.randn(batch, 5)), model.run(torch.randn(batch, 5))
    sites = ["first", "between", "second", "first.input"]
    return model, model.sweep(sites, base=base, source=source, metric=total)


APART: dict[str, Callable[[], nn.Module]] = {
    "batch norm in eval mode": normed,
    "layer norm": lambda: nn.LayerNorm(6),
    "softmax over features": lambda: nn.Softmax(-1),
    "sorted features": lambda: Lambda(lambda x: x.sort(-1).values + x.topk(6, -1).values),
    "transposed": lambda: Lambda(lambda x: x.t().contiguous().t()),
    "row numbers": lambda: Lambda(lambda x: x[torch.arange(x.shape[0]), :]),
    "split and joined": lambda: Lambda(lambda x: torch.cat(torch.chunk(x, 3, -1)[::-1], -1)),
    "written in place": lambda: Lambda(lambda x: x.clone().index_fill_(1, torch.tensor([2]), 0.5)),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart_are_swept_as_a_wavefront(name: str, batch: int) -> None:
    _, sweep = swept(APART[name](), batch)
    serial, wave = sweep.run(evaluator="serial"), sweep.run(evaluator="wavefront")
    torch.testing.assert_close(wave.per_prompt, serial.per_prompt, rtol=0, atol=1e-5)
    assert wave.verify(n=4)
    assert serial.verify(n=4)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "mean of the batch": lambda x: x - x.mean(0, keepdim=True),
    "sum of the batch": lambda x: x + x.sum(0),
    "sorted batch": lambda x: x.sort(0).values,
    "running sum over the batch": lambda x: x.cumsum(0),
    "the row before": lambda x: x.roll(1, 0),
    "rows compared": lambda x: (x @ x.t()).softmax(-1) @ x,
    "batch size as a number": shape_only,
    "rows of a flattened batch": flat_rows,
    "batch turned into features": lambda x: x.t().reshape(x.shape[0], 6),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MIXING)
def test_rows_that_mix_are_swept_serially_and_the_plan_says_where(name: str, batch: int) -> None:
    _, sweep = swept(Lambda(MIXING[name]), batch)
    plan = sweep.plan()
    assert plan.evaluator == "serial"
    assert "mixes the rows of the batch" in plan.why
    assert "between" in plan.why
    with pytest.raises(SweepError, match=r"cannot run as a wavefront.*Run it serially"):
        sweep.run(evaluator="wavefront")
    result = sweep.run()
    assert result.plan.node_evaluations == result.ledger.node_evaluations
    assert result.verify(n=4)


def test_mixing_above_the_swept_sites_is_no_obstacle() -> None:
    model, _ = swept(Lambda(MIXING["mean of the batch"]))
    base, source = model.run(torch.randn(3, 5)), model.run(torch.randn(3, 5))
    sweep = model.sweep(["between", "second"], base=base, source=source, metric=total)
    assert sweep.plan().evaluator == "wavefront"
    assert sweep.run().verify(n=2)


def test_mixing_behind_what_the_metric_reads_is_no_obstacle() -> None:
    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.second(self.first(x))
            return {"logits": y, "loss": y.square().mean()}

    torch.manual_seed(0)
    model = cw.capture(TwoOutputs().eval(), torch.randn(3, 5))
    base, source = model.run(torch.randn(3, 5)), model.run(torch.randn(3, 5))
    sweep = model.sweep(["first"], base=base, source=source, metric=cw.logit_diff(0, 1))
    assert sweep.plan().evaluator == "wavefront"
    assert sweep.run().verify(n=1)
    whole = model.sweep(["first"], base=base, source=source, metric=lambda out: out["loss"])
    assert whole.plan().evaluator == "serial"
    assert "mixes" in whole.plan().why


def test_one_token_prompts_do_not_hide_that_rows_mix() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            out: Tensor = self.head(x - x.mean(0, keepdim=True))
            return out

    torch.manual_seed(0)
    model = cw.capture(Tokens().eval(), torch.tensor([[3, 4], [1, 2]]))
    base, source = model.run(torch.tensor([[3]])), model.run(torch.tensor([[4]]))
    sweep = model.sweep(["embed"], base=base, source=source, metric=cw.logit_diff(1, 2))
    assert sweep.plan().evaluator == "serial"


def test_a_site_without_a_batch_is_swept_serially() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.where, self.head = nn.Embedding(9, 6), nn.Embedding(8, 6), nn.Linear(6, 9)

        def forward(self, input_ids: Tensor) -> Tensor:
            places = torch.arange(input_ids.shape[1])
            out: Tensor = self.head(self.embed(input_ids) + self.where(places))
            return out

    torch.manual_seed(0)
    model = cw.capture(Positions().eval(), torch.randint(0, 9, (2, 5)))
    base = model.run(torch.randint(0, 9, (2, 5)))
    sweep = model.sweep(
        [cw.site("where", pos=4), cw.site("embed", pos=4)],
        base=base,
        source="zero",
        metric=cw.logit_diff(1, 2),
    )
    plan = sweep.plan()
    assert plan.evaluator == "serial"
    assert "'where/embedding' is patched and has no batch" in plan.why
    assert sweep.run().verify(n=2)


def test_a_fixed_batch_is_swept_serially() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x) * torch.ones(int(x.shape[0]), 1)
            return out

    torch.manual_seed(0)
    model = cw.capture(Fixed().eval(), torch.randn(3, 5))
    assert model.batch_is_fixed
    base, source = model.run(torch.randn(3, 5)), model.run(torch.randn(3, 5))
    sweep = model.sweep(["layer"], base=base, source=source, metric=total)
    assert sweep.plan().evaluator == "serial"
    assert sweep.plan().why == "the batch size is fixed in this capture"
    assert sweep.run().verify(n=1)


def test_outputs_whose_batch_is_not_first() -> None:
    class LateBatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)

        def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
            x = self.embed(input_ids).transpose(0, 1)
            return {"logits": self.head(x.cumsum(0)).transpose(0, 1), "late": x}

    torch.manual_seed(0)
    model = cw.capture(LateBatch().eval(), torch.randint(0, 9, (2, 5)))
    base, source = (model.run(torch.randint(0, 9, (2, 5))) for _ in range(2))
    metrics = [
        cw.logit_diff(1, 2),
        Metric("late", lambda late: late[:, :, -1].sum(-1), output="late", last=False),
        lambda out: out["late"].sum((0, 2)),
    ]
    cells = cw.sites("embed", pos=":")
    sweep = model.sweep(cells, base=base, source=source, metric=metrics)
    serial, wave = sweep.run(evaluator="serial"), sweep.run(evaluator="wavefront")
    torch.testing.assert_close(wave.per_prompt, serial.per_prompt, rtol=0, atol=1e-5)
    assert wave.verify(n=5)


def test_an_output_that_no_world_changes_and_one_without_a_batch() -> None:
    class Constants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 4)
            self.scale = nn.Buffer(torch.tensor([2.0, 3.0]))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.second(self.first(x)), "given": x * 2, "scale": self.scale + 1}

    torch.manual_seed(0)
    model = cw.capture(Constants().eval(), torch.randn(3, 5))
    base, source = model.run(torch.randn(3, 5)), model.run(torch.randn(3, 5))

    def metric(out: dict[str, Tensor]) -> Tensor:
        assert out["scale"].shape == (2,)
        assert out["given"].shape == (3, 5)
        return out["logits"].sum(-1) * out["scale"][0] + out["given"].sum(-1)

    sweep = model.sweep(["first", "second"], base=base, source=source, metric=metric)
    serial, wave = sweep.run(evaluator="serial"), sweep.run(evaluator="wavefront")
    torch.testing.assert_close(wave.per_prompt, serial.per_prompt, rtol=0, atol=1e-5)


class Chosen(nn.Module):
    """Some rows are chosen by their values, so that how many there are is not known before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        read: Tensor = self.up(x)
        rows = (read.sum(-1) > 0).nonzero(as_tuple=True)
        return read.index_put(rows, self.down(read[rows]))


def test_sizes_that_depend_on_values_are_run_and_swept_serially() -> None:
    model = cw.capture(Chosen().eval(), torch.randn(3, 5, 4))
    x = torch.randn(2, 7, 4)
    run = model.run(x)
    assert torch.equal(run.outputs, model.module(x))
    sweep = model.sweep([cw.site("up")], base={"x": x}, source={"x": -x}, metric=lambda out: out.sum((1, 2)))
    assert "the size of 'getitem' depends on values" in sweep.plan().why
    expected = model.module(-x).sum((1, 2)).mean().detach()
    assert float(sweep.run().values) == pytest.approx(float(expected), abs=1e-5)
