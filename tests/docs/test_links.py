"""Every link of the documentation leads somewhere, on the code host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, anchors, blocks, broken, links, pages


def test_every_link_leads_somewhere() -> None:
    found = {page.relative_to(ROOT).as_posix(): list(broken(page)) for page in pages()}
    assert {page: links for page, links in found.items() if links} == {}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tests.docs.pages.ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# A title: with `code`, and §\n\n```\n# no heading\n```\n", "utf-8")
    return tmp_path / "page.md"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[a](gone.md)", "no such file"),
        ("![a](gone.png)", "no such file"),
        ('<img src="gone.png">', "no such file"),
        ("[a](other.md#no-heading)", "no heading"),
        ("[a](#missing)", "no heading"),
        ("[a](../outside.md)", "out of the repository"),
        ("[a](/other.md)", "out of the repository"),
        ("[a](http://plain.example)", "not an address"),
        ("[a](https://nohost)", "not an address"),
    ],
)
def test_a_broken_link_is_found(page: Path, text: str, why: str) -> None:
    page.write_text(text, "utf-8")
    (found,) = broken(page)
    assert why in found


@pytest.mark.parametrize(
    "text",
    [
        "[a](other.md)",
        "[a](other.md#a-title-with-code-and-)",
        "# Here\n[a](#here)",
        "[a](https://host.example/path)",
        "`[a](gone.md)`",
        "```\n[a](gone.md)\n```",
    ],
)
def test_what_leads_somewhere_is_not_broken(page: Path, text: str) -> None:
    page.write_text(text, "utf-8")
    assert list(broken(page)) == []


def test_links_and_blocks_are_found_at_all() -> None:
    assert len(pages()) > 20
    assert sum(len(links(one)) for one in pages()) > 60
    assert sum(len(blocks(one)) for one in pages()) > 30
    assert "exact-cost" in anchors(ROOT / "docs/theory.md")
