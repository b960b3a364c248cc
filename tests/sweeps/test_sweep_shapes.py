"""Sweeps over inputs of many shapes: padding, positions, several stacks, one token, few values kept."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.errors import MissingSiteError, SiteError, UnhookedWarning
from conewise.model import Model
from conewise.program.tensors import cell_tolerance
from conewise.sweeps.sweep import Sweep
from tests.laws.swept import read_all, read_last
from tests.program.zoo import VOCABULARY, ZOO
from tests.sweeps import tiny

HEADS = cw.sites("z", layer=":", head=":")
Inputs = Callable[[int], dict[str, Any]]


def ids(batch: int, length: int, seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def captured(name: str, inputs: Inputs, attention: str = "", **options: Any) -> Model:
    case = ZOO[name]
    dtype = options.pop("dtype", torch.float32)
    return cw.capture(case.make(attention or case.attention[-1], dtype), **inputs(0), **options)


def assert_exact(sweep: Sweep, evaluator: str = "wavefront") -> None:
    """The wavefront is serial, both are the module, and all count the same."""
    serial, wave = sweep.run(evaluator="serial"), sweep.run()
    assert wave.plan.evaluator == evaluator
    if sweep.facts.dtype.itemsize > 2:  # in half precision `verify` says more than any tolerance could
        scale = serial.per_prompt.abs().max()
        assert (wave.per_prompt - serial.per_prompt).abs().max() <= cell_tolerance(sweep.facts.dtype) * scale
    assert (serial.table[0] - serial.base[0]).abs().max() > 1e-3, "nothing that is patched matters"
    assert wave.plan.node_evaluations == wave.ledger.node_evaluations == serial.ledger.node_evaluations
    for result in (serial, wave):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnhookedWarning)  # some sites lie inside of modules
            check = result.verify(n=4)
        assert check.ok, check


def sweep_of(model: Model, inputs: Inputs, sites: Any = HEADS, metric: Any = None) -> Sweep:
    base, source = model.run(**inputs(1)), model.run(**inputs(2))
    made: Sweep = model.sweep(sites, base=base, source=source, metric=metric or cw.logit_diff(1, 3))
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_precisions(dtype: torch.dtype) -> None:
    def inputs(seed: int) -> dict[str, Any]:
        return {"input_ids": ids(2, 12, seed)}

    assert_exact(sweep_of(captured("llama", inputs, dtype=dtype), inputs))


@pytest.mark.parametrize(("encoder", "decoder"), [(9, 5), (6, 12)])
def test_the_last_position_of_a_decoder_is_not_that_of_its_encoder(encoder: int, decoder: int) -> None:
    def inputs(seed: int) -> dict[str, Any]:
        return {"input_ids": ids(2, encoder, seed), "decoder_input_ids": ids(2, decoder, seed + 9)}

    model = captured("t5", inputs)
    heads = cw.sites("z", stack="encoder", layer=":", head=":")
    sites = heads + cw.sites("mlp_out", stack="decoder", layer=":", pos=":")
    last = sweep_of(model, inputs, sites, read_last("one"))
    assert_exact(last)
    every = sweep_of(model, inputs, sites, read_all("one"))
    torch.testing.assert_close(last.run().per_prompt, every.run().per_prompt, rtol=0, atol=1e-5)
    assert last.plan().flops < every.plan().flops


def test_padding_on_the_left_with_positions_of_their_own() -> None:
    def inputs(seed: int) -> dict[str, Any]:
        mask = torch.ones(3, 9, dtype=torch.long)
        mask[0, :4] = mask[1, :2] = 0
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        return {"input_ids": ids(3, 9, seed), "attention_mask": mask, "position_ids": places}

    sites = HEADS + cw.sites("resid_pre", layer=":", pos=":")
    assert_exact(sweep_of(captured("llama", inputs), inputs, sites, cw.logit_diff([1, 2, 3], [4, 5, 6])))


def test_positions_that_all_prompts_share() -> None:
    def inputs(seed: int) -> dict[str, Any]:
        return {"input_ids": ids(3, 9, seed), "position_ids": torch.arange(9)[None]}

    assert_exact(sweep_of(captured("gpt2", inputs), inputs))


def test_a_module_that_computes_the_last_logits_only() -> None:
    def inputs(seed: int) -> dict[str, Any]:
        return {"input_ids": ids(2, 9, seed)}

    model = captured("gemma2", inputs, logits_to_keep=1)
    assert_exact(sweep_of(model, inputs, HEADS + cw.sites("resid_post", layer=":", pos=":")))


def inputs_of_gpt2(seed: int) -> dict[str, Any]:
    return {"input_ids": ids(2, 12, seed)}


@pytest.fixture(scope="module")
def gpt2() -> Model:
    return captured("gpt2", inputs_of_gpt2, "eager")


def test_runs_that_keep_few_values(gpt2: Model) -> None:
    base = gpt2.run(**inputs_of_gpt2(1), keep=["z"])
    source = gpt2.run(**inputs_of_gpt2(2), keep=["mlp_out"])
    sites = HEADS + cw.sites("mlp_out", layer=":", pos=":") + cw.sites("resid_pre", layer=0, pos=":")
    assert_exact(gpt2.sweep(sites, base=base, source=source, metric=[cw.logit_diff(1, 3), cw.prob(3)]))


def test_batches_of_several_shapes(gpt2: Model) -> None:
    shapes = [(2, 12), (3, 8), (1, 12)]
    base = [{"input_ids": ids(*shape, seed)} for seed, shape in enumerate(shapes)]
    source = [{"input_ids": ids(*shape, seed + 7)} for seed, shape in enumerate(shapes)]
    assert_exact(gpt2.sweep(HEADS, base=base, source=source, metric=cw.logit_diff(1, 3)))


def test_prompts_of_one_token(gpt2: Model) -> None:
    base, source = (gpt2.run(input_ids=ids(1, 1, seed)) for seed in (1, 2))
    assert_exact(gpt2.sweep(HEADS, base=base, source=source, metric=cw.logit_diff(1, 3)))


def test_the_inputs_themselves_are_sites(gpt2: Model) -> None:
    assert_exact(sweep_of(gpt2, inputs_of_gpt2, cw.sites("input_ids", pos=":")))


def test_the_output_that_the_metric_reads_is_a_site(gpt2: Model) -> None:
    logits = cw.site("lm_head", pos=-1)
    sites = [
        logits,
        "lm_head",
        ("mlp_out", 0),
        (cw.site("lm_head", pos=-1, dim2=[1, 4]), cw.site("mlp_out", layer=1)),
        (cw.site("lm_head", pos=0), cw.site("mlp_out", layer=1)),
    ]
    assert_exact(sweep_of(gpt2, inputs_of_gpt2, sites))


def test_one_of_several_tensors_is_given_where_the_others_are_computed(gpt2: Model) -> None:
    """Queries, keys and values come out of one split; a world may replace one of them whole."""
    sites = [
        (("resid_pre", 0), ("q", 1)),
        (("resid_pre", 0), ("v", 1), ("k", 0)),
        (("mlp_out", 0), ("z", 1)),
        ("k", 1),
    ]
    assert_exact(sweep_of(gpt2, inputs_of_gpt2, sites))


LENGTHS = (4, 7, 5)


def zeroed_at(positions: list[int], layer: int, batch: Tensor) -> list[float]:
    """What hooks on the module give for each prompt: MLP outputs at positions of its own end or start."""

    def zero(whole: Tensor) -> Tensor:
        whole[:, positions] = 0
        return whole

    last = tiny.logits("llama", batch, {("mlp_out", layer): zero})[:, -1]
    return (last[:, 5] - last[:, 9]).tolist()


@pytest.mark.parametrize("pos", [-1, -3, [-1, -2], [0, -1], "-2:", "-3:-1", "1:3", 2])
def test_positions_from_the_end_are_those_of_each_batch(pos: Any) -> None:
    batches = [tiny.prompts(2, length, length) for length in LENGTHS]
    inputs = [{"input_ids": one} for one in batches]
    picked = [range(length)[slice(*_bounds(pos))] for length in LENGTHS] if isinstance(pos, str) else None
    numbers = [pos] if isinstance(pos, int) else pos
    for order in (slice(None), slice(None, None, -1)):
        sweep = tiny.tiny("llama").sweep(
            cw.sites("mlp_out", layer=":", pos=pos),
            base=inputs[order],
            source="zero",
            metric=cw.logit_diff(5, 9),
        )
        got = sweep.run().per_prompt[0].reshape(tiny.LAYERS, -1, 2 * len(LENGTHS))
        for layer, column in itertools.product(range(tiny.LAYERS), range(got.shape[1])):
            each = [row[column] for row in picked] if picked else [numbers[column]] * len(LENGTHS)
            wanted = [zeroed_at([at], layer, one) for at, one in zip(each, batches, strict=True)][order]
            torch.testing.assert_close(
                got[layer, column].float(), torch.tensor(list(itertools.chain(*wanted))), rtol=1e-4, atol=1e-4
            )


def _bounds(text: str) -> list[int | None]:
    return [int(one) if one else None for one in text.split(":")]


def test_the_last_prompt_is_that_of_each_batch() -> None:
    inputs = [{"input_ids": tiny.prompts(count, count)} for count in (3, 2)]
    sweep = tiny.tiny("llama").sweep(
        cw.sites("mlp_out", layer=[1], batch=-1), base=inputs, source="zero", metric=cw.logit_diff(5, 9)
    )
    result = sweep.run()
    assert result.base_per_prompt is not None
    changed = (result.per_prompt[0, 0] - result.base_per_prompt[0]).abs() > 1e-6
    assert changed.tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("pos", [":", "1:", ":-1"])
def test_a_slice_that_means_other_positions_in_each_batch_is_refused(pos: str) -> None:
    inputs = [{"input_ids": tiny.prompts(1, 0, length)} for length in LENGTHS]
    with pytest.raises(SiteError, match=r"lengths 4, 7, 5 along pos.*does not mean the same.*Count from"):
        tiny.tiny("llama").sweep(
            cw.sites("mlp_out", layer=":", pos=pos), base=inputs, source="zero", metric=cw.logit_diff(5, 9)
        )


def test_a_position_that_a_later_batch_does_not_have_is_refused_before_anything_runs() -> None:
    inputs = [{"input_ids": tiny.prompts(1, 0, length)} for length in (7, 4)]
    for sites in (cw.sites("mlp_out", layer=":", pos=5), [cw.site("mlp_out", layer=1, pos=5)]):
        with pytest.raises((SiteError, MissingSiteError), match="5"):
            tiny.tiny("llama").sweep(sites, base=inputs, source="zero", metric=cw.logit_diff(5, 9))
