"""Names and forms that people bring from other libraries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import conewise as cw
from conewise.errors import InputMismatchError, LoadError, SiteError
from conewise.sweeps.result import Result
from conewise.text.prompts import as_pairs
from tests.sweeps.small import HEADS, LAYERS, model, prompts, sweep_over

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
METRIC = cw.logit_diff(" Mary", " John")


@pytest.fixture(scope="module")
def small() -> cw.Model:
    return model()


@pytest.fixture(scope="module")
def result() -> Result:
    return sweep_over(model()).run()


def test_a_kind_and_a_layer_are_told_by_a_dot(small: cw.Model) -> None:
    run = small.run(input_ids=prompts(1, 2))
    assert run["resid_post.1"].equal(run["resid_post", 1])
    assert run["resid_post.-1"].equal(run["resid_post", LAYERS - 1])


def test_a_layer_that_is_not_there_is_refused_in_that_form_too(small: cw.Model) -> None:
    with pytest.raises(cw.errors.MissingSiteError, match="layer"):
        small.locate(f"resid_post.{LAYERS}")


def test_a_star_means_every_layer() -> None:
    assert cw.sites("z.*", head=":") == cw.sites("z", layer=":", head=":")
    assert cw.sites("z.*", layer=1) == cw.sites("z.*", layer=1)
    assert cw.sites("model.layers.*").name == "model.layers.*"


def test_a_model_says_how_large_it_is(small: cw.Model) -> None:
    assert (small.n_layers, small.n_heads) == (LAYERS, HEADS)


def test_american_spelling(result: Result) -> None:
    assert result.normalized.equal(result.normalised)


class Dataset:
    """Has what a dataset of Hugging Face has: rows, names of columns, None for what is missing."""

    column_names = ("clean", "corrupted", "answers", "wrong_answers")

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield {"clean": "a", "corrupted": "b", "answers": [" c"], "wrong_answers": None}
        yield {"clean": "d", "corrupted": "e", "answers": " f| g", "wrong_answers": [" h"]}


def test_a_dataset_of_hugging_face_is_read_by_rows() -> None:
    first, second = as_pairs(Dataset())
    assert (first.answers, first.wrong_answers) == ((" c",), ())
    assert second.answers == (" f", " g")


def test_a_result_is_an_xarray_dataset(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(variables: Any, coords: Any) -> tuple[Any, Any]:
        return variables, coords

    xarray = ModuleType("xarray")
    monkeypatch.setattr(xarray, "Dataset", made, raising=False)
    monkeypatch.setitem(sys.modules, "xarray", xarray)
    variables, coords = result.to_xarray()
    axes, values, ends = variables[result.metrics[0]]
    assert axes == result.axes
    assert list(coords) == list(axes)
    assert values.shape == tuple(len(along) for along in coords.values())
    assert ends["base"] == float(result.base[0])
    assert f"{result.metrics[0]}_effect" in variables


@pytest.fixture(scope="module")
def tiny() -> cw.Model:
    found = cw.load("tiny")
    found.run(CLEAN)
    return found


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        ("resid_post.2", ("resid_post", 2)),
        ("resid_post[-1]", ("resid_post", 3)),
        ("blocks.2.hook_resid_post", ("resid_post", 2)),
        ("model.layers.1.output", "model.layers.1"),
        ("model.layers.1.mlp.output", ("mlp_out", 1)),
    ],
)
def test_names_of_values(tiny: cw.Model, typed: str, plain: Any) -> None:
    run = tiny.run(CLEAN)
    assert torch.equal(run[typed], run[plain])


ALL_HEADS = cw.sites("z", layer=":", head=":")


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        ("z", ALL_HEADS),
        ("z.*", ALL_HEADS),
        ("L*H*", ALL_HEADS),
        ("blocks.*.attn.hook_z", ALL_HEADS),
        ("z[layer=*, head=*]", ALL_HEADS),
        (cw.sites("blocks.*.attn.hook_z", head="*"), ALL_HEADS),
        ("L1H*", cw.sites("z", layer=1, head=":")),
        ("mlp_out.*", cw.sites("mlp_out", layer=":")),
        ("model.layers.*.mlp", cw.sites("mlp_out", layer=":")),
        (["z", "mlp_out"], ALL_HEADS + cw.sites("mlp_out", layer=":")),
        (cw.sites("model.layers.*.mlp", layer="1:3"), cw.sites("mlp_out", layer="1:3")),
    ],
    ids=str,
)
def test_wildcards_are_all_layers(tiny: cw.Model, typed: Any, plain: Any) -> None:
    found, expected = (
        tiny.sweep(sites, base=CORRUPTED, source=CLEAN, metric=METRIC).run() for sites in (typed, plain)
    )
    assert torch.equal(found.values, expected.values)
    assert [part.axes for part in found.spreads] == [part.axes for part in expected.spreads]


@pytest.mark.parametrize("typed", ["blocks.0.*", "*", "model.*.mlp"])
def test_a_wildcard_that_matches_nothing_says_so(tiny: cw.Model, typed: str) -> None:
    with pytest.raises(SiteError, match=r"no site matches .*: '\*' is the number of a layer"):
        tiny.sweep(typed, base=CORRUPTED, source=CLEAN, metric=METRIC)


def test_inputs_as_tokenizers_return_them(tiny: cw.Model) -> None:
    expected = tiny.run(CLEAN).logits
    tensors, lists = tiny.tokenizer(CLEAN, return_tensors="pt"), tiny.tokenizer(CLEAN)
    for given in (tensors, lists, {"input_ids": lists["input_ids"]}, {"input_ids": tensors.input_ids}):
        assert torch.equal(tiny.run(given).logits, expected)
        assert torch.equal(tiny.run(**given).logits, expected)
    swept = tiny.sweep("z", base=CORRUPTED, source=CLEAN, metric=METRIC).run()
    for base, source in (
        (tiny.tokenizer(CORRUPTED), lists),
        (tiny.tokenizer(CORRUPTED, return_tensors="pt").input_ids, tensors.input_ids),
    ):
        again = tiny.sweep("z", base=base, source=source, metric=METRIC).run()
        assert torch.equal(again.values, swept.values)


def test_a_mask_that_hides_something_is_not_dropped(tiny: cw.Model) -> None:
    given = dict(tiny.tokenizer(CLEAN, return_tensors="pt"))
    given["attention_mask"] = given["attention_mask"].index_fill(1, torch.tensor([0]), 0)
    with pytest.raises(InputMismatchError, match="'attention_mask' was not part of the captured call"):
        tiny.run(**given)


def test_names_of_other_libraries_lead_on(tiny: cw.Model) -> None:
    for name, hint in (("run_with_cache", "model.run"), ("cfg", "n_layers"), ("to_tokens", "tokenizer")):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'. Use .*{hint}"):
            getattr(tiny, name)
    assert not hasattr(tiny, "run_with_hooks")


def test_short_names_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cw.load("Tiny").label == "tiny"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LoadError, match="cannot load 'EleutherAI/pythia-70m'"):
        cw.load("pythia-70m", revision="no such revision")
