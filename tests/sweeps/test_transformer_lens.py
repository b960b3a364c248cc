"""Sites hold what TransformerLens has under the same names. Slow, and needs the extra `compare`.

`make test-transformer-lens` runs it; docs/transformer-lens.md says what is defined otherwise.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from tests.program.coverage_table import KINDS
from tests.program.zoo import ZOO

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 1e-4
"""Of a site's largest value: both compute in float32, in other orders of summation."""


def compared(name: str, module: Any, ids: Tensor) -> tuple[dict[str, float], list[str]]:
    """The largest deviation of each kind, relative to the site's largest value; and what they lack."""
    bridge = pytest.importorskip("transformer_lens.model_bridge").TransformerBridge
    tokenizer = cw.load("smollm2-135m").tokenizer
    model = cw.capture(module, input_ids=ids)
    run = model.run(input_ids=ids)
    theirs = bridge.boot_transformers(name, hf_model=copy.deepcopy(module), tokenizer=tokenizer)
    theirs.set_use_attn_result(True)
    with torch.no_grad():
        logits, cached = theirs.run_with_cache(ids)
    deviations = {"logits": relative(run.logits, logits)}
    lacking = []
    for site in model.sites:
        if site.layer is None:
            continue
        if site.name not in cached:
            lacking.append(site.name)
            continue
        value, other = run[site.name], cached[site.name]
        assert value.shape == other.shape, (site.name, value.shape, other.shape)
        deviations[site.kind] = max(deviations.get(site.kind, 0.0), relative(value, other))
    return deviations, lacking


def relative(value: Tensor, other: Tensor) -> float:
    """Max |value − other| over max |value|, where neither is masked away by a large negative number."""
    seen = (value > -1e30) & (other > -1e30)
    assert torch.equal(value > -1e30, other > -1e30)
    return float((value - other)[seen].abs().max() / value[seen].abs().max())


@pytest.mark.parametrize(
    ("case", "name"), [("gpt2", "gpt2"), ("llama", "HuggingFaceTB/SmolLM2-135M-Instruct")]
)
def test_small_models(case: str, name: str) -> None:
    torch.manual_seed(0)
    found, lacking = compared(name, ZOO[case].make("eager"), torch.randint(0, 211, (2, 9)))
    check(found, lacking)


def test_smollm2() -> None:
    """30 layers, 9 heads, 3 kv heads, real weights, the prompt of an indirect object."""
    loaded = cw.load("smollm2-135m", attn_implementation="eager")
    prompt = "When Mary and John went to the store, John gave a drink to"
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer(prompt, return_tensors="pt")["input_ids"]
    found, lacking = compared("HuggingFaceTB/SmolLM2-135M-Instruct", loaded.module, ids)
    check(found, lacking)


def check(found: dict[str, float], lacking: list[str]) -> None:
    assert set(found) >= set(KINDS)
    assert not lacking
    for kind, deviation in found.items():
        assert deviation <= TOLERANCE, (kind, deviation)
