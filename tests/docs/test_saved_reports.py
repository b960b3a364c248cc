"""The saved pages open from disk, and are what the commands write now."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.saved_reports import COMMANDS, FOLDER, form, write

LARGEST = 1_500_000  # bytes


@pytest.mark.parametrize("name", COMMANDS)
def test_a_saved_page_is_small_and_fetches_nothing(name: str) -> None:
    page = FOLDER / name
    text = page.read_text("utf-8")
    assert page.stat().st_size < LARGEST
    assert "default-src 'none'" in text
    assert ' src="http' not in text
    for guide in ("gallery.md", "index.md"):
        assert f"](reports/{name})" in (FOLDER.parent / guide).read_text("utf-8")


def test_every_saved_page_has_a_command() -> None:
    assert {page.name for page in FOLDER.iterdir()} == set(COMMANDS)


@pytest.mark.pages
@pytest.mark.parametrize("name", ["circuit.html", "cone.html"])
def test_a_saved_page_has_the_form_of_today(name: str, tmp_path: Path) -> None:
    fresh, found = form(write(name, tmp_path)), form(FOLDER / name)
    assert found, "no programs in it"
    assert found == fresh, "run `make reports`"


def test_the_cones_have_one_form() -> None:
    assert form(FOLDER / "cone.html") == form(FOLDER / "cone-smollm2.html")
