"""Patches of a run, interrupted: each is made or not, and what is read is right for those that are."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch

import conewise as cw
from conewise.runs.reading import RunWorld
from tests.laws.interrupting import interrupt, moments_of
from tests.sweeps.captured import inputs, small

Act = Callable[[RunWorld], object]
RUN = tuple(f"conewise.runs.{name}" for name in ("run", "reading", "values", "edit", "lent"))
PLACES = [
    cw.site("z", layer=0),
    cw.site("z", layer=1, head=1),
    cw.site("mlp_out", layer=0),
    cw.site("resid_post", layer=1, pos=3),
]


def answer(base: cw.Run, places: list[cw.Place]) -> torch.Tensor:
    """The logits with zeros at `places`, in a world that nothing interrupted."""
    with base.fork() as world:
        for place in places:
            world.patch(place, "zero")
        found: torch.Tensor = world.logits
        return found.clone()


@pytest.fixture(scope="module")
def base() -> cw.Run:
    run = small().run(**inputs())
    assert run.logits is not None
    return run


def begin(base: cw.Run) -> RunWorld:
    world = base.fork()
    for place in PLACES[:2]:
        world.patch(place, "zero")
    assert world.logits is not None
    world.patch(PLACES[2], "zero")
    return world


def read(world: RunWorld) -> torch.Tensor:
    logits: torch.Tensor = world.logits
    return logits


def moments(act: Act, world: RunWorld) -> list[int]:
    return list(range(1, moments_of(lambda: act(world), within=RUN) + 1))


@pytest.mark.filterwarnings("ignore::conewise.errors.NoEffectWarning")
@pytest.mark.parametrize(
    ("act", "before", "after"),
    [
        (lambda world: world.patch(PLACES[3], "zero"), PLACES[:3], PLACES),
        (lambda world: world.restore(PLACES[0]), PLACES[:3], PLACES[1:3]),
    ],
)
def test_an_interrupted_patch_of_a_run_is_made_or_not(
    base: cw.Run, act: Act, before: list[cw.Place], after: list[cw.Place]
) -> None:
    expected = {len(places): answer(base, places) for places in (before, after)}
    for at in moments(act, begin(base))[-12:]:  # First it looks, then it changes something.
        world = begin(base)
        read(world)
        assert interrupt(partial(act, world), at, within=RUN) == 1
        assert [edit.place for edit in world.edits] in (before, after)
        assert torch.equal(world.logits, expected[len(world.edits)]), f"interrupted at {at}"


def test_patches_that_the_engine_got_in_part_can_be_taken_back(base: cw.Run) -> None:
    """They are handed over at the next reading; what it had got when that was interrupted does not stay."""
    expected = answer(base, PLACES[:1])
    for at in random.Random(0).sample(moments(read, begin(base)), 12):
        world = begin(base)
        assert interrupt(partial(read, world), at, within=RUN) == 1
        world.restore(PLACES[2])
        world.restore(PLACES[1])
        assert torch.equal(world.logits, expected), f"interrupted at {at}"
