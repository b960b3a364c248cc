"""A result shows its numbers in natural axes, as a table, as a figure and as text."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.errors import SweepError
from conewise.model import Model
from conewise.sweeps.plots import FEW_BARS
from conewise.sweeps.result import Result
from tests.sweeps.small import HEADS, LAYERS, LENGTH, model, prompts, sweep_over

COLUMNS = [
    "site",
    "kind",
    "layer",
    "head",
    "pos",
    "metric",
    "value",
    "base",
    "source",
    "effect",
    "normalised",
]


@pytest.fixture(scope="module")
def captured() -> Model:
    return model()


@pytest.fixture(scope="module")
def result(captured: Model) -> Result:
    """A sum of two selectors, two metrics, two prompts."""
    return sweep_over(captured, metric=[cw.logit_diff(7, 9), cw.prob(3)]).run()


# -- natural axes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sites", "shape"),
    [
        (cw.sites("z", layer=":", head=":"), (LAYERS, HEADS)),
        (cw.sites("resid_pre", layer=":", pos=":"), (LAYERS, LENGTH)),
        (cw.sites("z", layer=":", head=":", pos="3:"), (LAYERS, HEADS, 3)),
        (cw.sites("mlp_out", layer=":"), (LAYERS,)),
        (cw.sites("z", layer=1, head=":"), (HEADS,)),
        (cw.sites("z", layer=1, head=0), ()),
        (["blocks.0.attn.hook_z", ("mlp_out", 1), cw.site("z", layer=0, head=1)], (3,)),
        ([(cw.site("z", layer=0), cw.site("mlp_out", layer=1)), ("z", 1)], (2,)),
        (cw.site("mlp_out", layer=0), (1,)),
    ],
    ids=str,
)
def test_values_lie_along_the_axes_that_were_chosen(captured: Model, sites: Any, shape: Any) -> None:
    found = sweep_over(captured, sites).run()
    assert tuple(found.values.shape) == shape
    assert found.values.dtype == torch.float64
    assert torch.equal(found.values.flatten(), found.table[0])
    assert torch.equal(found[0], found.values)


def test_a_sum_is_flat_and_its_parts_have_axes(result: Result) -> None:
    heads = LAYERS * HEADS
    assert result.values.shape == (heads + LAYERS,)
    assert torch.equal(result["z"], result.table[0, :heads].reshape(LAYERS, HEADS))
    assert torch.equal(result["mlp_out"], result.table[0, heads:])
    assert torch.equal(result[1], result["mlp_out"])


def test_an_unknown_part_is_refused(result: Result) -> None:
    with pytest.raises(SweepError, match="no part 'q' in this result; its parts are 0: z, 1: mlp_out"):
        result["q"]


def test_parts_of_one_kind_are_chosen_by_number(captured: Model) -> None:
    found = sweep_over(captured, cw.sites("z", layer=0, head=":") + cw.sites("z", layer=1, head=":")).run()
    with pytest.raises(SweepError, match="several parts of this result are named 'z'; choose by number"):
        found["z"]
    assert torch.equal(torch.cat([found[0], found[1]]), found.values)


def test_metrics_by_name(result: Result) -> None:
    assert torch.equal(result.metric("prob"), result.table[1])
    assert torch.equal(result.select("prob").values, result.table[1])
    assert result.select("prob").metrics == ("prob",)
    assert torch.equal(result.select("prob").per_prompt[0], result.per_prompt[1])
    with pytest.raises(SweepError, match="no metric 'loss' in this result; there are logit_diff, prob"):
        result.metric("loss")


def test_values_are_means_over_prompts(captured: Model, result: Result) -> None:
    assert result.per_prompt.shape == (2, len(result.cells), 2)
    assert torch.equal(result.per_prompt.mean(-1), result.table)
    for prompt in range(2):
        alone = sweep_over(
            captured,
            base=captured.run(input_ids=prompts(1, 2)[prompt : prompt + 1]),
            source=captured.run(input_ids=prompts(2, 2)[prompt : prompt + 1]),
        ).run()
        assert torch.allclose(alone.table[0], result.per_prompt[0, :, prompt], atol=1e-6)


def test_prompts_of_several_batches_stand_one_behind_the_other(captured: Model) -> None:
    inputs = [{"input_ids": prompts(seed, count)} for seed, count in ((1, 2), (3, 1), (5, 2))]
    others = [{"input_ids": prompts(seed, count)} for seed, count in ((2, 2), (4, 1), (6, 2))]
    found = sweep_over(captured, base=inputs, source=others).run()
    assert found.per_prompt.shape[-1] == 5
    one = sweep_over(captured, base=captured.run(**inputs[1]), source=captured.run(**others[1])).run()
    assert torch.allclose(one.per_prompt[..., 0], found.per_prompt[..., 2], atol=1e-6)


def test_normalised_is_0_at_the_base_and_1_at_the_source(captured: Model) -> None:
    found = sweep_over(captured, cw.sites("resid_post", layer=":")).run()
    assert found.source is not None
    assert float(found.normalised[-1]) == pytest.approx(1, abs=1e-5)
    assert torch.allclose(found.effect, found.values - found.base[0])
    assert torch.allclose(found.base[0] + found.normalised * (found.source - found.base)[0], found.values)


def test_without_a_source_run_there_is_nothing_to_normalise_by(captured: Model) -> None:
    found = sweep_over(captured, source="zero").run()
    with pytest.raises(SweepError, match="the values did not come from a source run"):
        _ = found.normalised
    table = found.to_dataframe()
    assert table["source"].isna().all()
    assert table["normalised"].isna().all()
    assert table["normalised"].dtype == table["source"].dtype == "float64"


def test_equal_runs_leave_nothing_to_normalise_by(captured: Model) -> None:
    run = captured.run(input_ids=prompts(1, 2))
    found = sweep_over(captured, base=run, source=run).run()
    with pytest.raises(SweepError, match="base and source have the same value of the metric"):
        _ = found.normalised
    assert found.to_dataframe()["normalised"].isna().all()
    assert found.to_dataframe()["source"].notna().all()


# -- the table -----------------------------------------------------------------------------------


def test_the_table_has_these_columns_and_types(result: Result) -> None:
    table = result.to_dataframe()
    assert list(table.columns) == COLUMNS
    assert [str(kind) for kind in table.dtypes] == [
        *("str", "str", "Int64", "Int64", "Int64", "str"),
        *["float64"] * 5,
    ]
    assert len(table) == 2 * len(result.cells)
    assert table["value"].tolist() == result.table.flatten().tolist()
    assert list(dict.fromkeys(table["metric"])) == ["logit_diff", "prob"]
    first, last = table.iloc[0], table.iloc[-1]
    assert (first["site"], first["kind"], first["layer"], first["head"]) == ("z[layer=0, head=0]", "z", 0, 0)
    assert (last["site"], last["kind"], last["layer"]) == ("mlp_out[layer=1]", "mlp_out", 1)
    assert last["head"] is pd.NA
    assert last["pos"] is pd.NA
    assert table["effect"].equals(table["value"] - table["base"])
    assert result.source is not None
    assert last["source"] == float(result.source[1])


def test_cells_of_several_places_have_no_coordinates(captured: Model) -> None:
    sites = [(cw.site("z", layer=0, head=1), cw.site("mlp_out", layer=1)), cw.site("z", layer=1, pos=-1)]
    table = sweep_over(captured, sites).run().to_dataframe()
    assert table["site"].tolist()[0] == "z[layer=0, head=1] + mlp_out[layer=1]"
    assert table["kind"].tolist() == ["z+mlp_out", "z"]
    assert table["layer"].isna().tolist() == [True, False]


def test_a_row_for_each_prompt(result: Result) -> None:
    table = result.to_dataframe(per_prompt=True)
    assert list(table.columns) == [*COLUMNS, "prompt"]
    assert len(table) == 4 * len(result.cells)
    assert table["prompt"].tolist() == [0] * (len(table) // 2) + [1] * (len(table) // 2)
    means = table.groupby(["metric", "site"], sort=False)[["value", "base", "source"]].mean()
    averaged = result.to_dataframe().set_index(["metric", "site"])[["value", "base", "source"]]
    assert (means - averaged).abs().max().max() < 1e-12


# -- the figure ----------------------------------------------------------------------------------


def test_two_axes_are_a_heatmap_around_zero(captured: Model) -> None:
    found = sweep_over(captured, cw.sites("z", layer=":", head=":")).run()
    drawn = found.plot()
    (heat,) = drawn.data
    assert heat.type == "heatmap"
    assert [list(row) for row in heat.z] == found.effect.tolist()
    assert (list(heat.x), list(heat.y)) == (["0", "1"], ["0", "1"])
    assert drawn.layout.xaxis.title.text == "head"
    assert drawn.layout.yaxis.title.text == "layer"
    axis = drawn.layout.coloraxis
    assert axis.cmid == 0
    assert axis.cmax == -axis.cmin == pytest.approx(float(found.effect.abs().max()))
    assert list(heat.customdata[1][0]) == [
        "z[layer=1, head=0]",
        float(found.values[1, 0]),
        float(found.effect[1, 0]),
    ]


def test_a_sum_of_selectors_is_a_panel_for_each(result: Result) -> None:
    drawn = result.plot()
    assert [trace.type for trace in drawn.data] == ["heatmap", "bar"]
    assert [note.text for note in drawn.layout.annotations] == ["z", "mlp_out"]
    assert list(drawn.data[1].y) == (result["mlp_out"] - result.base[0]).tolist()
    assert drawn.layout.coloraxis.colorbar.title.text == "logit_diff − base"


def test_a_metric_is_chosen_by_name(result: Result) -> None:
    drawn = result.plot(metric="prob")
    assert drawn.layout.title.text == "Effect of patching the sites on prob"
    assert list(drawn.data[1].y) == (result.select("prob")["mlp_out"] - result.base[1]).tolist()
    with pytest.raises(SweepError, match="no metric 'loss'"):
        result.plot(metric="loss")


def test_three_axes_and_lists_and_single_cells_are_drawn(captured: Model) -> None:
    found = sweep_over(captured, cw.sites("z", layer=":", head=":", pos="4:")).run()
    (heat,) = found.plot().data
    assert list(heat.y) == ["L0 H0", "L0 H1", "L1 H0", "L1 H1"]
    assert list(heat.x) == ["4", "5"]
    (bars,) = sweep_over(captured, [("z", 0), ("mlp_out", 1)]).run().plot().data
    assert list(bars.x) == ["z[layer=0]", "mlp_out[layer=1]"]
    (bar,) = sweep_over(captured, cw.sites("z", layer=0, head=1)).run().plot().data
    assert list(bar.x) == ["z[layer=0, head=1]"]


def test_an_outline_does_not_hide_the_colours_of_many_bars(captured: Model) -> None:
    (bars,) = sweep_over(captured, cw.sites("post", layer=0, neuron=":")).run().plot().data
    assert len(bars.x) > FEW_BARS
    assert bars.marker.line.width == 0
    (bars,) = sweep_over(captured, cw.sites("mlp_out", layer=":")).run().plot().data
    assert bars.marker.line.width == 1


def test_no_effect_and_infinite_effects_leave_a_finite_scale(result: Result) -> None:
    still = replace(result, table=result.base[:, None].expand_as(result.table))
    assert still.plot().layout.coloraxis.cmax == 1
    endless = replace(result, table=torch.full_like(result.table, math.inf))
    assert math.isfinite(endless.plot().layout.coloraxis.cmax)


# -- as text -------------------------------------------------------------------------------------


def test_text_names_the_strongest_cells(result: Result) -> None:
    cell, effect, value = result.strongest()[0]
    assert abs(effect) == float((result.table[0] - result.base[0]).abs().max())
    assert repr(result).startswith(
        "Result of logit_diff, prob over z[2, 2], mlp_out[2]: 6 cells, wavefront, "
    )
    assert f"{effect:+.6g}  {cell.name}  ({value:.6g})" in str(result)
    assert f"prob: base {float(result.base[1]):.6g}, source " in str(result)


def test_html_escapes_names(result: Result) -> None:
    named = replace(result, metrics=("<b>", "prob"))
    shown = named._repr_html_()
    assert "<strong>&lt;b&gt;</strong> base" in shown
    assert "<b>" not in shown
    assert shown.count("<tr>") == 2 * (1 + 5)


def test_equals_looks_at_every_bit(result: Result) -> None:
    assert result.equals(result)
    changed = result.table.clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(math.inf, dtype=torch.float64))
    assert not result.equals(replace(result, table=changed))
    assert not result.equals(replace(result, source=None))
    assert not result.equals(replace(result, metrics=("logit_diff", "p")))


@pytest.mark.parametrize("evaluator", ["serial", "wavefront"])
def test_a_metric_may_return_the_same_tensor_at_every_call(evaluator: str) -> None:
    """What it returned is copied before it is called again: for the source, for the next world."""
    rooms: dict[tuple[int, ...], Tensor] = {}

    def plain(outputs: Any) -> Tensor:
        found: Tensor = outputs.logits[:, -1, 7].double()
        return found

    def into_its_own(outputs: Any) -> Tensor:
        found = plain(outputs)
        return rooms.setdefault(found.shape, torch.empty_like(found)).copy_(found)

    def as_asked(metric: Any) -> Any:
        base, source = ({"input_ids": prompts(seed, 2)} for seed in (1, 2))
        return sweep_over(model(), base=base, source=source, metric=[metric]).run(evaluator=evaluator)

    own, expected = as_asked(into_its_own), as_asked(plain)
    for name in ("base_per_prompt", "source_per_prompt", "per_prompt"):
        assert torch.equal(getattr(own, name), getattr(expected, name)), name
    assert not torch.equal(own.base, own.source)


def test_inputs_may_be_written_to_after_the_sweep_was_made(captured: Model) -> None:
    """One tensor for all prompts, filled anew for each: numbers and provenance are of what was given."""

    def pairs(seeds: tuple[int, ...]) -> list[dict[str, Tensor]]:
        return [{"input_ids": prompts(seed, 2)} for seed in seeds]

    for base, source in ((pairs((1,)), pairs((2,))), (pairs((1, 3)), pairs((2, 4)))):
        expected = sweep_over(captured, base=base, source=source).run()
        told = expected.provenance
        own = [{name: value.clone() for name, value in one.items()} for one in (*base, *source)]
        sweep = sweep_over(captured, base=own[: len(base)], source=own[len(base) :])
        for one in own:
            one["input_ids"].fill_(5)
        result = sweep.run(verify=2)
        assert result.verification
        assert torch.equal(result.per_prompt, expected.per_prompt)
        assert result.provenance == told


def test_a_metric_goes_when_its_results_go(captured: Model) -> None:
    """What is kept with the model to run the next pair does not hold what was asked by the last."""

    class Own:
        def __call__(self, outputs: Any) -> Tensor:
            found: Tensor = outputs.logits[:, -1, 11]
            return found

    metric = Own()
    held = weakref.ref(metric)
    base, source = ({"input_ids": prompts(seed, 2)} for seed in (1, 2))
    for _ in range(2):
        sweep_over(captured, base=base, source=source, metric=metric).run(evaluator="wavefront")
    del metric
    gc.collect()
    assert held() is None
