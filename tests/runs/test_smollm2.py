"""A real language model: verified, and every head and MLP patched as a hook on the module would. Slow.

`make test-smollm2` runs it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.anatomy.places import Place
from conewise.model import Model
from tests.runs.state import assert_untouched, state_of
from tests.sweeps.captured import hooked

pytestmark = pytest.mark.slow

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
LAYERS, HEADS = 30, 9


@cache
def loaded() -> Any:
    return cw.load("smollm2-135m")


@cache
def prompts() -> tuple[Tensor, Tensor]:
    tokenizer = loaded().tokenizer
    clean, corrupted = (tokenizer(text, return_tensors="pt")["input_ids"] for text in (CLEAN, CORRUPTED))
    assert clean.shape == corrupted.shape == (1, 14)
    assert (clean != corrupted).sum() == 1
    return clean, corrupted


@cache
def captured() -> Model:
    model: Model = cw.capture(loaded().module, input_ids=prompts()[0], logits_to_keep=1)
    return model


def test_the_prompts_are_told_apart() -> None:
    tokenizer = loaded().tokenizer
    mary, john = (tokenizer(name)["input_ids"][0] for name in (" Mary", " John"))
    differences = []
    for ids in prompts():
        logits = captured().run(input_ids=ids).logits[0, -1]
        differences.append(float(logits[mary] - logits[john]))
    assert differences[0] > 3
    assert differences[1] < -3


def test_the_graph_equals_the_module() -> None:
    module = loaded().module
    before = state_of(module)
    verification = cw.capture(module, input_ids=prompts()[0]).verify()
    assert verification.ok, str(verification)
    assert_untouched(module, before)


def part_of_z(head: int, part: Tensor) -> Any:
    def change(z: Tensor) -> Tensor:
        z.view(1, 14, HEADS, 64)[:, :, head] = part
        return z

    return change


def place_and_hook(layer: int, head: int | None, source: cw.Run) -> tuple[Place, str, str, Any]:
    if head is None:
        place = cw.site("mlp_out", layer=layer)
        return place, "out", f"model.layers.{layer}.mlp", lambda _: source[place]
    place = cw.site("z", layer=layer, head=head)
    change = part_of_z(head, source[place])
    return place, "in", f"model.layers.{layer}.self_attn.o_proj", change


@pytest.mark.parametrize("layer", range(LAYERS))
def test_every_head_and_the_mlp_of_a_layer_equal_hooks_bit_for_bit(layer: int) -> None:
    model, module = captured(), loaded().module
    clean, corrupted = prompts()
    base, source = model.run(input_ids=corrupted), model.run(input_ids=clean)
    for head in (*range(HEADS), None):
        place, way, path, change = place_and_hook(layer, head, source)
        with hooked(module, way, path, change), torch.no_grad():
            expected = module(input_ids=corrupted, use_cache=False, logits_to_keep=1).logits
        with base.fork() as world:
            world.patch(place, source)
            assert torch.equal(world.logits, expected), place
            assert not torch.equal(world.logits, base.logits), place
