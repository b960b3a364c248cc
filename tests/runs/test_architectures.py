"""Every architecture of the zoo: verified, one part patched as a hook would, the module left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import conewise as cw
from conewise.anatomy.places import Place
from conewise.model import Model
from tests.program.marks import marks
from tests.program.zoo import ZOO
from tests.runs.state import assert_untouched, state_of
from tests.sweeps.captured import assert_same, hook_of, hooked, inputs, module_outputs

BOTH = {"gpt2", "llama"}
EVERY = [
    pytest.param(name, attention, marks=marks(name))
    for name, case in ZOO.items()
    for attention in (case.attention if name in BOTH else case.attention[-1:])
]
"""The fused attention where there is one. That sites lie right in the other is tests/anatomy's business."""

MODULES = {"mamba": "backbone.layers.1.mixer", "skips": "blocks.1", "two_and_two": "right"}
"""Where a hook patches a model that has no heads."""


def patched_place(name: str) -> tuple[Place, tuple[str, str, int], Any]:
    """A place of the architecture, the hook that finds it, and its index in what the hook sees."""
    if name in MODULES:
        return cw.site(MODULES[name]), ("out", MODULES[name], 0), (...,)
    place = cw.site("z", layer=1, stack="decoder" if name == "t5" else "", head=2)
    return place, hook_of(ZOO[name], "z", 1), (slice(None), slice(None), 2)


@pytest.mark.parametrize(("name", "attention"), EVERY)
def test_an_architecture_is_captured_verified_and_patched(name: str, attention: str) -> None:
    case = ZOO[name]
    module = case.make(attention)
    example = case.example(1, 12)
    before = state_of(module)
    model = cw.capture(module, **example)
    verification = model.verify(n=1)
    assert verification.ok, str(verification)
    assert "length is fixed" not in str(verification) or len(case.lengths) == 1
    assert_untouched(module, before)
    check_patch(model, name)
    assert_untouched(module, before | {"random": torch.get_rng_state()})


def check_patch(model: Model, name: str) -> None:
    place, (way, path, call), index = patched_place(name)
    given = inputs(name, batch=2, length=9 if len(ZOO[name].lengths) > 1 else 12)
    base = model.run(**given)
    source = model.run(**inputs(name, batch=2, length=9 if len(ZOO[name].lengths) > 1 else 12, seed=5))
    part = source[place].clone()

    def change(value: Tensor) -> Tensor:
        shown = value.view(*value.shape[:2], 4, -1) if "head" in place.part else value
        shown[index] = part
        return value

    with hooked(model.module, way, path, change, call):
        expected = module_outputs(model, given)
    with base.fork() as world:
        world.patch(place, source)
        found = tree_leaves(world.outputs)
        assert set(world.ledger.recomputed) <= set(model.graph.cone(model.locate(place).node))
    assert_same(found, expected)
    assert not all(map(torch.equal, found, tree_leaves(base.outputs)))
