"""Names and forms that people bring from other libraries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import conewise as cw
from conewise.sweeps.result import Result
from conewise.text.prompts import as_pairs
from tests.sweeps.small import HEADS, LAYERS, model, prompts, sweep_over


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
