"""Questions in text, against one hooked forward for each head and prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import conewise as cw
from conewise.errors import MetricError, PromptError, PromptWarning
from conewise.loading import load as load_model
from conewise.model import Model
from conewise.text.answer import Answer
from conewise.text.prompts import Pair
from tests.text.plain import difference, head_effects, logits, pairs, tiny, token, tokens

alike = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
"""Equal but for rounding: a batch of prompts is computed by other kernels than one prompt alone."""

CLEAN = "When Mary and John went to the store, John gave a drink to"


@cache
def model() -> Model:
    return cw.capture(tiny(), CLEAN)


@cache
def answer() -> Answer:
    return model().ask(pairs(7)).run()


def test_heads_over_prompts_of_three_lengths_are_what_hooks_find_for_each_prompt_alone() -> None:
    rows = pairs(7)
    assert len({tokens(row["clean"]).shape[1] for row in rows}) == 3
    plain = head_effects(rows)
    assert plain.abs().max() > 1
    alike(answer().effect_by_prompt, plain)
    alike(answer().effect, plain.mean(-1))
    base = answer().base_per_prompt
    assert base is not None
    alike(
        base[0],
        torch.tensor([difference(logits(row["corrupted"]), row) for row in rows], dtype=torch.float64),
    )


def test_prompts_are_given_as_a_file_a_table_rows_or_pairs(tmp_path: Path) -> None:
    rows = pairs(4)
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps(rows), "utf-8")
    table = pd.DataFrame(rows)
    separated = table.assign(answers=[row["answers"][0] for row in rows])
    given: list[Any] = [
        str(file),
        file,
        rows,
        tuple(rows),
        {"prompts": rows},
        table,
        separated,
        (row for row in rows),
        [Pair(r["clean"], r["corrupted"], tuple(r["answers"]), tuple(r["wrong_answers"])) for r in rows],
        [dict(zip(("clean", "corrupt", "answer", "wrong"), row.values(), strict=True)) for row in rows],
    ]
    found = [model().ask(one) for one in given]
    assert len({json.dumps(question.described()) for question in found}) == 1
    assert model().ask(rows[0]).prompts.pairs == found[0].prompts.pairs[:1]


def test_what_is_worth_a_word_of_how_texts_were_read_is_told() -> None:
    row = pairs(1)[0]
    with pytest.warns(PromptWarning, match=r"row 1, field 'clean': part of .* is not in the vocabulary"):
        model().ask({**row, "clean": row["clean"].replace("store", "wombat")})


def test_what_was_loaded_is_captured_and_named() -> None:
    loaded = tiny()
    question = loaded.ask(pairs(4))
    assert question.model.module is loaded.module
    assert question.model.label == "tiny"
    assert question.model.tokenizer is loaded.tokenizer
    assert question.story().model == "tiny"
    alike(question.run().effect_by_prompt, answer().effect_by_prompt[..., :4])
    captured = cw.capture(loaded.module, tokenizer=loaded.tokenizer)
    by_module = captured.ask(pairs(1))
    assert by_module.model.label == type(loaded.module).__name__


def test_sites_are_written_as_on_the_command_line_or_selected() -> None:
    few = "z[layer=1:3, head=2],mlp_out"
    names = [cell.name for cell in model().ask(pairs(1), sites=few).cells]
    assert names == [
        *("z[layer=1, head=2]", "z[layer=2, head=2]"),
        *(f"mlp_out[layer={layer}]" for layer in range(4)),
    ]
    selected = cw.sites("z", layer="1:3", head=2) + cw.sites("mlp_out", layer=":")
    assert [cell.name for cell in model().ask(pairs(1), sites=selected).cells] == names
    edges = model().ask(pairs(2), sites="a0.h2->m*")
    assert [cell.name for cell in edges.cells] == [f"a0.h2->m{layer}" for layer in range(4)]
    assert edges.run().values.isfinite().all()


def test_an_ablation_takes_texts_and_needs_no_corrupted_prompts() -> None:
    texts = [row["clean"] for row in pairs(3)]
    question = model().ask(texts, sites="mlp_out", metric="kl", source="zero")
    assert question.direction == "noise"
    found = question.run()
    mlps = [layer.mlp for layer in tiny().module.model.layers]
    for number, text in enumerate(texts):
        before = logits(text).log_softmax(-1)
        for layer, mlp in enumerate(mlps):
            after = logits(text, {mlp: torch.zeros_like}, of_inputs=False).log_softmax(-1)
            kl = float((before.exp() * (before - after)).sum())
            assert float(found.effect_by_prompt[layer, number]) == pytest.approx(kl, abs=1e-4)
    with pytest.raises(PromptError, match="row 1 is a text, and a clean and a corrupted prompt are expected"):
        model().ask(texts)


@pytest.mark.parametrize("one_for_all", [True, False])
def test_a_metric_of_ones_own_is_read_of_each_prompt(one_for_all: bool) -> None:
    rows = pairs(4)
    answers = [token(row["answers"][0]) for row in rows]
    metric = cw.logit(answers[0] if one_for_all else answers)
    found = model().ask(rows, metric=metric).run()
    assert found.base_per_prompt is not None
    for number, row in enumerate(rows):
        read = logits(row["corrupted"])[answers[0 if one_for_all else number]]
        assert float(found.base_per_prompt[0, number]) == pytest.approx(float(read), abs=1e-4)
    with pytest.raises(MetricError, match="made for 4 prompts, and 3 were given"):
        model().ask(rows[:3], metric=cw.logit(answers))


def test_an_answer_is_verified_by_hooks_over_all_its_groups() -> None:
    check = answer().verify(n=3)
    assert check.ok
    assert check.hooked == 3
    spoilt = answer().per_prompt.clone()
    spoilt[:, :, -1] += 0.5
    assert not replace(answer(), per_prompt=spoilt).verify(n=3).ok


def test_an_answer_says_how_far_its_means_can_be_trusted() -> None:
    said = str(answer())
    assert "logit_diff over 7 prompts" in said
    assert "95% intervals" in said
    assert said.startswith("Head 0.2 alone restores ")
    assert "  7 prompts; 95% interval of head 0.2 " in said
    assert "\n  Answer of logit_diff over z[4, 4]" in said
    table = answer().to_dataframe(statistics=True)
    assert {"effect", "sem", "low", "high", "p"} <= set(table.columns)
    assert (table["low"] <= table["effect"]).all()
    assert (table["effect"] <= table["high"]).all()


def test_a_stored_answer_goes_on_and_is_saved_with_its_story(tmp_path: Path) -> None:
    question = model().ask(pairs(7))
    first = question.run(out=tmp_path / "run")
    again = question.run(out=tmp_path / "run", resume=True)
    assert again.ledger.resumed == 3 * 16
    assert again.equals(first)
    loaded = cw.open(first.save(tmp_path / "saved"))
    assert isinstance(loaded, cw.Result)
    assert loaded.equals(first)
    assert loaded.story == first.story


def test_smollm2_is_a_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def embedded() -> None:
        seen.append("embedded")
        raise PromptError("this is the embedded one")

    monkeypatch.setattr("conewise.loading._embedded", embedded)
    with pytest.raises(PromptError, match="the embedded one"):
        load_model("smollm2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(cw.ConewiseError, match="is not a model"):  # a folder of that name is that folder
        load_model("smollm2")
    assert seen == ["embedded"]


def test_a_split_has_every_prompt_once_and_the_same_each_time() -> None:
    question = model().ask(pairs(7))
    first, second = question.split(seed=3)
    texts = [pair.clean for part in (first, second) for pair in part.prompts.pairs]
    assert sorted(texts) == sorted(pair.clean for pair in question.prompts.pairs)
    assert {len(first.prompts.pairs), len(second.prompts.pairs)} == {3, 4}
    again = question.split(seed=3)[0]
    assert again.prompts.pairs == first.prompts.pairs
    assert question.split(seed=4)[0].prompts.pairs != first.prompts.pairs
    assert len(question.split(share=0.01)[0].prompts.pairs) == 1
    metric = cw.logit([token(row["answers"][0]) for row in pairs(7)])
    part = model().ask(pairs(7), metric=metric).split()[1]
    for pair, number in zip(part.prompts.pairs, part.metric.described[1], strict=True):
        assert token(pair.answers[0]) == number


def test_sites_found_on_some_prompts_are_tried_on_others() -> None:
    """The sets by hand: the strongest heads of one part, all patched together in the other."""
    question = model().ask(pairs(8))
    held = question.faithfulness(top=[1, 3], seed=1)
    first, second = question.split(seed=1)
    rows = {row["clean"]: row for row in pairs(8)}
    effects = head_effects([rows[pair.clean] for pair in first.prompts.pairs]).mean(-1)
    assert held.found.source is not None
    order = (
        (effects * (held.found.source - held.found.base).sign()).flatten().argsort(descending=True).tolist()
    )
    expected = [cw.site("z", layer=at // 4, head=at % 4) for at in order[:3]]
    assert list(held.sets[1]) == expected
    assert list(held.sets[0]) == expected[:1]
    others = [rows[pair.clean] for pair in second.prompts.pairs]
    alone = head_effects(others)[order[0] // 4, order[0] % 4]
    ends = [
        torch.tensor([difference(logits(row[run]), row) for row in others], dtype=torch.float64).mean()
        for run in ("corrupted", "clean")
    ]
    assert float(held.shares[0]) == pytest.approx(float(alone.mean() / (ends[1] - ends[0])), abs=1e-4)
    assert held.found_shares.shape == (2,)
    assert "sites found on 4 prompts, tried on 4 others" in str(held)


@pytest.mark.parametrize(
    ("asked", "how", "said"),
    [
        ({}, {"top": 0}, "top is 0"),
        ({}, {"top": 17}, "from 1 to 16"),
        ({}, {"top": []}, "names no number"),
        ({}, {"share": 1}, "share is 1"),
        ({"source": "zero"}, {}, "'zero' has no source"),
        ({"sites": "a0.*->m1"}, {"top": 1}, "edges are a circuit"),
    ],
)
def test_a_split_that_cannot_be_is_refused(asked: dict[str, Any], how: dict[str, Any], said: str) -> None:
    with pytest.raises(cw.ConewiseError, match=said):
        model().ask(pairs(3), **asked).faithfulness(**how)
    with pytest.raises(PromptError, match="one prompt cannot be split"):
        model().ask(pairs(1)).split()


def test_noise_has_its_scale() -> None:
    assert model().ask(pairs(1), source=cw.noise(2.0)).scale == 2.0
    assert model().ask(pairs(1), source=cw.noise(1.0)).scale == 1.0
