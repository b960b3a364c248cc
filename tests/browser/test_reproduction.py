"""The page of the reproduced experiments in a browser: every figure is drawn, and nothing is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from conewise.paper.experiments.page import FIGURES, write_report
from tests.browser.conftest import Opener
from tests.paper.experiments.quick import quick

pytestmark = pytest.mark.browser

NAMES = ("e4", "e7")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `conewise reproduce e4 e7 --out` writes."""
    folder = tmp_path_factory.mktemp("reproduced")
    write_report([quick(name) for name in NAMES], folder)
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_drawn_in_the_page_s_colours(folder: Path, open_page: Opener, scheme: str) -> None:
    page = open_page(folder / "index.html", color_scheme=scheme).page
    assert page.locator("section").count() == len(NAMES)
    for name in NAMES:
        plot = page.locator(f"[data-figure={name}]")
        assert plot.locator("svg.main-svg").count() > 0
        box = plot.bounding_box()
        assert box is not None
        assert box["height"] == 430
    ink = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--ink').trim()")
    plots = "[...document.querySelectorAll('.plotly-graph-div')]"
    colours = page.evaluate(f"{plots}.map(plot => plot.layout.font.color)")
    assert colours == [ink] * len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_alone_is_a_page(folder: Path, open_page: Opener, tmp_path: Path, name: str) -> None:
    alone = tmp_path / "alone.html"
    alone.write_bytes((folder / FIGURES / f"{name}.html").read_bytes())
    page = open_page(alone).page
    assert page.locator("[data-figure] svg.main-svg").count() > 0
    assert page.title().startswith(f"{name}: ")
