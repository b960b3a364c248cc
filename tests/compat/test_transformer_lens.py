"""The sweeps in the manner of TransformerLens, against one full forward with hooks for each cell."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import conewise as cw
import conewise.compat.transformer_lens as patching
import conewise.compat.transformer_lens as sweeps
from conewise.anatomy.places import Place
from conewise.errors import MetricError, PatchError, SweepError
from tests.sweeps.tiny import HEADS, LAYERS, LENGTH, hooks, logits, prompts, tiny, value

BATCHED = 1e-4
"""How far batched kernels may lie from single ones; the metrics below are of order 1."""

CLEAN, CORRUPTED = prompts(2, seed=1), prompts(2, seed=2)


def logit_difference(found: Tensor) -> Tensor:
    last = found[:, -1, :]
    return (last[:, 5] - last[:, 9]).mean()


def everywhere(found: Tensor) -> Tensor:
    return found.log_softmax(-1)[:, :, 7].mean()


def swept(name: str, sweep: Callable[..., Any], metric: Any = logit_difference, **options: Any) -> Any:
    model = tiny(name)
    return sweep(model, CORRUPTED, model.run(input_ids=CLEAN), metric, **options)


def plain(
    name: str,
    kind: str,
    index: Callable[..., tuple[Any, ...]],
    *ranges: int,
    metric: Callable[[Tensor], Tensor] = logit_difference,
    split: int | None = None,
) -> Tensor:
    """One full forward for each layer and each combination of `ranges`; `split` heads in the last axis."""
    table = torch.zeros(LAYERS, *ranges)
    for layer in range(LAYERS):
        clean = value(name, kind, layer, CLEAN)
        for point in itertools.product(*map(range, ranges)):

            def patch(whole: Tensor, clean: Tensor = clean, point: tuple[int, ...] = point) -> Tensor:
                heads = (split, -1) if split else (whole.shape[-1],)
                shown, given = (one.reshape(*one.shape[:2], *heads) for one in (whole, clean))
                shown[index(*point)] = given[index(*point)]
                return shown.reshape(whole.shape)

            table[(layer, *point)] = metric(logits(name, CORRUPTED, {(kind, layer): patch}))
    return table


def by_pos(pos: int) -> tuple[Any, ...]:
    return slice(None), pos


def by_head(head: int) -> tuple[Any, ...]:
    return slice(None), slice(None), head


def by_pos_head(pos: int, head: int) -> tuple[Any, ...]:
    return slice(None), pos, head


def assert_alike(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=BATCHED)
    assert expected.std() > 0.01, "a sweep in which nothing matters shows nothing"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", ["resid_pre", "attn_out", "mlp_out"])
def test_the_stream_by_layer_and_position(name: str, kind: str) -> None:
    found = swept(name, getattr(patching, f"get_act_patch_{kind}"))
    assert_alike(found, plain(name, kind, by_pos, LENGTH))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_stream_in_the_middle_of_a_block(name: str) -> None:
    """No module hands on the sum: attention is made to add what is missing to the clean one."""
    table = torch.zeros(LAYERS, LENGTH)
    for layer in range(LAYERS):
        clean = value(name, "resid_mid", layer, CLEAN)
        missing = clean - value(name, "resid_pre", layer, CORRUPTED)
        for pos in range(LENGTH):

            def patch(out: Tensor, missing: Tensor = missing, pos: int = pos) -> Tensor:
                out[:, pos] = missing[:, pos]
                return out

            table[layer, pos] = logit_difference(logits(name, CORRUPTED, {("attn_out", layer): patch}))
    assert_alike(swept(name, patching.get_act_patch_resid_mid), table)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_output_of_each_head(name: str) -> None:
    found = swept(name, patching.get_act_patch_attn_head_out_all_pos)
    assert_alike(found, plain(name, "z", by_head, HEADS, split=HEADS))
    found = swept(name, patching.get_act_patch_attn_head_out_by_pos)
    assert found.shape == (LAYERS, LENGTH, HEADS)
    assert_alike(found, plain(name, "z", by_pos_head, LENGTH, HEADS, split=HEADS))


@pytest.mark.parametrize(("kind", "heads"), [("q", HEADS), ("k", 2), ("v", 2)])
def test_queries_keys_and_values_where_heads_share_them(kind: str, heads: int) -> None:
    found = swept("llama", getattr(patching, f"get_act_patch_attn_head_{kind}_all_pos"))
    assert_alike(found, plain("llama", kind, by_head, heads, split=heads))
    found = swept("llama", getattr(patching, f"get_act_patch_attn_head_{kind}_by_pos"))
    assert_alike(found, plain("llama", kind, by_pos_head, LENGTH, heads, split=heads))


@pytest.mark.parametrize("kind", ["q", "k", "v"])
def test_queries_keys_and_values_of_one_projection(kind: str) -> None:
    """GPT-2 has all three in one: a third of `c_attn`'s output each."""
    offset = ["q", "k", "v"].index(kind) * 32
    table = torch.zeros(LAYERS, HEADS)
    module = tiny("gpt2").module
    for layer in range(LAYERS):
        projection = module.transformer.h[layer].attn.c_attn
        seen: list[Tensor] = []
        with hooks("gpt2", {}):
            handle = projection.register_forward_hook(lambda _, __, out, s=seen: s.append(out.clone()))
            logits("gpt2", CLEAN)
            handle.remove()
        for head in range(HEADS):
            part = slice(offset + head * 8, offset + (head + 1) * 8)

            def patch(_: Any, __: Any, out: Tensor, part: slice = part, seen: list[Tensor] = seen) -> Tensor:
                out = out.clone()
                out[..., part] = seen[0][..., part]
                return out

            handle = projection.register_forward_hook(patch)
            table[layer, head] = logit_difference(logits("gpt2", CORRUPTED))
            handle.remove()
    assert_alike(swept("gpt2", getattr(patching, f"get_act_patch_attn_head_{kind}_all_pos")), table)


def test_attention_patterns_whole_by_row_and_by_entry() -> None:
    """A pattern is no module's output: the expected values come from forks, each bit for bit a re-run."""
    model = tiny("gpt2")
    base, clean = model.run(input_ids=CORRUPTED), model.run(input_ids=CLEAN)

    def forked(layer: int, **part: int) -> Tensor:
        with base.fork() as world:
            world.patch(Place("pattern", layer, part=part), clean)
            return logit_difference(world.logits)

    found = swept("gpt2", patching.get_act_patch_attn_head_pattern_all_pos)
    cells = itertools.product(range(LAYERS), range(HEADS))
    expected = torch.stack([forked(layer=layer, head=head) for layer, head in cells])
    assert_alike(found, expected.reshape(LAYERS, HEADS))
    found = swept("gpt2", patching.get_act_patch_attn_head_pattern_by_pos)
    assert found.shape == (LAYERS, HEADS, LENGTH)
    expected = forked(layer=1, head=2, query_pos=6)
    assert found[1, 2, 6].item() == pytest.approx(expected.item(), abs=BATCHED)
    found = swept("gpt2", patching.get_act_patch_attn_head_pattern_dest_src_pos)
    assert found.shape == (LAYERS, HEADS, LENGTH, LENGTH)
    expected = forked(layer=2, head=1, query_pos=6, key_pos=3)
    assert found[2, 1, 6, 3].item() == pytest.approx(expected.item(), abs=BATCHED)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_kind_of_a_head_stacked(name: str) -> None:
    parts = ["out", "q", "k", "v", "pattern"]
    found = swept(name, patching.get_act_patch_attn_head_all_pos_every)
    assert found.shape == (5, LAYERS, HEADS)
    for number, part in enumerate(parts):
        one = swept(name, getattr(patching, f"get_act_patch_attn_head_{part}_all_pos"))
        assert torch.equal(found[number, :, : one.shape[1]], one)
        assert not found[number, :, one.shape[1] :].any()
    found = swept(name, patching.get_act_patch_attn_head_by_pos_every)
    assert found.shape == (5, LAYERS, LENGTH, HEADS)
    pattern = swept(name, patching.get_act_patch_attn_head_pattern_by_pos)
    assert torch.equal(found[4], pattern.permute(0, 2, 1))


def test_every_part_of_a_block_stacked() -> None:
    found = swept("gpt2", patching.get_act_patch_block_every)
    assert found.shape == (3, LAYERS, LENGTH)
    assert torch.equal(found[2], swept("gpt2", patching.get_act_patch_mlp_out))


def test_a_metric_may_read_every_position() -> None:
    found = swept("gpt2", patching.get_act_patch_mlp_out, everywhere)
    assert_alike(found, plain("gpt2", "mlp_out", by_pos, LENGTH, metric=everywhere))


def test_a_metric_that_looks_elsewhere_in_some_worlds_is_still_right() -> None:
    """Watched in the base it reads the last position alone; in some worlds it reads on."""
    edge = float(logit_difference(logits("gpt2", CORRUPTED)))

    def fickle(found: Tensor) -> Tensor:
        last = logit_difference(found)
        return last if last <= edge + 1e-3 else found[:, 3, 5].mean()

    found = swept("gpt2", patching.get_act_patch_mlp_out, fickle)
    assert_alike(found, plain("gpt2", "mlp_out", by_pos, LENGTH, metric=fickle))


def test_a_metric_of_conewise_may_be_given() -> None:
    found = swept("gpt2", patching.get_act_patch_mlp_out, cw.logit_diff(answer=5, wrong=9))
    torch.testing.assert_close(found, swept("gpt2", patching.get_act_patch_mlp_out), rtol=0, atol=BATCHED)


def test_the_clean_cache_may_be_a_mapping_from_hook_names() -> None:
    model = tiny("llama")
    clean = model.run(input_ids=CLEAN)
    names = [f"blocks.{layer}.attn.hook_k" for layer in range(LAYERS)]
    cache = {name: clean[name].clone() for name in names}
    sweep = patching.get_act_patch_attn_head_k_by_pos
    assert torch.equal(sweep(model, CORRUPTED, cache, logit_difference), swept("llama", sweep))
    with pytest.raises(PatchError, match=r"the clean cache has no 'blocks.0.attn.hook_v'"):
        patching.get_act_patch_attn_head_v_all_pos(model, CORRUPTED, cache, logit_difference)
    cache = {name: one[:1] for name, one in cache.items()}
    with pytest.raises(PatchError, match=r"has shape \(1, 7, 2, 8\), and this model's is \(2, 7, 2, 8\)"):
        sweep(model, CORRUPTED, cache, logit_difference)


def test_cells_may_be_given_as_rows_and_their_frame_returned() -> None:
    rows = pd.DataFrame([[2, 1, 3], [0, 6, 0]], columns=["layer", "pos", "head"])
    whole = swept("gpt2", patching.get_act_patch_attn_head_out_by_pos)
    found = swept(
        "gpt2", patching.generic_activation_patch, activation_name="z", index_df=rows,
        patch_setter=patching.layer_pos_head_vector_patch_setter,
    )  # fmt: skip
    torch.testing.assert_close(found, torch.stack([whole[2, 1, 3], whole[0, 6, 0]]), rtol=0, atol=BATCHED)
    _, frame = swept("gpt2", patching.get_act_patch_mlp_out, return_index_df=True)
    assert list(frame.columns) == ["layer", "pos"]
    assert list(frame.iloc[LENGTH]) == [1, 0]


@pytest.mark.parametrize("setter", list(sweeps.SELECTED), ids=lambda one: one.__doc__)
def test_a_setter_does_what_its_axes_say(setter: sweeps.Setter) -> None:
    """Once as known, once as any function: in a fork of its own, all of the activation put in."""
    kind = "pattern" if "pattern" in (setter.__doc__ or "") else "z"
    lengths = {"pos": LENGTH, "head": HEADS, "query_pos": LENGTH, "key_pos": LENGTH}
    last = [lengths[axis] - 1 for axis in sweeps.SELECTED[setter]]
    rows = pd.DataFrame([[1, *last], [2, *[0 for _ in last]]])

    def unknown(corrupted: Tensor, index: Any, clean: Tensor) -> Tensor:
        return setter(corrupted, index, clean)

    found = [
        swept(
            "gpt2", patching.generic_activation_patch, patch_setter=one, activation_name=kind, index_df=rows
        )
        for one in (setter, unknown)
    ]
    torch.testing.assert_close(*found, rtol=0, atol=BATCHED)


def by_prompt(found: Tensor) -> Tensor:
    return found[:, -1, 5] - found[:, -1, 9]


def test_values_of_each_prompt_are_kept_on_request() -> None:
    result = swept("gpt2", patching.get_act_patch_mlp_out, by_prompt, reduce="none", baseline=True)
    assert result.values.shape == (LAYERS, LENGTH, 2)
    average = swept("gpt2", patching.get_act_patch_mlp_out)
    torch.testing.assert_close(result.mean(), average, rtol=0, atol=BATCHED)
    torch.testing.assert_close(result.baseline, by_prompt(logits("gpt2", CORRUPTED)), rtol=0, atol=BATCHED)
    assert torch.equal(result.effect(), result.values - result.baseline)
    assert result.stderr().shape == (LAYERS, LENGTH)
    clean = by_prompt(logits("gpt2", CLEAN))
    ends = result.normalized(clean)
    expected = (result.values - result.baseline) / (clean - result.baseline)
    torch.testing.assert_close(ends, expected)
    frame = result.to_dataframe()
    assert len(frame) == LAYERS * LENGTH * 2
    assert list(frame.columns) == ["metric", "layer", "pos", "example", "value"]
    same = swept("gpt2", patching.get_act_patch_mlp_out, by_prompt, reduce="mean")
    torch.testing.assert_close(same, average, rtol=0, atol=BATCHED)


def test_several_metrics_are_read_in_one_sweep() -> None:
    metrics = {"difference": logit_difference, "everywhere": everywhere}
    result = swept("gpt2", patching.get_act_patch_mlp_out, metrics, baseline=True)
    assert result.values.shape == (2, LAYERS, LENGTH)
    one = swept("gpt2", patching.get_act_patch_mlp_out)
    torch.testing.assert_close(result["difference"].values, one, rtol=0, atol=BATCHED)
    assert result.effect().shape == (2, LAYERS, LENGTH)
    every = swept("llama", patching.get_act_patch_attn_head_by_pos_every, metrics)
    assert every.values.shape == (2, 5, LAYERS, LENGTH, HEADS)
    assert every.axis_names == ["patch_type", "layer", "pos", "head"]
    assert set(every.to_dataframe()["patch_type_name"]) == {"out", "q", "k", "v", "pattern"}
    with pytest.raises(KeyError, match="no metric 'loss'; there are difference, everywhere"):
        every["loss"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"metric": by_prompt}, MetricError, "expected one number. Keep one for each prompt"),
        ({"reduce": "none"}, MetricError, "expected one number for each of the 2 prompts"),
        ({"reduce": "sum"}, ValueError, "'scalar', 'mean' or 'none'"),
        ({"metric": {}}, ValueError, "at least one"),
        ({"baseline": True, "return_index_df": True}, ValueError, "goes with a tensor"),
        ({"evaluator": "both"}, SweepError, "no evaluator 'both'"),
    ],
)
def test_what_cannot_be_swept_is_told(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        swept("gpt2", patching.get_act_patch_mlp_out, **options)


def test_an_axis_that_is_not_there_is_told() -> None:
    with pytest.raises(PatchError, match="mlp_out has no axis 'head'; its axes are batch, pos, d_model"):
        swept(
            "gpt2", patching.generic_activation_patch, activation_name="mlp_out",
            patch_setter=patching.layer_head_vector_patch_setter, index_axis_names=["layer", "head"],
        )  # fmt: skip


def test_a_clean_run_of_another_length_is_told() -> None:
    model = tiny("gpt2")
    with pytest.raises(SweepError, match="differ in shape"):
        patching.get_act_patch_mlp_out(
            model, CORRUPTED, model.run(input_ids=prompts(2, length=5)), logit_difference
        )


def test_every_public_name_says_what_it_does() -> None:
    assert sorted(patching.__all__) == list(patching.__all__)
    for name in patching.__all__:
        assert inspect.getdoc(getattr(patching, name)), name
