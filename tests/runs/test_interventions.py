"""What a sweep puts into its sites, each against hooks on the module; and sweeps over datasets and worlds."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.anatomy.places import Place
from conewise.errors import PatchError, SweepError
from conewise.runs import interventions
from conewise.runs.run import InputRun, Run, baseline
from tests.sweeps.tiny import LAYERS, LENGTH, Change, logits, prompts, tiny, value

BATCHED = 1e-4
"""How far batched kernels may lie from single ones; the metrics below are of order 1."""
EVALUATORS = pytest.mark.parametrize("evaluator", ["serial", "wavefront"])
METRIC = cw.logit_diff(answer=5, wrong=9)
BASE = prompts(3, seed=2)
SITES = cw.sites("mlp_out", layer=":", pos=[1, -1])


def difference(found: Tensor) -> Tensor:
    return (found[:, -1, 5] - found[:, -1, 9]).double()


def plain(part: Any, ids: Tensor = BASE) -> Tensor:
    """[layer, pos] by full forwards: `part(layer, pos, whole)` is put at each place."""
    table = torch.zeros(LAYERS, 2, dtype=torch.float64)
    for layer in range(LAYERS):
        for place, pos in enumerate([1, LENGTH - 1]):

            def patch(whole: Tensor, layer: int = layer, pos: int = pos) -> Tensor:
                whole[:, pos] = part(layer, pos, whole)
                return whole

            table[layer, place] = difference(logits("gpt2", ids, {("mlp_out", layer): patch})).mean()
    return table


def swept(source: Any, evaluator: str = "auto", base: Any = None, **options: Any) -> Any:
    model = tiny("gpt2")
    base = model.run(input_ids=BASE) if base is None else base
    return model.sweep(SITES, base=base, source=source, metric=METRIC).run(evaluator=evaluator, **options)


def put(intervention: Any, base: Any, layer: int, **part: int) -> Tensor:
    """What an intervention puts at mlp_out."""
    place = Place("mlp_out", layer, part=part)
    found = intervention.part(place, base)
    put_in: Tensor = found(base[place].clone()) if intervention.is_function else found
    return put_in


def assert_alike(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=BATCHED)
    assert expected.std() > 0.01, "a sweep in which nothing matters shows nothing"


@EVALUATORS
def test_the_values_of_a_run(evaluator: str) -> None:
    ids = prompts(3, seed=1)
    clean = {layer: value("gpt2", "mlp_out", layer, ids) for layer in range(LAYERS)}
    found = swept(tiny("gpt2").run(input_ids=ids), evaluator)
    assert_alike(found.values, plain(lambda layer, pos, _: clean[layer][:, pos]))


@EVALUATORS
def test_zeros(evaluator: str) -> None:
    assert_alike(swept("zero", evaluator).values, plain(lambda *_: 0.0))


@EVALUATORS
def test_the_mean_over_the_base_itself(evaluator: str) -> None:
    means = [value("gpt2", "mlp_out", layer, BASE).mean((0, 1)) for layer in range(LAYERS)]
    assert_alike(swept("mean", evaluator).values, plain(lambda layer, *_: means[layer]))


@pytest.mark.parametrize("per_position", [False, True])
def test_the_mean_over_a_dataset_whatever_its_batches(per_position: bool) -> None:
    ids = prompts(5, seed=3)
    dataset = [{"input_ids": ids[:2]}, {"input_ids": ids[2:3]}, {"input_ids": ids[3:]}]
    means = [value("gpt2", "mlp_out", layer, ids).mean(0) for layer in range(LAYERS)]
    found = swept(cw.mean(tiny("gpt2"), dataset, per_position=per_position))

    def part(layer: int, pos: int, _: Tensor) -> Tensor:
        return means[layer][pos] if per_position else means[layer].mean(0)

    assert_alike(found.values, plain(part))
    whole = swept(cw.mean(tiny("gpt2"), iter([{"input_ids": ids}]), per_position=per_position))
    torch.testing.assert_close(found.values, whole.values, rtol=0, atol=BATCHED)


def test_a_dataset_is_gone_through_once_for_all_layers_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = tiny("gpt2"), baseline
    runs: list[int] = []

    def run(*args: Any) -> Run:
        runs.append(1)
        return own(*args)

    monkeypatch.setattr(interventions, "baseline", run)
    dataset = [{"input_ids": prompts(2, seed=seed)} for seed in range(3)]
    base = model.run(input_ids=BASE)
    model.sweep(
        cw.sites("z", layer=":", head=":", pos=":"), base=base, source=cw.mean(model, dataset), metric=METRIC
    ).run()
    assert len(runs) == len(dataset)


def test_the_mean_of_one_head_is_that_of_its_site() -> None:
    model, ids = tiny("gpt2"), prompts(4, seed=3)
    part = cw.mean(model, [{"input_ids": ids}]).part(
        cw.site("z", layer=1, head=2, pos=3), model.run(input_ids=BASE)
    )
    expected = model.run(input_ids=ids)["z", 1].mean((0, 1))[2]
    torch.testing.assert_close(part, expected.expand(3, -1))


@EVALUATORS
def test_a_vector_is_added(evaluator: str) -> None:
    vector = torch.randn(32, generator=torch.Generator().manual_seed(1))
    expected = plain(lambda _, pos, whole: whole[:, pos] + 2.5 * vector)
    assert_alike(swept(cw.add(vector, scale=2.5), evaluator).values, expected)


@EVALUATORS
def test_any_function_of_what_was_there(evaluator: str) -> None:
    found = swept(lambda part: part.flip(-1) * 2, evaluator)
    assert_alike(found.values, plain(lambda _, pos, whole: whole[:, pos].flip(-1) * 2))


@EVALUATORS
def test_a_function_that_returns_another_shape_is_told(evaluator: str) -> None:
    with pytest.raises(PatchError, match=r"has shape \(3,\).*the place has shape \(3, 32\)"):
        swept(lambda part: part.sum(-1), evaluator)


def test_noise_is_the_same_for_one_seed_however_it_is_evaluated() -> None:
    one = swept(cw.noise(0.7, seed=4), "wavefront")
    serial = swept(cw.noise(0.7, seed=4), "serial")
    least = one.plan.peak_bytes * 3 // 4
    chunked = swept(cw.noise(0.7, seed=4), "wavefront", max_memory=least)
    assert len(chunked.plan.chunks) > 1
    torch.testing.assert_close(one.values, serial.values, rtol=0, atol=BATCHED)
    torch.testing.assert_close(one.values, chunked.values, rtol=0, atol=BATCHED)
    other = swept(cw.noise(0.7, seed=5))
    assert (other.values - one.values).abs().max() > 0.01


def test_noise_is_the_same_whatever_the_default_dtype() -> None:
    base = tiny("gpt2").run(input_ids=BASE)
    expected = put(cw.noise(0.7, seed=4), base, layer=1)
    torch.set_default_dtype(torch.float64)
    try:
        found = put(cw.noise(0.7, seed=4), base, layer=1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_noise_has_its_scale_and_differs_from_place_to_place_and_input_to_input() -> None:
    model = tiny("gpt2")
    base, other = (model.run(input_ids=prompts(40, seed=seed)) for seed in (0, 1))
    noise = cw.noise(0.7)
    drawn = put(noise, base, 0) - base["mlp_out", 0]
    assert float(drawn.std()) == pytest.approx(0.7, rel=0.05)
    assert torch.equal(put(noise, base, 0), put(cw.noise(0.7), base, 0))
    for run, layer in ((base, 1), (other, 0)):
        elsewhere = put(noise, run, layer) - run["mlp_out", layer]
        assert (elsewhere - drawn).abs().mean() > 0.1


def test_resampling_takes_each_prompt_from_another_one() -> None:
    model = tiny("gpt2")
    base = model.run(input_ids=BASE)
    part, whole = put(cw.resample(base, seed=1), base, 1), base["mlp_out", 1]
    rows = [next(n for n in range(3) if torch.equal(one, whole[n])) for one in part]
    assert sorted(rows) == [0, 1, 2]
    assert all(row != n for n, row in enumerate(rows))
    assert torch.equal(put(cw.resample(base, seed=1), base, 0), base["mlp_out", 0][rows])
    found = swept(cw.resample(base, seed=1), base=base)
    clean = [value("gpt2", "mlp_out", layer, BASE)[rows] for layer in range(LAYERS)]
    assert_alike(found.values, plain(lambda layer, pos, _: clean[layer][:, pos]))


def test_resampling_from_a_run_of_another_size() -> None:
    model = tiny("gpt2")
    many, base = model.run(input_ids=prompts(7, seed=6)), model.run(input_ids=BASE)
    assert put(cw.resample(many), base, 1).shape == base["mlp_out", 1].shape


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nought", "cannot patch with 'nought': source is a run, 'zero', 'mean'"),
        (cw.add(torch.ones(5)), r"shape \(5,\), and the place has \(3, 32\)\. Give one of that"),
        (cw.mean(tiny("gpt2"), []), "a dataset without a batch"),
    ],
)
def test_what_cannot_be_put_in_is_told(source: Any, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        swept(source)


def test_a_mean_at_each_position_needs_prompts_of_one_length() -> None:
    dataset = [{"input_ids": prompts(1)}, {"input_ids": prompts(1, length=5)}]
    with pytest.raises(PatchError, match="Give batches of one length"):
        swept(cw.mean(tiny("gpt2"), dataset, per_position=True))


# -- datasets ----------------------------------------------------------------------------------


def batches(ids: Tensor) -> list[dict[str, Tensor]]:
    return [{"input_ids": ids[:2]}, {"input_ids": ids[2:3]}, {"input_ids": ids[3:]}]


@EVALUATORS
def test_a_dataset_is_averaged_over_its_prompts_and_each_is_kept(evaluator: str) -> None:
    model = tiny("gpt2")
    ids, clean = prompts(5, seed=7), prompts(5, seed=8)
    whole = swept(model.run(input_ids=clean), evaluator, base=model.run(input_ids=ids))
    parts = swept(batches(clean), evaluator, base=batches(ids))
    assert parts.per_prompt.shape == (1, LAYERS * 2, 5)
    torch.testing.assert_close(parts.per_prompt, whole.per_prompt, rtol=0, atol=BATCHED)
    torch.testing.assert_close(parts.values, whole.values, rtol=0, atol=BATCHED)
    torch.testing.assert_close(parts.base, whole.base, rtol=0, atol=BATCHED)
    assert parts.plan.batches == 3
    assert parts.ledger.node_evaluations == parts.plan.node_evaluations == 3 * whole.plan.node_evaluations


def test_only_one_batch_of_a_dataset_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[InputRun] = weakref.WeakSet()
    most, make = [0], InputRun.__init__

    def making(run: InputRun, *args: Any) -> None:
        gc.collect()
        most.append(len(alive))
        make(run, *args)
        alive.add(run)

    monkeypatch.setattr(InputRun, "__init__", making)
    gc.collect()
    gc.freeze()  # what is there before is not looked at each time
    dataset = [{"input_ids": prompts(2, seed=seed)} for seed in range(6)]
    result = swept("zero", base=dataset)
    assert result.per_prompt.shape[-1] == 12
    assert len(most) > len(dataset), "every batch is run"
    assert max(most) == 0, "a run was held when the next one was made"
    assert len(most) <= 1 + 2 + len(dataset), "planning and the description of a sweep run little again"


def test_lists_of_bases_and_sources_go_in_pairs() -> None:
    with pytest.raises(SweepError, match="base has 3 batches and source 2; they go in pairs"):
        swept(batches(BASE)[:2], base=batches(prompts(5)))
    with pytest.raises(SweepError, match="it has at least one"):
        swept("zero", base=[])


# -- on top of a world ---------------------------------------------------------------------------


def knocked_out(kind: str, layer: int, pos: int) -> tuple[Any, dict[tuple[str, int], Change]]:
    """A world in which one state is zero, and the hook that does the same."""
    world = tiny("gpt2").run(input_ids=BASE).fork()
    world.patch(cw.site(kind, layer=layer, pos=pos), "zero")

    def zero(whole: Tensor) -> Tensor:
        whole[:, pos] = 0
        return whole

    return world, {(kind, layer): zero}


@EVALUATORS
@pytest.mark.parametrize(("kind", "layer"), [("attn_out", 0), ("attn_out", 2), ("resid_post", 1)])
def test_a_sweep_on_top_of_a_world_keeps_what_is_patched_there(evaluator: str, kind: str, layer: int) -> None:
    """The world's patch lies above some cells, and below others: there it is made again."""
    world, standing = knocked_out(kind, layer, 3)
    expected = torch.zeros(LAYERS, LENGTH, dtype=torch.float64)
    for swept_layer in range(LAYERS):
        for pos in range(LENGTH):

            def double(whole: Tensor, pos: int = pos) -> Tensor:
                whole[:, pos] *= 2
                return whole

            changes = {**standing, ("mlp_out", swept_layer): double}
            expected[swept_layer, pos] = difference(logits("gpt2", BASE, changes)).mean()
    sites = cw.sites("mlp_out", layer=":", pos=":")
    sweep = tiny("gpt2").sweep(sites, base=world, source=lambda part: part * 2, metric=METRIC)
    result = sweep.run(evaluator=evaluator)
    assert_alike(result.values, expected)
    assert result.plan.node_evaluations == result.ledger.node_evaluations
    assert float(result.base[0]) == pytest.approx(
        float(difference(logits("gpt2", BASE, standing)).mean()), abs=BATCHED
    )
    check = result.verify(n=5)
    assert check.ok, check


@EVALUATORS
def test_a_site_that_the_world_replaces_whole_is_not_reached_from_above(evaluator: str) -> None:
    model = tiny("gpt2")
    world = model.run(input_ids=BASE).fork()
    world.patch(("attn_out", 2), "zero")
    sites = cw.sites("mlp_out", layer=[0, 1], pos=[2])
    result = model.sweep(sites, base=world, source="zero", metric=METRIC).run(evaluator=evaluator)
    assert result.ledger.node_evaluations == result.plan.node_evaluations
    for layer in (0, 1):

        def zero(whole: Tensor) -> Tensor:
            return torch.zeros_like(whole)

        def part(whole: Tensor) -> Tensor:
            whole[:, 2] = 0
            return whole

        expected = difference(logits("gpt2", BASE, {("attn_out", 2): zero, ("mlp_out", layer): part})).mean()
        assert float(result.values[layer, 0]) == pytest.approx(float(expected), abs=BATCHED)


def test_values_may_come_from_a_world() -> None:
    model = tiny("gpt2")
    source, standing = knocked_out("resid_post", 0, 1)
    clean: dict[int, Tensor] = {}
    for layer in range(LAYERS):

        def keep(whole: Tensor, layer: int = layer) -> Tensor:
            clean[layer] = whole
            return whole

        logits("gpt2", BASE, {**standing, ("mlp_out", layer): keep})
    base = model.run(input_ids=prompts(3, seed=1))
    found = swept(source, base=base)
    assert_alike(found.values, plain(lambda layer, pos, _: clean[layer][:, pos], prompts(3, seed=1)))


def test_sweeps_on_different_worlds_are_told_apart() -> None:
    def provenance(base: Any) -> str:
        sweep = tiny("gpt2").sweep(SITES, base=base, source="zero", metric=METRIC)
        return str(sweep.provenance()["batches"])

    one, _ = knocked_out("attn_out", 0, 3)
    other, _ = knocked_out("attn_out", 0, 2)
    assert provenance(one) == provenance(knocked_out("attn_out", 0, 3)[0])
    assert provenance(one) != provenance(other) != provenance(tiny("gpt2").run(input_ids=BASE))
