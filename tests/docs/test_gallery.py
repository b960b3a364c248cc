"""The gallery shows every picture once, with lines that are those of its example."""

from __future__ import annotations

import ast
import re

import pytest

from tests.browser.gallery import ALL, FOLDER, LARGEST, PICTURES, Picture
from tests.docs.pages import ROOT

PAGE = ROOT / "docs/gallery.md"
SECTIONS = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)


def _section(picture: Picture) -> str:
    (found,) = (one for one in SECTIONS if f"](images/gallery/{picture.name}.png)" in one)
    return found


def _statements(code: str) -> list[str]:
    """The statements of a program, without its comments."""
    return [ast.unparse(one) for one in ast.parse(code).body]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_has_the_lines_of_its_example_and_a_link_to_it(picture: Picture) -> None:
    section = _section(picture)
    example = _statements((ROOT / "examples" / picture.script).read_text("utf-8"))
    (shown,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    statements = _statements(shown)
    assert [one for one in statements if one not in example] == []
    assert statements[-1].startswith(f"{picture.variable} = ")
    assert f"](../examples/{picture.script})" in section


def test_pictures_are_small_and_all_are_used() -> None:
    sizes = {path.stem: path.stat().st_size for path in FOLDER.iterdir()}
    assert sizes.keys() == {picture.name for picture in PICTURES}
    assert max(sizes.values()) <= LARGEST
    assert sum(sizes.values()) <= ALL
    for picture in PICTURES:
        assert picture.path.read_bytes().startswith(b"\x89PNG")


def test_examples_with_a_figure_are_in_the_gallery() -> None:
    shown = {picture.script for picture in PICTURES}
    drawing = {path.name for path in ROOT.glob("examples/*.py") if ".plot()" in path.read_text("utf-8")}
    assert drawing == shown
