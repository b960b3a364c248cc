"""Keys and values of every head where groups of heads share them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import conewise as cw
from conewise.errors import LoadError
from conewise.models.groups import split_groups
from tests.circuits.small_models import small

METRIC = cw.logit_diff(answer=3, wrong=5)


def test_a_split_model_computes_what_the_module_does() -> None:
    given = small("llama")
    split = split_groups(given.plain.module)
    with torch.no_grad():
        own, other = given.plain.module(given.ids).logits, split(given.ids).logits
    torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)
    assert given.plain.module.config.num_key_value_heads == 2
    assert split.config.num_key_value_heads == 4  # type: ignore[union-attr]


def test_the_edges_of_a_group_are_those_of_its_heads_together() -> None:
    given = small("llama")
    model = cw.capture(split_groups(given.plain.module), input_ids=given.ids)
    shared, own = given.model.edges(), model.edges()
    assert "m0->a1.kv1<v>" in shared
    assert {"m0->a1.h2<v>", "m0->a1.h3<v>"} <= set(own)
    base, source = model.run(input_ids=given.ids), model.run(input_ids=given.other)
    runs: dict[str, Any] = {"base": given.base, "source": given.source, "metric": METRIC}
    kept = [edge for edge in shared if edge != "m0->a1.kv1<v>"]
    kept_own = [edge for edge in own if edge not in {"m0->a1.h2<v>", "m0->a1.h3<v>"}]
    one = cw.Circuit.made(given.model, kept).bind(given.model).evaluate(**runs, only="faithfulness")
    other = cw.Circuit.made(model, kept_own).bind(model)
    found = other.evaluate(base=base, source=source, metric=METRIC, only="faithfulness")
    assert found.circuit == pytest.approx(one.circuit, abs=1e-6)


def test_a_model_is_loaded_with_its_groups_split(tmp_path: Path) -> None:
    given = small("llama")
    given.plain.module.save_pretrained(tmp_path)
    model = cw.load(tmp_path, split_groups=True)
    assert "input->a0.h3<k>" in model.edges()


def test_a_model_without_groups_says_so() -> None:
    with pytest.raises(LoadError, match="no attention with grouped queries was found"):
        split_groups(small("gpt2").plain.module)
