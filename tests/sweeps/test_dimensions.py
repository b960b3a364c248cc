"""What a dimension means is known from the computation, not from its place; if not, nobody guesses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import conewise as cw
from conewise.errors import CaptureError, MetricError
from conewise.model import Model
from tests.laws.modules import Choices, Network, inputs_of, network, tapped

VOCABULARY, WIDTH = 11, 8


def choices(**given: Any) -> Choices:
    plain: dict[str, Any] = {
        "seed": 4,
        "boundary": "ids",
        "inside": "batch first",
        "packing": "fused",
        "mixer": "nothing",
        "output": "logits",
        "dtype": torch.float32,
        "is_causal": True,
        "has_large_feature": False,
        "is_gated": False,
        "is_parallel": False,
        "is_named": False,
        "layers": 2,
    }
    return Choices(**{**plain, **given})


def captured(built: Choices) -> tuple[Network, Model]:
    module = network(built)
    return module, cw.capture(module, **inputs_of(built, 0))


def swept(model: Model, built: Choices, sites: Any, metric: Any) -> tuple[Tensor, Tensor, str]:
    """Per prompt: serial, and as the plan has it; and how that is."""
    base, source = (model.run(**inputs_of(built, seed)) for seed in (1, 2))
    sweep = model.sweep(sites, base=base, source=source, metric=metric)
    auto = sweep.run()
    return sweep.run(evaluator="serial").per_prompt[0], auto.per_prompt[0], auto.plan.evaluator


# -- positions -------------------------------------------------------------------------------------


def test_the_patches_of_a_channel_are_no_positions_of_the_inputs() -> None:
    built = choices(boundary="channels", output="pooled", is_causal=False)
    _, model = captured(built)
    for picked in ([1, 2], ":"):
        serial, auto, evaluator = swept(
            model, built, cw.sites("z", layer=":", pos=picked), lambda outputs: outputs["logits"][:, 0]
        )
        assert evaluator == "wavefront"
        torch.testing.assert_close(auto, serial, rtol=0, atol=1e-6)


def test_what_is_folded_into_the_batch_has_an_axis_of_its_own() -> None:
    built = choices(boundary="channels", output="pooled", packing="batch·head")
    module, model = captured(built)
    z = model.run(**inputs_of(built, 1))["z", 0]
    batch, channels = inputs_of(built, 1)["x"].shape[:2]
    assert model.locate(("z", 0)).view.axes == ("batch", "fold", "pos", "head", "d_head")
    tap = tapped(module, inputs_of(built, 1), "blocks.0.attention.z")
    assert torch.equal(z.flatten(-2), tap.view(batch, channels, *tap.shape[1:]))


@pytest.mark.parametrize("packing", ["fused", "eager", "batch·head", "head·batch"])
@pytest.mark.parametrize("boundary", ["ids", "sequence first"])
def test_sites_of_sequence_first_blocks_are_shown_batch_first(packing: str, boundary: str) -> None:
    built = choices(inside="sequence first", packing=packing, boundary=boundary)
    module, model = captured(built)
    inputs = inputs_of(built, 1)
    run = model.run(**inputs)
    for kind, path in (
        ("resid_pre", "resid.1"),
        ("attn_out", "blocks.1.attn_out"),
        ("mlp_out", "blocks.1.mlp_out"),
        ("post", "blocks.1.mlp.post"),
    ):
        assert model.locate((kind, 1)).view.axes[:2] == ("batch", "pos")
        assert torch.equal(run[kind, 1], tapped(module, inputs, path).transpose(0, 1)), kind
    z = tapped(module, inputs, "blocks.1.attention.z").transpose(0, 1)
    assert torch.equal(run["z", 1].flatten(2), z)
    whole = run["result", 1].sum(2) + module.get_submodule("blocks.1.attention.o").bias
    torch.testing.assert_close(whole, run["attn_out", 1])


def test_a_patched_result_of_a_sequence_first_block_is_that_of_its_head() -> None:
    built = choices(inside="sequence first", packing="eager")
    _, model = captured(built)
    base, source = (model.run(**inputs_of(built, seed)) for seed in (1, 2))
    with base.fork() as by_result, base.fork() as by_z:
        by_result.patch(cw.site("result", layer=1, head=1), source)
        by_z.patch(cw.site("z", layer=1, head=1), source)
        torch.testing.assert_close(by_result.logits, by_z.logits)


def test_two_cells_on_one_node_of_a_sequence_first_block() -> None:
    built = choices(inside="sequence first")
    _, model = captured(built)
    serial, auto, evaluator = swept(model, built, cw.sites("resid_pre", layer=":", pos=":"), cw.logit(3))
    assert evaluator == "wavefront"
    torch.testing.assert_close(auto, serial, rtol=0, atol=1e-5)


def test_heads_in_front_of_the_batch_are_told_from_it() -> None:
    built = choices(packing="head·batch")
    module, model = captured(built)
    inputs = inputs_of(built, 1)
    z = model.run(**inputs)["z", 0]
    assert torch.equal(z.flatten(2), tapped(module, inputs, "blocks.0.attention.z"))


# -- the batch -------------------------------------------------------------------------------------


def test_the_batch_is_not_the_first_dimension_of_whatever_comes_first() -> None:
    built = choices(boundary="positions given")
    _, model = captured(built)
    serial, auto, evaluator = swept(model, built, cw.sites("z", layer=":"), cw.logit(3))
    assert evaluator == "wavefront"
    assert serial.shape[-1] == inputs_of(built, 1)["ids"].shape[0]
    torch.testing.assert_close(auto, serial, rtol=0, atol=1e-5)
    base = model.run(**inputs_of(built, 1))
    with base.fork() as world:
        world.patch(("z", 0), model.run(**inputs_of(built, 2)))
        assert torch.equal(serial[0], world.logits[:, -1, 3].double())


@pytest.mark.parametrize("boundary", ["unbatched"])
def test_one_prompt_without_a_batch_is_one_prompt(boundary: str) -> None:
    built = choices(boundary=boundary)
    _, model = captured(built)
    serial, auto, evaluator = swept(model, built, cw.sites("z", layer=":", head=":"), cw.logit(3))
    assert evaluator == "serial"
    assert serial.shape == (4, 1)
    assert torch.equal(serial, auto)
    assert model.locate(("resid_pre", 0)).view.axes == ("pos", "d_model")
    assert model.locate(("z", 0)).view.axes == ("pos", "head", "d_head")
    assert "without a batch" in model.batch_is_fixed


class Flat(nn.Module):
    """A table of answers to single tokens: each entry by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head((self.embed(a) * self.embed(b)).relu())  # type: ignore[no-any-return]


def test_entries_that_are_computed_apart_are_a_batch_though_inputs_have_one_dimension() -> None:
    model = cw.capture(Flat(), torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]))
    base = model.run(torch.tensor([1, 2, 3, 4]), torch.tensor([4, 5, 6, 7]))
    source = model.run(torch.tensor([1, 5, 3, 4]), torch.tensor([4, 5, 6, 8]))
    sweep = model.sweep(["embed"], base=base, source=source, metric=cw.logit(2))
    assert sweep.run().per_prompt.shape == (1, 1, 4)
    assert sweep.plan().evaluator == "wavefront"


class OverRows(nn.Module):
    """Attention over dimension 0, and nothing that says what dimension 0 is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).transpose(0, 1)
        h = h + functional.scaled_dot_product_attention(h, h, h)
        return self.head(h.transpose(0, 1))  # type: ignore[no-any-return]


def test_nobody_guesses_where_either_dimension_may_be_the_batch() -> None:
    tokens = torch.arange(6).view(2, 3)
    model = cw.capture(OverRows(), tokens)
    base, source = model.run(tokens), model.run(tokens + 1)
    sweep = model.sweep(["embed"], base=base, source=source, metric=cw.logit(2))
    with pytest.raises(
        MetricError, match=r"not known which is the batch. Say it with .*batch_dim=0.*batch_dim=1"
    ):
        sweep.run()
    known = model.sweep(["embed"], base=base, source=source, metric=lambda outputs: outputs[:, -1, 2]).run()
    assert known.plan.evaluator == "serial"
    assert "batch_dim" in known.plan.why
    assert torch.equal(known.per_prompt[0, 0], source.outputs[:, -1, 2].double())


@pytest.mark.parametrize(("batch_dim", "prompts", "evaluator"), [(0, 2, "serial"), (1, 3, "wavefront")])
def test_who_says_which_dimension_is_the_batch_is_believed(
    batch_dim: int, prompts: int, evaluator: str
) -> None:
    tokens = torch.arange(6).view(2, 3)
    model = cw.capture(OverRows(), tokens, batch_dim=batch_dim)
    base, source = model.run(tokens), model.run(tokens + 1)
    found = model.sweep(["embed"], base=base, source=source, metric=cw.logit(2, pos=-1)).run()
    expected = source.outputs.select(1 - batch_dim, -1)[:, 2]
    assert found.plan.evaluator == evaluator
    assert found.per_prompt.shape == (1, 1, prompts)
    torch.testing.assert_close(found.per_prompt[0, 0], expected.double(), rtol=0, atol=1e-6)


def test_a_batch_dimension_that_no_input_has_is_refused() -> None:
    with pytest.raises(CaptureError, match="batch_dim is 5; the inputs have dimensions 0 to 1"):
        cw.capture(OverRows(), torch.arange(6).view(2, 3), batch_dim=5)


@pytest.mark.filterwarnings("ignore:The tensor attributes")
def test_recurrent_layers_know_whether_the_batch_comes_first() -> None:
    for batch_first, axes in ((True, ("batch", "dim1", "dim2")), (False, ("dim0", "batch", "dim2"))):
        model = cw.capture(nn.GRU(5, 6, batch_first=batch_first), torch.randn(3, 4, 5))
        assert model.locate(model.program.inputs[0].name).view.axes == axes


# -- outputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["pointers", "vocabulary first", "flat", "flat, positions first"])
def test_metrics_of_the_last_position_find_it_wherever_it_lies(output: str) -> None:
    built = choices(output=output)
    _, model = captured(built)
    reference = model.run(**inputs_of(built, 1))
    metrics: list[Any] = [cw.kl_to(reference), cw.prob(2), cw.logit_diff(1, 0)]
    for metric in metrics:
        serial, auto, _ = swept(model, built, cw.sites("z", layer=":", head=":"), metric)
        torch.testing.assert_close(auto, serial, rtol=0, atol=1e-5)
        if metric.name == "kl":
            assert (serial >= -1e-6).all()
        if metric.name == "prob":
            assert ((serial > 0) & (serial < 1)).all()


def test_an_output_without_prompts_is_refused_by_metrics_of_tokens() -> None:
    model = cw.capture(Rows(lambda h: h.sum(0), 0.0), torch.randn(3, 5))
    base, source = (model.run(torch.randn(3, 5)) for _ in range(2))
    sweep = model.sweep(["first"], base=base, source=source, metric=cw.logit(2))
    with pytest.raises(MetricError, match="not known where the prompts lie"):
        sweep.run()


# -- mixing of rows --------------------------------------------------------------------------------


class Rows(nn.Module):
    """Features by row, with one large among them, and something that lets rows see each other a little."""

    def __init__(self, mix: Callable[[Tensor], Tensor], large: float) -> None:
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(5, WIDTH), nn.Linear(WIDTH, VOCABULARY), mix
        with torch.no_grad():
            self.first.bias[0] = large
            self.last.weight[:, 0] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mix(self.first(x)))  # type: ignore[no-any-return]


def over_rows(h: Tensor) -> Tensor:
    small = h * (torch.arange(WIDTH) > 0).to(h.dtype)
    return h + 1e-2 * ((small @ small.T).softmax(-1) @ small)


def numbered(h: Tensor) -> Tensor:
    return h + 3e-4 * torch.arange(h.shape[0]).to(h.dtype)[:, None]


def shared_mean(h: Tensor) -> Tensor:
    return h + 1e-4 * (h - h[:, :1]).cumsum(0).flip(0)


def scaled_by_largest(h: Tensor) -> Tensor:
    return h * torch.where(h.amax() > 1e3, 0.5, 1.0).to(h.dtype)


@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.float32, 300.0), (torch.bfloat16, 8.0), (torch.float64, 1e6)]
)
@pytest.mark.parametrize("mix", [over_rows, numbered, shared_mean, scaled_by_largest])
def test_rows_that_mix_a_little_beside_a_large_feature_are_seen(
    mix: Callable[[Tensor], Tensor], dtype: torch.dtype, large: float
) -> None:
    torch.manual_seed(0)
    module = Rows(mix, large).to(dtype)
    model = cw.capture(module, torch.randn(3, 5, dtype=dtype))
    base, source = (model.run(torch.randn(3, 5, dtype=dtype)) for _ in range(2))
    sweep = model.sweep(["first", "first.input"], base=base, source=source, metric=cw.logit(1))
    found = sweep.run()
    assert found.plan.evaluator == "serial"
    assert "mixes the rows of the batch" in found.plan.why
