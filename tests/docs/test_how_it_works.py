"""The figures of "How it works" are of the plan as it is now, and say what the engine does."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.etree import ElementTree as ET

import pytest

from tests.docs.how_it_works import FIGURES, SITE, Scene, stack, wave
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/how-it-works.md").read_text("utf-8")


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene.made()


@pytest.mark.parametrize(("name", "draw"), [("wave.svg", wave), ("stack.svg", stack)], ids=["wave", "stack"])
def test_a_figure_is_up_to_date(scene: Scene, name: str, draw: Callable[[Scene], str]) -> None:
    """`python -m tests.docs.how_it_works` writes them anew."""
    drawn = draw(scene)
    assert (FIGURES / name).read_text("utf-8") == drawn
    assert "prefers-color-scheme: dark" in drawn
    assert f"](figures/{name})" in PAGE
    ET.fromstring(drawn)


def test_what_is_drawn_of_one_patch_is_what_the_engine_counts(scene: Scene) -> None:
    cell = next(cell for cell in scene.sweep.cells if cell.name == SITE)
    with scene.base.fork() as world:
        world.patch(cell.places[0], 0.0 * scene.base[cell.places[0]])
        world.demand(scene.sweep.targets())
        computed = len(world.ledger.recomputed)
    assert scene.folded.cone(SITE).node_evaluations == computed
    assert f"{computed} of {scene.folded.full_evaluations} nodes are computed" in wave(scene)


def test_what_is_drawn_of_a_sweep_is_what_it_computes(scene: Scene) -> None:
    """The area is the ledger's count, and no world is computed before its patch."""
    bars = list(scene.computed())
    ledger = scene.sweep.run().ledger
    assert sum(end - start for _, start, end in bars) == ledger.node_evaluations
    assert len(scene.columns) * scene.plan.worlds == scene.plan.full_evaluations
    patched = scene.patched()
    assert all(start > patched[world] for world, start, _ in bars)
    assert patched == sorted(patched)


def test_the_words_for_the_figures_have_their_numbers(scene: Scene) -> None:
    said = "\n".join(re.findall(r"^!\[(.*)\]\(figures/(?:wave|stack)", PAGE, flags=re.MULTILINE))
    cone, plan = scene.folded.cone(SITE), scene.plan
    for number in (cone.node_evaluations, scene.folded.full_evaluations, plan.node_evaluations):
        assert f"{number:,}" in said
