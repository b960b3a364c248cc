"""Activations of texts of any lengths, against one hooked forward for each text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.errors import ArgumentError, ConewiseError, PromptError, SiteError
from tests.sweeps.tiny import HEADS, LAYERS, VOCABULARY, tiny, value


def rows(count: int = 9) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(2, 8, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


ROWS = rows()


def hooked(name: str, kind: str, layer: int, row: list[int]) -> Tensor:
    """[pos, ...] of one text."""
    found = value(name, kind, layer, torch.tensor([row]))[0]
    return found.view(len(row), HEADS, -1) if kind == "z" else found


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("batch", [1, 4])
def test_every_text_has_the_values_that_a_hook_sees(name: str, batch: int) -> None:
    model = tiny(name)
    for kind, axes in (("resid_post", ()), ("z", ("head",)), ("mlp_out", ())):
        found = model.activations(ROWS, cw.sites(kind, layer=":"), batch=batch)
        expected = torch.stack(
            [torch.stack([hooked(name, kind, layer, row)[-1] for layer in range(LAYERS)]) for row in ROWS]
        )
        torch.testing.assert_close(found.values, expected, rtol=1e-4, atol=1e-4)
        assert found.axes[:-1] == ("text", "layer", *axes)
        assert np.asarray(found).shape == tuple(expected.shape)


def test_positions_are_one_several_all_or_their_mean(tmp_path: Path) -> None:
    model, name = tiny("gpt2"), "gpt2"
    whole = [hooked(name, "resid_post", 1, row) for row in ROWS]
    place = ("resid_post", 1)
    cases: dict[Any, Tensor] = {
        -1: torch.stack([one[-1] for one in whole]),
        0: torch.stack([one[0] for one in whole]),
        "mean": torch.stack([one.mean(0) for one in whole]),
        "all": torch.cat(whole),
    }
    for pos, expected in cases.items():
        torch.testing.assert_close(model.activations(ROWS, place, pos).values, expected, rtol=1e-4, atol=1e-4)
    several = model.activations(ROWS, place, [0, -1])
    assert several.axes == ("text", "pos", "d_model")
    torch.testing.assert_close(several.values[:, 1], cases[-1], rtol=1e-4, atol=1e-4)
    tokens = model.activations(ROWS, place, "all")
    assert tokens.texts == tuple(n for n, row in enumerate(ROWS) for _ in row)
    assert tokens.positions == tuple(at for row in ROWS for at in range(len(row)))
    table = model.activations(ROWS, cw.sites("z", layer=[0, 2], head=[1, 3])).to_dataframe()
    assert table.shape == (len(ROWS) * 2 * 2, 3 + 8)
    found = table[(table.text == 4) & (table.layer == 2) & (table["head"] == 3)].iloc[0, 3:]
    expected_row = hooked(name, "z", 2, ROWS[4])[-1, 3]
    torch.testing.assert_close(
        torch.tensor(found.to_numpy(dtype="float32")), expected_row, rtol=1e-4, atol=1e-4
    )
    file = tmp_path / "made" / "stream.npy"
    kept = model.activations(ROWS, cw.sites("resid_post", layer=":"), out=file)
    assert np.array_equal(
        np.load(file), np.asarray(model.activations(ROWS, cw.sites("resid_post", layer=":")))
    )
    assert torch.equal(kept.values, torch.from_numpy(np.load(file)))


def test_only_what_lies_before_the_site_is_computed() -> None:
    model = tiny("gpt2")
    told: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        behind = model.graph.table.rules[model.graph.number(model.locate(("mlp_out", 1)).node)]
        assert behind is not None
        patch.setattr(model.graph, "rule", lambda _: behind)
        model.activations(ROWS, ("resid_post", 0), progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (len(ROWS), len(ROWS))


@pytest.mark.parametrize(
    ("texts", "sites", "pos", "error", "message"),
    [
        ("one text", ("mlp_out", 0), -1, ArgumentError, "expected a sequence"),
        (["a text"], ("mlp_out", 0), -1, PromptError, "no tokenizer"),
        ([[1.5]], ("mlp_out", 0), -1, PromptError, "a row of tokens"),
        ([[1, 2]], ("mlp_out", 0), 2, SiteError, "text 0 has 2 tokens"),
        ([[1, 2]], ("mlp_out", 0), "last", SiteError, "'mean' or 'all'"),
        ([[1, 2]], cw.sites("mlp_out", layer=0, pos=1), -1, SiteError, "leave pos and batch out"),
        ([[1, 2]], ("pattern", 0), -1, SiteError, "has the axes"),
    ],
)
def test_bad_input_is_refused(
    texts: object, sites: object, pos: object, error: type[ConewiseError], message: str
) -> None:
    with pytest.raises(error, match=message):
        tiny("gpt2").activations(texts, sites, pos)  # type: ignore[arg-type]


def test_a_model_that_was_just_loaded_reads_texts_of_several_lengths() -> None:
    found = cw.load("tiny").activations(["Mary and John", "Mary"], "resid_post[layer=1]")
    assert found.values.shape[0] == 2
