"""What is set for the whole process, or hooked into the user's module, is gone after Ctrl-C too."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import transformers

import conewise as cw
from conewise.checks.hooking import HookedModule
from conewise.errors import LoadError
from conewise.models.model_files import WeightCount, bounded
from conewise.paper.experiments.transformers import one_thread
from conewise.program.export import _quiet
from conewise.program.foreign import quiet
from conewise.program.tensors import multiplying
from conewise.reactive.graph import Graph
from conewise.reactive.ledger import Ledger
from tests.laws.interrupting import interrupt, moments_of
from tests.sweeps.captured import inputs, small

LEDGER = Ledger(Graph())
HOW: dict[str, Any] = {"within": ("conewise", "torch", "transformers", "logging"), "calls": True}


def everywhere() -> tuple[object, ...]:
    """What a context manager of ours may set for all."""
    return (
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        transformers.utils.logging.get_verbosity(),
        transformers.utils.logging.is_progress_bar_enabled(),
        logging.getLogger("huggingface_hub").level,
        logging.getLogger("torch").level,
        len(LEDGER._spans),
    )


@pytest.mark.parametrize(
    "make",
    [lambda: multiplying("tf32"), one_thread, quiet, _quiet, LEDGER.interval],
    ids=["multiplying", "one_thread", "quiet", "_quiet", "interval"],
)
def test_what_is_set_for_a_while_is_put_back_wherever_that_is_interrupted(
    make: Callable[[], AbstractContextManager[object]],
) -> None:
    def enter() -> None:
        with make():
            pass

    before = everywhere()
    moments = moments_of(enter, **HOW)
    assert moments >= 2
    for at in range(1, moments + 1):
        assert interrupt(enter, at, **HOW) == 1
        assert everywhere() == before, f"interrupted at {at}"


def test_a_bound_that_is_interrupted_bounds_nothing_afterwards() -> None:
    def enter() -> None:
        with bounded("here", WeightCount(0, 0)):
            pass

    def build() -> torch.nn.Sequential:
        return torch.nn.Sequential(*(torch.nn.Identity() for _ in range(1_100)))

    with bounded("here", WeightCount(0, 0)), pytest.raises(LoadError, match="more than 1,000 modules"):
        build()
    for at in range(1, moments_of(enter, **HOW) + 1):
        assert interrupt(enter, at, **HOW) == 1
    assert len(build()) == 1_100


# Where hooks are made and removed: in torch's own module for that, and in ours.
HOOKING: dict[str, Any] = {
    "within": ("conewise.checks.hooking", "torch.utils.hooks", "contextlib"),
    "calls": True,
}


def test_hooks_that_are_interrupted_change_nothing_afterwards() -> None:
    model, given = small(), inputs()
    hooked = HookedModule(model.module, model.program, model.signature)
    run = model.run(**given)
    node = model.locate(cw.site("mlp_out", layer=0)).node
    hook = hooked.find({node: run.demand([node])[0]}, given)[node]

    def act() -> None:
        hooked.outputs(given, {hook: torch.zeros_like})

    with torch.no_grad():
        expected = model.module(**given, use_cache=False).logits
        moments = moments_of(act, **HOOKING)
        for at in range(1, moments + 1):
            assert interrupt(act, at, **HOOKING) == 1
            assert torch.equal(model.module(**given, use_cache=False).logits, expected), f"at {at}"
    assert not any(part._forward_hooks for part in model.module.modules())
