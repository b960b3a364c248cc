"""Sweeps that compute only the rows that a change can reach give the numbers of those that compute all."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import MetricError, SweepError
from conewise.model import Model
from conewise.runs.metrics import Metric
from conewise.runs.reading import Reading
from conewise.runs.run import Run
from conewise.sweeps.planning import schedule
from conewise.sweeps.sweep import Sweep
from tests.sweeps.mixers import ATTENTION, BATCHES, POSITIONS, VOCABULARY, Attention, ids, module

LENGTH = 6
ROUNDING = 1e-4
"""How far a wavefront may lie from serial, relative to the largest value: batched kernels sum otherwise."""


@pytest.fixture(autouse=True)
def _every_beginning_has_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small models a pass costs more than it saves: let it cost nothing, so that regions are used."""
    for device in schedule.LAUNCH_FLOPS:
        monkeypatch.setitem(schedule.LAUNCH_FLOPS, device, 0)


def every_position(name: str = "all") -> Metric:
    def compute(logits: Tensor) -> Tensor:
        return (logits[..., 1] * torch.linspace(0.3, 1.9, logits.shape[2])).sum(-1)

    return Metric(name, compute, last=False)


def loss_from(first: int) -> Metric:
    """The loss over the positions from the first on; of the second prompt, one position less is counted."""
    targets = ids(2, LENGTH, 3)
    targets[:, :first] = targets[1, first] = -100
    return cw.cross_entropy(targets)


METRICS: dict[str, Any] = {"last": cw.logit_diff(1, 2), "all": every_position(), "loss": loss_from(3)}


def cells(model: Model, base: Reading, targets: tuple[str, ...]) -> list[Any]:
    """Every value with a batch that the targets depend on, whole and position by position."""
    found: list[Any] = []
    support = model.graph.support(targets)
    for record in model.program.records:
        if record.name not in support or record.dtype != torch.float32 or not record.shape:
            continue
        axes = model.locate(record.name).view.axes
        if "batch" in axes:
            found.append(cw.site(record.name))
            if "pos" in axes:
                length = base[record.name].shape[axes.index("pos")]
                found += [cw.site(record.name, pos=pos) for pos in range(length)]
    return found


def differing(model: Model, batch: int, start: int) -> tuple[Run, Run]:
    """Two runs whose prompts are the same before `start`."""
    given, other = ids(batch, LENGTH, 1), ids(batch, LENGTH, 2)
    source = given.clone()
    source[:, start:] = other[:, start:]
    return model.run(input_ids=given), model.run(input_ids=source)


def assert_exact(sweep: Sweep, evaluator: str = "wavefront", **how: Any) -> None:
    serial, wave = sweep.run(evaluator="serial"), sweep.run(evaluator="auto", **how)
    assert wave.plan.evaluator == evaluator
    for one, other in zip(wave.per_prompt, serial.per_prompt, strict=True):
        assert (one - other).abs().max() <= ROUNDING * other.abs().max()
    assert wave.plan.node_evaluations == wave.ledger.node_evaluations == serial.ledger.node_evaluations
    assert wave.plan.launches == wave.ledger.launches


@cache
def captured(name: str) -> Model:
    """The model with that between its layers; no two names are alike."""
    between = ATTENTION[name]() if name in ATTENTION else (POSITIONS | BATCHES)[name]
    return cw.capture(module(between), input_ids=ids(2, LENGTH, 0))


def swept(name: str, metric: str, batch: int, start: int) -> Sweep:
    model = captured(name)
    base, source = differing(model, batch, start)
    target = model.sweep("embed", base=base, source=source, metric=METRICS[metric]).targets()
    made: Sweep = model.sweep(cells(model, base, target), base=base, source=source, metric=METRICS[metric])
    return made


@pytest.mark.parametrize("metric", ["all", pytest.param("last", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ATTENTION)
def test_whatever_attention_sees(name: str, metric: str) -> None:
    assert_exact(swept(name, metric, 2, 3))


@pytest.mark.parametrize(("metric", "batch"), [pytest.param("last", 1, marks=pytest.mark.slow), ("all", 2)])
@pytest.mark.parametrize("name", POSITIONS)
def test_whatever_mixes_positions(name: str, metric: str, batch: int) -> None:
    assert_exact(swept(name, metric, batch, 2))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", BATCHES)
def test_what_mixes_rows_is_swept_serially(name: str, batch: int) -> None:
    assert_exact(swept(name, "all", batch, 0), "serial")


def test_rows_that_no_change_reaches_are_not_computed() -> None:
    """The regions are there: a causal model pays for what is changed, one that sees everything for all."""
    seen = swept("causal, no mask", "all", 2, 3).plan()
    everything = swept("everything", "all", 2, 3).plan()
    assert seen.node_evaluations == everything.node_evaluations
    assert seen.flops < 0.8 * everything.flops


@pytest.fixture
def causal() -> Model:
    return captured("causal, no mask")


def test_no_logits_are_computed_in_front_of_those_that_a_loss_reads(causal: Model) -> None:
    base, source = differing(causal, 2, 0)

    def flops(*metrics: Metric) -> int:
        return causal.sweep("between", base=base, source=source, metric=list(metrics)).plan().flops

    assert flops(loss_from(4)) < flops(loss_from(2)) < flops(loss_from(0))
    assert flops(loss_from(4), every_position()) == flops(loss_from(0))
    assert flops(loss_from(4), cw.logit_diff(1, 2)) == flops(loss_from(4))


def test_targets_of_another_length_are_refused_whatever_they_leave_out(causal: Model) -> None:
    base, source = differing(causal, 2, 0)
    targets = torch.full((2, LENGTH + 2), -100)
    targets[:, -1] = 1
    sweep = causal.sweep("embed", base=base, source=source, metric=cw.cross_entropy(targets))
    with pytest.raises(MetricError, match="targets have shape"):
        sweep.run()


CELLS: list[Any] = [
    (cw.site("embed", pos=4), cw.site("between", pos=2)),
    (cw.site("embed", pos=[1, 5]), cw.site("mlp", pos=slice(3, 5))),
    ("embed", cw.site("mlp", pos=5)),
    (cw.site("between", pos=-1), "between"),
    cw.site("embed", pos=0),
    "mlp",
    cw.site("head", pos=5),
]


@pytest.mark.parametrize("start", [0, 3, LENGTH - 1, LENGTH])
@pytest.mark.parametrize("metric", METRICS)
def test_sets_of_sites_at_several_positions(causal: Model, metric: str, start: int) -> None:
    """With `start` at the end, base and source are the same everywhere."""
    base, source = differing(causal, 2, start)
    assert_exact(causal.sweep(CELLS, base=base, source=source, metric=METRICS[metric]))


@pytest.mark.parametrize("source", ["zero", "mean", cw.noise(0.5, seed=1), lambda x: x * -0.5 + 0.3])
def test_whatever_is_put_there(causal: Model, source: Any) -> None:
    base, _ = differing(causal, 2, 0)
    assert_exact(causal.sweep(CELLS, base=base, source=source, metric=list(METRICS.values())))


def test_a_base_in_which_something_is_patched(causal: Model) -> None:
    run, source = differing(causal, 2, 2)
    with run.fork() as base:
        base.patch(cw.site("between", pos=3), torch.ones(2, 8))
        base.patch(cw.site("mlp", pos=1), torch.ones(2, 8))
        assert_exact(causal.sweep(CELLS, base=base, source=source, metric=list(METRICS.values())))


def test_a_function_in_the_base_may_carry_a_change_back(causal: Model) -> None:
    run, source = differing(causal, 2, 3)
    with run.fork() as base:
        base.patch("mlp", lambda present: present.flip(1))
        assert_exact(causal.sweep(CELLS[:5], base=base, source=source, metric=list(METRICS.values())))


def test_batches_of_other_lengths_that_begin_elsewhere(causal: Model, tmp_path: Path) -> None:
    """The first batch orders the worlds; a run that goes on gives the same numbers at the same places."""
    base, source = [], []
    for seed, (batch, length, start) in enumerate([(2, 6, 4), (1, 6, 1), (2, 5, 3), (2, 6, 2)]):
        given, other = ids(batch, length, seed), ids(batch, length, seed + 9)
        base.append({"input_ids": given})
        source.append({"input_ids": torch.cat([given[:, :start], other[:, start:]], 1)})
    sites = [cw.site(name, pos=pos) for pos in (3, 0, 4, 1, 2) for name in ("mlp", "embed")]

    def made() -> Sweep:
        sweep: Sweep = causal.sweep(sites, base=base, source=source, metric=METRICS["all"])
        return sweep

    assert_exact(made())
    whole = made().run(evaluator="wavefront")

    class StopError(Exception):
        pass

    def stop(done: int, _: int) -> None:
        if done > 14:
            raise StopError

    with pytest.raises(StopError):
        made().run(out=tmp_path, progress=stop, evaluator="wavefront")
    again = made()
    again.plan(max_memory="1MiB")
    resumed = again.run(out=tmp_path, resume=True)
    assert 0 < resumed.ledger.resumed < whole.plan.worlds * 4
    assert torch.equal(resumed.per_prompt, whole.per_prompt)


def test_values_of_a_sweep_by_position_stand_at_their_positions(causal: Model) -> None:
    base, source = differing(causal, 2, 1)
    how: dict[str, Any] = {"base": base, "source": source, "metric": METRICS["all"]}
    result = causal.sweep(cw.sites("mlp", pos=":") + cw.sites("embed", pos=":"), **how).run()
    for name in ("mlp", "embed"):
        for pos in range(LENGTH):
            one = causal.sweep(cw.site(name, pos=pos), **how).run(evaluator="serial")
            assert float(result[name][pos]) == pytest.approx(float(one.values), rel=1e-5)


def test_the_least_budget_is_that_of_the_largest_world_of_all_passes(causal: Model) -> None:
    base, source = differing(causal, 2, 0)
    sites = [cw.site("head", pos=0), cw.site("embed", pos=3)]  # the second pass holds more
    sweep = causal.sweep(sites, base=base, source=source, metric=METRICS["all"])
    with pytest.raises(SweepError, match="The least that would do") as refused:
        sweep.plan(max_memory=1)
    least = int(str(refused.value).split("max_memory=")[1].rstrip("."))
    assert sweep.plan(max_memory=least).peak_bytes <= least
    with pytest.raises(SweepError):
        sweep.plan(max_memory=least - 1)


def test_another_length_is_looked_at_anew() -> None:
    """With one token, positions first is batch first; with more it is not."""

    class PositionsFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer, self.head = nn.Embedding(23, 8), nn.Linear(8, 8), nn.Linear(8, 23)

        def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
            x = self.embed(input_ids)
            batch, length, width = x.shape
            flat = self.layer(x.transpose(0, 1).reshape(length * batch, width)).relu()
            return {"logits": self.head(x + flat.view(length, batch, width).transpose(0, 1))}

    torch.manual_seed(0)
    model = cw.capture(PositionsFirst().eval(), input_ids=ids(2, 5, 0))
    for length, evaluator in ((1, "wavefront"), (5, "serial")):
        base, source = (model.run(input_ids=ids(2, length, seed)) for seed in (1, 2))
        sweep = model.sweep(["embed", "layer"], base=base, source=source, metric=cw.logit_diff(1, 2))
        assert_exact(sweep, evaluator)


def test_outputs_in_which_batch_and_positions_are_one(causal: Model) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module(Attention(is_causal=True))

        def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
            return {"flat": self.inner(input_ids)["logits"].reshape(-1, VOCABULARY)}

    model = cw.capture(Flat().eval(), input_ids=ids(2, LENGTH, 0))
    base, source = differing(model, 2, 2)

    def metric(outputs: dict[str, Tensor]) -> Tensor:
        assert outputs["flat"].shape == (2 * LENGTH, VOCABULARY)
        return outputs["flat"].view(2, -1)[:, ::3].sum(-1)

    assert_exact(model.sweep(["inner.embed", "inner.mlp"], base=base, source=source, metric=metric))


def test_weights_that_were_written_to_are_read_again(tmp_path: Path) -> None:
    model = cw.capture(module(Attention(is_causal=True)), input_ids=ids(2, LENGTH, 0))
    base = [{"input_ids": ids(2, LENGTH, 1)}]
    sweep = model.sweep("mlp", base=base, source="zero", metric=cw.logit_diff(1, 2))
    sweep.run(evaluator="wavefront", out=tmp_path)
    with torch.no_grad():
        model.module.head.weight.mul_(-2)
    assert_exact(sweep)
    with pytest.raises(SweepError, match="weights"):
        sweep.run(out=tmp_path, resume=True)


class Written(nn.Module):
    """A value that is written to in place, through a view of some of its positions, or of some prompts."""

    def __init__(self, part: tuple[slice, ...]) -> None:
        super().__init__()
        self.part = part
        self.embed, self.inner = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.inner(self.embed(input_ids)).tanh()
        x[self.part] += 0.5
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "part", [(slice(None), slice(1, None)), (slice(0, 1),)], ids=["positions", "prompts"]
)
def test_a_write_to_a_part_of_a_value_does_not_treat_positions_and_prompts_alike(
    part: tuple[slice, ...],
) -> None:
    """Positions 1 to the end of the last row alone are none; the first prompt is one of each world's."""
    torch.manual_seed(0)
    prompts = torch.arange(2 * LENGTH).reshape(2, LENGTH) % VOCABULARY
    other = prompts.clone()
    other[:, -1] += 1
    model = cw.capture(Written(part), input_ids=prompts)
    base, source = model.run(input_ids=prompts), model.run(input_ids=other)
    sweep = model.sweep(["inner/linear"], base=base, source=source, metric=every_position())
    serial = sweep.run(evaluator="serial").per_prompt
    torch.testing.assert_close(sweep.run().per_prompt, serial, rtol=ROUNDING, atol=1e-6)
    assert sweep.run().verify(n=1).ok
