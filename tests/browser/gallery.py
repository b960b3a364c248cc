"""The pictures of the gallery, made by the examples: `python -m tests.browser.gallery`; `make gallery`.

An example leaves a Plotly figure in a variable; here it is run, and what it left is drawn by Chromium. This
is no part of the tests, so that tests leave the tree as it was.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.browser.conftest import CHROMIUM, FLAGS

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/images/gallery"
LARGEST, ALL = 150_000, 1_500_000
"""Bytes of a picture, and of all of them."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A file of the gallery: the example that makes it, the variable that holds the figure, its size."""

    name: str
    script: str
    variable: str = "figure"
    width: int = 760
    height: int | None = None

    @property
    def path(self) -> Path:
        """Where it is kept."""
        return FOLDER / f"{self.name}.png"


PICTURES = (
    Picture("heads", "ioi_sweep.py", height=420),
    Picture("trace", "causal_tracing.py"),
    Picture("lens", "lens_and_attribution.py", "table", width=980),
    Picture("shares", "lens_and_attribution.py", "shares"),
    Picture("attention", "lens_and_attribution.py", "looks", width=980),
    Picture("circuit", "circuit.py"),
    Picture("estimates", "exact_or_estimated.py"),
    Picture("latents", "dictionary.py", height=320),
    Picture("units", "own_cnn_and_gru.py", height=300),
)


def main() -> None:
    """Run the examples, and write what they draw."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # not installed by `make setup`

    FOLDER.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for picture, figure in drawn():
            photographed(browser, picture, figure, Path(folder) / "figure.html")
            print(picture.path, picture.path.stat().st_size)  # noqa: T201  # a script
        browser.close()
    total = sum(picture.path.stat().st_size for picture in PICTURES)
    assert total <= ALL, f"the gallery has {total} bytes; more than {ALL} is too much for the docs"


def drawn() -> Iterator[tuple[Picture, Any]]:
    """Each picture with the figure that its example left."""
    for script, pictures in groupby(PICTURES, key=lambda picture: picture.script):
        with contextlib.redirect_stdout(io.StringIO()):
            left = runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
        for picture in pictures:
            yield picture, left[picture.variable]


def photographed(browser: Browser, picture: Picture, figure: Any, page_path: Path) -> None:
    """Draw a figure on white, and keep what is seen."""
    height = picture.height or figure.layout.height or 420
    figure.update_layout(width=picture.width, height=height, paper_bgcolor="white", font_family="DejaVu Sans")
    figure.update_layout(margin={"t": 70, "b": 60, "l": 70, "r": 40})
    figure.write_html(page_path, include_plotlyjs=True, config={"displayModeBar": False})
    page = browser.new_page(
        viewport={"width": picture.width + 40, "height": height + 40}, device_scale_factor=1.5
    )
    page.goto(page_path.as_uri())
    plot = page.locator(".plot-container").first
    plot.wait_for()
    page.wait_for_timeout(500)  # fonts
    plot.screenshot(path=picture.path)
    page.close()
    size = picture.path.stat().st_size
    assert size <= LARGEST, f"{picture.path} has {size} bytes; more than {LARGEST} is too much for the docs"


if __name__ == "__main__":
    main()
